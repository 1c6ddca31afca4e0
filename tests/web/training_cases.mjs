// Runs the training modules of the page on cases.

import { readFileSync } from "node:fs";
import { answerCases } from "./case_loop.mjs";

const folder = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, folder));
const [vector, { distances }, json, { Rejected, SecureSumError }, { clippedVector, wordsOf }, { exactSum }] =
  await Promise.all(["vector", "distance", "json", "bytes", "clipped", "exact"].map((name) => load(`secure/${name}`)));
const { look } = await load("client/look");
const [{ deriveSeed, Draws, blake2b }, batches, { trainLocally }, { readTensors }] =
  await Promise.all(["training/seeds", "training/batches", "training/descent", "decoder/safetensors"].map(load));

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
  // A client's vector of each purpose, from the upload in a file.
  vector({ path, mediator, public: numbers, members, ratio, score, done }) {
    const tensors = readTensors(readFileSync(path));
    const upload = Object.fromEntries([...tensors].map(([name, { data }]) => [name, data]));
    const shapes = Object.fromEntries([...tensors].map(([name, { shape }]) => [name, shape]));
    const own = Object.fromEntries(done.layers.map((name) => [name, upload[name]]));
    const all = { ...done, upload: own, distance: done.distance ?? distances(own, shapes, "spectral") };
    const rule = vector.ruleOf(mediator);
    return {
      upload: sent(vector.uploadVector(all, rule, numbers, members, ratio, score)),
      calibration: sent(vector.calibrationVector(all, rule, members)),
      evaluation: sent(vector.evaluationVector(score, members)),
      distance: distances(own, shapes, "spectral"), frobenius: distances(own, shapes, "frobenius"),
    };
  },
  // A client's vector of a private round, from the upload in a file.
  clipped({ path, layers, scales, clip, isRatio }) {
    const tensors = readTensors(readFileSync(path));
    const own = Object.fromEntries(layers.map((name) => [name, tensors.get(name).data]));
    const words = clippedVector(own, scales, clip, isRatio);
    return { words: sent(words), expected: wordsOf(Object.fromEntries(layers.map((name) => [name, tensors.get(name).shape]))) };
  },
  // Two models on one text, whose tensors are in files.
  look({ model, current, next, stream, isLines, isAlike }) {
    const weightsIn = (path) => Object.fromEntries([...readTensors(readFileSync(path))].map(([name, { data }]) => [name, data]));
    const [before, after] = [current, next].map((path) => ({ model, weights: weightsIn(path), stream: Int32Array.from(stream), isLines }));
    return look(before, after, isAlike);
  },
  sums: ({ lists }) => lists.map(exactSum),
  json: ({ texts }) => texts.map((text) => {
    try {
      const read = json.parse(text, 1000);
      return { written: json.written(read), plain: json.plain(read) };
    } catch (error) {
      if (error instanceof SecureSumError) return { error: error.message };
      throw error;
    }
  }),
};

await answerCases(operations, (error) => error instanceof SecureSumError || error instanceof Rejected);
