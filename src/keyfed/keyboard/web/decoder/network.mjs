/**
 * One step of the recurrent network, in typed arrays: tokens and states in, log-probabilities and states out. The
 * equations are those of `keyfed/model/cells.py`, gate for gate. All arrays are float32, so that the engine compiles one
 * product; a sum is a float64 until it is stored.
 */

import { widened } from "./safetensors.mjs";

/** Blocks of rows in the weights of a cell. */
export const GATES = { gru: 3, "gru-printed": 3, lstm: 4, cifg: 3 };
const MOST_TABLE = 1 << 20; // numbers in the table of a small vocabulary's inputs, and no more than that

/** The names and shapes of the parameters of a model, as `keyfed.model.language_model.shapes` gives them. */
export function shapesOf({ cell, vocab, embed, hidden, layers, dense, projection, tied, biases }) {
  const rows = GATES[cell] * hidden, width = projection || hidden;
  const shapes = { "embedding.weight": [vocab, embed] };
  for (let layer = 0; layer < layers; layer++) {
    shapes[`rnn.weight_ih_l${layer}`] = [rows, layer ? width : embed];
    shapes[`rnn.weight_hh_l${layer}`] = [rows, width];
    shapes[`rnn.bias_ih_l${layer}`] = [rows];
    if (biases === 2) shapes[`rnn.bias_hh_l${layer}`] = [rows];
    if (projection) shapes[`rnn.weight_hr_l${layer}`] = [projection, hidden];
  }
  if (dense) [shapes["dense.weight"], shapes["dense.bias"]] = [[dense, width], [dense]];
  if (!tied) shapes["output.weight"] = [vocab, dense || width];
  shapes["output.bias"] = [vocab];
  return shapes;
}

/** The network of an export. `step` changes nothing that it is given, so states may be kept and gone back to. */
export class Network {
  #model;
  #layers;
  #embedding;
  #dense;
  #output;
  #table = null; // W_ih x + b_ih of every token, where the vocabulary is small

  /**
   * @param {object} manifest  `model` describes the network, `reading` how it reads
   * @param {Map<string, import("./safetensors.mjs").Tensor>} tensors  int8 with scales, or float32
   * @throws {Error} one line: a parameter is missing, too many, or of another shape
   */
  constructor({ model, reading }, tensors) {
    const weights = widened(tensors);
    const expected = shapesOf(model);
    for (const name of new Set([...Object.keys(expected), ...weights.keys()])) {
      const [got, want] = [weights.get(name)?.shape, expected[name]];
      if (String(got) !== String(want)) throw new Error(`parameter "${name}" is [${got}], expected [${want}]`);
    }
    const of = (name) => weights.get(name)?.data ?? null;
    this.#model = { ...model, width: model.projection || model.hidden };
    this.#embedding = of("embedding.weight");
    this.#layers = Array.from({ length: model.layers }, (_, n) => ({
      ih: of(`rnn.weight_ih_l${n}`), hh: of(`rnn.weight_hh_l${n}`), hr: of(`rnn.weight_hr_l${n}`),
      inputBias: of(`rnn.bias_ih_l${n}`), stateBias: of(`rnn.bias_hh_l${n}`),
      inputs: n ? this.#model.width : model.embed,
    }));
    this.#dense = model.dense ? { weight: of("dense.weight"), bias: of("dense.bias") } : null;
    this.#output = { weight: model.tied ? this.#embedding : of("output.weight"), bias: of("output.bias") };
    const rows = GATES[model.cell] * model.hidden;
    if (model.vocab * rows <= MOST_TABLE) this.#table = this.#inputTable(rows);
    this.vocab = model.vocab;
    this.lines = reading === "lines"; // learnt from single lines, each from a zero state
  }

  #inputTable(rows) {
    const { ih, inputBias } = this.#layers[0], { vocab, embed } = this.#model;
    const table = new Float32Array(vocab * rows);
    for (let token = 0; token < vocab; token++) {
      product(table.subarray(token * rows, (token + 1) * rows), ih, inputBias, this.#row(token), rows, embed);
    }
    return table;
  }

  #row(token) {
    const { embed } = this.#model;
    return this.#embedding.subarray(token * embed, (token + 1) * embed);
  }

  /** The state before any text, for one row: h of each layer, and c behind it where the cell has a memory. */
  zero() {
    const { layers, cell, width, hidden } = this.#model;
    const sizes = cell in CELLS ? [width, hidden] : [width];
    return Array.from({ length: layers }, () => sizes.map((size) => new Float32Array(size))).flat();
  }

  /**
   * @param {ArrayLike<number>} tokens  [n]
   * @param {Float32Array[]} states     per state [m · width]
   * @param {object} [given]
   * @param {boolean} [given.scored]    false: only the states, for a token that more text follows
   * @param {number[]} [given.rows]     [n] the row of the states that each token comes after; the token's own by default
   * @returns {{logp: Float32Array | null, states: Float32Array[]}}  logp [n · V], states [n · width]
   */
  step(tokens, states, { scored = true, rows = null } = {}) {
    const { vocab, width } = this.#model, n = tokens.length, m = states[0].length / width;
    const logp = scored ? new Float32Array(n * vocab) : null;
    const after = states.map((state) => new Float32Array(n * (state.length / m)));
    const cut = (state, row, of) => state.subarray(row * (state.length / of), (row + 1) * (state.length / of));
    const products = Array.from({ length: m }, () => []); // of each row of the states: tokens after one row share them
    for (let row = 0; row < n; row++) {
      const from = rows ? rows[row] : row;
      const before = states.map((state) => cut(state, from, m)), next = after.map((state) => cut(state, row, n));
      const read = this.#recur(tokens[row], before, next, products[from]);
      if (scored) this.#score(read, logp.subarray(row * vocab, (row + 1) * vocab));
    }
    return { logp, states: after };
  }

  /**
   * One row through the recurrent layers; writes the states after it, returns what the last layer says. `products` are
   * those of the states before it, by layer: what is missing is added.
   */
  #recur(token, before, after, products) {
    const { cell, hidden, width } = this.#model, rows = GATES[cell] * hidden, each = cell in CELLS ? 2 : 1;
    if (!(token >= 0 && token < this.vocab)) throw new RangeError(`token ${token} is not one of ${this.vocab}`);
    const input = new Float32Array(rows), gated = new Float32Array(hidden);
    let x = this.#row(token);
    this.#layers.forEach(({ ih, hh, hr, inputBias, stateBias, inputs }, layer) => {
      const h = before[layer * each], nextH = after[layer * each];
      const own = layer || !this.#table ? input : this.#table.subarray(token * rows, (token + 1) * rows);
      if (own === input) product(input, ih, inputBias, x, rows, inputs);
      if (!products[layer]) product((products[layer] = new Float32Array(rows)), hh, stateBias, h, rows, width);
      const recurrent = products[layer];
      if (cell === "gru") {
        gru(own, recurrent, h, nextH);
      } else if (cell === "gru-printed") {
        const last = 2 * hidden; // rows of n, whose product reads r ⊙ h
        const reset = h.map((value, k) => value * sigmoid(own[k] + recurrent[k]));
        product(recurrent.subarray(last), hh.subarray(last * width), stateBias && stateBias.subarray(last), reset, hidden, width);
        printedGru(own, recurrent, h, nextH);
      } else {
        const out = hr ? gated : nextH;
        CELLS[cell](own, recurrent, before[layer * each + 1], after[layer * each + 1], out);
        if (hr) product(nextH, hr, null, gated, width, hidden);
      }
      x = nextH;
    });
    return x;
  }

  /** log softmax of the output layer. */
  #score(x, logp) {
    const { vocab, width, dense } = this.#model;
    if (this.#dense) {
      const narrow = new Float32Array(dense);
      product(narrow, this.#dense.weight, this.#dense.bias, x, dense, width);
      x = narrow;
    }
    product(logp, this.#output.weight, this.#output.bias, x, vocab, x.length);
    let most = -Infinity, sum = 0;
    for (let i = 0; i < vocab; i++) if (logp[i] > most) most = logp[i];
    for (let i = 0; i < vocab; i++) sum += Math.exp(logp[i] - most);
    const all = most + Math.log(sum);
    for (let i = 0; i < vocab; i++) logp[i] -= all;
  }
}

/** Whether a cell keeps c next to h. */
export const hasMemory = (cell) => cell in CELLS;

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

/** h' = (1 − z) ⊙ n + z ⊙ h, the reset gate acting after the product; gates r, z, n. */
function gru(input, recurrent, h, next) {
  for (let k = 0, width = h.length; k < width; k++) {
    const r = sigmoid(input[k] + recurrent[k]), z = sigmoid(input[k + width] + recurrent[k + width]);
    const n = Math.tanh(input[k + 2 * width] + r * recurrent[k + 2 * width]);
    next[k] = (1 - z) * n + z * h[k];
  }
}

/** h' = (1 − z) ⊙ h + z ⊙ n, the reset gate being in the product of n already; gates r, z, n. */
function printedGru(input, recurrent, h, next) {
  for (let k = 0, width = h.length; k < width; k++) {
    const z = sigmoid(input[k + width] + recurrent[k + width]);
    next[k] = (1 - z) * h[k] + z * Math.tanh(input[k + 2 * width] + recurrent[k + 2 * width]);
  }
}

const CELLS = {
  /** c' = f ⊙ c + i ⊙ g, out = o ⊙ tanh(c'); gates i, f, g, o. */
  lstm(input, recurrent, c, next, out) {
    for (let k = 0, width = c.length; k < width; k++) {
      const i = sigmoid(input[k] + recurrent[k]), f = sigmoid(input[k + width] + recurrent[k + width]);
      const g = Math.tanh(input[k + 2 * width] + recurrent[k + 2 * width]);
      next[k] = f * c[k] + i * g;
      out[k] = sigmoid(input[k + 3 * width] + recurrent[k + 3 * width]) * Math.tanh(next[k]);
    }
  },

  /** c' = (1 − i) ⊙ c + i ⊙ g, out = o ⊙ tanh(c'); gates i, g, o. */
  cifg(input, recurrent, c, next, out) {
    for (let k = 0, width = c.length; k < width; k++) {
      const i = sigmoid(input[k] + recurrent[k]), g = Math.tanh(input[k + width] + recurrent[k + width]);
      next[k] = (1 - i) * c[k] + i * g;
      out[k] = sigmoid(input[k + 2 * width] + recurrent[k + 2 * width]) * Math.tanh(next[k]);
    }
  },
};

/** out = W x + b, four rows and two columns at a time: twice as quick as one by one. `bias` null is zero. */
function product(out, weight, bias, x, rows, columns) {
  const fours = rows - 3, pairs = columns - 1;
  let row = 0;
  for (; row < fours; row += 4) {
    const a = row * columns, b = a + columns, c = b + columns, d = c + columns;
    let p = 0, q = 0, r = 0, s = 0, k = 0;
    for (; k < pairs; k += 2) {
      const u = x[k], v = x[k + 1];
      p += weight[a + k] * u + weight[a + k + 1] * v;
      q += weight[b + k] * u + weight[b + k + 1] * v;
      r += weight[c + k] * u + weight[c + k + 1] * v;
      s += weight[d + k] * u + weight[d + k + 1] * v;
    }
    if (k < columns) {
      const u = x[k];
      p += weight[a + k] * u;
      q += weight[b + k] * u;
      r += weight[c + k] * u;
      s += weight[d + k] * u;
    }
    out[row] = p;
    out[row + 1] = q;
    out[row + 2] = r;
    out[row + 3] = s;
  }
  for (; row < rows; row++) {
    let sum = 0;
    for (let k = 0, at = row * columns; k < columns; k++, at++) sum += weight[at] * x[k];
    out[row] = sum;
  }
  if (bias) for (let k = 0; k < rows; k++) out[k] += bias[k];
}
