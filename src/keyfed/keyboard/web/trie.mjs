/**
 * All words of a lexicon as one tree of letters: a node is a beginning, node 0 the empty one. Nodes are numbered
 * breadth first, so that one loop over the arrays sees every node after the one above it.
 */

import { fold } from "./layout.mjs";

/** A tree over folded words (lower case, plain apostrophes); words that are spelt alike share a node. */
export class Trie {
  /**
   * @param {string[]} words  the number of a word is its place here
   * @param {Object<string, string>} plainJoints  constants.json
   */
  constructor(words, plainJoints) {
    const spelt = words.map((word) => [...fold(word, plainJoints)]);
    /** Characters in use, ascending; a node names its own by the place here. @type {string[]} */
    this.alphabet = [...new Set(spelt.flat())].sort((a, b) => a.codePointAt(0) - b.codePointAt(0));
    /** Place of each character. @type {Map<string, number>} */
    this.index = new Map(this.alphabet.map((character, place) => [character, place]));
    const coded = spelt.map((characters) => characters.map((character) => this.index.get(character)));

    /** The node at which each word ends. */
    this.node = new Int32Array(words.length);
    const letters = this.alphabet.length;
    const parent = [0], char = [letters]; // the root has a letter of its own, behind the last
    let going = coded.keys();
    for (let depth = 0; ; depth++) {
      going = Array.from(going).filter((w) => coded[w].length > depth);
      if (!going.length) break;
      const key = (w) => this.node[w] * letters + coded[w][depth];
      const keys = Float64Array.from(new Set(going.map(key))).sort();
      const first = parent.length;
      const places = new Map(Array.from(keys, (k, place) => [k, first + place]));
      for (const k of keys) {
        parent.push(Math.floor(k / letters));
        char.push(k % letters);
      }
      for (const w of going) this.node[w] = places.get(key(w));
    }
    /** The node above each; the root's is the root. */
    this.parent = Int32Array.from(parent);
    this.char = Int16Array.from(char);
    this.size = parent.length;
  }
}
