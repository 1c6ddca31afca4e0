/**
 * A look at a new model before a page takes it: what it and the current one say of own text that was held back. For
 * line i with n_i tokens and d_i nats more under the new model than under the current one,
 *
 *   D = Σ d_i / Σ n_i,  s² = L/(L − 1) · Σ (d_i − D n_i)² / (Σ n_i)²
 *
 * is the mean difference a token and its standard error over L lines: tokens of one line are not independent. The new
 * model is worse if D is above 2 s. For models of other vocabularies the same holds of words that are not among the
 * first three.
 */

import { BOS, EOS, UNK } from "../decoder/context.mjs";
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

/** Tokens, nats, words and words among the first three of every line; a word that the vocabulary lacks is missed. */
async function linesOf(of, pause) {
  const none = () => ({ tokens: 0, nats: 0, words: 0, hits: 0 }), lines = [];
  let line = none();
  await predicted(of, of.stream, of.isLines, pause, ({ token, nats, rank }) => {
    line.tokens += 1;
    line.nats += nats;
    line.words += Number(token !== EOS);
    line.hits += Number(token !== EOS && token !== UNK && rank < 3);
    if (token === EOS) lines.push(line);
    if (token === EOS) line = none();
  });
  return line.tokens ? [...lines, line] : lines;
}

const total = (lines, what) => lines.reduce((sum, line) => sum + line[what], 0);
const shown = (lines) => ({ nats: total(lines, "nats") / total(lines, "tokens"), top3: total(lines, "hits") / Math.max(1, total(lines, "words")) });

/** How much more there is of something after than before, of each of something else, and its standard error. */
function difference(before, after, what, each) {
  const size = Math.max(1, total(before, each)), mean = (total(after, what) - total(before, what)) / size, count = before.length;
  const squares = before.reduce((sum, line, i) => sum + (after[i][what] - line[what] - mean * line[each]) ** 2, 0);
  return { mean, error: count > 1 ? Math.sqrt((count / (count - 1)) * squares) / size : Infinity };
}

/**
 * @typedef {{model: object, weights: Object<string, Float32Array | Float64Array>, stream: Int32Array, isLines: boolean}} Reader
 *   a model, and the text in its own tokens
 */

/**
 * Compare a new model with the current one on text that neither learns from.
 * @param {Reader} before
 * @param {Reader} after      of the same lines
 * @param {boolean} isAlike   the two have the same vocabulary; else nats say nothing, and words among the first three decide
 * @param {() => unknown} [pause]
 * @returns {Promise<{lines: number, tokens: number, before: {nats: number, top3: number}, after: {nats: number,
 *   top3: number}, difference: number, error: number, isEnough: boolean, isWorse: boolean}>}  nats a token, share of the
 *   words; difference: what is worse, in nats or in the share; isEnough: lines for a verdict
 */
export async function look(before, after, isAlike, pause = () => true) {
  const [old, fresh] = [await linesOf(before, pause), await linesOf(after, pause)];
  if (!old.length) throw new Rejected("no text", "no own text was held back to look at a model with");
  if (old.length !== fresh.length) throw new Rejected("other method", "the two models read other lines");
  const { mean, error } = isAlike ? difference(old, fresh, "nats", "tokens") : difference(fresh, old, "hits", "words");
  const isEnough = old.length >= LEAST_LINES, isBroken = !Number.isFinite(shown(fresh).nats); // whatever the text
  return {
    lines: old.length, tokens: total(old, "tokens"), before: shown(old), after: shown(fresh), difference: mean, error,
    isEnough, isWorse: isBroken || (isEnough && mean > ERRORS * error),
  };
}
