/**
 * The n-grams of an export, ngram.safetensors, and the network mixed with them. Contexts are numbered as rows of the
 * level below, the empty one is row 0. Per length n there are, of the contexts that have continuations, n{n}.gaps (the
 * row of each less that of the one before), n{n}.sizes, n{n}.mass (float32), n{n}.backoff, n{n}.bucket, and of every
 * continuation n{n}.words and n{n}.shares. With q a share and b a backoff:
 *
 *   p_n(w | h) = mass·2^(−q/12) / Σ 2^(−q/12),  γ(h) = 2^(8 − b/12)
 */

import { EOS } from "./context.mjs";
import { readTensors } from "./safetensors.mjs";

const STEPS = 12; // to an octave
const LARGEST = 2 ** 8; // γ
const POWERS = Float64Array.from({ length: 256 }, (_, q) => 2 ** (-q / STEPS));

/** A source of log-probabilities (`engine.mjs`) that needs nothing but tables. */
export class NGram {
  /**
   * @param {Map<string, import("./safetensors.mjs").Tensor>} tensors
   * @param {number} vocabSize  V
   * @param {boolean} [lines]  whether a line is read on its own, from the end of the one before it
   * @throws {Error} the tables do not fit one another or the vocabulary
   */
  constructor(tensors, vocabSize, lines = false) {
    this.vocabSize = vocabSize;
    this.lines = lines;
    this.levels = [];
    for (let n = 1, contexts = 1; tensors.has(`n${n}.gaps`); n++) {
      const level = levelOf(tensors, n, contexts, vocabSize);
      this.levels.push(level);
      contexts = level.words.length;
    }
    if (!this.levels.length) throw new Error("damaged n-gram file: it has no tables");
  }

  /** @param {ArrayBuffer | Uint8Array} file */
  static read(file, vocabSize, lines = false) {
    return new NGram(readTensors(file), vocabSize, lines);
  }

  /**
   * The distribution of the token after a context, [V]: p ← 1/V, then for every length whose context was seen
   * p ← γ(h) p, and p_n(w | h) for its continuations.
   * @param {ArrayLike<number>} context
   */
  next(context) {
    const p = new Float64Array(this.vocabSize).fill(1 / this.vocabSize);
    this.#each(context, ({ start, words, prob, backoff }, h) => {
      const gamma = backoff[h];
      for (let w = 0; w < p.length; w++) p[w] *= gamma;
      for (let row = start[h]; row < start[h + 1]; row++) p[words[row]] = prob[row];
    });
    return p;
  }

  /**
   * The place of a context among those of a mixture: the words of its longest end that has continuations, and the
   * bucket of that context, which the file names.
   * @param {ArrayLike<number>} context
   * @returns {[number, number]}
   */
  place(context) {
    let place = [0, 0];
    this.#each(context, ({ start, bucket }, h, length) => {
      if (start[h + 1] > start[h]) place = [length, bucket[h]];
    });
    return place;
  }

  /**
   * log p of every word after `ids`.
   * @param {Int32Array} ids
   * @returns {Promise<Float64Array>}
   */
  async scores(ids) {
    return this.next(ids).map(Math.log);
  }

  /** Call `use(level, row of the context, its length)` for every end of a context that was seen, the shortest first. */
  #each(text, use) {
    const context = this.lines ? text.slice(Math.max(0, text.lastIndexOf(EOS))) : text;
    for (let n = 0; n < this.levels.length && n <= context.length; n++) {
      const h = this.#row(context, n);
      if (h < 0) break;
      use(this.levels[n], h, n);
    }
  }

  /** The row of the last `length` tokens in the level of that length; −1: never seen. The empty context is row 0. */
  #row(context, length) {
    let row = 0;
    for (let i = 0; i < length && row >= 0; i++) {
      const { start, words } = this.levels[i];
      row = find(words, start[row], start[row + 1], context[context.length - length + i]);
    }
    return row;
  }
}

/**
 * The network and the n-grams as one source: p = λ·p_network + (1 − λ)·p_counts, with λ by the n-grams' place of the
 * context and by how sure the network is.
 */
export class Mixture {
  #network;
  #ngram;
  #edges;
  #weights;

  /**
   * @param {import("./engine.mjs").Source} network
   * @param {NGram} ngram
   * @param {{order: number, confidence_edges: number[], weights: number[][][]}} fitted  as in the manifest
   * @throws {Error} the weights are not those of these n-grams
   */
  constructor(network, ngram, { order, confidence_edges: edges, weights }) {
    const isWeight = (weight) => typeof weight === "number" && weight >= 0 && weight <= 1;
    const isRow = (row) => row.length === edges.length + 1 && row.every(isWeight);
    const reached = Math.max(...ngram.levels.map(({ bucket }) => bucket.reduce((most, b) => Math.max(most, b), 0)));
    const fits = order === ngram.levels.length && weights.length === order;
    if (!fits || !weights.every((of) => of.length > reached && of.every(isRow))) {
      throw new Error("damaged manifest: the mixture's weights are not those of the n-grams");
    }
    this.#network = network;
    this.#ngram = ngram;
    this.#edges = edges;
    this.#weights = weights;
  }

  /** log p of every word after `ids`; null if the caller lost interest on the way. */
  async scores(ids, signal) {
    const logp = await this.#network.scores(ids, signal);
    if (!logp) return null;
    const counted = this.#ngram.next(ids), [length, bucket] = this.#ngram.place(ids);
    let most = -Infinity;
    for (let w = 0; w < logp.length; w++) if (logp[w] > most) most = logp[w];
    const sure = Math.exp(most);
    const weight = this.#weights[length][bucket][this.#edges.filter((edge) => edge <= sure).length];
    for (let w = 0; w < counted.length; w++) {
      counted[w] = Math.log(weight * Math.exp(logp[w]) + (1 - weight) * counted[w]);
    }
    return counted;
  }
}

function levelOf(tensors, n, contexts, vocabSize) {
  const part = (name, kind) => {
    const tensor = tensors.get(`n${n}.${name}`);
    if (!(tensor?.data instanceof kind)) throw damaged(n, `there is no ${name}`);
    return tensor.data;
  };
  const gaps = part("gaps", Uint16Array), sizes = part("sizes", Uint16Array), mass = part("mass", Float32Array);
  const gammas = part("backoff", Uint8Array), buckets = part("bucket", Uint8Array);
  const words = part("words", Uint16Array), shares = part("shares", Uint8Array);
  const fits = [sizes, mass, gammas, buckets].every(({ length }) => length === gaps.length);
  if (!fits || words.length !== shares.length) throw damaged(n, "they do not fit one another");
  const start = new Int32Array(contexts + 1), prob = new Float64Array(words.length);
  const backoff = new Float64Array(contexts).fill(1), bucket = new Uint8Array(contexts);
  let row = -1, at = 0;
  for (let i = 0; i < gaps.length; i++) {
    const end = at + sizes[i];
    if (!gaps[i] || row + gaps[i] >= contexts || !sizes[i] || end > words.length) {
      throw damaged(n, "they do not fit one another");
    }
    start.fill(at, row + 1, row + gaps[i] + 1);
    row += gaps[i];
    backoff[row] = LARGEST * POWERS[gammas[i]];
    bucket[row] = buckets[i];
    let whole = 0;
    for (let k = at; k < end; k++) whole += POWERS[shares[k]];
    for (const scale = mass[i] / whole; at < end; at++) prob[at] = POWERS[shares[at]] * scale;
    if (!(mass[i] > 0 && mass[i] <= 1)) throw damaged(n, "a context's mass is none");
  }
  if (at !== words.length) throw damaged(n, "they do not fit one another");
  start.fill(at, row + 1);
  for (const word of words) {
    if (word >= vocabSize) throw damaged(n, `they name word ${word}, the vocabulary has ${vocabSize}`);
  }
  return { start, words, prob, backoff, bucket };
}

/** The place of `word` in words[from … to − 1], which ascend; −1: not there. */
function find(words, from, to, word) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (words[middle] < word) from = middle + 1;
    else if (words[middle] > word) to = middle;
    else return middle;
  }
  return -1;
}

const damaged = (n, what) => new Error(`damaged n-gram file: tables of length ${n}: ${what}`);
