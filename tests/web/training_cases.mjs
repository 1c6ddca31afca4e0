// Runs the training modules of the page on cases from stdin, {cases: [{op, …}]}, and answers a JSON list.

import { readFileSync } from "node:fs";

const folder = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, folder));
const [{ deriveSeed, Draws, blake2b }, batches, { trainLocally }, { readTensors }] =
  await Promise.all(["training/seeds", "training/batches", "training/descent", "safetensors"].map(load));

const sent = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");

const operations = {
  digest: ({ text, size }) => [...blake2b(new TextEncoder().encode(text), size)],
  seed: ({ seed, parts }) => String(deriveSeed(BigInt(seed), ...parts)),
  draws({ seed, sizes }) {
    const draws = new Draws(BigInt(seed));
    return sizes.map(([what, n]) => (what === "integer" ? draws.integer(n) : [...draws.permutation(n)]));
  },
  batches: ({ stream, cut, seed }) => {
    const text = batches.limitText(Int32Array.from(stream), cut, BigInt(seed));
    return batches.epochBatches(text, cut, BigInt(seed)).map((one) => ({
      ...one, inputs: [...one.inputs], targets: [...one.targets], mask: [...one.mask],
    }));
  },
  async train({ path, model, stream, local, task }) {
    const theta = Object.fromEntries([...readTensors(readFileSync(path))].map(([name, { data }]) => [name, data]));
    const before = Object.fromEntries(Object.entries(theta).map(([name, data]) => [name, data.slice()]));
    const seen = [];
    const found = await trainLocally(model, theta, Int32Array.from(stream), local, { ...task, seed: BigInt(task.seed) },
      ({ epoch, step }) => seen.push([epoch, step]));
    const isKept = Object.entries(before).every(([name, data]) => data.every((value, i) => value === theta[name][i]));
    return { ...found, isKept, seen, weights: Object.fromEntries(Object.entries(found.weights).map(([n, w]) => [n, sent(w)])) };
  },
};

const found = [];
for (const { op, ...given } of JSON.parse(readFileSync(0, "utf8")).cases) {
  try {
    found.push(await operations[op](given));
  } catch (error) {
    if (error.constructor !== Error) throw error; // a TypeError is a mistake of ours
    found.push({ error: error.message });
  }
}
process.stdout.write(JSON.stringify(found));
