/**
 * The engine behind a pipe: one JSON object a line in, one out. A request {op, …} is answered by {answer} or {error}.
 * While it works it may ask for scores: {ids} out, and the next line in is {logp}, float64 in base64.
 * It runs in node and is not served.
 */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { readDictionary } from "../decoder/dictionary.mjs";
import { Engine } from "../decoder/engine.mjs";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const table = (name) => JSON.parse(readFileSync(new URL(`../data/${name}.json`, import.meta.url), "utf8"));
const tables = Object.fromEntries(["constants", "layouts", "emoji", "offensive"].map((name) => [name, table(name)]));
const WEIGHED = 500; // words of a person, the latest ones, at which the model is run to weigh the cache
let engine = null;

async function read() {
  const { value, done } = await lines.next();
  if (done) process.exit(0);
  return JSON.parse(value);
}

function write(message) {
  process.stdout.write(`${JSON.stringify(message)}\n`);
}

const source = {
  async scores(ids) {
    write({ ids: [...ids] });
    const { buffer } = Uint8Array.from(Buffer.from((await read()).logp, "base64"));
    return new Float64Array(buffer);
  },
};

const operations = {
  open({ vocab, forms, dictionary }) {
    const words = dictionary ? readDictionary(new Uint8Array(Buffer.from(dictionary, "base64"))) : undefined;
    engine = new Engine({ vocab, forms, dictionary: words, tables, sources: { federated: source } });
    return { node: process.version };
  },
  strip: (request) => engine.strip(request),
  finish: (request) => engine.finish(request),
  undo: (request) => engine.undo(request),
  gesture: (request) => engine.gesture(request),
  knows: ({ words }) => words.map((word) => engine.knows(word)),
  async learn({ words }) {
    for (const [i, [word, before]] of words.entries()) await engine.learnt(before, word, i >= words.length - WEIGHED);
  },
  personal: ({ action, value }) => engine.personal[action](value) ?? null,
};

for (;;) {
  const used = process.cpuUsage();
  try {
    const { op, ...request } = await read();
    const answer = (await operations[op](request)) ?? null;
    const { user, system } = process.cpuUsage(used);
    write({ answer, cpu: (user + system) / 1000 });
  } catch (error) {
    write({ error: error.message });
  }
}
