/**
 * A swipe over the keys, decoded against the path of every word (after SHARK², Kristensson & Zhai 2004). Both paths are
 * resampled to `gesture_points` points at equal distances; with x the swipe's points and y the word's
 *
 *   location = mean |x_i − y_i|,   shape = the same after both were centred and scaled to their larger side (≥ 1)
 *   score(w) = gesture_model·log p(w) − gesture_location·location² − gesture_shape·shape²
 *
 * A path is [x0, y0, x1, y1, …].
 */

import { distance } from "./layout.mjs";

/** Words that can be swiped: at least two different keys. A path is computed when a swipe comes near its word. */
export class Templates {
  /**
   * @param {string[]} words  folded; the number of a word is its place here
   * @param {import("./layout.mjs").Layout} layout
   * @param {object} constants  constants.json
   */
  constructor(words, layout, constants) {
    this.constants = constants;
    this.layout = layout;
    this.words = words;
    /** The keys of the layout, and of each word the first and the last of them; −1: it cannot be swiped. */
    this.keys = [...layout.centres.values()];
    this.first = new Int16Array(words.length).fill(-1);
    this.last = new Int16Array(words.length).fill(-1);
    const places = new Map(this.keys.map((centre, place) => [centre, place]));
    words.forEach((word, number) => {
      const keys = keysOf(word, layout);
      if (keys.length < 2) return;
      this.first[number] = places.get(keys[0]);
      this.last[number] = places.get(keys.at(-1));
    });
  }

  /**
   * The words near a swipe and their scores.
   * @param {[number, number][]} points
   * @param {ArrayLike<number>} logp  of every word that was given
   * @returns {{word: number, score: number}[]}
   */
  score(points, logp) {
    const k = this.constants;
    const swipe = swipeOf(points);
    if (!swipe.length) return [];
    const begins = this.keys.map((key) => distance(key, swipe[0]) <= k.gesture_start);
    const ends = this.keys.map((key) => distance(key, swipe.at(-1)) <= k.gesture_end);
    const given = pathsOf(swipe, k.gesture_points);
    const found = [];
    for (let word = 0; word < this.words.length; word++) {
      if (!begins[this.first[word]] || !ends[this.last[word]]) continue;
      const template = pathsOf(keysOf(this.words[word], this.layout), k.gesture_points);
      const location = meanDistance(template.path, given.path);
      const shape = meanDistance(template.shape, given.shape);
      const away = k.gesture_location * (location * location) + k.gesture_shape * (shape * shape);
      found.push({ word, score: k.gesture_model * logp[word] - away });
    }
    return found;
  }
}

/** @typedef {{path: Float64Array, shape: Float64Array}} Paths */

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

function pathsOf(points, n) {
  const path = resampled(points, n);
  return { path, shape: shapeOf(path) };
}

/** n points at equal distances along a polyline. */
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

/** A path centred on its mean and scaled to its larger side, at least one key. */
function shapeOf(path) {
  const axes = [0, 1].map((axis) => {
    let sum = 0, least = Infinity, most = -Infinity;
    for (let i = axis; i < path.length; i += 2) {
      sum += path[i];
      least = Math.min(least, path[i]);
      most = Math.max(most, path[i]);
    }
    return { mean: sum / (path.length / 2), side: most - least };
  });
  const side = Math.max(1, axes[0].side, axes[1].side);
  return path.map((value, i) => (value - axes[i % 2].mean) / side);
}

function meanDistance(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 2) {
    const x = a[i] - b[i], y = a[i + 1] - b[i + 1];
    sum += Math.sqrt(x * x + y * y);
  }
  return sum / (a.length / 2);
}
