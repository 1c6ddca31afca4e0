/**
 * What was typed against all beginnings of a lexicon at once: weighted Damerau–Levenshtein, a set of nodes a keystroke.
 *
 *   D_0[n] = D_0[parent] + miss(n)
 *   D_i[n] = min( D_{i−1}[parent] + sub_i(char[n]),  D_{i−1}[n] + extra,  D_i[parent] + miss(n),
 *                 D_{i−2}[grandparent] + swap  where t_i = char[parent] and t_{i−1} = char[n] )
 *
 * Only nodes with D_i ≤ `most` are kept. No cost is negative, so what leads to such a node is such a node: within the
 * bound the costs are exact. The names of the costs are those of constants.json.
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
    this.most = Math.max(constants.max_cost_most, constants.correct_max);
    this.bases = trie.alphabet.map(baseOf);
    this.centres = trie.alphabet.map((character) => layout.centre(character));
    this.miss = this.#missing();
    /** D_{i−2}, D_{i−1} and D_i by node while a key is looked at; Infinity everywhere in between. */
    this.rows = [0, 1, 2].map(() => new Float64Array(trie.size).fill(Infinity));
    /** The key at which a node was last looked at. */
    this.seen = new Uint32Array(trie.size);
    this.keys = 0;
  }

  /** Costs without a tap, by typed character. */
  #subs = new Map();

  #missing() {
    const { parent, char, alphabet } = this.trie;
    const { miss, miss_mark, miss_double } = this.costs;
    const marks = alphabet.map((character) => this.costs.marks.includes(character));
    const cost = new Float32Array(this.trie.size);
    for (let n = 1; n < cost.length; n++) {
      cost[n] = marks[char[n]] ? miss_mark : char[n] === char[parent[n]] ? miss_double : miss;
    }
    return cost;
  }

  /** Nothing typed yet. */
  start() {
    const { kids } = this.trie, { miss, most } = this;
    const nodes = [0], costs = [0];
    for (let at = 0; at < nodes.length; at++) {
      const n = nodes[at];
      for (let kid = kids[n]; kid < kids[n + 1]; kid++) {
        const cost = costs[at] + miss[kid];
        if (cost <= most) nodes.push(kid), costs.push(cost);
      }
    }
    return new Typing(this, null, "", Int32Array.from(nodes), Float64Array.from(costs));
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

/** The nodes within the bound after some keystrokes, shallow ones first; never changed. */
export class Typing {
  constructor(speller, previous, typed, nodes, costs) {
    this.speller = speller;
    /** The state before the last character; null before the first. @type {Typing | null} */
    this.previous = previous;
    /** The last character. */
    this.typed = typed;
    this.length = previous ? previous.length + 1 : 0;
    this.nodes = nodes;
    /** D_i of each of `nodes`. */
    this.costs = costs;
  }

  /**
   * One more keystroke.
   * @param {string} typed  one code point, folded
   * @param {[number, number] | null} [tap]
   */
  key(typed, tap = null) {
    const { trie, miss, costs: k, most, rows, seen } = this.speller;
    const { parent, char, kids } = trie;
    const sub = this.speller.substitutions(typed, tap);
    const extra = typed === this.typed ? k.extra_double : k.extra, { swap } = k;
    const [earlier, before, row] = rows;
    const stamp = ++this.speller.keys;
    const now = trie.index.get(typed) ?? -1, last = this.previous ? (trie.index.get(this.typed) ?? -1) : -1;
    const old = this.previous && now >= 0 && last >= 0 ? this.previous : null;
    this.#fill(before);
    old?.#fill(earlier);

    const nodes = [], found = [];
    const look = (n) => {
      if (seen[n] === stamp) return;
      seen[n] = stamp;
      const p = parent[n], c = char[n];
      let cost = before[n] + extra;
      if (n) {
        const meant = before[p] + sub[c], missed = row[p] + miss[n];
        if (meant < cost) cost = meant;
        if (missed < cost) cost = missed;
        if (c === last && char[p] === now) {
          const swapped = earlier[parent[p]] + swap;
          if (swapped < cost) cost = swapped;
        }
      }
      if (!(cost <= most)) return;
      row[n] = cost;
      nodes.push(n), found.push(cost);
    };
    // By depth, for the sake of row[parent]: nodes that were kept, and those under kept ones of this key and the last.
    const kept = { list: this.nodes, at: 0 }, under = [{ list: this.nodes, at: 0 }, { list: nodes, at: 0 }];
    const swaps = { list: old?.nodes ?? [], at: 0 };
    // The nodes of a depth are first … end − 1, `above` is the end of those above them, `above2` of those above these.
    for (let first = 0, end = 1, above = 0, above2 = 0; first < end; [first, end, above, above2] = [end, kids[end], end, above]) {
      for (; kept.at < kept.list.length && kept.list[kept.at] < end; kept.at++) look(kept.list[kept.at]);
      for (const stream of under) {
        for (; stream.at < stream.list.length && stream.list[stream.at] < above; stream.at++) {
          const n = stream.list[stream.at];
          for (let kid = kids[n]; kid < kids[n + 1]; kid++) look(kid);
        }
      }
      for (; swaps.at < swaps.list.length && swaps.list[swaps.at] < above2; swaps.at++) {
        const g = swaps.list[swaps.at];
        if (earlier[g] + swap > most) continue;
        for (let p = kids[g]; p < kids[g + 1]; p++) {
          if (char[p] !== now) continue;
          for (let n = kids[p]; n < kids[p + 1]; n++) if (char[n] === last) look(n);
        }
      }
    }
    const after = new Typing(this.speller, this, typed, Int32Array.from(nodes), Float64Array.from(found));
    this.#clear(before);
    old?.#clear(earlier);
    after.#clear(row);
    return after;
  }

  #fill(row) {
    for (let i = 0; i < this.nodes.length; i++) row[this.nodes[i]] = this.costs[i];
  }

  #clear(row) {
    for (let i = 0; i < this.nodes.length; i++) row[this.nodes[i]] = Infinity;
  }

  /**
   * The costs by word: of the whole word, and of its cheapest beginning, itself excepted.
   * @param {Float64Array} whole
   * @param {Float64Array} beginning
   */
  spread(whole, beginning) {
    const { from, ends, to } = this.speller.trie;
    whole.fill(Infinity);
    beginning.fill(Infinity);
    for (let i = 0; i < this.nodes.length; i++) {
      const n = this.nodes[i], cost = this.costs[i];
      for (let place = from[n]; place < ends[n]; place++) whole[place] = cost;
      // Shallow nodes come first: what stands there is the least of the nodes above.
      if (ends[n] < to[n] && cost < beginning[ends[n]]) beginning.fill(cost, ends[n], to[n]);
    }
  }
}

function squared(a, b) {
  const x = a[0] - b[0], y = a[1] - b[1];
  return x * x + y * y;
}
