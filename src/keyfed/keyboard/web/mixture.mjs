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
  const rest = Float64Array.from(logp);
  rest.fill(-Infinity, 0, SPECIALS.length);
  let most = -Infinity;
  for (const value of rest) if (value > most) most = value;
  if (most === -Infinity) return rest;
  let sum = 0;
  for (const value of rest) sum += Math.exp(value - most);
  const whole = most + Math.log(sum);
  return rest.map((value) => value - whole);
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
  const model = withoutSpecials(logp);
  const main = Float64Array.from(lexicon.ids, (id) => model[id]);
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
  const log = p.map(Math.log);
  return { main: log.subarray(0, main.length), own: log.subarray(main.length) };
}

function sumOf(counts) {
  let sum = 0;
  for (const n of counts.values()) sum += n;
  return sum;
}
