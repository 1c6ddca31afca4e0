/**
 * All words of a lexicon as one tree of letters: a node is a beginning, node 0 the empty one. Nodes are numbered
 * breadth first: every node comes after the one above it, and the nodes under one follow each other.
 */

/** A tree over words in ascending order; words that are spelt alike share a node. */
export class Trie {
  /**
   * @param {string[]} keys  folded and sorted (by UTF-16 units, as `<` does); the number of a word is its place here
   */
  constructor(keys) {
    /** Characters in use; a node names its own by the place here. @type {string[]} */
    this.alphabet = [];
    /** Place of each character. @type {Map<string, number>} */
    this.index = new Map();
    const depths = keys.map((key) => this.#take(key));

    // What a word shares with the one before it; its other letters get nodes of their own.
    const shared = keys.map((key, w) => (w ? sharedLetters(keys[w - 1], key) : 0)), wide = [0];
    for (let w = 0; w < keys.length; w++) {
      for (let depth = shared[w] + 1; depth <= depths[w]; depth++) wide[depth] = (wide[depth] ?? 0) + 1;
    }
    const next = [0];
    for (let depth = 1, first = 1; depth < wide.length; first += wide[depth++]) next[depth] = first;
    const size = wide.reduce((sum, n) => sum + n, 1);

    this.size = size;
    /** The node above each; the root's is the root. */
    this.parent = new Int32Array(size);
    /** The character of each; the root's is one of its own, behind the last. */
    this.char = new Uint16Array(size).fill(this.alphabet.length);
    /** Those under a node are kids[n] … kids[n + 1] − 1. */
    this.kids = new Int32Array(size + 1);
    /** The words that begin so are from[n] … to[n] − 1; the first of them, up to ends[n] − 1, are spelt so. */
    this.from = new Int32Array(size);
    this.ends = new Int32Array(size);
    this.to = new Int32Array(size).fill(keys.length);
    /** The node at which each word ends. */
    this.node = new Int32Array(keys.length);
    const path = [0];
    for (let w = 0; w < keys.length; w++) {
      while (path.length > shared[w] + 1) this.to[path.pop()] = w;
      for (let depth = shared[w] + 1, at = offset(keys[w], shared[w]); depth <= depths[w]; depth++) {
        const c = String.fromCodePoint(keys[w].codePointAt(at)), n = next[depth]++;
        at += c.length;
        this.parent[n] = path[depth - 1];
        this.char[n] = this.index.get(c);
        this.kids[path[depth - 1] + 1]++;
        this.from[n] = this.ends[n] = w;
        path.push(n);
      }
      this.node[w] = path.at(-1);
      this.ends[path.at(-1)] = w + 1;
    }
    this.kids[0] = 1;
    for (let n = 0; n < size; n++) this.kids[n + 1] += this.kids[n];
  }

  /** Take a word's letters into the alphabet; returns how many it has. */
  #take(key) {
    let depth = 0;
    for (const c of key) {
      depth++;
      if (this.index.has(c)) continue;
      this.index.set(c, this.alphabet.length);
      this.alphabet.push(c);
    }
    return depth;
  }

  /** The node of a beginning; −1 where no word begins so. */
  find(beginning) {
    let n = 0;
    for (const c of beginning) {
      const wanted = this.index.get(c);
      let kid = this.kids[n];
      while (kid < this.kids[n + 1] && this.char[kid] !== wanted) kid++;
      if (kid === this.kids[n + 1]) return -1;
      n = kid;
    }
    return n;
  }
}

/** How many code points two words begin with alike. */
function sharedLetters(a, b) {
  let at = 0, pairs = 0;
  while (at < a.length && a.charCodeAt(at) === b.charCodeAt(at)) if (isLow(a, at++)) pairs++;
  return at - pairs - (isLow(a, at) || isLow(b, at) ? 1 : 0); // half a code point is none
}

const isLow = (word, at) => (word.charCodeAt(at) & 0xfc00) === 0xdc00;

/** Where the n-th code point of a word begins. */
function offset(word, n) {
  let at = 0;
  for (; n > 0; n--) at += word.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}
