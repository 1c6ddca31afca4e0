// The page's half of keyboard_network.py: reads the same with the page's network and with two sessions of onnxruntime-web.

import { complete } from "/web/decoder/characters.mjs";
import { CharacterSource } from "/web/decoder/model.mjs";
import { Network } from "/web/decoder/network.mjs";
import { readTensors, widened } from "/web/decoder/safetensors.mjs";
import * as ort from "/ort/ort.wasm.min.mjs";

const SPELT = 5; // completions of a word, as the page's engine wants

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = "/ort/";

const bytes = async (file) => new Uint8Array(await (await fetch(file)).arrayBuffer());

/** A session in the place of the page's network; `fixed` are feeds of every run. */
async function session(file, manifest, fixed) {
  const made = await ort.InferenceSession.create(await bytes(file), { executionProviders: ["wasm"] });
  return {
    vocab: manifest.model.vocab, widths: manifest.states.map(({ width }) => width),
    async step(tokens, states) {
      const feeds = { ...fixed, token: new ort.Tensor("int32", Int32Array.from(tokens), [tokens.length]) };
      manifest.states.forEach(({ name, width }, i) => {
        feeds[name] = new ort.Tensor("float32", states[i], [tokens.length, width]);
      });
      const out = await made.run(feeds);
      return { logp: out.logp.data, states: manifest.states.map(({ name }) => out[`${name}_next`].data) };
    },
    release: () => made.release(),
  };
}

/** What a word's completion needs: `CharacterSource.step` for a model that answers with a promise. */
function stepOf(model, count) {
  if (model instanceof Network) {
    const source = new CharacterSource(model);
    return (tokens, state, rows) => ((count.rows += tokens.length), source.step(tokens, state, rows));
  }
  return async (tokens, state, rows) => {
    count.rows += tokens.length;
    const picked = state.map((values, i) => {
      const width = model.widths[i], batch = new Float32Array(tokens.length * width);
      rows.forEach((row, j) => batch.set(values.subarray(row * width, (row + 1) * width), j * width));
      return batch;
    });
    const { logp, states } = await model.step(tokens, picked);
    return { logp: tokens.map((_, j) => logp.subarray(j * model.vocab, (j + 1) * model.vocab)), state: states };
  };
}

/**
 * Reads tokens with all three, one token after the other, and after each one completes the word where that is wanted.
 * @param {{name: string, tokens: number[], warm: number, line: number, words: string[] | null}} given  a line of so many
 *   tokens begins at a zero state; words: those of a model over characters, whose words are completed
 * @returns {Promise<{times: Object<string, number[]>, rows: number, most: number, range: number}>}  rows of a beam, all its
 *   steps together; the largest difference from the page's network, and that of the most and least probable token, in nats
 */
export async function compare({ name, tokens, warm, line, words }) {
  const manifest = await (await fetch(`/${name}/manifest.json`)).json();
  const stored = readTensors(await bytes(`/${name}/weights.safetensors`));
  const weights = {};
  for (const [key, { shape, data }] of widened(stored)) weights[key] = new ort.Tensor("float32", data, shape);
  const models = {
    javascript: new Network(manifest, stored),
    inputs: await session(`/${name}/model.onnx`, manifest, weights),
    baked: await session(`/${name}/baked.onnx`, manifest, {}),
  };
  const names = Object.keys(models), times = Object.fromEntries(names.map((one) => [one, []])), states = {};
  const zero = () => manifest.states.map(({ width }) => new Float32Array(width));
  let most = 0, range = 0, beams = 0;
  for (const [n, token] of tokens.entries()) {
    const found = {};
    for (let turn = 0; turn < names.length; turn++) {
      const one = names[(n + turn) % names.length], model = models[one], count = { rows: 0 }; // each is first at times
      if (n % line === 0) states[one] = zero();
      const began = performance.now();
      const after = await model.step([token], states[one]);
      const read = { logp: after.logp, state: after.states };
      const ends = words && await complete({ words }, read, stepOf(model, count), SPELT);
      const took = performance.now() - began;
      states[one] = after.states;
      found[one] = { logp: after.logp, ends };
      if (n < warm) continue;
      times[one].push(took);
      if (one === "javascript") beams += count.rows;
    }
    const { logp, ends } = found.javascript;
    range += (Math.max(...logp) - Math.min(...logp)) / tokens.length;
    for (const one of names.slice(1)) {
      for (let i = 0; i < logp.length; i++) most = Math.max(most, Math.abs(found[one].logp[i] - logp[i]));
      ends?.forEach(({ score }, i) => (most = Math.max(most, Math.abs(found[one].ends[i].score - score))));
    }
  }
  await Promise.all([models.inputs.release(), models.baked.release()]);
  return { times, rows: beams / (tokens.length - warm), most, range };
}
