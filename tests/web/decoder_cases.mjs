// Runs the keyboard's modules on cases.

import { readFileSync } from "node:fs";
import { answerCases } from "./case_loop.mjs";

const web = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const load = (name) => import(new URL(`decoder/${name}.mjs`, web));
const [context, layout, casing] = await Promise.all(["context", "layout", "casing"].map(load));
const [{ readTensors, widened }, { Mixture, NGram }, { Trie }, { Speller }, { Templates, keysOf, resampled, swipeOf }] =
  await Promise.all(["safetensors", "ngram", "trie", "typed", "gesture"].map(load));
const [{ Network }, lexicons, mixture, { EMPTY, readDictionary }] =
  await Promise.all(["network", "lexicon", "mixture", "dictionary"].map(load));
const { WordSource } = await load("model");
const [{ complete }, { Personal }, { Predictor }, { Engine }, { Seal }] =
  await Promise.all(["characters", "personal", "predict", "engine", "../page/seal"].map(load));

const modules = { context, layout, casing };
const table = (name) => JSON.parse(readFileSync(new URL(`data/${name}.json`, web), "utf8"));
const tables = Object.fromEntries(["constants", "layouts", "emoji", "offensive"].map((name) => [name, table(name)]));
const k = tables.constants;
const bytesOf = (base64) => new Uint8Array(Buffer.from(base64, "base64"));

const operations = {
  // A function of a module, with the decoder's numbers behind its own arguments.
  call({ module, name, given, constants = {} }) {
    const found = modules[module][name](...given, { ...k, ...constants });
    return ArrayBuffer.isView(found) ? [...found] : found ?? null;
  },

  // Ranges of code points without a meaning in this Unicode version.
  unassigned() {
    const ranges = [];
    for (let c = 0; c < 0x110000; c++) {
      if (!/\p{Cn}/u.test(String.fromCodePoint(c))) continue;
      if (ranges.at(-1)?.[1] === c) ranges.at(-1)[1]++;
      else ranges.push([c, c + 1]);
    }
    return ranges;
  },

  // What is announced to the collector, where there is room and where there is none.
  async collect() {
    const { collectEarly } = await load("collect"), usual = globalThis.ArrayBuffer;
    const announced = collectEarly();
    globalThis.ArrayBuffer = class { constructor() { throw new RangeError("no room"); } };
    try {
      return [announced, collectEarly()];
    } finally {
      globalThis.ArrayBuffer = usual;
    }
  },

  lineRead: ({ ids }) => [...context.lineRead(ids)],

  words: ({ line, tokenised, lower }) => context.wordsOf(line, { tokenised, lower }),

  // The tree of words; costs of each, whole and of its cheapest beginning, after none, one, two … keys, null above `most`.
  rows({ words, layout: name, keys, most = 1e9 }) {
    const folded = words.map((word) => layout.fold(word, k.plain_joints));
    const order = [...words.keys()].sort((a, b) => (folded[a] < folded[b] ? -1 : Number(folded[a] > folded[b])));
    const trie = new Trie(order.map((word) => folded[word]));
    let typing = new Speller(trie, layout.layoutOf(tables.layouts, name), { ...k, max_cost_most: most, correct_max: 0 }).start();
    const byWord = (values) => words.map((_, word) => values[order.indexOf(word)]);
    const costs = () => {
      const whole = new Float64Array(words.length), beginning = new Float64Array(words.length);
      typing.spread(whole, beginning);
      return { whole: byWord(whole), beginning: byWord(beginning) };
    };
    const seen = [costs()];
    for (const [character, tap] of keys) {
      typing = typing.key(layout.fold(character, k.plain_joints), tap);
      seen.push(costs());
    }
    const { alphabet, parent, char, node, kids } = trie;
    return { seen, node: byWord(node), alphabet: alphabet.join(""), parent: [...parent], char: [...char], kids: [...kids] };
  },

  // Numbers of the words that are near each swipe, with their scores; and the words' own keys.
  swipes({ words, swipes, logp, constants = {} }) {
    const keys = layout.layoutOf(tables.layouts, "qwerty");
    const templates = new Templates(words.map((word) => layout.fold(word, k.plain_joints)), keys, { ...k, ...constants });
    const found = swipes.map((points) => templates.score(points, logp).map(({ word, score }) => [word, score]));
    return { found, keys: words.map((word) => keysOf(word, keys)), swipeable: [...words.keys()].filter((word) => templates.isSwipeable(word)) };
  },

  swipeOf: ({ points }) => swipeOf(points),

  folded: ({ text }) => [layout.fold(text, k.plain_joints), [...text].map(layout.baseOf)],

  // What is read of each text after the one before it.
  context({ befores }, shared) {
    const numbers = new context.Numbers(shared.vocab);
    let last = null;
    return befores.map((before) => {
      last = context.readContext(before, numbers, k, last);
      return { ...last, ids: [...last.ids] };
    });
  },

  // Where each character's key is, [x, y] or null.
  centres: ({ layout: name, characters }) => {
    const keys = layout.layoutOf(tables.layouts, name);
    return [...characters].map((c) => keys.centre(c) ?? null);
  },

  suggestible: ({ words }) => words.map((word) => lexicons.isSuggestible(word, k)),

  learnable: ({ words }) => words.map((word) => new Personal(k).learnable(word)),

  correctable({ words }) {
    const predictor = new Predictor({ words: context.SPECIALS }, {}, tables, "qwerty", new Personal(k));
    return words.map((word) => predictor.isCorrectable(word));
  },

  casing: ({ text, word, typed, forms }) => ({
    sentence: casing.startsSentence(text, k),
    capitals: casing.allCapitals(typed),
    shown: casing.display(word, typed, casing.startsSentence(text, k), new Map(Object.entries(forms)), k),
    put: casing.put({ text, automatic: true }, word.slice(0, 1), k),
  }),

  personal({ actions, constants = {} }) {
    const personal = new Personal({ ...k, ...constants });
    const answered = actions.map(([name, ...given]) => {
      try {
        return personal[name](...given) ?? null;
      } catch (error) {
        if (error.constructor !== Error) throw error;
        return { error: error.message };
      }
    });
    const known = ["kiel", "zwölf", "teh", "the"].map((word) => personal.knows(word));
    const uses = [...personal.uses()], after = [...personal.usesAfter("in")];
    return { answered, known, uses, after, held: personal.exportJSON() };
  },

  dictionary({ file }) {
    const { words, logs, forms, both } = readDictionary(bytesOf(file));
    return { words, logs: [...logs], forms: [...forms], both: [...both] };
  },

  // What a dictionary and a user's words do to the model's opinion; `listed` are [word, log of its share], ascending.
  mixed({ logp, previous, words, own, held, listed = [], tilt = null }) {
    const personal = held === null ? null : new Personal(k);
    personal?.importJSON(held);
    const dictionary = { ...EMPTY, words: listed.map(([word]) => word), logs: Float64Array.from(listed, ([, log]) => log) };
    const vocab = { words: [...context.SPECIALS, ...words] };
    const entries = lexicons.entriesOf(vocab, context.SPECIALS.length, dictionary.words, k);
    const lexicon = new lexicons.Lexicon(entries, layout.layoutOf(tables.layouts, "qwerty"), k);
    const spread = mixture.spreadOver(lexicon, dictionary, tilt);
    const model = mixture.lexiconScores(logp, lexicon, spread, k), alone = [...model].map(Math.exp);
    const found = mixture.mixed(model, previous, lexicon, own, personal, k);
    return { words: lexicon.words, main: [...found.main], own: [...found.own], model: alone };
  },

  // Words in order, each with the word before: what the model with the cache says before it, of the whole lexicon. The
  // first `history` words are counted only. Then what says the cache after each of `befores`, and what is kept.
  cached({ vocab, typed, history, logps, befores = [] }) {
    const personal = new Personal(k), predictor = new Predictor(vocab, {}, tables, "qwerty", personal), { lexicon } = predictor;
    const spread = mixture.spreadOver(lexicon, EMPTY, null);
    const byId = (places) => vocab.words.slice(context.SPECIALS.length).map((word) => places(lexicon.place(word)) ?? 0);
    const seen = typed.map(([word, before], at) => {
      if (at < history) return void personal.learn(word, before);
      const logp = Float64Array.from(logps[(at - history) % logps.length]);
      const model = mixture.lexiconScores(logp, lexicon, spread, k);
      const { main } = mixture.mixed(model, before, lexicon, [], personal, k);
      personal.learn(word, before, null, predictor.explained(logp, word, before));
      return byId((place) => Math.exp(main[place]));
    });
    const said = befores.map((before) => {
      const { p, kappa, paired } = personal.cache.after(before, lexicon);
      return { p: byId((place) => p.get(place)), kappa, paired };
    });
    return { seen: seen.slice(history), said, held: personal.exportJSON() };
  },

  // A text that is typed key by key: what the cache had explained of it after each key, and what is kept.
  async explained({ text, settings = {}, logp }, shared) {
    const sources = { federated: { scores: async () => Float64Array.from(logp) } };
    const engine = new Engine({ vocab: shared.vocab, forms: {}, tables, sources });
    let typed = "";
    const seen = [];
    for (const key of text) {
      await engine.strip({ before: typed, settings });
      if (key === "⌫") typed = typed.slice(0, engine.undo({ before: typed, settings })?.start ?? -1);
      else {
        const { start, text: put } = await engine.finish({ before: typed, separator: key, settings });
        typed = typed.slice(0, start) + put;
      }
      seen.push(engine.personal.cache.kept().weighed);
    }
    return { seen, held: engine.personal.exportJSON() };
  },

  path: ({ points, n }) => [...resampled(swipeOf(points), n)],

  // One predictor, many questions: it has to forget nothing and to remember nothing wrong, as `fresh` ones do.
  predict({ vocab, forms, layout: name, personal: learnt, questions, fresh = false, constants = {} }, shared) {
    const own = { ...tables, constants: { ...k, ...constants } };
    const personal = new Personal(own.constants);
    personal.importJSON(learnt);
    const words = shared.vocabularies[vocab];
    const numbers = new context.Numbers(words), logps = shared.logps.map((logp) => Float64Array.from(logp));
    const made = () => new Predictor(words, forms, own, name, personal);
    const one = made();
    return questions.map(({ before, logp, taps, choice, points, block, learn }) => {
      const predictor = fresh ? made() : one;
      if (block) personal.block(block);
      if (learn) personal.learn(...learn);
      const read = context.readContext(before, numbers, k);
      const scores = logps[logp].subarray(0, words.words.length);
      return points ? predictor.gesture(scores, read, points, choice) : predictor.suggest(scores, read, taps, choice);
    });
  },

  // A person at the keyboard: text, strip and edits after every action, and what was learnt in the end. Now and then
  // the strip is compared with that of an engine which was only just made.
  async script({ actions, settings, file, fresh = Infinity }, shared) {
    const vocab = shared.vocabularies[0];
    const ngram = NGram.read(bytesOf(file), vocab.words.length);
    const made = () => new Engine({ vocab, forms: shared.forms, tables, sources: { federated: ngram } });
    const engine = made();
    let text = "";
    const seal = new Seal();
    const change = ({ start, text: put }) => (text = text.slice(0, start) + put);
    const seen = [];
    for (const [action, given] of actions) {
      const sealed = seal.within(text, text, text.length);
      if (action === "switch") {
        settings[given] = !settings[given];
        seal.close(text);
      } else if (action === "type") change(await engine.finish({ before: text, separator: given, sealed, settings }));
      else if (action === "backspace") {
        const edit = engine.undo({ before: text, sealed, settings });
        if (edit) change(edit);
        else text = [...text].slice(0, -1).join("");
      } else {
        const picked = (await engine.strip({ before: text, settings })).slots[given];
        if (picked) change(await engine.finish({ before: text, picked, sealed, settings }));
      }
      const { slots, correction } = await engine.strip({ before: text, settings });
      const now = { text, slots, correction, learnt: engine.personal.words.size };
      if (seen.length % fresh === 0) {
        const other = made();
        other.personal.importJSON(engine.personal.exportJSON());
        const { slots: again, correction: second } = await other.strip({ before: text, settings });
        now.fresh = { slots: again, correction: second };
      }
      seen.push(now);
    }
    return { seen, learnt: JSON.parse(engine.personal.exportJSON()) };
  },

  // What the engine asks of its sources, and when it stops asking.
  async engine() {
    const words = (...own) => ({ words: [...context.SPECIALS, ...own], lower: true, tokenised: false });
    const vocab = { kind: "word", ...words("hat", "hut", "hit") };
    const asked = [], buffer = new Float32Array(7); // one buffer for all answers, as a model may do
    const source = (name, best) => ({
      scores: async (ids, signal) => {
        asked.push([name, ...ids]);
        if (signal?.onAsked) return (signal.aborted = true) && signal.onAsked === "stop" ? null : buffer;
        buffer.fill(-9)[best] = -0.1;
        return buffer;
      },
    });
    const sources = { federated: source("f", 4), ngram: source("n", 5) };
    const engine = new Engine({ vocab, forms: {}, tables, sources });
    const middle = async (before, settings, signal) =>
      (await engine.strip({ before, settings, signal }))?.slots[1].text ?? null;
    const seen = {};
    seen.sources = [await middle("a ", { source: "federated" }), await middle("a ", { source: "ngram" }),
      await middle("a ", { source: "personal" })];
    for (let i = 0; i < 30; i++) await engine.finish({ before: "a hit", separator: " " });
    seen.learnt = [await middle("a ", {}), await middle("a ", { source: "federated" }),
      await middle("a ", { incognito: true })];
    seen.asked = asked.splice(0);
    for (const typed of ["h", "hu", "hut", "hu"]) await middle(`a ${typed}`, {});
    seen.whileTyping = asked.splice(0);
    seen.long = [(await engine.strip({ before: `b ${"h".repeat(9999)}` })).slots, asked.splice(0)];
    const later = { aborted: false };
    const waiting = middle("hut ", {}, later);
    later.aborted = true; // by a message that the engine lets in before it runs the model
    seen.stale = [await waiting, await middle("hat ", {}, { aborted: true }), asked.splice(0)];
    seen.during = [await middle("hit ", {}, { aborted: false, onAsked: "stop" }),
      await middle("hit ", {}, { aborted: false, onAsked: "go on" }), await middle("hit ", {}), asked.splice(0)];
    seen.staleSwipe = await engine.gesture({ before: "hut hut ", points: [[5, 1], [4, 0]], signal: { aborted: true } });
    seen.swipes = [];
    for (const name of ["qwerty", "azerty"]) {
      const points = [[5.75, 1.5], [name === "azerty" ? 0.5 : 0.75, name === "azerty" ? 0.5 : 1.5], [4.5, 0.5]];
      seen.swipes.push((await engine.gesture({ before: "", points, settings: { layout: name } }))[0].text);
    }
    seen.undone = [engine.undo({ before: "a hit " })];
    const spelling = new Engine({
      vocab: { kind: "char", ...words(" ", "d", "e", "n") },
      forms: {}, tables, sources: { federated: speller(["den", "end", "ende"]) },
    });
    const spelt = async (before) => (await spelling.strip({ before })).slots.map((slot) => slot?.text ?? null);
    const { text } = await spelling.finish({ before: "en", separator: " " });
    seen.spelt = [await spelt("en"), await spelt(""), await spelt("den "), text];
    spelling.personal.block("end");
    seen.spelt.push(await spelt("en"));
    return seen;
  },

  tensors({ file }) {
    const found = [...readTensors(bytesOf(file))];
    return Object.fromEntries(found.map(([name, { shape, data }]) => [name, [shape, [...data]]]));
  },

  widened({ file }) {
    const found = [...widened(readTensors(bytesOf(file)))];
    return Object.fromEntries(found.map(([name, { shape, data }]) => [name, [shape, [...data]]]));
  },

  // Texts read token by token, then side by side, then once more from the states in the middle of each.
  network({ manifest, path, texts }) {
    const network = new Network(manifest, readTensors(readFileSync(path)));
    const told = (arrays) => Buffer.concat(arrays.map((a) => Buffer.from(a.buffer, a.byteOffset, a.byteLength))).toString("base64");
    const read = (ids, from) => {
      const seen = [{ states: from }];
      for (const token of ids) seen.push(network.step([token], seen.at(-1).states));
      return seen.slice(1);
    };
    const alone = texts.map((ids) => read(ids, network.zero()));
    const half = texts[0].length >> 1;
    const again = texts.map((ids, n) => read(ids.slice(half), alone[n][half - 1].states));
    let together = { states: network.zero().map((zero) => new Float32Array(zero.length * texts.length)) };
    const columns = texts[0].map((_, t) => (together = network.step(texts.map((ids) => ids[t]), together.states)).logp);
    // Several tokens after each text, in one step and one by one.
    const after = texts.flatMap((_, row) => [texts[0][1], texts[0][2], texts[0][1]].map((token) => [token, row]));
    const rows = after.map(([, row]) => row), forks = network.step(after.map(([token]) => token), together.states, { rows });
    const ends = texts.map((_, row) => together.states.map((s) => s.slice(row * (s.length / texts.length), (row + 1) * (s.length / texts.length))));
    const single = after.map(([token, row]) => network.step([token], ends[row]));
    const wholes = network.zero().flatMap((_, i) => single.map(({ states }) => states[i]));
    return {
      forked: told([forks.logp, ...forks.states]), apart: told([...single.map(({ logp }) => logp), ...wholes]),
      alone: told(alone.flatMap((steps) => steps.map(({ logp }) => logp))),
      again: told(again.flatMap((steps) => steps.map(({ logp }) => logp))), together: told(columns),
    };
  },

  // The scores after texts that one source reads, and those of the step after each of their last tokens; how often the
  // output layer was needed.
  async reading({ manifest, path, texts }) {
    const network = new Network(manifest, readTensors(readFileSync(path))), needed = [];
    const source = new WordSource({
      zero: () => network.zero(),
      step: (tokens, states, given) => (needed.push(Number(given.scored)), network.step(tokens, states, given)),
    });
    const read = [], stepped = [], costs = [];
    for (const ids of texts) {
      needed.length = 0;
      read.push([...await source.scores(Int32Array.from(ids))]);
      costs.push([needed.length, needed.reduce((sum, one) => sum + one, 0)]);
      let after = { states: network.zero() };
      for (const token of ids) after = network.step([token], after.states);
      stepped.push([...after.logp]);
    }
    return { read, stepped, costs };
  },

  next({ file, vocab, contexts }) {
    const model = NGram.read(bytesOf(file), vocab);
    return contexts.map((context) => [...model.next(context)]);
  },

  // The network's scores mixed with those of the counts, and the counts alone.
  async mixture({ file, vocab, lines, mixture: fitted, contexts, scores }) {
    const ngram = NGram.read(bytesOf(file), vocab, lines);
    const rows = scores.values();
    const both = new Mixture({ scores: async () => Float64Array.from(rows.next().value) }, ngram, fitted);
    const found = { mixed: [], counts: [] };
    for (const context of contexts) {
      const ids = Int32Array.from(context);
      found.mixed.push([...await both.scores(ids)]);
      found.counts.push([...await ngram.scores(ids)]);
    }
    return found;
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

// A model over characters that knows a few words, likelier first; its state is the word so far of each row.
function speller(words) {
  const letters = ["", "", "", "", " ", "d", "e", "n"];
  const scores = (state) => Float32Array.from(letters, (letter, token) => {
    const fits = (word) => (token === 2 ? word === state : letter.trim() && word.startsWith(state + letter));
    const place = words.findIndex(fits);
    return place < 0 ? -20 : -0.5 - place;
  });
  return {
    async begin(ids) {
      const last = Math.max(ids.lastIndexOf(4), ids.lastIndexOf(2));
      const state = [...ids.slice(last + 1)].map((token) => letters[token]).join("");
      return { logp: scores(state), state: [state] };
    },
    async step(tokens, state, rows) {
      const states = tokens.map((token, j) => state[rows[j]] + letters[token]);
      return { logp: states.map(scores), state: states };
    },
  };
}

await answerCases(operations);
