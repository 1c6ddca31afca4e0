/** Completions from a model over characters: a beam search for the most probable ends of the word. */

import { EOS, SPECIALS, UNK, isSpace } from "./context.mjs";

const PAD = 0, BOS = 1;
export const BEAM = 12;
export const LONGEST_WORD = 24;

/**
 * The k most probable character strings that end in a blank or a line end, best first.
 * @param {{words: string[]}} vocab
 * @param {{logp: Float32Array, state: unknown}} after  what the source answers after the text (`begin`)
 * @param {(tokens: number[], state: unknown, rows: number[]) =>
 *   Promise<{logp: Float32Array[], state: unknown}>} step
 * @param {number} k
 * @param {{aborted: boolean}} [signal]
 * @returns {Promise<{rest: string, score: number}[] | null>}  null: not wanted any more
 */
export async function complete(vocab, after, step, k, signal) {
  const ends = endsOf(vocab.words);
  const never = [PAD, BOS, UNK, ...ends];
  const isNever = new Uint8Array(vocab.words.length);
  for (const token of never) isNever[token] = 1;
  // The first character of a suggestion is not a blank.
  let beams = best([{ score: 0, tokens: [] }], [after.logp], isNever).map((beam) => ({ ...beam, row: 0 }));
  let { state } = after;
  let finished = [];
  for (let length = 0; length < LONGEST_WORD && beams.length; length++) {
    if (signal?.aborted) return null;
    const answer = await step(beams.map((beam) => beam.tokens.at(-1)), state, beams.map((beam) => beam.row));
    state = answer.state;
    beams.forEach(({ score, tokens }, row) => {
      finished.push({ score: score + logSumExp(ends.map((token) => answer.logp[row][token])), tokens });
    });
    beams = best(beams, answer.logp, isNever);
    finished = finished.sort(byScore).slice(0, k);
    // A beam only becomes less probable: one that is below the k found already can add nothing.
    if (finished.length === k) beams = beams.filter(({ score }) => score > finished[k - 1].score);
  }
  return finished.map(({ score, tokens }) => ({ rest: tokens.map((token) => vocab.words[token]).join(""), score }));
}

function endsOf(words) {
  const isBlank = (word, token) => token === EOS || (token >= SPECIALS.length && isSpace(word));
  return words.flatMap((word, token) => (isBlank(word, token) ? [token] : []));
}

/** The BEAM best one character longer. */
function best(beams, logps, isNever) {
  const found = [];
  beams.forEach(({ score, tokens }, row) => {
    const logp = logps[row];
    for (let token = 0; token < logp.length; token++) {
      if (!isNever[token]) found.push({ score: score + logp[token], row, token, tokens });
    }
  });
  found.sort((a, b) => b.score - a.score || a.row - b.row || a.token - b.token);
  return found.slice(0, BEAM).map(({ score, row, token, tokens }) => ({ score, row, tokens: [...tokens, token] }));
}

/** Falling score, then falling tokens: the order of Python's `sorted(…, reverse=True)`. */
function byScore(a, b) {
  if (a.score !== b.score) return b.score - a.score;
  for (let i = 0; i < Math.min(a.tokens.length, b.tokens.length); i++) {
    if (a.tokens[i] !== b.tokens[i]) return b.tokens[i] - a.tokens[i];
  }
  return b.tokens.length - a.tokens.length;
}

function logSumExp(values) {
  const most = Math.max(...values);
  return most === -Infinity ? most : most + Math.log(values.reduce((sum, value) => sum + Math.exp(value - most), 0));
}
