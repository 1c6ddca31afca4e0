/** The exported model in the browser: fetch and check its files, and remember the states of the text by position. */

import { othersFirst } from "./breath.mjs";
import { lineRead } from "./context.mjs";
import { Network } from "./network.mjs";
import { readTensors } from "./safetensors.mjs";

const FORMAT = 1;
const INSECURE = "over plain http the browser lets a page check no file; open it over https, or on the computer that serves it at http://127.0.0.1";

/** A failure with one line for the person at the page; `cause` has the rest. */
export class LoadError extends Error {}

/** The bytes of a file. */
export async function fetched(url) {
  const name = new URL(url).pathname.split("/").pop();
  let answer;
  try {
    answer = await fetch(url);
  } catch (cause) {
    throw new LoadError(`${name} could not be loaded: the server does not answer`, { cause });
  }
  if (!answer.ok) throw new LoadError(`${name} could not be loaded (${answer.status})`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** A JSON file, parsed. */
export async function fetchedJSON(url) {
  const bytes = await fetched(url);
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (cause) {
    throw new LoadError(`${new URL(url).pathname.split("/").pop()} is damaged: not JSON`, { cause });
  }
}

async function sha256(bytes) {
  const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * The manifest of an export and those of its files that the page needs, each checked against the manifest's sum.
 * @param {string} base  the folder's address, with a slash at the end
 * @param {(name: string) => void} [told]  called as each file is there
 * @returns {Promise<{manifest: object, files: Object<string, Uint8Array>}>}
 */
export async function loadExport(base, told = () => {}) {
  if (!globalThis.crypto?.subtle) throw new LoadError(INSECURE);
  const manifest = await fetchedJSON(new URL("manifest.json", base));
  if (manifest?.format !== FORMAT) {
    throw new LoadError(`this page reads exports of format ${FORMAT}, this one has ${manifest?.format}; export the run again`);
  }
  // N-grams of an older version say nothing of how they were counted: they are not read.
  const counted = manifest.counts ? ["ngram.safetensors"] : [];
  const optional = [...counted, "dictionary.safetensors"].filter((name) => manifest.files?.[name]);
  const wanted = ["weights.safetensors", "vocab.json", ...optional];
  const files = {};
  await Promise.all(wanted.map(async (name) => {
    const said = manifest.files?.[name];
    const bytes = await fetched(new URL(name, base));
    if (!said || bytes.length !== said.bytes || (await sha256(bytes)) !== said.sha256) {
      throw new LoadError(`${name} is damaged: it is not the file that the manifest describes; export the run again`);
    }
    files[name] = bytes;
    told(name);
  }));
  return { manifest, files };
}

/**
 * The network of an export as the engine's source.
 * @param {{manifest: object, files: Object<string, Uint8Array>}} exported
 */
export function sourceOf({ manifest, files }) {
  const network = new Network(manifest, readTensors(files["weights.safetensors"]));
  return manifest.model.kind === "char" ? new CharacterSource(network) : new WordSource(network);
}

/** The text read so far, by position, so that one more token is one step and going back costs nothing. */
class Reader {
  #model;
  #ids = [];
  #after = []; // after[i]: the states when ids[0 … i] were read
  #answer = null; // {logp, states} after all of #ids; scores are not kept by position (40 KB each)

  constructor(model) {
    this.#model = model;
  }

  /** What follows `text` (ids): {logp, states}; null if the caller lost interest on the way. */
  async read(text, signal) {
    const ids = this.#model.lines ? lineRead(text) : text;
    let same = 0;
    while (same < ids.length && same < this.#ids.length && ids[same] === this.#ids[same]) same++;
    if (same === ids.length && same === this.#ids.length && this.#answer) return this.#answer;
    const last = ids.length - 1, from = Math.min(same, last);
    this.#ids.length = this.#after.length = from;
    this.#answer = null;
    let step = null;
    for (let at = from; at < ids.length; at++) {
      if (at % 16 === 15) await othersFirst(); // newer messages of the worker
      if (signal?.aborted) return null;
      // The output layer is most of the work, and the scores after the last token alone are wanted.
      step = this.#model.step([ids[at]], at ? this.#after[at - 1] : this.#model.zero(), { scored: at === last });
      this.#ids.push(ids[at]);
      this.#after.push(step.states);
    }
    this.#answer = step;
    return step;
  }
}

/** The network as the engine's source of word scores. */
export class WordSource {
  #reader;

  constructor(model) {
    this.#reader = new Reader(model);
  }

  async scores(ids, signal) {
    return (await this.#reader.read(ids, signal))?.logp ?? null;
  }
}

/** The network as the engine's source of characters: several continuations are one batch. */
export class CharacterSource {
  #model;
  #reader;

  constructor(model) {
    this.#model = model;
    this.#reader = new Reader(model);
  }

  async begin(ids, signal) {
    const found = await this.#reader.read(ids, signal);
    return found && { logp: found.logp, state: found.states };
  }

  async step(tokens, state, rows) {
    const { logp, states } = this.#model.step(tokens, state, { rows });
    const size = this.#model.vocab;
    return { logp: tokens.map((_, j) => logp.subarray(j * size, (j + 1) * size)), state: states };
  }
}
