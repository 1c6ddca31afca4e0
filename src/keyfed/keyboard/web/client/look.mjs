/**
 * A look at a new model before a page takes it: what it and the current one say of own text that was held back. For
 * line i with n_i tokens and d_i nats more under the new model than under the current one,
 *
 *   D = Σ d_i / Σ n_i,  s² = L/(L − 1) · Σ (d_i − D n_i)² / (Σ n_i)²
 *
 * is the mean difference a token and its standard error over L lines: tokens of one line are not independent. The new
 * model is worse if D is above 2 s.
 */

import { BOS, EOS } from "../decoder/context.mjs";
import { Network, shapesOf } from "../decoder/network.mjs";
import { Rejected } from "../secure/bytes.mjs";

const PIECE = 64; // tokens between two looks at the clock
const LEAST_LINES = 8, ERRORS = 2;

/**
 * Predict every token of a text from those before it.
 * @param {{model: object, weights: Object<string, Float32Array | Float64Array>}} of
 * @param {Int32Array} stream                an EOS behind every line
 * @param {boolean} isLines                  a line begins from a zero state; else the state is carried, and the first
 *   token is not predicted
 * @param {() => unknown} pause              awaited between pieces; false stops it
 * @param {(one: {token: number, nats: number, rank: number}) => void} take  rank 0 is the most probable
 */
export async function predicted({ model, weights }, stream, isLines, pause, take) {
  const shapes = shapesOf(model);
  const tensors = new Map(Object.entries(weights).map(([name, data]) => [name, { shape: shapes[name], data }]));
  const network = new Network({ model, reading: isLines ? "lines" : "stream" }, tensors);
  let states = network.zero(), last = isLines ? BOS : stream[0];
  for (const [n, token] of (isLines ? stream : stream.subarray(1)).entries()) {
    if (n % PIECE === 0 && (await pause()) === false) throw new Rejected("not now", "the page's owner stopped it");
    const { logp, states: after } = network.step([last], states);
    const own = logp[token];
    let rank = 0;
    for (let i = 0; i < logp.length; i++) if (logp[i] > own || (logp[i] === own && i < token)) rank += 1;
    take({ token, nats: -own, rank });
    [states, last] = isLines && token === EOS ? [network.zero(), BOS] : [after, token];
  }
}

/** Tokens, nats and top-3 hits of every line under a model. */
async function linesOf(of, stream, isLines, pause) {
  const lines = [];
  let line = { tokens: 0, nats: 0, hits: 0 };
  const close = () => {
    if (line.tokens) lines.push(line);
    line = { tokens: 0, nats: 0, hits: 0 };
  };
  await predicted(of, stream, isLines, pause, ({ token, nats, rank }) => {
    line.tokens += 1;
    line.nats += nats;
    line.hits += Number(rank < 3);
    if (token === EOS) close();
  });
  close();
  return lines;
}

const total = (lines, what) => lines.reduce((sum, line) => sum + line[what], 0);
const shown = (lines) => ({ nats: total(lines, "nats") / total(lines, "tokens"), hits: total(lines, "hits") });

/** The mean difference a token between two models' lines, and its standard error. */
export function difference(before, after) {
  const tokens = total(before, "tokens"), mean = (total(after, "nats") - total(before, "nats")) / tokens, count = before.length;
  const squares = before.reduce((sum, line, i) => sum + (after[i].nats - line.nats - mean * line.tokens) ** 2, 0);
  return { mean, error: count > 1 ? Math.sqrt((count / (count - 1)) * squares) / tokens : Infinity };
}

/**
 * Compare a new model with the current one on text that neither learns from.
 * @param {{model: object, weights: Object<string, Float32Array | Float64Array>}} current
 * @param {{model: object, weights: Object<string, Float32Array | Float64Array>}} next  of the same vocabulary
 * @param {{stream: Int32Array, isLines: boolean}} text
 * @param {() => unknown} [pause]
 * @returns {Promise<{lines: number, tokens: number, current: {nats: number, hits: number}, next: {nats: number,
 *   hits: number}, difference: number, error: number, isEnough: boolean, isWorse: boolean}>}  nats a token; how many of
 *   the tokens are among the first three; isEnough: lines for any verdict; isWorse: by more than the noise of so few
 */
export async function look(current, next, { stream, isLines }, pause = () => true) {
  if (!(stream.length > (isLines ? 0 : 1))) throw new Rejected("no text", "no own text was held back to look at a model with");
  const before = await linesOf(current, stream, isLines, pause), after = await linesOf(next, stream, isLines, pause);
  const { mean, error } = difference(before, after), isEnough = before.length >= LEAST_LINES;
  const isBroken = !Number.isFinite(shown(after).nats); // whatever the text
  return {
    lines: before.length, tokens: total(before, "tokens"), current: shown(before), next: shown(after),
    difference: mean, error, isEnough, isWorse: isBroken || (isEnough && mean > ERRORS * error),
  };
}
