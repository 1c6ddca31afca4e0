/**
 * The loss of a batch and its gradient: the network forwards and, through time, backwards, in typed arrays. The
 * equations are those of `keyfed/model/cells.py` and `keyfed/engine/kernels/step.py`, gate for gate; dropout has the
 * masks of `keyfed.model.language_model.keep_mask`. Arrays are Float32Array or Float64Array, as the weights are.
 *
 * Positions lie time by time: row b of step t is position t·rows + b.
 */

import { BOS } from "../decoder/context.mjs";
import { GATES, hasMemory } from "../decoder/network.mjs";
import { expBelowZero } from "./exponential.mjs";
import { addRow, addRows, addTimes, addTimesTransposed, addTransposedTimes } from "./matrices.mjs";

/** @typedef {Float32Array | Float64Array} Floats */
/** @typedef {Object<string, Floats>} Weights  by the name of the parameter */
/** @typedef {import("./batches.mjs").Batch} Batch */

/**
 * What drops units: the rate, the client's seed of the round and the number of its step, from one.
 * @typedef {{rate: number, seed: bigint, step: number}} Dropout
 */

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const like = (weights, size) => new weights["output.bias"].constructor(size);

/**
 * Zeros for one step after the other, the same ones each time: a step asks for the same sizes in the same order, and a
 * round that allocated megabytes in each would stop for the garbage collector.
 * @param {Floats} sample  of their type
 */
export function makeArrays(sample) {
  const kept = [];
  let next = 0;
  return {
    restart: () => {
      next = 0;
    },
    take: (size) => {
      if (!(kept[next]?.length >= size)) kept[next] = new sample.constructor(size);
      const found = kept[next++];
      return (found.length === size ? found : found.subarray(0, size)).fill(0);
    },
  };
}

/** The states before any text: of each layer h [rows, width], and c [rows, hidden] where the cell has a memory. */
export function zeroStates(model, weights, rows) {
  const width = model.projection || model.hidden;
  const sizes = hasMemory(model.cell) ? [width, model.hidden] : [width];
  return Array.from({ length: model.layers }, () => sizes.map((size) => like(weights, rows * size)));
}

/**
 * Nats and tokens of a batch, the gradient of its mean nats a token, and the states behind it.
 * @param {object} model  the manifest's
 * @param {Weights} weights
 * @param {Batch} batch
 * @param {Floats[][] | null} states  as returned for the batch before; null: a zero state
 * @param {Dropout | null} dropout
 * @param {(size: number) => Floats} [array]  zeros to compute in; see `makeArrays`
 * @returns {{nats: number, tokens: number, grads: Weights, states: Floats[][]}}
 */
export function gradient(model, weights, batch, states, dropout = null, array = (size) => like(weights, size)) {
  const { rows, time } = batch, n = rows * time, width = model.projection || model.hidden;
  const at = timeMajor(batch);
  const grads = Object.fromEntries(Object.entries(weights).map(([name, w]) => [name, array(w.length)]));
  const drop = (x, site, size) => (dropout?.rate ? dropped(x, keepMask(dropout, site, rows, time, size)) : null);

  const embedding = weights["embedding.weight"], { embed } = model;
  let x = array(n * embed);
  at.inputs.forEach((id, p) => x.set(embedding.subarray(id * embed, (id + 1) * embed), p * embed));
  const masks = [drop(x, 0, embed)];
  const layers = [], after = [];
  const before = states ?? zeroStates(model, weights, rows);
  for (let layer = 0; layer < model.layers; layer++) {
    const size = { rows, time, inputs: layer ? width : embed, hidden: model.hidden, width, gates: GATES[model.cell] * model.hidden };
    const own = layerOf(weights, layer);
    const saved = CELLS[model.cell].forward(own, x, before[layer], at.starts, size, array);
    layers.push({ own, saved, size, x });
    after.push(saved.last);
    x = array(saved.out.length);
    x.set(saved.out);
    masks.push(drop(x, layer + 1, width));
  }
  const recurrent = x;
  if (model.dense) {
    x = array(n * model.dense);
    addRow(x, weights["dense.bias"], n, model.dense);
    addTimesTransposed(x, recurrent, weights["dense.weight"], n, model.dense, width);
  }
  const { nats, tokens, back } = output(model, weights, grads, x, at, array);
  let d = back;
  if (model.dense) {
    addTransposedTimes(grads["dense.weight"], d, recurrent, n, model.dense, width);
    addRows(grads["dense.bias"], d, n, model.dense);
    const narrow = d;
    d = array(n * width);
    addTimes(d, narrow, weights["dense.weight"], n, model.dense, width);
  }
  for (let layer = model.layers - 1; layer >= 0; layer--) {
    dropped(d, masks[layer + 1]);
    const { own, saved, size, x: read } = layers[layer];
    d = CELLS[model.cell].backward(own, layerOf(grads, layer), saved, read, d, at.starts, size, array);
  }
  dropped(d, masks[0]);
  const table = grads["embedding.weight"];
  at.inputs.forEach((id, p) => {
    for (let k = 0; k < embed; k++) table[id * embed + k] += d[p * embed + k];
  });
  return { nats, tokens, grads, states: after };
}

/** A batch's tokens time by time; `starts` is 1 where a line begins, null where no line does. */
function timeMajor({ rows, time, inputs, targets, mask, lines }) {
  const turned = (from) => from.map((_, p) => from[(p % rows) * time + Math.floor(p / rows)]);
  const own = turned(inputs);
  return { inputs: own, targets: turned(targets), mask: turned(mask), starts: lines ? Uint8Array.from(own, (id) => Number(id === BOS)) : null };
}

const layerOf = (all, n) => ({
  ih: all[`rnn.weight_ih_l${n}`], hh: all[`rnn.weight_hh_l${n}`], hr: all[`rnn.weight_hr_l${n}`],
  inputBias: all[`rnn.bias_ih_l${n}`], stateBias: all[`rnn.bias_hh_l${n}`],
});

/** Cross-entropy of the output layer: writes its gradients, returns the nats and the gradient of what it read. */
function output({ vocab, tied }, weights, grads, x, { targets, mask }, array) {
  const name = tied ? "embedding.weight" : "output.weight", weight = weights[name];
  const n = targets.length, width = x.length / n;
  const tokens = mask.reduce((sum, one) => sum + one, 0), share = 1 / Math.max(1, tokens);
  const logits = array(n * vocab), back = array(n * width);
  addRow(logits, weights["output.bias"], n, vocab);
  addTimesTransposed(logits, x, weight, n, vocab, width);
  let nats = 0;
  for (let p = 0; p < n; p++) {
    const row = logits.subarray(p * vocab, (p + 1) * vocab);
    if (!mask[p]) {
      row.fill(0);
      continue;
    }
    const own = row[targets[p]];
    let most = -Infinity, sum = 0;
    for (let i = 0; i < vocab; i++) if (row[i] > most) most = row[i];
    for (let i = 0; i < vocab; i++) sum += row[i] = expBelowZero(row[i] - most);
    nats += most + Math.log(sum) - own;
    const each = share / sum;
    for (let i = 0; i < vocab; i++) row[i] *= each;
    row[targets[p]] -= share;
  }
  addTimes(back, logits, weight, n, vocab, width);
  addTransposedTimes(grads[name], logits, x, n, vocab, width);
  addRows(grads["output.bias"], logits, n, vocab);
  return { nats, tokens, back };
}

// Dropout: the mask is a function of the client's seed, the step and the place; see `language_model.keep_mask`.

const ROW_STRIDE = 65536;

/** MurmurHash3's fmix32. */
function scrambled(x) {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/** What each unit at a place of the network is multiplied by: 0, or 1/(1 − rate). */
function keepMask({ rate, seed, step }, site, rows, time, width) {
  const low = Number(seed & 0xffffffffn), high = Number(seed >> 32n);
  const key = scrambled(scrambled(scrambled(low) ^ high) ^ (step * 64 + site));
  const least = Math.floor(rate * 2 ** 32), kept = 1 / (1 - rate);
  const mask = new Float64Array(time * rows * width);
  for (let t = 0, at = 0; t < time; t++) {
    for (let b = 0; b < rows; b++) {
      for (let k = 0; k < width; k++, at++) {
        const place = (b * ROW_STRIDE + t) * width + k;
        const bits = scrambled(scrambled((place >>> 0) ^ key) ^ Math.floor(place / 2 ** 32));
        mask[at] = bits >= least ? kept : 0;
      }
    }
  }
  return mask;
}

/** Multiply by a mask in place; null leaves x alone. */
function dropped(x, mask) {
  if (mask) for (let i = 0; i < x.length; i++) x[i] *= mask[i];
  return mask;
}

// Layers. `size`: rows, time, inputs, hidden, width, gates (rows of the weights). `starts`: see `timeMajor`.

/** Set the state to zero in rows where a line begins at step t. */
function reset(state, starts, t, rows) {
  if (!starts) return;
  const width = state.length / rows;
  for (let b = 0; b < rows; b++) if (starts[t * rows + b]) state.fill(0, b * width, (b + 1) * width);
}

/** W_ih x + b_ih of all positions. */
function inputsOf({ ih, inputBias }, x, { rows, time, inputs, gates }, array) {
  const out = array(rows * time * gates);
  addRow(out, inputBias, rows * time, gates);
  addTimesTransposed(out, x, ih, rows * time, gates, inputs);
  return out;
}

/** Add the gradients of W_ih and b_ih; return that of x. */
function backToInputs({ ih }, grads, d, x, { rows, time, inputs, gates }, array) {
  const n = rows * time, back = array(n * inputs);
  addTransposedTimes(grads.ih, d, x, n, gates, inputs);
  addRows(grads.inputBias, d, n, gates);
  addTimes(back, d, ih, n, gates, inputs);
  return back;
}

const GRU = {
  /** h' = (1 − z) ⊙ n + z ⊙ h; the reset gate acts after the product; gates r, z, n. */
  forward(own, x, [state], starts, size, array) {
    const { rows, time, hidden, gates } = size, n = rows * hidden;
    const g = inputsOf(own, x, size, array), recurrent = array(rows * time * gates);
    const before = array(time * n), out = array(time * n);
    for (let t = 0; t < time; t++) {
      const h = before.subarray(t * n, (t + 1) * n), now = recurrent.subarray(t * rows * gates, (t + 1) * rows * gates);
      h.set(t ? out.subarray((t - 1) * n, t * n) : state);
      reset(h, starts, t, rows);
      if (own.stateBias) addRow(now, own.stateBias, rows, gates);
      addTimesTransposed(now, h, own.hh, rows, gates, hidden);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const r = (g[at] = sigmoid(g[at] + recurrent[at]));
          const z = (g[at + hidden] = sigmoid(g[at + hidden] + recurrent[at + hidden]));
          const c = (g[at + 2 * hidden] = Math.tanh(g[at + 2 * hidden] + r * recurrent[at + 2 * hidden]));
          out[t * n + b * hidden + k] = (1 - z) * c + z * h[b * hidden + k];
        }
      }
    }
    return { g, recurrent, before, out, last: [out.slice((time - 1) * n)] };
  },

  backward(own, grads, { g, recurrent, before }, x, d, starts, size, array) {
    const { rows, time, hidden, gates } = size, n = rows * hidden;
    const toInput = array(g.length), toState = array(g.length);
    let next = array(n);
    for (let t = time - 1; t >= 0; t--) {
      const back = array(n);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, dh = d[t * n + place] + next[place];
          const r = g[at], z = g[at + hidden], c = g[at + 2 * hidden];
          const dn = dh * (1 - z) * (1 - c * c);
          toInput[at] = toState[at] = dn * recurrent[at + 2 * hidden] * r * (1 - r);
          toInput[at + hidden] = toState[at + hidden] = dh * (before[t * n + place] - c) * z * (1 - z);
          toInput[at + 2 * hidden] = dn;
          toState[at + 2 * hidden] = dn * r;
          back[place] = dh * z;
        }
      }
      addTimes(back, toState.subarray(t * rows * gates, (t + 1) * rows * gates), own.hh, rows, gates, hidden);
      reset(back, starts, t, rows);
      next = back;
    }
    addTransposedTimes(grads.hh, toState, before, rows * time, gates, hidden);
    if (grads.stateBias) addRows(grads.stateBias, toState, rows * time, gates);
    return backToInputs(own, grads, toInput, x, size, array);
  },
};

const PRINTED_GRU = {
  /** h' = (1 − z) ⊙ h + z ⊙ n; the reset gate is in the product of n; gates r, z, n. */
  forward(own, x, [state], starts, size, array) {
    const { rows, time, hidden, gates } = size, n = rows * hidden, two = 2 * hidden;
    const g = inputsOf(own, x, size, array), before = array(time * n), gated = array(time * n), out = array(time * n);
    const { first, second, firstBias, secondBias } = halves(own, two, hidden);
    for (let t = 0; t < time; t++) {
      const h = before.subarray(t * n, (t + 1) * n), s = gated.subarray(t * n, (t + 1) * n);
      h.set(t ? out.subarray((t - 1) * n, t * n) : state);
      reset(h, starts, t, rows);
      const rz = array(rows * two), c = array(n);
      if (firstBias) addRow(rz, firstBias, rows, two);
      addTimesTransposed(rz, h, first, rows, two, hidden);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < two; k++, at++) g[at] = sigmoid(g[at] + rz[b * two + k]);
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) s[b * hidden + k] = g[at] * h[b * hidden + k];
      }
      if (secondBias) addRow(c, secondBias, rows, hidden);
      addTimesTransposed(c, s, second, rows, hidden, hidden);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, z = g[at + hidden];
          const value = (g[at + two] = Math.tanh(g[at + two] + c[place]));
          out[t * n + place] = (1 - z) * h[place] + z * value;
        }
      }
    }
    return { g, gated, before, out, last: [out.slice((time - 1) * n)] };
  },

  backward(own, grads, { g, gated, before }, x, d, starts, size, array) {
    const { rows, time, hidden, gates } = size, n = rows * hidden, two = 2 * hidden;
    const { first, second } = halves(own, two, hidden), to = halves(grads, two, hidden);
    const toInput = array(g.length), rz = array(time * rows * two), c = array(time * n);
    let next = array(n);
    for (let t = time - 1; t >= 0; t--) {
      const back = array(n), ds = array(n);
      const nowC = c.subarray(t * n, (t + 1) * n), nowRz = rz.subarray(t * rows * two, (t + 1) * rows * two);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, dh = (next[place] += d[t * n + place]);
          const z = g[at + hidden], value = g[at + two];
          nowC[place] = dh * z * (1 - value * value);
          nowRz[b * two + hidden + k] = dh * (value - before[t * n + place]) * z * (1 - z);
          back[place] = dh * (1 - z);
        }
      }
      addTimes(ds, nowC, second, rows, hidden, hidden);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, r = g[at];
          nowRz[b * two + k] = ds[place] * before[t * n + place] * r * (1 - r);
          back[place] += ds[place] * r;
        }
        toInput.set(nowRz.subarray(b * two, (b + 1) * two), (t * rows + b) * gates);
        toInput.set(nowC.subarray(b * hidden, (b + 1) * hidden), (t * rows + b) * gates + two);
      }
      addTimes(back, nowRz, first, rows, two, hidden);
      reset(back, starts, t, rows);
      next = back;
    }
    addTransposedTimes(to.first, rz, before, rows * time, two, hidden);
    addTransposedTimes(to.second, c, gated, rows * time, hidden, hidden);
    if (grads.stateBias) addRows(grads.stateBias, toInput, rows * time, gates);
    return backToInputs(own, grads, toInput, x, size, array);
  },
};

/** Rows of r and z, and rows of n, of the recurrent weights and bias. */
function halves({ hh, stateBias }, two, hidden) {
  return {
    first: hh.subarray(0, two * hidden), second: hh.subarray(two * hidden),
    firstBias: stateBias?.subarray(0, two), secondBias: stateBias?.subarray(two),
  };
}

/**
 * c' = f ⊙ c + i ⊙ g, h' = W_hr (o ⊙ tanh c'); gates i, f, g, o. Coupled: f = 1 − i, gates i, g, o.
 * @param {boolean} coupled
 */
const memoryCell = (coupled) => ({
  forward(own, x, [state, memory], starts, size, array) {
    const { rows, time, hidden, width, gates } = size, n = rows * hidden, w = rows * width;
    const a = inputsOf(own, x, size, array), toG = gates - 2 * hidden, toO = gates - hidden;
    const before = array(time * w), cells = array(time * n), held = array(time * n), squashed = array(time * n);
    const raw = array(time * n), out = own.hr ? array(time * w) : raw;
    for (let t = 0; t < time; t++) {
      const h = before.subarray(t * w, (t + 1) * w), c = held.subarray(t * n, (t + 1) * n);
      h.set(t ? out.subarray((t - 1) * w, t * w) : state);
      c.set(t ? cells.subarray((t - 1) * n, t * n) : memory);
      reset(h, starts, t, rows);
      reset(c, starts, t, rows);
      const now = a.subarray(t * rows * gates, (t + 1) * rows * gates);
      if (own.stateBias) addRow(now, own.stateBias, rows, gates);
      addTimesTransposed(now, h, own.hh, rows, gates, width);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, to = t * n + place;
          const i = (a[at] = sigmoid(a[at]));
          const f = coupled ? 1 - i : (a[at + hidden] = sigmoid(a[at + hidden]));
          const g = (a[at + toG] = Math.tanh(a[at + toG])), o = (a[at + toO] = sigmoid(a[at + toO]));
          cells[to] = f * c[place] + i * g;
          squashed[to] = Math.tanh(cells[to]);
          raw[to] = o * squashed[to];
        }
      }
      if (own.hr) addTimesTransposed(out.subarray(t * w, (t + 1) * w), raw.subarray(t * n, (t + 1) * n), own.hr, rows, width, hidden);
    }
    return { a, before, held, squashed, raw, out, last: [out.slice((time - 1) * w), cells.slice((time - 1) * n)] };
  },

  backward(own, grads, { a, before, held, squashed, raw }, x, d, starts, size, array) {
    const { rows, time, hidden, width, gates } = size, n = rows * hidden, w = rows * width;
    const toG = gates - 2 * hidden, toO = gates - hidden;
    const toGates = array(a.length), whole = array(time * w); // of what the layer says, in all
    let next = array(w);
    const dc = array(n);
    for (let t = time - 1; t >= 0; t--) {
      const dh = whole.subarray(t * w, (t + 1) * w);
      for (let k = 0; k < w; k++) dh[k] = d[t * w + k] + next[k];
      let toRaw = dh;
      if (own.hr) addTimes((toRaw = array(n)), dh, own.hr, rows, width, hidden);
      for (let b = 0; b < rows; b++) {
        for (let k = 0, at = (t * rows + b) * gates; k < hidden; k++, at++) {
          const place = b * hidden + k, to = t * n + place;
          const i = a[at], g = a[at + toG], o = a[at + toO], s = squashed[to], c = held[to];
          const into = (dc[place] += toRaw[place] * o * (1 - s * s));
          toGates[at] = into * (coupled ? g - c : g) * i * (1 - i);
          if (!coupled) toGates[at + hidden] = into * c * a[at + hidden] * (1 - a[at + hidden]);
          toGates[at + toG] = into * i * (1 - g * g);
          toGates[at + toO] = toRaw[place] * s * o * (1 - o);
          dc[place] = into * (coupled ? 1 - i : a[at + hidden]);
        }
      }
      next = array(w);
      addTimes(next, toGates.subarray(t * rows * gates, (t + 1) * rows * gates), own.hh, rows, gates, width);
      reset(next, starts, t, rows);
      reset(dc, starts, t, rows);
    }
    addTransposedTimes(grads.hh, toGates, before, rows * time, gates, width);
    if (grads.stateBias) addRows(grads.stateBias, toGates, rows * time, gates);
    if (own.hr) addTransposedTimes(grads.hr, whole, raw, rows * time, width, hidden);
    return backToInputs(own, grads, toGates, x, size, array);
  },
});

const CELLS = { gru: GRU, "gru-printed": PRINTED_GRU, lstm: memoryCell(false), cifg: memoryCell(true) };
