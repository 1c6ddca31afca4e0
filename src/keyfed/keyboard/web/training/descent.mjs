/**
 * What a client does in a round: E epochs of clipped SGD over its own text from θ, as `keyfed.federated.descent` does
 * it, step for step. The upload is w − θ; its scalars are the last epoch's mean nats a token and the tokens of the text.
 */

import { epochBatches, limitText } from "./batches.mjs";
import { gradient, makeArrays } from "./gradient.mjs";
import { deriveSeed } from "./seeds.mjs";

/**
 * How a client trains: rows and window of its batches, step size, epochs, and what SGD may do besides.
 * @typedef {{kind: "stream" | "packed", rows: number, window: number, maxTokens?: number | null, epochs: number,
 *   lr: number, clip?: number | null, momentum?: number, weightDecay?: number, mu?: number, dropout?: number}} Local
 */

/**
 * Whose round it is: the run's seed, the round from 0 and the client's name.
 * @typedef {{seed: bigint | number, round: number, client: string}} Task
 */

/** The number that brings a gradient's norm over all layers down to at most `most`. */
function clipScale(grads, most) {
  let squares = 0;
  for (const g of Object.values(grads)) for (let i = 0; i < g.length; i++) squares += g[i] * g[i];
  return Math.min(1, most / Math.max(Math.sqrt(squares), 1e-12));
}

/** One step: g ← clip(∇f) + μ(w − θ) + λ w, v ← m v + g, w ← w − η v. Changes weights and velocity in place. */
export function sgdStep(weights, theta, grads, velocity, { lr, clip = null, momentum = 0, weightDecay = 0, mu = 0 }) {
  const scale = clip === null ? 1 : clipScale(grads, clip);
  for (const [name, w] of Object.entries(weights)) {
    const g = grads[name], start = theta[name], v = velocity?.[name];
    for (let i = 0; i < w.length; i++) {
      let move = g[i] * scale;
      if (mu) move += mu * (w[i] - start[i]);
      if (weightDecay) move += weightDecay * w[i];
      if (v) move = v[i] = momentum * v[i] + move;
      w[i] -= lr * move;
    }
  }
}

/**
 * A round of local training. Between steps `pause` is awaited: a page lets its keys in there, and stops by answering
 * false, which gives null.
 * @param {object} model  the manifest's
 * @param {import("./gradient.mjs").Weights} theta  not changed
 * @param {Int32Array} stream  the client's tokens, an EOS behind every line
 * @param {Local} local
 * @param {Task} task
 * @param {(done: {epoch: number, step: number, steps: number, nats: number, tokens: number}) => unknown} [pause]
 * @returns {Promise<{weights: object, loss: number, tokens: number, worked: number} | null>}
 */
export async function trainLocally(model, theta, stream, local, task, pause = () => true) {
  const seedOf = (purpose, ...more) => deriveSeed(task.seed, task.round, task.client, purpose, ...more);
  const weights = Object.fromEntries(Object.entries(theta).map(([name, w]) => [name, w.slice()]));
  const velocity = local.momentum
    ? Object.fromEntries(Object.entries(theta).map(([name, w]) => [name, new w.constructor(w.length)])) : null;
  const text = limitText(stream, local, seedOf("text")), dropoutSeed = seedOf("dropout");
  const arrays = makeArrays(weights["output.bias"]);
  let step = 0, worked = 0, whole = 0, loss = 0;
  for (let epoch = 0; epoch < local.epochs; epoch++) {
    const batches = epochBatches(text, local, seedOf("order", epoch));
    let states = null, nats = 0, tokens = 0;
    for (const [number, batch] of batches.entries()) {
      step += 1;
      const dropout = local.dropout ? { rate: local.dropout, seed: dropoutSeed, step } : null;
      arrays.restart();
      const found = gradient(model, weights, batch, batch.fresh ? null : states, dropout, arrays.take);
      sgdStep(weights, theta, found.grads, velocity, local);
      states = found.states;
      nats += found.nats;
      tokens += found.tokens;
      if ((await pause({ epoch, step: number + 1, steps: batches.length, nats, tokens })) === false) return null;
    }
    loss = nats / Math.max(1, tokens);
    whole = tokens;
    worked += tokens;
  }
  return { weights, loss, tokens: whole, worked };
}
