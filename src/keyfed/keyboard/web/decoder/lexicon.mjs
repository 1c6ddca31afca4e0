/** The words a keyboard can suggest: their tree, their places in the vocabulary, their swipe paths. */

import { hasControl, isWordlike, sizeOf } from "./context.mjs";
import { Templates } from "./gesture.mjs";
import { fold } from "./layout.mjs";
import { Trie } from "./trie.mjs";
import { Speller } from "./typed.mjs";

const PLAIN = /^[a-z][a-z'-]*$/; // most words: quicker to see than what Unicode says of each character

/** Whether a vocabulary entry is a word or number of bearable length, without control characters. */
export function isSuggestible(word, k) {
  if (PLAIN.test(word)) return word.length <= k.longest_word;
  return isWordlike(word) && sizeOf(word) <= k.longest_word && !hasControl(word);
}

/**
 * A word of a lexicon: as it is written, folded, and its number in the vocabulary (−1: it is not there).
 * @typedef {{word: string, key: string, id: number}} Entry
 */

/** Words with their tree and the letters typed against it. */
export class Lexicon {
  /**
   * @param {Entry[]} entries  in any order; the place of a word is that among the sorted ones
   * @param {import("./layout.mjs").Layout} layout
   * @param {object} k  constants.json
   */
  constructor(entries, layout, k) {
    const sorted = isSorted(entries) ? entries : entries.toSorted(byKey);
    this.words = sorted.map(({ word }) => word);
    /** Folded, ascending. */
    this.keys = sorted.map(({ key }) => key);
    this.ids = new Int32Array(sorted.length);
    for (let place = 0; place < sorted.length; place++) this.ids[place] = sorted[place].id;
    this.k = k;
    this.trie = null;
    this.costs = null;
    this.use(layout);
  }

  /** Another layout: other keys are neighbours. */
  use(layout) {
    this.layout = layout;
    this.states = [];
    this.pressed = [];
    this.swiped = null;
  }

  /** The tree and nothing typed yet; made when the first letter comes, as the next word needs neither. */
  #begin() {
    this.trie ??= new Trie(this.keys);
    const costs = () => new Float64Array(this.keys.length);
    this.costs ??= { of: null, whole: costs(), beginning: costs() };
    this.states = [new Speller(this.trie, this.layout, this.k).start()];
  }

  /** Swipe paths of the words; made when the first swipe comes. */
  get templates() {
    return (this.swiped ??= new Templates(this.keys, this.layout, this.k));
  }

  /** The places of all words that fold to a key: from … to − 1. */
  range(key) {
    const { keys } = this;
    let from = 0, end = keys.length;
    while (from < end) {
      const middle = (from + end) >> 1;
      if (keys[middle] < key) from = middle + 1;
      else end = middle;
    }
    let to = from;
    while (to < keys.length && keys[to] === key) to++;
    return { from, to };
  }

  /** Whether a word folds to a key. */
  has(key) {
    const { from, to } = this.range(key);
    return from < to;
  }

  /** The place of a folded word: the one spelt exactly so, else the first; undefined where there is none. */
  place(key) {
    const { from, to } = this.range(key);
    for (let place = from; place < to; place++) if (this.words[place] === key) return place;
    return from < to ? from : undefined;
  }

  /**
   * What it costs that a word, or a beginning of it, was typed so; to be read before the next call. What is shared with
   * what was typed last is not computed again, and a cost above the bound (`typed.mjs`) is Infinity.
   * @param {string} typed
   * @param {([number, number] | null)[]} taps  of its characters, as far as known
   * @returns {{whole: Float64Array, beginning: Float64Array}}  by place
   */
  typing(typed, taps) {
    if (!this.states.length) this.#begin();
    const pressed = [...fold(typed, this.k.plain_joints)].map((c, i) => ({ c, tap: taps[i] ?? null }));
    let same = 0;
    while (same < pressed.length && same < this.pressed.length && isSameKey(pressed[same], this.pressed[same])) same++;
    this.states.length = same + 1;
    for (const { c, tap } of pressed.slice(same)) this.states.push(this.states.at(-1).key(c, tap));
    this.pressed = pressed;
    const { costs } = this, state = this.states.at(-1);
    if (costs.of !== state) state.spread(costs.whole, costs.beginning);
    costs.of = state;
    return costs;
  }

  /** Which words may be shown (1): those that fold to none of `keys`. */
  outside(keys) {
    const allowed = new Uint8Array(this.words.length).fill(1);
    for (const key of keys) {
      const { from, to } = this.range(key);
      allowed.fill(0, from, to);
    }
    return allowed;
  }
}

/**
 * The entries of a vocabulary and of a dictionary, ascending: a dictionary's word that the vocabulary has is not there
 * twice, and a word of the vocabulary that is doubted is not there at all.
 * @param {{words: string[], doubted?: string[]}} vocab
 * @param {number} first  the first number that is a word
 * @param {string[]} listed  the dictionary's words
 * @param {object} k  constants.json
 * @returns {Entry[]}
 */
export function entriesOf(vocab, first, listed, k) {
  const doubted = new Set(vocab.doubted ?? []);
  const own = [];
  for (let id = first; id < vocab.words.length; id++) {
    const word = vocab.words[id];
    if (!doubted.has(word) && isSuggestible(word, k)) own.push({ word, key: fold(word, k.plain_joints), id });
  }
  own.sort(byKey);
  const merged = [];
  let at = 0;
  for (const word of listed) {
    while (at < own.length && own[at].key < word) merged.push(own[at++]);
    if (own[at]?.key !== word && isSuggestible(word, k)) merged.push({ word, key: word, id: -1 });
  }
  return [...merged, ...own.slice(at)];
}

function isSorted(entries) {
  for (let i = 1; i < entries.length; i++) if (byKey(entries[i - 1], entries[i]) > 0) return false;
  return true;
}

/** By key, words that are spelt alike by their number. */
function byKey(a, b) {
  if (a.key !== b.key) return a.key < b.key ? -1 : 1;
  return a.id - b.id;
}

function isSameKey(a, b) {
  if (a.c !== b.c || (a.tap === null) !== (b.tap === null)) return false;
  return a.tap === null || (a.tap[0] === b.tap[0] && a.tap[1] === b.tap[1]);
}
