// Runs the keyboard's modules on cases from stdin, one JSON object {shared, cases: [{op, …}]}, and answers a JSON list.
// A case that is refused answers {"error": message}.

import { readFileSync } from "node:fs";

const web = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, web));
const [context, { readTensors, widened }, { NGram }, { Trie }, { Speller }, layout, { complete }, casing, { Personal },
  { Predictor }, { resampled, swipeOf }, { Engine }] = await Promise.all(["context", "safetensors", "ngram", "trie", "typed",
  "layout", "characters", "casing", "personal", "predict", "gesture", "engine"].map(load));

const { shared, cases } = JSON.parse(readFileSync(0, "utf8"));
const table = (name) => JSON.parse(readFileSync(new URL(`data/${name}.json`, web), "utf8"));
const tables = Object.fromEntries(["constants", "layouts", "emoji", "offensive"].map((name) => [name, table(name)]));
const k = tables.constants;
const bytesOf = (base64) => new Uint8Array(Buffer.from(base64, "base64"));

const operations = {
  words: ({ line, tokenised, lower }) => context.wordsOf(line, { tokenised, lower }),

  rows({ words, layout: name, keys }) {
    const trie = new Trie(words, k.plain_joints);
    let typing = new Speller(trie, layout.layoutOf(tables.layouts, name), k).start();
    const seen = keys.map(([character, tap]) => {
      typing = typing.key(layout.fold(character, k.plain_joints), tap);
      return { row: [...typing.row], prefix: [...typing.prefix] };
    });
    return { alphabet: trie.alphabet.join(""), parent: [...trie.parent], char: [...trie.char], node: [...trie.node], seen };
  },

  folded: ({ text }) => [layout.fold(text, k.plain_joints), [...text].map(layout.baseOf)],

  context({ before }) {
    const found = context.readContext(before, new context.Numbers(shared.vocab), k);
    return { ...found, ids: [...found.ids] };
  },

  casing: ({ text, word, typed, forms }) => ({
    sentence: casing.startsSentence(text, k),
    capitals: casing.allCapitals(typed),
    shown: casing.display(word, typed, casing.startsSentence(text, k), new Map(Object.entries(forms)), k),
    put: casing.put({ text, automatic: true }, word.slice(0, 1), k),
  }),

  personal({ actions }) {
    const personal = new Personal(k);
    const answered = actions.map(([name, ...given]) => {
      try {
        return personal[name](...given) ?? null;
      } catch (error) {
        if (error.constructor !== Error) throw error;
        return { error: error.message };
      }
    });
    const known = ["kiel", "zwölf", "teh", "the"].map((word) => personal.knows(word));
    return { answered, known, uses: [...personal.uses()], after: [...personal.usesAfter("in")], held: personal.exportJSON() };
  },

  path: ({ points, n }) => [...resampled(swipeOf(points), n)],

  // One predictor, many questions: it has to forget nothing and to remember nothing wrong.
  predict({ vocab, forms, layout: name, personal: learnt, questions }) {
    const personal = new Personal(k);
    personal.importJSON(learnt);
    const words = shared.vocabularies[vocab];
    const numbers = new context.Numbers(words), logps = shared.logps.map((logp) => Float64Array.from(logp));
    const predictor = new Predictor(words, forms, tables, name, personal);
    return questions.map(({ before, logp, taps, choice, points, block, learn }) => {
      if (block) personal.block(block);
      if (learn) personal.learn(...learn);
      const read = context.readContext(before, numbers, k);
      const scores = logps[logp].subarray(0, words.words.length);
      return points ? predictor.gesture(scores, read, points, choice) : predictor.suggest(scores, read, taps, choice);
    });
  },

  // A person at the keyboard: text, strip and edits after every action, and what was learnt in the end.
  async script({ actions, settings, file }) {
    const vocab = shared.vocabularies[0];
    const ngram = NGram.read(bytesOf(file), vocab.words.length);
    const engine = new Engine({ vocab, forms: shared.forms, tables, sources: { federated: ngram } });
    let text = "";
    const change = ({ start, text: put }) => (text = text.slice(0, start) + put);
    const seen = [];
    for (const [action, given] of actions) {
      if (action === "type") change(await engine.finish({ before: text, separator: given, settings }));
      else if (action === "backspace") {
        const edit = engine.undo({ before: text, settings });
        if (edit) change(edit);
        else text = [...text].slice(0, -1).join("");
      } else {
        const picked = (await engine.strip({ before: text, settings })).slots[given];
        if (picked) change(await engine.finish({ before: text, picked, settings }));
      }
      const { slots, correction } = await engine.strip({ before: text, settings });
      seen.push({ text, slots, correction });
    }
    return { seen, learnt: JSON.parse(engine.personal.exportJSON()) };
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
    if (error.constructor !== Error) throw error; // a TypeError is a mistake of ours
    answers.push({ error: error.message });
  }
}
process.stdout.write(JSON.stringify(answers));
