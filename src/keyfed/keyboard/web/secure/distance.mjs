/**
 * How far each layer of a client moved: the norms of `keyfed/federated/distance.py`, for clients that weigh themselves
 * by them (FedAtt). The spectral norm is √λ of the Gram matrix G of the smaller side, with
 *
 *   λ ≤ (tr G^p)^(1/p) ≤ n^(1/p) λ,  p = 2^24,
 *
 * by squaring G again and again, scaled to trace 1: the excess, ln(n)/p, is below 1e-6.
 */

import { addTimes, addTimesTransposed, addTransposedTimes } from "../training/matrices.mjs";

const SQUARINGS = 24, TINY = 2.2250738585072014e-308;

/** Root of the sum of squares. */
export function frobenius(change) {
  const largest = change.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
  if (largest === 0) return 0;
  let sum = 0;
  for (let i = 0; i < change.length; i++) sum += (change[i] / largest) ** 2;
  return largest * Math.sqrt(sum);
}

/** The largest singular value of a matrix [rows, columns]; of a vector its length. */
export function spectral(change, shape) {
  if (shape.length < 2) return frobenius(change);
  const [rows] = shape, columns = change.length / rows, n = Math.min(rows, columns);
  const own = Float64Array.from(change);
  let gram = new Float64Array(n * n);
  if (rows <= columns) addTimesTransposed(gram, own, own, rows, rows, columns);
  else addTransposedTimes(gram, own, own, rows, columns, columns);
  const trace = (of) => {
    let sum = 0;
    for (let i = 0; i < n; i++) sum += of[i * n + i];
    return Math.max(sum, TINY);
  };
  let log = 0;
  for (let step = 0; step < SQUARINGS; step++) {
    const size = trace(gram);
    log += Math.log(size) / 2 ** step;
    for (let i = 0; i < gram.length; i++) gram[i] /= size;
    const squared = new Float64Array(n * n);
    addTimes(squared, gram, gram, n, n, n);
    gram = squared;
  }
  return Math.sqrt(Math.exp(log + Math.log(trace(gram)) / 2 ** SQUARINGS));
}

/**
 * The distance of every layer.
 * @param {Object<string, Float32Array | Float64Array>} upload
 * @param {Object<string, number[]>} shapes
 * @param {"spectral" | "frobenius"} norm
 */
export function distances(upload, shapes, norm) {
  const size = norm === "spectral" ? spectral : frobenius;
  return Object.fromEntries(Object.entries(upload).map(([name, change]) => [name, size(change, shapes[name])]));
}
