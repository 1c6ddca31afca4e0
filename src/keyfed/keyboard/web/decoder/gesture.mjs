/**
 * A swipe over the keys, decoded against the keys of every word: the finger aims at each key in order and misses it a
 * little, and goes straight from one to the next. The swipe is resampled to points x_0 … x_m−1 at equal distances δ;
 * a word with the keys y_0 … y_n−1 is laid on it at places 0 = t_0 ≤ … ≤ t_n−1 = m − 1:
 *
 *   cost(w) = min_t Σ_i gesture_key·|x_t_i − y_i|² + Σ_i gesture_bend·bend(t_i−1, t_i)
 *   bend(a, b) = δ·Σ_{a<j<b} |x_j − (x_a + (j − a)/(b − a)·(x_b − x_a))|²
 *   score(w) = log p(w) − cost(w)
 *
 * With keys missed by a normal error of 0.25 key widths, gesture_key is 1/(2·0.25²). No key is missed by more than
 * gesture_reach. SHARK² (Kristensson & Zhai 2004) compares whole paths at equal shares of their lengths instead; there a
 * key that is missed shifts all that follows. A path is [x0, y0, x1, y1, …].
 */

import { distance } from "./layout.mjs";

/** Words that can be swiped: at least two different keys. */
export class Templates {
  /**
   * @param {string[]} words  folded; the number of a word is its place here
   * @param {import("./layout.mjs").Layout} layout
   * @param {object} constants  constants.json
   */
  constructor(words, layout, constants) {
    this.constants = constants;
    this.centres = [...layout.centres.values()];
    const places = new Map(this.centres.map((centre, place) => [centre, place]));
    const keys = words.map((word) => keysOf(word, layout).map((centre) => places.get(centre)));
    /** The numbers of each word's keys, one word behind the other: those of word w from starts[w] to starts[w + 1] − 1. */
    this.keys = Uint8Array.from(keys.flat());
    this.starts = new Int32Array(words.length + 1);
    keys.forEach((own, word) => { this.starts[word + 1] = this.starts[word] + own.length; });
  }

  /** Whether a word has a path. */
  isSwipeable(word) {
    return this.starts[word + 1] - this.starts[word] > 1;
  }

  /**
   * The words near a swipe and their scores.
   * @param {[number, number][]} points
   * @param {ArrayLike<number>} logp  of every word that was given
   * @returns {{word: number, score: number}[]}
   */
  score(points, logp) {
    const swipe = swipeOf(points), { keys, starts } = this;
    if (!swipe.length) return [];
    const drawn = new Drawn(swipe, this.centres, this.constants);
    const found = [];
    for (let word = 0; word + 1 < starts.length; word++) {
      const from = starts[word], to = starts[word + 1];
      if (to - from < 2 || !drawn.begins[keys[from]] || !drawn.ends[keys[to - 1]]) continue;
      const cost = drawn.cost(keys, from, to);
      if (cost < Infinity) found.push({ word, score: logp[word] - cost });
    }
    return found;
  }
}

/** A swipe as words are laid on it. */
class Drawn {
  constructor(swipe, centres, k) {
    const length = lengthOf(swipe);
    const m = Math.max(2, Math.min(k.gesture_points, Math.ceil(length / k.gesture_step) + 1));
    const path = resampled(swipe, m);
    this.m = m;
    this.bends = bendsOf(path, (k.gesture_bend * length) / (m - 1));
    const most = k.gesture_key * k.gesture_reach ** 2;
    /** What it costs that a key was meant at a point, [key][point]; Infinity: too far. */
    this.misses = centres.map(([x, y]) => Float64Array.from({ length: m }, (_, j) => {
      const miss = k.gesture_key * ((path[2 * j] - x) ** 2 + (path[2 * j + 1] - y) ** 2);
      return miss <= most ? miss : Infinity;
    }));
    this.begins = this.misses.map((miss) => miss[0] < Infinity);
    this.ends = this.misses.map((miss) => miss[m - 1] < Infinity);
    this.passes = this.misses.map((miss) => miss.some((cost) => cost < Infinity));
    this.rows = [new Float64Array(m), new Float64Array(m)];
  }

  /** cost(w) of the word with the keys from … to − 1: row i has the least cost with key i at each point. */
  cost(keys, from, to) {
    for (let i = from; i < to; i++) if (!this.passes[keys[i]]) return Infinity;
    const { m, bends, misses } = this;
    let [row, next] = this.rows;
    row.fill(Infinity);
    row[0] = misses[keys[from]][0];
    let low = 0, high = 0; // where the row is finite
    for (let i = from + 1; i < to; i++) {
      const miss = misses[keys[i]];
      next.fill(Infinity);
      let first = m, last = -1;
      for (let b = i + 1 < to ? low : m - 1; b < m; b++) {
        if (miss[b] === Infinity) continue;
        let least = Infinity;
        for (let a = low, end = Math.min(high, b); a <= end; a++) {
          const cost = row[a] + bends[a * m + b];
          if (cost < least) least = cost;
        }
        if (least === Infinity) continue;
        next[b] = least + miss[b];
        if (first === m) first = b;
        last = b;
      }
      if (last < 0) return Infinity;
      [row, next, low, high] = [next, row, first, last];
    }
    return row[m - 1];
  }
}

function lengthOf(points) {
  let length = 0;
  for (let i = 1; i < points.length; i++) length += distance(points[i], points[i - 1]);
  return length;
}

/** weight·Σ_j |…|² of bend(a, b), for all pairs of a path's points, at a·m + b. */
function bendsOf(path, weight) {
  const m = path.length / 2, bends = new Float64Array(m * m);
  for (let a = 0; a < m; a++) {
    for (let b = a + 2; b < m; b++) {
      const dx = (path[2 * b] - path[2 * a]) / (b - a), dy = (path[2 * b + 1] - path[2 * a + 1]) / (b - a);
      let sum = 0;
      for (let j = a + 1; j < b; j++) {
        const x = path[2 * j] - path[2 * a] - (j - a) * dx, y = path[2 * j + 1] - path[2 * a + 1] - (j - a) * dy;
        sum += x * x + y * y;
      }
      bends[a * m + b] = weight * sum;
    }
  }
  return bends;
}

/** The centres of a word's keys; characters without a key are skipped, equal successive keys counted once. */
export function keysOf(word, layout) {
  const centres = [];
  for (const character of word) {
    const centre = layout.centre(character);
    if (centre && centre !== centres.at(-1)) centres.push(centre); // a layout has one array a key
  }
  return centres;
}

/** A swipe's points without those that are no numbers or repeat the one before. */
export function swipeOf(points) {
  const swipe = [];
  for (const [x, y] of points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
    const last = swipe.at(-1);
    if (!last || last[0] !== x || last[1] !== y) swipe.push([x, y]);
  }
  return swipe;
}

/** n points at equal distances on a polyline. */
export function resampled(points, n) {
  const reached = new Float64Array(points.length);
  for (let i = 1; i < points.length; i++) reached[i] = reached[i - 1] + distance(points[i], points[i - 1]);
  const total = reached[points.length - 1];
  const path = new Float64Array(2 * n);
  for (let j = 0, i = 0; j < n; j++) {
    const target = total * (j / (n - 1));
    while (i + 2 < points.length && reached[i + 1] <= target) i++;
    const a = points[i], b = points[Math.min(i + 1, points.length - 1)];
    const length = distance(b, a);
    const share = length > 0 ? (target - reached[i]) / length : 0;
    path[2 * j] = a[0] + share * (b[0] - a[0]);
    path[2 * j + 1] = a[1] + share * (b[1] - a[1]);
  }
  return path;
}
