// Runs the keyboard's modules on cases from stdin, one JSON object {tables, cases: [{op, …}]}, and answers a JSON list.
// A case that throws answers {"error": message}.

import { readFileSync } from "node:fs";

const web = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, web));
const [{ wordsOf }, { readTensors, widened }, { NGram }, { Trie }, { Speller }, { layoutOf }, { complete }] =
  await Promise.all(["context", "safetensors", "ngram", "trie", "typed", "layout", "characters"].map(load));

const { shared, cases } = JSON.parse(readFileSync(0, "utf8"));
const table = (name) => JSON.parse(readFileSync(new URL(`data/${name}.json`, web), "utf8"));
const tables = Object.fromEntries(["constants", "layouts", "emoji", "offensive"].map((name) => [name, table(name)]));
const bytesOf = (base64) => new Uint8Array(Buffer.from(base64, "base64"));

const operations = {
  words: ({ line, tokenised, lower }) => wordsOf(line, { tokenised, lower }),

  rows({ words, layout, keys }) {
    const trie = new Trie(words, tables.constants.plain_joints);
    let typing = new Speller(trie, layoutOf(tables.layouts, layout), tables.constants).start();
    const seen = keys.map(([character, tap]) => {
      typing = typing.key(character, tap);
      return { row: [...typing.row], prefix: [...typing.prefix] };
    });
    return { alphabet: trie.alphabet.join(""), parent: [...trie.parent], char: [...trie.char], node: [...trie.node], seen };
  },

  tensors({ file }) {
    return Object.fromEntries([...readTensors(bytesOf(file))].map(([name, { shape, data }]) => [name, [shape, [...data]]]));
  },

  widened({ file }) {
    const found = [...widened(readTensors(bytesOf(file)))];
    return Object.fromEntries(found.map(([name, { shape, data }]) => [name, [shape, [...data]]]));
  },

  next({ file, vocab, contexts }) {
    const model = NGram.read(bytesOf(file), vocab);
    return contexts.map((context) => [...model.next(context)]);
  },

  // A model whose scores depend on the last two characters only: its state is the last character.
  async complete({ words, table, last, k }) {
    const step = async (tokens, state, rows) => ({
      logp: tokens.map((token, j) => Float32Array.from(table[state[rows[j]]][token])),
      state: tokens,
    });
    const after = { logp: Float32Array.from(table[last[0]][last[1]]), state: [last[1]] };
    return (await complete({ words }, after, step, k)).map(({ rest }) => rest);
  },
};

const answers = [];
for (const { op, ...given } of cases) {
  try {
    answers.push(await operations[op](given));
  } catch (error) {
    if (!(error instanceof Error) || error.constructor !== Error) throw error; // a TypeError is a mistake of ours
    answers.push({ error: error.message });
  }
}
process.stdout.write(JSON.stringify(answers));
