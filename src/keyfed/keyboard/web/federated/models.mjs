/**
 * Models that the strip may be of: that of the export, one tuned to this person, one that a federation made. A model is
 * {model, reading, vocab, weights, from}: as in the manifest, how it reads, its vocabulary, its weights by name.
 */

import { Learner, LIMITS } from "../client/learner.mjs";
import { look as compare } from "../client/look.mjs";
import { loadExport } from "../decoder/model.mjs";
import { readTensors, widened } from "../decoder/safetensors.mjs";
import { Rejected } from "../secure/bytes.mjs";
import { isHeld, streamsOf } from "./text.mjs";

const WINDOW = 20, TUNED = { lr: 3, decay: 1, clip: 0.25, momentum: 0, epochs: 1, batch_size: 5, optimiser: "sgd" };
const MOST_WORDS = 1 << 20;

/** @typedef {{model: object, reading: "lines" | "stream", vocab: object, from: object, weights: Object<string, Float32Array>}} Model */

/** The model that the site came with. @returns {Promise<Model>} */
export async function exportedModel(address) {
  const { manifest, files } = await loadExport(address);
  if (manifest.model.kind !== "word") throw new Error("a model of characters is not trained here");
  const tensors = widened(readTensors(files["weights.safetensors"]));
  const weights = Object.fromEntries([...tensors].map(([name, { data }]) => [name, data]));
  const { words, lower } = JSON.parse(new TextDecoder().decode(files["vocab.json"]));
  return { model: manifest.model, reading: manifest.reading, vocab: { kind: "word", words, lower }, weights, from: { kind: "export" } };
}

/** The vocabulary of a run as its server writes it. @throws {Rejected} */
export function vocabOf(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    found = null;
  }
  const isWord = (word) => typeof word === "string" && word.length <= 400;
  const isVocab = found?.kind === "word" && typeof found.lower === "boolean" && Array.isArray(found.words);
  if (!isVocab || found.words.length > MOST_WORDS || !found.words.every(isWord)) throw new Rejected("malformed", "a vocabulary that is none of words");
  return { kind: "word", words: found.words, lower: found.lower };
}

/** What trains and counts a model on kept lines, as in a round of a federation. */
function learnerOf({ model, reading, vocab }, lines, pause) {
  const kind = reading === "lines" ? "packed" : "stream", batches = { kind, window: WINDOW, max_tokens: null };
  const spec = { name: "fedavg", options: TUNED, mediator: null, keep: 1, quantise: "none", schedule: null };
  const config = { data: { window: WINDOW, max_tokens: null, batches: kind }, model: { dropout: model.dropout } };
  return new Learner({ page: { spec, model, batches }, config }, streamsOf(lines, vocab), { limits: LIMITS, pause });
}

/**
 * A model tuned to the kept text. Nothing is sent.
 * @param {Model} start
 * @param {{id: number, text: string}[]} lines
 * @param {(done?: object) => Promise<boolean>} pause
 * @returns {Promise<{model: Model, tokens: number, loss: number}>}
 * @throws {Rejected}  too little text, or stopped
 */
export async function tuned(start, lines, pause) {
  const { upload, tokens, loss } = await learnerOf(start, lines, pause).solve(start.weights, { seed: 1, round: 0, client: "own", halvings: 0 });
  const weights = Object.fromEntries(Object.entries(start.weights).map(([name, w]) => [name, w.map((x, i) => x + upload[name][i])]));
  return { model: { ...start, weights, from: { kind: "tuned", on: start.from, tokens } }, tokens, loss };
}

const isAlike = (one, other) => one.reading === other.reading && one.vocab.words.length === other.vocab.words.length &&
  one.vocab.words.every((word, n) => word === other.vocab.words[n]);

/**
 * How two models do on lines that were held back (`client/look.mjs`).
 * @param {Model} before  the model in use
 * @param {Model} after
 * @returns {ReturnType<typeof compare> | Promise<null>}  null: nothing was held back
 */
export async function look(before, after, lines, pause) {
  const held = lines.filter(isHeld);
  if (!held.length) return null;
  const readers = [before, after].map(({ model, reading, vocab, weights }) =>
    ({ model, weights, isLines: reading === "lines", stream: streamsOf(held, vocab).valid }));
  return compare(...readers, isAlike(before, after), pause);
}
