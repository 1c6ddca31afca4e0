/**
 * A person's own cache: words and pairs that were typed on this device, old ones fading, weighed for this person alone.
 * It is the model of `run/counts/cache.py`, equal to it within 1e-9:
 *
 *   p(w | h) = (1 − κ)·p_model(w | h) + κ·p_cache(w | v),  v the word before
 *   p_cache(w | v) = μ·b(v, w)/B(v) + (1 − μ)·u(w)/U,  μ = B(v)/(B(v) + cache_pairs)
 *
 * u and b count a word and a pair with weight cache_decay to the power of the words since; U and B are their sums. Only
 * words that the lexicon has take part, and of these the cache_support heaviest. κ has two values, by whether v was
 * followed by a word before. Each is the share of words that the cache explained so far, as EM's posterior says, from a
 * prior of cache_prior.
 */

/** Words after which the weights are scaled down, so that they stay small. */
export const EPOCH = 1000;
const LEAST = 1e-9; // a weight that is dropped then
const UNIT = 20; // a kept document has weights in twentieths: it does not say to the word when something was typed

/** Words and pairs with their weights, and how much of what came the cache explained. */
export class Cache {
  // Weights are as of the beginning of the epoch: only that of the word that comes is written.
  #words = new Map();
  #pairs = new Map(); // the word before → its followers
  #age = 0; // words in this epoch
  #weighed = []; // by whether pairs took part: [explained, words]
  #last = null; // the latest word, which may be taken back
  #places = { lexicon: null, of: new Map() };
  #found = { lexicon: null }; // what `after` found last

  /** @param {object} constants  constants.json */
  constructor(constants) {
    this.k = constants;
    this.clear();
  }

  /** Forget everything. */
  clear() {
    this.#words.clear();
    this.#pairs.clear();
    this.#age = 0;
    this.#weighed = [this.k.cache_prior.slice(), this.k.cache_prior.slice()];
    this.#change(null);
  }

  /** What a use of this moment weighs. */
  get #now() {
    return this.k.cache_decay ** -this.#age;
  }

  #change(last) {
    this.#last = last;
    this.#found = { lexicon: null };
  }

  /**
   * Count a word.
   * @param {string} word  folded
   * @param {string | null} before  the word before, folded, "" at a line start; null: none that may be kept
   * @param {{share: number, paired: boolean} | null} [explained]  how much of it the cache explained (`explained`)
   */
  add(word, before, explained = null) {
    if (this.#age >= EPOCH) this.#scale();
    this.#age++;
    const weight = this.#now;
    raise(this.#words, word, weight);
    if (before !== null) {
      if (!this.#pairs.has(before)) this.#pairs.set(before, new Map());
      raise(this.#pairs.get(before), word, weight);
    }
    if (explained) this.#weigh(explained, 1);
    this.#change({ word, before, explained });
  }

  #weigh({ share, paired }, sign) {
    this.#weighed[Number(paired)][0] += sign * share;
    this.#weighed[Number(paired)][1] += sign;
  }

  /** Take back a use that `add` counted, the latest one as if it had never been. */
  takeBack(word, before) {
    const weight = this.#now, last = this.#last;
    lower(this.#words, word, weight);
    const after = this.#pairs.get(before);
    if (after) lower(after, word, weight);
    if (after?.size === 0) this.#pairs.delete(before);
    if (last?.word === word && last.before === before) {
      if (last.explained) this.#weigh(last.explained, -1);
      this.#age--;
    }
    this.#change(null);
  }

  /** Begin an epoch: weights as of now, and without those that are as good as nothing. */
  #scale() {
    const now = this.#now;
    for (const table of [...this.#pairs.values(), this.#words]) {
      for (const [word, weight] of table) {
        if (weight < LEAST * now) table.delete(word);
        else table.set(word, weight / now);
      }
    }
    for (const [before, after] of this.#pairs) if (!after.size) this.#pairs.delete(before);
    this.#age = 0;
    this.#change(null);
  }

  /**
   * Remove what is not counted any more.
   * @param {Map<string, number>} words
   * @param {Map<string, Map<string, number>>} pairs
   */
  keepOnly(words, pairs) {
    for (const word of this.#words.keys()) if (!words.has(word)) this.#words.delete(word);
    for (const [before, after] of this.#pairs) {
      for (const word of after.keys()) if (!pairs.get(before)?.has(word)) after.delete(word);
      if (!after.size) this.#pairs.delete(before);
    }
    this.#change(null);
  }

  /**
   * What the cache says of the word that comes.
   * @param {string} before  the word before, folded
   * @param {import("./lexicon.mjs").Lexicon} lexicon
   * @returns {{p: Map<number, number>, kappa: number, paired: boolean}}  p_cache by place of the lexicon, and κ
   */
  after(before, lexicon) {
    if (this.#found.lexicon !== lexicon || this.#found.before !== before) {
      this.#found = { lexicon, before, ...this.#read(before, lexicon) };
    }
    return this.#found;
  }

  #read(before, lexicon) {
    const { k } = this, places = new Int32Array(this.#words.size), shares = new Float64Array(this.#words.size);
    let n = 0, ofWords = 0, ofPairs = 0;
    for (const [word, weight] of this.#words) {
      const place = this.#place(word, lexicon);
      if (place === undefined) continue;
      places[n] = place;
      shares[n++] = weight;
      ofWords += weight;
    }
    const pairs = new Map();
    for (const [word, weight] of this.#pairs.get(before) ?? []) {
      const place = this.#place(word, lexicon);
      if (place === undefined) continue;
      pairs.set(place, weight);
      ofPairs += weight;
    }
    const total = (ofPairs * k.cache_decay) / this.#now, mu = total / (total + k.cache_pairs);
    for (let i = 0; i < n; i++) {
      shares[i] *= (1 - mu) / ofWords;
      if (pairs.has(places[i])) shares[i] += (mu * pairs.get(places[i])) / ofPairs;
    }
    const heaviest = most(shares.subarray(0, n), k.cache_support), p = new Map();
    const sum = heaviest.reduce((sofar, i) => sofar + shares[i], 0);
    for (const i of heaviest) p.set(places[i], shares[i] / sum);
    const [explained, seen] = this.#weighed[Number(pairs.size > 0)];
    return { p, kappa: n ? explained / seen : 0, paired: pairs.size > 0 };
  }

  /** The place of a word, which is looked up in the lexicon only when it is new. */
  #place(word, lexicon) {
    if (this.#places.lexicon !== lexicon || this.#places.of.size > 2 * this.#words.size + EPOCH) this.#places = { lexicon, of: new Map() };
    const { of } = this.#places;
    if (!of.has(word)) of.set(word, lexicon.place(word));
    return of.get(word);
  }

  /**
   * How much of a word that came the cache explains, before the word is added.
   * @param {number | undefined} place  in the lexicon; of another word neither cache nor model says anything
   * @param {number} byModel  p_model(w)
   * @returns {{share: number, paired: boolean} | null}
   */
  explained(place, byModel, before, lexicon) {
    const { p, kappa, paired } = this.after(before, lexicon);
    if (place === undefined || !p.size) return null;
    const byCache = kappa * (p.get(place) ?? 0);
    return { share: byCache > 0 ? byCache / (byCache + (1 - kappa) * byModel) : 0, paired };
  }

  /** What a document keeps. */
  kept() {
    const rounded = (table) => Object.fromEntries([...table].map(([word, weight]) => [word, Math.round(weight * UNIT)]).filter(([, n]) => n));
    const pairs = [...this.#pairs].map(([before, after]) => [before, rounded(after)]);
    return {
      words: rounded(this.#words), pairs: Object.fromEntries(pairs.filter(([, after]) => Object.keys(after).length)),
      age: this.#age, weighed: this.#weighed.map((one) => one.slice()),
    };
  }

  /**
   * Take what `kept` gave in the place of what is here.
   * @param {(word: string) => string} folded  how a word is counted
   */
  take({ words, pairs, age, weighed }, folded) {
    const table = (found) => {
      const weights = new Map();
      for (const [word, n] of Object.entries(found)) raise(weights, folded(word), n / UNIT);
      return weights;
    };
    this.clear();
    this.#words = table(words);
    this.#pairs = new Map(Object.entries(pairs).map(([before, after]) => [folded(before), table(after)]));
    this.#age = age;
    this.#weighed = weighed.map((one) => one.slice());
  }

  /**
   * Begin with uses whose order is not known, as documents of before have them: each weighs what n uses in any order
   * weigh on average, (1 − d^n) / (n·(1 − d)).
   * @param {Map<string, number>} words
   * @param {Map<string, Map<string, number>>} pairs
   */
  begin(words, pairs) {
    this.clear();
    let n = 0;
    for (const uses of words.values()) n += uses;
    const rate = 1 - this.k.cache_decay, weight = (1 - this.k.cache_decay ** n) / (n * rate);
    const table = (uses) => new Map([...uses].map(([word, times]) => [word, times * weight]));
    this.#words = table(words);
    this.#pairs = new Map([...pairs].map(([before, after]) => [before, table(after)]));
  }

  /** Add another cache: of two weights the larger one holds, of two κ the one that more words weighed. */
  merge(other) {
    for (const one of [this, other]) one.#scale();
    const highest = (table, more) => {
      for (const [word, weight] of more) table.set(word, Math.max(weight, table.get(word) ?? 0));
    };
    highest(this.#words, other.#words);
    for (const [before, after] of other.#pairs) {
      if (!this.#pairs.has(before)) this.#pairs.set(before, new Map());
      highest(this.#pairs.get(before), after);
    }
    this.#weighed = this.#weighed.map((one, i) => (other.#weighed[i][1] > one[1] ? other.#weighed[i].slice() : one));
    this.#change(null);
  }
}

/** Where the n highest shares are. */
function most(shares, n) {
  const least = shares.length > n ? shares.slice().sort()[shares.length - n] : 0, found = [];
  for (let i = 0; i < shares.length; i++) if (shares[i] >= least) found.push(i);
  return found.sort((a, b) => shares[b] - shares[a]).slice(0, n);
}

function raise(table, word, weight) {
  table.set(word, (table.get(word) ?? 0) + weight);
}

function lower(table, word, weight) {
  const left = (table.get(word) ?? 0) - weight;
  if (left > LEAST * weight) table.set(word, left);
  else table.delete(word);
}
