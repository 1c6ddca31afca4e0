/**
 * Batches of a client's text, as `keyfed/text/batches.py` cuts them: streams, whose rows are contiguous pieces read in
 * windows, and packed lines, whose state is reset where a line begins (at BOS). The state is carried from window to
 * window. Every predicted token counts once.
 */

import { BOS, EOS } from "../decoder/context.mjs";
import { Draws } from "./seeds.mjs";

const PAD = 0;

/**
 * One batch: [rows · time] tokens row by row; `mask` is 0 for padding; `fresh` starts from a zero state.
 * @typedef {{rows: number, time: number, inputs: Int32Array, targets: Int32Array, mask: Uint8Array, fresh: boolean,
 *   lines: boolean}} Batch
 */

/** Where the lines of a stream begin, and its end: behind every EOS; a rest without one is a line too. */
function lineBounds(stream) {
  const bounds = [0];
  stream.forEach((id, i) => {
    if (id === EOS) bounds.push(i + 1);
  });
  if (bounds.at(-1) !== stream.length) bounds.push(stream.length);
  return bounds;
}

/**
 * What a client reads in a round: at most `most` tokens, one contiguous piece whose start is drawn by the seed.
 * @param {Int32Array} stream
 * @param {{kind: "stream" | "packed", maxTokens?: number | null}} cut  Infinity and null: no limit
 * @param {bigint | number} seed
 */
export function limitText(stream, { kind, maxTokens = null }, seed) {
  if (maxTokens === null) return stream;
  const most = maxTokens + (kind === "stream" ? 1 : 0); // a stream's first token is not predicted
  if (stream.length <= most) return stream;
  const start = new Draws(seed).integer(stream.length - most + 1);
  return stream.subarray(start, start + most);
}

/** Cut [rows, columns] into windows; the last one may be shorter. */
function windows({ inputs, targets, mask }, rows, columns, window, lines) {
  const cut = (from, at, time) => {
    const out = new from.constructor(rows * time);
    for (let row = 0; row < rows; row++) {
      out.set(from.subarray(row * columns + at, row * columns + at + time), row * time);
    }
    return out;
  };
  const batches = [];
  for (let at = 0; at < columns; at += window) {
    const time = Math.min(window, columns - at);
    const [i, t, m] = [inputs, targets, mask].map((array) => cut(array, at, time));
    batches.push({ rows, time, inputs: i, targets: t, mask: m, fresh: at === 0, lines });
  }
  return batches;
}

/** A stream in `rows` contiguous pieces side by side; fewer where the text is short. @returns {Batch[]} */
export function streamBatches(stream, mostRows, window) {
  const predicted = stream.length - 1;
  if (predicted < 1) return [];
  const rows = Math.max(1, Math.min(mostRows, Math.floor(predicted / window)));
  const columns = Math.ceil(predicted / rows);
  const inputs = new Int32Array(rows * columns).fill(PAD), targets = new Int32Array(rows * columns).fill(PAD);
  inputs.set(stream.subarray(0, predicted));
  targets.set(stream.subarray(1));
  const mask = new Uint8Array(rows * columns).fill(1, 0, predicted);
  return windows({ inputs, targets, mask }, rows, columns, window, false);
}

/** The row of each line: longest first, each to the row that is shortest so far, the first of equals. */
function spread(lengths, rows) {
  const rowOf = new Int32Array(lengths.length), filled = new Array(rows).fill(0);
  const longest = [...lengths.keys()].sort((a, b) => lengths[b] - lengths[a] || a - b);
  for (const line of longest) {
    let row = 0;
    for (let other = 1; other < rows; other++) if (filled[other] < filled[row]) row = other;
    rowOf[line] = row;
    filled[row] += lengths[line];
  }
  return { rowOf, columns: Math.max(...filled) };
}

/** Whole lines one after the other in rows, in an order drawn by the seed. @returns {Batch[]} */
export function packedBatches(stream, mostRows, window, seed) {
  if (!stream.length) return [];
  const bounds = lineBounds(stream), count = bounds.length - 1;
  const mixed = new Draws(seed).permutation(count);
  const lengths = Array.from(mixed, (line) => bounds[line + 1] - bounds[line]);
  const rows = Math.max(1, Math.min(mostRows, Math.floor(stream.length / window), count));
  const { rowOf, columns } = spread(lengths, rows);
  const inputs = new Int32Array(rows * columns).fill(PAD), targets = new Int32Array(rows * columns).fill(PAD);
  const mask = new Uint8Array(rows * columns), end = Int32Array.from({ length: rows }, (_, row) => row * columns);
  mixed.forEach((line, place) => {
    const own = stream.subarray(bounds[line], bounds[line + 1]), at = end[rowOf[place]];
    inputs[at] = BOS;
    inputs.set(own.subarray(0, own.length - 1), at + 1);
    targets.set(own, at);
    mask.fill(1, at, at + own.length);
    end[rowOf[place]] += own.length;
  });
  return windows({ inputs, targets, mask }, rows, columns, window, true);
}

/**
 * One epoch's batches of a text that was limited already.
 * @param {Int32Array} stream
 * @param {{kind: "stream" | "packed", rows: number, window: number}} cut
 * @param {bigint | number} seed  the client's, for this round and epoch
 * @returns {Batch[]}
 */
export function epochBatches(stream, { kind, rows, window }, seed) {
  if (kind === "stream") return streamBatches(stream, rows, window);
  if (kind === "packed") return packedBatches(stream, rows, window, seed);
  throw new Error(`text cannot be cut as "${kind}" here; expected stream or packed`);
}
