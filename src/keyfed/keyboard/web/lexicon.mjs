/** The words a keyboard can suggest: their tree, their places in the vocabulary, their swipe paths. */

import { hasControl, isWordlike, sizeOf } from "./context.mjs";
import { Templates } from "./gesture.mjs";
import { fold } from "./layout.mjs";
import { Trie } from "./trie.mjs";
import { Speller } from "./typed.mjs";

/** Whether a vocabulary entry is a word or number of bearable length, without control characters. */
export function isSuggestible(word, k) {
  return isWordlike(word) && sizeOf(word) <= k.longest_word && !hasControl(word);
}

/** Words with their tree and the letters typed against it. */
export class Lexicon {
  /**
   * @param {string[]} words  as they are written
   * @param {number[]} ids    the number of each in the vocabulary, ascending
   * @param {import("./layout.mjs").Layout} layout
   * @param {object} k  constants.json
   */
  constructor(words, ids, layout, k) {
    this.words = words;
    /** Folded. */
    this.keys = words.map((word) => fold(word, k.plain_joints));
    this.ids = Int32Array.from(ids);
    this.k = k;
    this.trie = new Trie(words, k.plain_joints);
    /** The node above each word's own. */
    this.above = this.trie.node.map((node) => this.trie.parent[node]);
    /** Places of all words that fold to each key. @type {Map<string, number[]>} */
    this.places = new Map();
    /** Place of each folded word: the one spelt exactly so, else the first. @type {Map<string, number>} */
    this.place = new Map();
    this.keys.forEach((key, place) => {
      if (!this.places.has(key)) this.places.set(key, []);
      this.places.get(key).push(place);
      if (!this.place.has(key) || words[place] === key) this.place.set(key, place);
    });
    this.use(layout);
  }

  /** Change the keys under the words. */
  use(layout) {
    this.layout = layout;
    this.speller = new Speller(this.trie, layout, this.k);
    this.states = [this.speller.start()];
    this.pressed = [];
    this.swiped = null;
  }

  /** Swipe paths of the words; made when the first swipe comes. */
  get templates() {
    return (this.swiped ??= new Templates(this.keys, this.layout, this.k));
  }

  /**
   * The costs of a typed word, to be read before the next call; what it shares with the last one asked for is not
   * computed again.
   * @param {string} typed
   * @param {([number, number] | null)[]} taps  of its characters, as far as known
   * @returns {import("./typed.mjs").Typing}
   */
  typing(typed, taps) {
    const pressed = [...fold(typed, this.k.plain_joints)].map((c, i) => ({ c, tap: taps[i] ?? null }));
    let same = 0;
    while (same < pressed.length && same < this.pressed.length && isSameKey(pressed[same], this.pressed[same])) same++;
    for (const gone of this.states.splice(same + 1)) this.speller.recycle(gone);
    for (const { c, tap } of pressed.slice(same)) this.states.push(this.states.at(-1).key(c, tap));
    this.pressed = pressed;
    return this.states.at(-1);
  }

  /** Which words may be shown (1): those that fold to none of `keys`. */
  outside(keys) {
    const allowed = new Uint8Array(this.words.length).fill(1);
    for (const key of keys) for (const place of this.places.get(key) ?? []) allowed[place] = 0;
    return allowed;
  }
}

function isSameKey(a, b) {
  if (a.c !== b.c || (a.tap === null) !== (b.tap === null)) return false;
  return a.tap === null || (a.tap[0] === b.tap[0] && a.tap[1] === b.tap[1]);
}
