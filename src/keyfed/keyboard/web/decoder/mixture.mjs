/**
 * From a source's opinion to the scores of words. With p_s the source's probabilities over its vocabulary, t the tilt
 * of each entry (0 without one) and f the dictionary's frequencies:
 *
 *   q(w) ∝ p_s(w)·exp(tilt·t(w))                        over the vocabulary, `<unk>` included and the other specials not
 *   p_model(w) = q(w),  of a word that the vocabulary lacks: q(<unk>)·f(w) / Σ f over all such words
 *
 * mixed with what this device learnt. Words of the lexicon have the cache (`cache.mjs`). The user's own words, which the
 * lexicon lacks or the user's dictionary has, have their share of all uses: u(w) are the uses of w and b(v, w) those
 * after v, of words that count, and c_u and c_b(v) their sums.
 *
 *   p(w) = p_own(w) + (1 − Σ p_own)·((1 − κ)·p_model(w) + κ·p_cache(w | v)),
 *   p_own(w) = λ_b·b/c_b + (1 − λ_b)·λ_u·u/c_u of the user's own, 0 of the others,
 *   λ_b = c_b/(c_b + k_bigram),  λ_u = min(lambda_most, c_u/(c_u + k_unigram))
 */

import { SPECIALS, UNK } from "./context.mjs";

/**
 * log q over the vocabulary; −Infinity for the specials, `<unk>` too where no word stands for it.
 * @param {ArrayLike<number>} logp  the source's
 * @param {{tilt: ArrayLike<number> | null, keepsUnknown: boolean}} how
 * @param {object} k  constants.json
 */
export function everyday(logp, { tilt, keepsUnknown }, k) {
  // Plain loops: once a word over the whole vocabulary, and the first time before anything is compiled.
  const rest = new Float64Array(logp);
  rest.fill(-Infinity, 0, keepsUnknown ? UNK : SPECIALS.length);
  if (tilt) for (let i = UNK; i < rest.length; i++) rest[i] += k.tilt * tilt[i];
  let most = -Infinity, sum = 0;
  for (let i = 0; i < rest.length; i++) if (rest[i] > most) most = rest[i];
  if (most === -Infinity) return rest;
  for (let i = 0; i < rest.length; i++) sum += Math.exp(rest[i] - most);
  const whole = most + Math.log(sum);
  for (let i = 0; i < rest.length; i++) rest[i] -= whole;
  return rest;
}

/**
 * A source's scores as those of a lexicon's words, by place.
 * @param {ArrayLike<number>} logp  the source's, over the vocabulary
 * @param {{ids: Int32Array}} lexicon
 * @param {Spread} spread
 * @param {object} k  constants.json
 * @param {Float64Array} [scores]  written over: half a megabyte a word is much for the collector
 */
export function lexiconScores(logp, { ids }, spread, k, scores = new Float64Array(ids.length)) {
  const model = everyday(logp, { tilt: spread.tilt, keepsUnknown: spread.logs !== null }, k);
  const { logs } = spread, unknown = model[UNK];
  for (let i = 0; i < scores.length; i++) scores[i] = ids[i] >= 0 ? model[ids[i]] : unknown + logs[i];
  return scores;
}

/**
 * How a source's scores become those of a lexicon: the tilt of each entry of the vocabulary; of each place the log of
 * its share of `<unk>` (null: no word of the lexicon stands for it), and of how often people write it at all (−Infinity
 * where no list has it).
 * @typedef {{tilt: ArrayLike<number> | null, logs: Float64Array | null, general: Float64Array}} Spread
 */

/**
 * @param {import("./lexicon.mjs").Lexicon} lexicon
 * @param {import("./dictionary.mjs").Dictionary} dictionary
 * @param {ArrayLike<number> | null} tilt
 * @returns {Spread}
 */
export function spreadOver({ ids, keys }, { words, logs }, tilt) {
  const general = new Float64Array(ids.length).fill(-Infinity);
  let sum = 0;
  for (let i = 0, at = 0; i < ids.length; i++) {
    while (words[at] < keys[i]) at++; // both ascend
    if (words[at] !== keys[i]) continue;
    general[i] = logs[at];
    if (ids[i] < 0) sum += Math.exp(logs[at]);
  }
  return { tilt, logs: sum > 0 ? general.map((log) => log - Math.log(sum)) : null, general };
}

/**
 * log p of the lexicon's words, and of the user's own words, which it does not have.
 * @param {Float64Array} model  log p_model by place; it is written over
 * @param {string} previous  the word before, folded
 * @param {import("./lexicon.mjs").Lexicon} lexicon
 * @param {string[]} own  folded words that count and are not in the lexicon
 * @param {import("./personal.mjs").Personal | null} personal  null: the model alone
 * @param {object} k  constants.json
 * @returns {{main: Float64Array, own: Float64Array}}
 */
export function mixed(model, previous, lexicon, own, personal, k) {
  const others = new Float64Array(own.length).fill(-Infinity);
  if (!personal) return { main: model, own: others };
  const uses = personal.uses(), after = personal.usesAfter(previous), total = sumOf(uses), totalAfter = sumOf(after);
  const byUse = total ? Math.min(k.lambda_most, total / (total + k.k_unigram)) : 0;
  const byPair = totalAfter ? totalAfter / (totalAfter + k.k_bigram) : 0;
  let given = 0;
  const give = (word) => {
    const ofUses = total ? ((uses.get(word) ?? 0) / total) * byUse : 0;
    const ofPairs = totalAfter ? ((after.get(word) ?? 0) / totalAfter) * byPair : 0;
    const share = ofPairs + (1 - byPair) * ofUses;
    given += share;
    return share;
  };
  for (let i = 0; i < own.length; i++) others[i] = Math.log(give(own[i]));
  const listed = new Map(); // by place
  for (const word of personal.dictionary.keys()) {
    const place = lexicon.place(word);
    if (place !== undefined) listed.set(place, give(word));
  }
  const { p, kappa } = personal.cache.after(previous, lexicon), left = Math.max(0, 1 - given);
  if (!given && !kappa) return { main: model, own: others };
  const rarer = Math.log(left * (1 - kappa));
  for (let i = 0; i < model.length; i++) model[i] += rarer;
  for (const [place, share] of p) model[place] = Math.log(Math.exp(model[place]) + left * kappa * share); // of few words
  for (const [place, share] of listed) model[place] = Math.log(Math.exp(model[place]) + share);
  return { main: model, own: others };
}

function sumOf(counts) {
  let sum = 0;
  for (const n of counts.values()) sum += n;
  return sum;
}
