/**
 * Products of matrices in typed arrays, all of which add to `out`. The names say which factor is transposed.
 *
 * All three are one loop, out_ij += Σ_t a_it b_tj, which differs in how far apart the numbers of its factors lie. It
 * computes tiles of 2 × 4, whose eight sums stay in registers, over pieces of t that stay in the cache. A sum is a
 * float64 until its piece ends.
 */

const DEPTH = 128;

/** @typedef {Float32Array | Float64Array} Floats */

/**
 * @param {Floats} out   [rows, columns]
 * @param {Floats} a     a_it lies at i·ai + t·at
 * @param {Floats} b     b_tj lies at j·bj + t·bt
 */
function addProduct(out, a, b, rows, columns, depth, ai, at, bj, bt) {
  for (let start = 0; start < depth; start += DEPTH) {
    const count = Math.min(DEPTH, depth - start), x = start * at, y = start * bt;
    const wholeRows = rows - (rows % 2), wholeColumns = columns - (columns % 4);
    if (rows < columns) { // the longer side is the outer loop: what the inner one reads again is small
      for (let j = 0; j < wholeColumns; j += 4) {
        for (let i = 0; i < wholeRows; i += 2) addTile(out, a, b, i * columns + j, columns, x + i * ai, ai, at, y + j * bj, bj, bt, count);
      }
    } else {
      for (let i = 0; i < wholeRows; i += 2) {
        for (let j = 0; j < wholeColumns; j += 4) addTile(out, a, b, i * columns + j, columns, x + i * ai, ai, at, y + j * bj, bj, bt, count);
      }
    }
    if (wholeRows < rows) {
      for (let j = 0; j < wholeColumns; j += 4) addQuad(out, a, b, wholeRows * columns + j, x + wholeRows * ai, at, y + j * bj, bj, bt, count);
    }
    for (let j = wholeColumns; j < columns; j++) {
      for (let i = 0; i < rows; i++) {
        let sum = 0;
        for (let t = 0, p = x + i * ai, q = y + j * bj; t < count; t++, p += at, q += bt) sum += a[p] * b[q];
        out[i * columns + j] += sum;
      }
    }
  }
}

/** Two rows by four columns, from `x` in a and `y` in b on. */
function addTile(out, a, b, to, columns, x, ai, at, y, bj, bt, count) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0, r0 = 0, r1 = 0, r2 = 0, r3 = 0;
  const y1 = bj, y2 = 2 * bj, y3 = 3 * bj;
  for (let t = 0; t < count; t++, x += at, y += bt) {
    const p = a[x], q = a[x + ai], w0 = b[y], w1 = b[y + y1], w2 = b[y + y2], w3 = b[y + y3];
    s0 += p * w0;
    s1 += p * w1;
    s2 += p * w2;
    s3 += p * w3;
    r0 += q * w0;
    r1 += q * w1;
    r2 += q * w2;
    r3 += q * w3;
  }
  out[to] += s0;
  out[to + 1] += s1;
  out[to + 2] += s2;
  out[to + 3] += s3;
  const below = to + columns;
  out[below] += r0;
  out[below + 1] += r1;
  out[below + 2] += r2;
  out[below + 3] += r3;
}

/** One row by four columns. */
function addQuad(out, a, b, to, x, at, y, bj, bt, count) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (let t = 0; t < count; t++, x += at, y += bt) {
    const p = a[x];
    s0 += p * b[y];
    s1 += p * b[y + bj];
    s2 += p * b[y + 2 * bj];
    s3 += p * b[y + 3 * bj];
  }
  out[to] += s0;
  out[to + 1] += s1;
  out[to + 2] += s2;
  out[to + 3] += s3;
}

/** out [n, m] += A [n, k] · B [m, k]ᵀ */
export const addTimesTransposed = (out, a, b, n, m, k) => addProduct(out, a, b, n, m, k, k, 1, k, 1);

/** out [n, k] += A [n, m] · B [m, k] */
export const addTimes = (out, a, b, n, m, k) => addProduct(out, a, b, n, k, m, m, 1, 1, k);

/** out [m, k] += A [n, m]ᵀ · B [n, k] */
export const addTransposedTimes = (out, a, b, n, m, k) => addProduct(out, a, b, m, k, n, 1, m, 1, k);

/** Add a bias to every row of out [n, m]. */
export function addRow(out, bias, n, m) {
  for (let i = 0, at = 0; i < n; i++) for (let j = 0; j < m; j++, at++) out[at] += bias[j];
}

/** out [m] += the sum of the rows of A [n, m] */
export function addRows(out, a, n, m) {
  for (let i = 0, at = 0; i < n; i++) for (let j = 0; j < m; j++, at++) out[j] += a[at];
}
