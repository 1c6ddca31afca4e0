/** Sums of floating-point numbers that are rounded at the end only, so that they do not depend on the order. */

const BLOCK = 4096;

/**
 * The sum of numbers, rounded to the nearest (Shewchuk 1997), as Python's `math.fsum`.
 * @param {number[]} numbers  finite
 */
export function exactSum(numbers) {
  const pieces = []; // that do not overlap, the smallest first; their sum is exact
  for (let x of numbers) {
    let kept = 0;
    for (let y of pieces) {
      if (Math.abs(x) < Math.abs(y)) [x, y] = [y, x];
      const high = x + y, low = y - (high - x);
      if (low !== 0) pieces[kept++] = low;
      x = high;
    }
    pieces.length = kept;
    pieces.push(x);
  }
  let n = pieces.length, high = n ? pieces[--n] : 0, low = 0;
  while (n > 0 && low === 0) {
    const x = high, y = pieces[--n];
    high = x + y;
    low = y - (high - x);
  }
  if (n > 0 && low !== 0 && Math.sign(low) === Math.sign(pieces[n - 1])) { // half-way, and what is left decides
    const twice = 2 * low, next = high + twice;
    if (twice === next - high) high = next;
  }
  return high;
}

/** Numbers whose sum is Σ x² to far beyond a double's precision; x² is rounded to a double first. */
export function exactSquares(values) {
  const pieces = [];
  for (let start = 0; start < values.length; start += BLOCK) {
    let sum = 0, lost = 0;
    for (let i = start, end = Math.min(start + BLOCK, values.length); i < end; i++) {
      const square = values[i] * values[i], next = sum + square, added = next - sum;
      lost += sum - (next - added) + (square - added);
      sum = next;
    }
    pieces.push(sum, lost);
  }
  return pieces;
}
