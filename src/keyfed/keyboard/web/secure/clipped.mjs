/**
 * One client's vector of a private round: its upload and masses clipped as one vector, written in fixed point, word for
 * word as `clip_upload` and `encode_clipped` of `keyfed/engine/sums/codec.py` write it for the same upload.
 *
 *   [ clipped scale·upload, layer by layer | clipped κ·mass of every layer | half counts ],  κ = S/(2√L)
 */

import { exactSquares, exactSum } from "./exact.mjs";

const MOST_PRIVATE = 4096, MOST_WORD = 2 ** 30, MOST_COUNTS = 3;
/** r of a private sum, however many are drawn: a scale is at least 1/r. */
export const PRIVATE_RATIO = 2;

/** The step with which sums of up to 4,096 clipped uploads fit into 32 bits. */
const fixedPoint = (clip) => (clip * MOST_PRIVATE) / MOST_WORD;

/** Numbers in the vector of a private round, over layers of these shapes. */
export function wordsOf(shapes) {
  const sizes = Object.values(shapes).map((shape) => shape.reduce((product, n) => product * n, 1));
  return sizes.reduce((sum, n) => sum + n, 0) + sizes.length + MOST_COUNTS;
}

/**
 * Clip [scale·upload, κ·mass] to the norm S in double precision, and write it.
 * @param {Object<string, Float32Array | Float64Array>} upload
 * @param {Object<string, number>} scales  of every layer; held within [1/r, 1], and so is the mass
 * @param {number} clip                    S
 * @param {boolean} isRatio                the method divides by its own mass, so masses are sent
 * @returns {Uint32Array}
 */
export function clippedVector(upload, scales, clip, isRatio) {
  const layers = Object.keys(upload), unit = clip / (2 * Math.sqrt(Math.max(1, layers.length)));
  const held = layers.map((name) => Math.max(scales[name], 1 / PRIVATE_RATIO));
  const scaled = layers.map((name, l) => Float64Array.from(upload[name], (x) => x * held[l]));
  const masses = held.map((scale) => (isRatio ? unit * scale : 0));
  const norm = Math.sqrt(exactSum([...scaled.flatMap(exactSquares), ...masses.map((mass) => mass * mass)]));
  const factor = clip / Math.max(norm, clip), step = fixedPoint(clip);
  const out = new Uint32Array(scaled.reduce((sum, { length }) => sum + length, layers.length + MOST_COUNTS));
  let at = 0;
  for (const layer of scaled) for (let i = 0; i < layer.length; i++) out[at++] = Math.trunc((layer[i] * factor) / step);
  for (const mass of masses) out[at++] = Math.trunc((factor * mass) / step);
  out[at] = Math.trunc((norm <= clip ? 0.5 : -0.5) / fixedPoint(1)); // whether nothing was clipped, as a half count
  return out;
}
