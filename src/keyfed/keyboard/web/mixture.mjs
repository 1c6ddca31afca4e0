/**
 * The model's next-word probabilities mixed with what this device learnt. With u(w) the uses of w and b(v, w) its uses
 * after v, of those that count, and their sums c_u and c_b(v):
 *
 *   p(w) = λ_b·b/c_b + (1 − λ_b)·(λ_u·u/c_u + (1 − λ_u)·p_model(w)),
 *   λ_b = c_b/(c_b + k_bigram),  λ_u = min(lambda_most, c_u/(c_u + k_unigram))
 */

import { SPECIALS } from "./context.mjs";

/** Log-probabilities over the vocabulary with the specials taken out and the rest summing to one. */
export function withoutSpecials(logp) {
  // Plain loops: once a word over the whole vocabulary, and the first time before anything is compiled.
  const rest = new Float64Array(logp);
  rest.fill(-Infinity, 0, SPECIALS.length);
  let most = -Infinity, sum = 0;
  for (let i = 0; i < rest.length; i++) if (rest[i] > most) most = rest[i];
  if (most === -Infinity) return rest;
  for (let i = 0; i < rest.length; i++) sum += Math.exp(rest[i] - most);
  const whole = most + Math.log(sum);
  for (let i = 0; i < rest.length; i++) rest[i] -= whole;
  return rest;
}

/**
 * log p of the lexicon's words, and of the user's own words, which the vocabulary does not have.
 * @param {ArrayLike<number>} logp  the model's, over the vocabulary
 * @param {string} previous  the word before, folded
 * @param {import("./lexicon.mjs").Lexicon} lexicon
 * @param {string[]} own  folded words that count and are not in the lexicon
 * @param {import("./personal.mjs").Personal | null} personal  null: the model alone
 * @param {object} k  constants.json
 * @returns {{main: Float64Array, own: Float64Array}}
 */
export function mixed(logp, previous, lexicon, own, personal, k) {
  const model = withoutSpecials(logp), { ids } = lexicon;
  const main = new Float64Array(ids.length);
  for (let i = 0; i < main.length; i++) main[i] = model[ids[i]];
  const uses = personal?.uses() ?? new Map(), after = personal?.usesAfter(previous) ?? new Map();
  if (!uses.size && !after.size) return { main, own: new Float64Array(own.length).fill(-Infinity) };
  const total = sumOf(uses), totalAfter = sumOf(after);
  const byUse = total ? Math.min(k.lambda_most, total / (total + k.k_unigram)) : 0;
  const byPair = totalAfter ? totalAfter / (totalAfter + k.k_bigram) : 0;
  const p = new Float64Array(main.length + own.length);
  for (let i = 0; i < main.length; i++) p[i] = (1 - byPair) * (1 - byUse) * Math.exp(main[i]);
  const ownPlace = new Map(own.map((word, i) => [word, main.length + i]));
  for (const [counts, share, whole] of [[uses, (1 - byPair) * byUse, total], [after, byPair, totalAfter]]) {
    for (const [word, n] of counts) {
      const place = lexicon.place.get(word) ?? ownPlace.get(word);
      if (place !== undefined) p[place] += (share * n) / whole;
    }
  }
  for (let i = 0; i < p.length; i++) p[i] = Math.log(p[i]);
  return { main: p.subarray(0, main.length), own: p.subarray(main.length) };
}

function sumOf(counts) {
  let sum = 0;
  for (const n of counts.values()) sum += n;
  return sum;
}
