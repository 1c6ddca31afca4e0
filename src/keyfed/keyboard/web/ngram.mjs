/**
 * Kneser–Ney n-grams as they stand in ngram.safetensors. Per length n, with contexts numbered as rows of the level
 * below: n{n}.start (the continuations of context c are the rows start[c] … start[c + 1] − 1), n{n}.words, n{n}.prob,
 * n{n}.backoff.
 */

import { readTensors } from "./safetensors.mjs";

/** A source of log-probabilities (`engine.mjs`) that needs nothing but tables. */
export class NGram {
  /**
   * @param {Map<string, import("./safetensors.mjs").Tensor>} tensors
   * @param {number} vocabSize  V
   * @throws {Error} the tables do not fit one another or the vocabulary
   */
  constructor(tensors, vocabSize) {
    this.vocabSize = vocabSize;
    this.levels = [];
    for (let n = 1, contexts = 1; tensors.has(`n${n}.start`); n++) {
      const level = levelOf(tensors, n, contexts, vocabSize);
      this.levels.push(level);
      contexts = level.words.length;
    }
    if (!this.levels.length) throw new Error("damaged n-gram file: it has no tables");
  }

  /** @param {ArrayBuffer | Uint8Array} file */
  static read(file, vocabSize) {
    return new NGram(readTensors(file), vocabSize);
  }

  /**
   * The distribution of the token after a context, [V]: p ← 1/V, then for every length whose context was seen
   * p ← γ(h) p, and p_n(w | h) for its continuations.
   * @param {ArrayLike<number>} context
   */
  next(context) {
    const p = new Float64Array(this.vocabSize).fill(1 / this.vocabSize);
    for (let n = 1; n <= this.levels.length && n - 1 <= context.length; n++) {
      const h = this.#row(context, n - 1);
      if (h < 0) break;
      const { start, words, prob, backoff } = this.levels[n - 1];
      const gamma = backoff[h];
      for (let w = 0; w < p.length; w++) p[w] *= gamma;
      for (let row = start[h]; row < start[h + 1]; row++) p[words[row]] = prob[row];
    }
    return p;
  }

  /**
   * log p of every word after `ids`.
   * @param {Int32Array} ids
   * @returns {Promise<Float64Array>}
   */
  async scores(ids) {
    const p = this.next(ids);
    for (let w = 0; w < p.length; w++) p[w] = Math.log(p[w]);
    return p;
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

function levelOf(tensors, n, contexts, vocabSize) {
  const part = (name, kind) => {
    const tensor = tensors.get(`n${n}.${name}`);
    if (!(tensor?.data instanceof kind)) throw damaged(n, `there is no ${name}`);
    return tensor.data;
  };
  const start = part("start", Int32Array), words = part("words", Int32Array);
  const prob = part("prob", Float32Array), backoff = part("backoff", Float32Array);
  const fits = start.length === contexts + 1 && backoff.length === contexts && prob.length === words.length;
  if (!fits || start[0] !== 0 || start[contexts] !== words.length) throw damaged(n, "they do not fit one another");
  for (let c = 0; c < contexts; c++) if (start[c] > start[c + 1]) throw damaged(n, "a context ends before it starts");
  for (const word of words) {
    if (word < 0 || word >= vocabSize) throw damaged(n, `they name word ${word}, the vocabulary has ${vocabSize}`);
  }
  return { start, words, prob, backoff };
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
