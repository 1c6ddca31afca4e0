/**
 * Products of matrices in typed arrays, row by row, all of which add to `out`. Four rows share what is read; a sum is a
 * float64 until it is stored. The names say which factor is transposed.
 */

/** out [n, m] += A [n, k] · B [m, k]ᵀ */
export function addTimesTransposed(out, a, b, n, m, k) {
  let j = 0;
  for (; j + 3 < m; j += 4) {
    const b0 = j * k, b1 = b0 + k, b2 = b1 + k, b3 = b2 + k;
    for (let i = 0; i < n; i++) {
      let p = 0, q = 0, r = 0, s = 0;
      for (let at = i * k, c = 0; c < k; c++, at++) {
        const x = a[at];
        p += x * b[b0 + c];
        q += x * b[b1 + c];
        r += x * b[b2 + c];
        s += x * b[b3 + c];
      }
      const to = i * m + j;
      out[to] += p;
      out[to + 1] += q;
      out[to + 2] += r;
      out[to + 3] += s;
    }
  }
  for (; j < m; j++) {
    for (let i = 0; i < n; i++) {
      let sum = 0;
      for (let at = i * k, c = j * k, end = at + k; at < end; at++, c++) sum += a[at] * b[c];
      out[i * m + j] += sum;
    }
  }
}

/** out [n, k] += A [n, m] · B [m, k] */
export function addTimes(out, a, b, n, m, k) {
  let j = 0;
  for (; j + 3 < m; j += 4) {
    const b0 = j * k, b1 = b0 + k, b2 = b1 + k, b3 = b2 + k;
    for (let i = 0; i < n; i++) {
      const at = i * m + j, p = a[at], q = a[at + 1], r = a[at + 2], s = a[at + 3];
      for (let to = i * k, c = 0; c < k; c++, to++) out[to] += p * b[b0 + c] + q * b[b1 + c] + r * b[b2 + c] + s * b[b3 + c];
    }
  }
  for (; j < m; j++) {
    for (let i = 0; i < n; i++) {
      const p = a[i * m + j];
      for (let to = i * k, from = j * k, end = to + k; to < end; to++, from++) out[to] += p * b[from];
    }
  }
}

/** out [m, k] += A [n, m]ᵀ · B [n, k] */
export function addTransposedTimes(out, a, b, n, m, k) {
  let i = 0;
  for (; i + 3 < n; i += 4) {
    const b0 = i * k, b1 = b0 + k, b2 = b1 + k, b3 = b2 + k;
    for (let j = 0; j < m; j++) {
      const at = i * m + j, p = a[at], q = a[at + m], r = a[at + 2 * m], s = a[at + 3 * m];
      for (let to = j * k, c = 0; c < k; c++, to++) out[to] += p * b[b0 + c] + q * b[b1 + c] + r * b[b2 + c] + s * b[b3 + c];
    }
  }
  for (; i < n; i++) {
    for (let j = 0; j < m; j++) {
      const p = a[i * m + j];
      for (let to = j * k, from = i * k, end = to + k; to < end; to++, from++) out[to] += p * b[from];
    }
  }
}

/** Add a bias to every row of out [n, m]. */
export function addRow(out, bias, n, m) {
  for (let i = 0, at = 0; i < n; i++) for (let j = 0; j < m; j++, at++) out[at] += bias[j];
}

/** out [m] += the sum of the rows of A [n, m] */
export function addRows(out, a, n, m) {
  for (let i = 0, at = 0; i < n; i++) for (let j = 0; j < m; j++, at++) out[j] += a[at];
}
