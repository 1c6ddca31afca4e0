/**
 * What was typed against all prefixes of a lexicon at once: exact weighted Damerau–Levenshtein, one row a keystroke.
 *
 *   D_0[n] = D_0[parent] + miss(n)
 *   D_i[n] = min( D_{i−1}[parent] + sub_i(char[n]),  D_{i−1}[n] + extra,  D_i[parent] + miss(n),
 *                 D_{i−2}[grandparent] + swap  where t_i = char[parent] and t_{i−1} = char[n] )
 *   P_i[n] = min(D_i[n], P_i[parent])
 *
 * The names of the costs are those of constants.json.
 */

import { baseOf, distance } from "./layout.mjs";

/** A tree of words together with what it costs to miss a character of it; the same for every keystroke. */
export class Speller {
  /**
   * @param {import("./trie.mjs").Trie} trie
   * @param {import("./layout.mjs").Layout} layout
   * @param {object} constants  constants.json
   */
  constructor(trie, layout, constants) {
    this.trie = trie;
    this.layout = layout;
    this.costs = constants;
    this.bases = trie.alphabet.map(baseOf);
    this.centres = trie.alphabet.map((character) => layout.centre(character));
    this.miss = this.#missing();
  }

  /** Costs without a tap, by typed character. */
  #subs = new Map();
  /** Arrays of states that are gone: new ones of this size cost more than the row. */
  #spare = [];

  #missing() {
    const { parent, char, alphabet } = this.trie;
    const { miss, miss_mark, miss_double } = this.costs;
    const marks = alphabet.map((character) => this.costs.marks.includes(character));
    const cost = new Float64Array(this.trie.size);
    for (let n = 1; n < cost.length; n++) {
      cost[n] = marks[char[n]] ? miss_mark : char[n] === char[parent[n]] ? miss_double : miss;
    }
    return cost;
  }

  /** Nothing typed yet. */
  start() {
    const { parent, size } = this.trie;
    const row = new Float64Array(size), prefix = new Float64Array(size);
    for (let n = 1; n < size; n++) row[n] = row[parent[n]] + this.miss[n];
    return new Typing(this, null, "", row, prefix);
  }

  /** An array of one number a node, to be filled. */
  array() {
    return this.#spare.pop() ?? new Float64Array(this.trie.size);
  }

  /** Take the arrays of a state back that nobody will look at again. */
  recycle(typing) {
    this.#spare.push(typing.row, typing.prefix);
  }

  /** sub_i of every character of the alphabet for one that was typed. */
  substitutions(typed, tap) {
    const key = this.layout.centre(typed);
    if (tap && key) return this.#tapped(tap, key);
    let costs = this.#subs.get(typed);
    if (!costs) this.#subs.set(typed, (costs = this.#untapped(typed, key)));
    return costs;
  }

  #untapped(typed, key) {
    const { sub_far, sub_near, accent } = this.costs;
    const base = baseOf(typed);
    return Float64Array.from(this.trie.alphabet, (character, place) => {
      if (character === typed) return 0;
      if (this.bases[place] === base) return accent;
      const centre = this.centres[place];
      return key && centre ? Math.min(sub_far, sub_near * distance(key, centre)) : sub_far;
    });
  }

  /** The key that was hit costs nothing, a neighbour little if the tap lay between the two. */
  #tapped(tap, key) {
    const { sub_far, tap_weight } = this.costs;
    const hit = tap_weight * squared(tap, key);
    return Float64Array.from(this.centres, (centre) =>
      centre ? Math.min(sub_far, Math.max(0, tap_weight * squared(tap, centre) - hit)) : sub_far);
  }
}

/** The rows after some keystrokes; never changed (until `recycle`). The one before is `previous`. */
export class Typing {
  constructor(speller, previous, typed, row, prefix) {
    this.speller = speller;
    /** The state before the last character; null before the first. @type {Typing | null} */
    this.previous = previous;
    /** The last character. */
    this.typed = typed;
    this.length = previous ? previous.length + 1 : 0;
    /** D_i by node. */
    this.row = row;
    /** P_i by node. */
    this.prefix = prefix;
  }

  /**
   * One more keystroke.
   * @param {string} typed  one code point, folded
   * @param {[number, number] | null} [tap]
   */
  key(typed, tap = null) {
    const { trie, miss, costs } = this.speller;
    const { parent, char, size } = trie;
    const sub = this.speller.substitutions(typed, tap);
    const extra = typed === this.typed ? costs.extra_double : costs.extra;
    const swap = costs.swap;
    const before = this.row;
    const earlier = this.previous ? this.previous.row : before;
    // −2: a character that is on no node
    const now = trie.index.get(typed) ?? -2;
    const last = this.previous ? (trie.index.get(this.typed) ?? -2) : -2;
    const row = this.speller.array(), prefix = this.speller.array();
    row[0] = prefix[0] = before[0] + extra;
    for (let n = 1; n < size; n++) {
      const p = parent[n], c = char[n];
      let cost = before[p] + sub[c];
      const superfluous = before[n] + extra;
      if (superfluous < cost) cost = superfluous;
      const missed = row[p] + miss[n];
      if (missed < cost) cost = missed;
      if (c === last && char[p] === now) {
        const swapped = earlier[parent[p]] + swap;
        if (swapped < cost) cost = swapped;
      }
      row[n] = cost;
      prefix[n] = cost < prefix[p] ? cost : prefix[p];
    }
    return new Typing(this.speller, this, typed, row, prefix);
  }
}

function squared(a, b) {
  const x = a[0] - b[0], y = a[1] - b[1];
  return x * x + y * y;
}
