/**
 * Scores, edits and swipes → the strip above the keys, and what a separator will put in the place of the typed word.
 * Bayes' rule in nats, with F the cost of a whole word and C that of its cheapest beginning (`typed.mjs`):
 *
 *   full(w) = log p(w) − alpha·F(w),  completion(w) = log p(w) − alpha·C(w) − complete,  score = the larger
 *
 * against the typed word itself, which has log p(w) if it is known and unknown_word − unknown_letter·letters if not.
 */

import { allCapitals, capitalised, display, isCapital, startsSentence } from "./casing.mjs";
import { belongs, hasNumber, sizeOf, SPECIALS, UNK } from "./context.mjs";
import { EMPTY } from "./dictionary.mjs";
import { fold, layoutOf } from "./layout.mjs";
import { entriesOf, isSuggestible, Lexicon } from "./lexicon.mjs";
import { everyday, lexiconScores, mixed, spreadOver } from "./mixture.mjs";

const RANKED = 16; // candidates that are looked at for three slots; some may be shown alike
const ALPHABETIC = /\p{L}/gu;
const PLAIN = /^[\x00-\x7f]*$/;
const LAST_WORD = /([\p{L}\p{M}'’-]+) $/u;

/** @typedef {import("./engine.mjs").Slot} Slot */
/** @typedef {import("./context.mjs").Context} Context */

/**
 * What a call may do: `autocorrect`, `emoji`, `filter` as in the page's settings; `own`: suggest what was learnt.
 * @typedef {{autocorrect: boolean, emoji: boolean, filter: boolean, own: boolean}} Choice
 */

/** @typedef {{lexicon: Lexicon, scores: Float64Array, allowed: Uint8Array}} Part  words that may be suggested */

/** A vocabulary, a layout and a user's counts: ranks words given the model's log-probabilities. */
export class Predictor {
  #forms;
  #always;
  #spread;
  #tables;
  #offensive;
  #own = { version: -1, lexicon: null };
  #mixed = {};
  #allowed = {};
  #sentence = {};

  /**
   * @param {{words: string[], doubted?: string[], tilt?: number[]}} vocab
   * @param {Object<string, string>} forms
   * @param {{constants: object, layouts: object, emoji: object, offensive: object}} tables
   * @param {string} layout  a name in layouts.json
   * @param {import("./personal.mjs").Personal} personal
   * @param {import("./dictionary.mjs").Dictionary} [dictionary]
   */
  constructor(vocab, forms, tables, layout, personal, dictionary = EMPTY) {
    this.k = tables.constants;
    this.personal = personal;
    this.layout = layoutOf(tables.layouts, layout);
    this.#tables = tables;
    this.#forms = formsOf(forms, dictionary);
    /** Words that are never in lower case. */
    this.#always = dictionary.forms;
    this.#offensive = new Set(tables.offensive.words);
    this.lexicon = new Lexicon(entriesOf(vocab, SPECIALS.length, dictionary.words, this.k), this.layout, this.k);
    this.#spread = spreadOver(this.lexicon, dictionary, vocab.tilt ?? null);
  }

  /** Change the keys under the words. */
  use(layout) {
    if (layout === this.layout.name) return;
    this.layout = layoutOf(this.#tables.layouts, layout);
    this.lexicon.use(this.layout);
    this.#own.lexicon?.use(this.layout);
  }

  /**
   * The strip.
   * @param {ArrayLike<number>} logp  the model's, over the vocabulary; a new array for new scores
   * @param {Context} context
   * @param {([number, number] | null)[]} taps  of the typed characters, as far as known
   * @param {Choice} choice
   * @returns {{slots: (Slot|null)[], correction: string | null}}
   */
  suggest(logp, context, taps, choice) {
    const { typed } = context;
    if (sizeOf(typed) > this.k.max_typed) return { slots: [null, null, null], correction: null };
    if (!typed) return this.#next(logp, context, choice);
    const ranked = this.#ranked(logp, context, taps, choice);
    const key = this.#fold(typed);
    const literal = { text: typed, word: key, kind: "literal" };
    const corrected = this.correct(logp, context, taps, choice);
    const [best, ...rest] = corrected ? [corrected, ...ranked] : ranked;
    const others = rest.filter(({ text }) => text !== typed && text !== best.text);
    const ordered = best.text === typed ? [best, ...others] : [best, literal, ...others];
    return { slots: three(ordered, this.#emoji(key, choice)), correction: corrected?.text ?? null };
  }

  /**
   * What a separator puts in the place of the typed word; null: it stays.
   * @returns {Slot | null}
   */
  correct(logp, context, taps, choice) {
    const { typed } = context, { k } = this;
    if (!choice.autocorrect || !this.isCorrectable(typed)) return null;
    const key = this.#fold(typed);
    if (this.#isHeldBack(key, choice) || this.personal.dictionary.get(key) === typed) return null;
    if (Object.hasOwn(k.capital_i, key)) { // whether it is known says nothing here: the counts are those of "I"
      const text = display(key, typed, false, this.#forms, k);
      return text === typed ? null : { text, word: key, kind: "correction" };
    }
    const letters = typed.match(ALPHABETIC)?.length ?? 0;
    if (letters < 2 || this.personal.knows(typed)) return null;
    const literal = this.#literal(logp, context, choice);
    const slot = this.#contracted(key, literal, logp, context, choice) ?? this.#mended(literal, logp, context, taps, choice);
    if (slot && (slot.word !== key || slot.text.includes(" "))) return slot;
    // The word stays; one that is never in lower case gets its capitals, and the second half of a name those of the first.
    const usual = display(this.#second(key, context) ?? this.#always.get(key) ?? typed, typed, false, NO_FORMS, k);
    return usual === typed ? null : { text: usual, word: key, kind: "correction" };
  }

  /** What was typed without its apostrophe or blank; where that is a word, too, the model has to prefer the other. */
  #contracted(key, literal, logp, context, choice) {
    const { contractions, margin_contraction, margins } = this.k;
    if (!Object.hasOwn(contractions, key)) return null;
    const meant = contractions[key];
    if (meant.includes(" ")) {
      return literal.isKnown ? null : { text: display(meant, context.typed, false, NO_FORMS, this.k), word: key, kind: "correction" };
    }
    const [{ lexicon, scores, allowed }] = this.#parts(logp, context.previous, choice);
    const place = lexicon.place(meant);
    if (place === undefined || !allowed[place]) return null;
    if (literal.isKnown && !(scores[place] > literal.score + (Object.hasOwn(margins, key) ? margins[key] : margin_contraction))) return null;
    return this.#slot(lexicon, place, context, "correction");
  }

  /** The word, or the two words, that most probably were meant; null: what was typed. */
  #mended(literal, logp, context, taps, choice) {
    const { typed } = context, { k } = this;
    const marked = markedLetters(typed);
    let best = { score: -Infinity, part: null, place: -1 };
    for (const part of this.#parts(logp, context.previous, choice)) {
      const { lexicon, scores, allowed } = part;
      const { whole } = lexicon.typing(typed, taps);
      for (let place = 0; place < scores.length; place++) {
        const cost = whole[place];
        if (!(cost <= k.correct_max) || !allowed[place]) continue;
        const score = scores[place] - k.alpha * cost;
        if (score > best.score && keepsLetters(lexicon.keys[place], marked)) best = { score, part, place };
      }
    }
    const two = literal.isKnown ? null : this.#split(logp, context, choice);
    const margin = literal.isKnown ? k.margin_known : this.#isNamed(context) ? k.margin_name : k.margin_unknown;
    if (!(Math.max(best.score, two?.score ?? -Infinity) > literal.score + margin)) return null;
    return two?.score > best.score ? two.slot : this.#slot(best.part.lexicon, best.place, context, "correction");
  }

  /** Whether a capital says that the typed word is a name: nothing else put it there. */
  #isNamed({ text, typed, shift }) {
    const [first] = typed;
    return isCapital(first) && shift !== "lock" && !startsSentence(text, this.k);
  }

  /** The two words that were run together; the second is as likely as it is in general. */
  #split(logp, context, choice) {
    const { typed } = context, { k } = this, { general } = this.#spread, key = this.#fold(typed);
    const [{ lexicon, scores, allowed }] = this.#parts(logp, context.previous, choice);
    let best = null;
    for (let at = 1; at < key.length; at++) {
      const first = lexicon.place(key.slice(0, at)), second = lexicon.place(key.slice(at));
      if (first === undefined || second === undefined || !allowed[first] || !allowed[second]) continue;
      const score = general[first] > -Infinity ? scores[first] + general[second] - k.alpha * k.miss_blank : -Infinity;
      if (!(score > (best?.score ?? -Infinity))) continue;
      const [one, two] = [first, second].map((place) => lexicon.words[place]);
      const begins = display(one, typed.slice(0, at), false, this.#forms, k);
      const text = `${begins} ${display(two, key.slice(at), false, this.#forms, k)}`;
      best = { score, slot: { text, word: key, kind: "correction" } };
    }
    return best;
  }

  /** Whether a typed word is one that may be corrected: no number, address, abbreviation or closing quote. */
  isCorrectable(typed) {
    const characters = [...typed], { max_typed, unlearnt } = this.k;
    if (characters.length > max_typed || !belongs(characters.at(-1)) || allCapitals(typed)) return false;
    if (hasNumber(typed) || characters.some((c) => unlearnt.includes(c))) return false;
    return !characters.slice(1).some(isCapital);
  }

  /**
   * The n best words for a swipe, best first.
   * @param {[number, number][]} points
   * @returns {Slot[]}
   */
  gesture(logp, context, points, choice, n = 3) {
    const found = [];
    for (const { lexicon, scores, allowed } of this.#parts(logp, context.previous, choice)) {
      const best = new Best(RANKED);
      for (const { word, score } of lexicon.templates.score(points, scores)) if (allowed[word]) best.take(score, word);
      for (const [score, place] of best.entries()) found.push([score, this.#slot(lexicon, place, context, "word")]);
    }
    return unlike(found).slice(0, n);
  }

  #next(logp, context, choice) {
    const found = [];
    for (const { lexicon, scores, allowed } of this.#parts(logp, context.previous, choice)) {
      const best = new Best(RANKED);
      for (let place = 0; place < scores.length; place++) if (allowed[place]) best.take(scores[place], place);
      for (const [score, place] of best.entries()) found.push([score, this.#slot(lexicon, place, context, "next")]);
    }
    return { slots: three(unlike(found), this.#emoji(context.previous, choice)), correction: null };
  }

  /** The candidates and the literal, best first, no two alike; never empty. */
  #ranked(logp, context, taps, choice) {
    const { typed } = context, { alpha, complete, fuzzy_from, max_cost, max_cost_letter, max_cost_most } = this.k;
    const size = sizeOf(typed);
    const most = Math.min(max_cost_most, max_cost + max_cost_letter * size);
    const found = [];
    for (const { lexicon, scores, allowed } of this.#parts(logp, context.previous, choice)) {
      const { whole, beginning } = lexicon.typing(typed, taps);
      const mostBeginning = size < fuzzy_from ? 0 : most;
      const best = new Best(RANKED);
      for (let place = 0; place < scores.length; place++) {
        if (!(whole[place] <= most || beginning[place] <= mostBeginning) || !allowed[place]) continue;
        const full = scores[place] - alpha * whole[place];
        const completion = beginning[place] <= mostBeginning || size >= fuzzy_from
          ? scores[place] - alpha * beginning[place] - complete : -Infinity;
        best.take(full > completion ? full : completion, place);
      }
      for (const [score, place] of best.entries()) {
        // The score is that of the whole word unless its beginning gave more.
        const kind = score > scores[place] - alpha * whole[place] ? "completion" : whole[place] > 0 ? "correction" : "word";
        found.push([score, this.#slot(lexicon, place, context, kind)]);
      }
    }
    const { score } = this.#literal(logp, context, choice);
    found.push([score, { text: typed, word: this.#fold(typed), kind: "literal" }]);
    return unlike(found);
  }

  /**
   * Score of the typed word as it was typed, and whether it is a word: one of the lexicon, or of its possessives.
   * @returns {{score: number, isKnown: boolean}}
   */
  #literal(logp, context, choice) {
    const { unknown_word, unknown_letter, possessive } = this.k;
    const key = this.#fold(context.typed), owner = /^(.+)(?:'s|(?<=s)')$/u.exec(key)?.[1];
    let score = -Infinity;
    for (const { lexicon, scores } of this.#parts(logp, context.previous, choice)) {
      const { from, to } = lexicon.range(key);
      for (let place = from; place < to; place++) score = Math.max(score, scores[place]);
      const place = owner === undefined ? undefined : lexicon.place(owner);
      if (place !== undefined) score = Math.max(score, scores[place] - possessive);
    }
    const isKnown = score > -Infinity;
    return { score: isKnown ? score : unknown_word - unknown_letter * sizeOf(context.typed), isKnown };
  }

  /**
   * The vocabulary's lexicon and the user's own one, with log p and what may be suggested of each.
   * @returns {Part[]}
   */
  #parts(logp, previous, { own: isOwn, filter }) {
    const own = this.#ownWords(), { version } = this.personal;
    const held = this.#mixed;
    if (held.logp !== logp || held.previous !== previous || held.version !== version || held.isOwn !== isOwn) {
      const model = lexiconScores(logp, this.lexicon, this.#spread, this.k, held.both?.main);
      const both = mixed(model, previous, this.lexicon, own.words, isOwn ? this.personal : null, this.k);
      this.#mixed = { logp, previous, version, isOwn, both };
    }
    if (this.#allowed.version !== version || this.#allowed.filter !== filter) {
      const never = [...this.personal.blocked, ...(filter ? this.#offensive : [])];
      this.#allowed = { version, filter, main: this.lexicon.outside(never), own: own.outside(never) };
    }
    const { both } = this.#mixed, allowed = this.#allowed;
    const parts = [{ lexicon: this.lexicon, scores: both.main, allowed: allowed.main }];
    if (isOwn && own.words.length) parts.push({ lexicon: own, scores: both.own, allowed: allowed.own });
    return parts;
  }

  /**
   * How much of a finished word the cache of what was typed explains; null: nothing can be said.
   * @param {ArrayLike<number>} logp  the model's before the word
   * @param {string} word
   * @param {string} previous  the word before, folded
   */
  explained(logp, word, previous) {
    const { lexicon } = this, place = lexicon.place(this.#fold(word));
    if (place === undefined) return null;
    const { tilt, logs } = this.#spread, id = lexicon.ids[place];
    const model = everyday(logp, { tilt, keepsUnknown: logs !== null }, this.k);
    return this.personal.cache.explained(place, Math.exp(id >= 0 ? model[id] : model[UNK] + logs[place]), previous, lexicon);
  }

  #isHeldBack(key, { filter }) {
    return this.personal.blocked.has(key) || (filter && this.#offensive.has(key));
  }

  /** @returns {Lexicon} */
  #ownWords() {
    const { version } = this.personal, last = this.#own.lexicon;
    if (this.#own.version === version) return last;
    const counting = new Set(this.personal.uses().keys());
    for (const after of this.personal.pairs.values()) {
      for (const [word, n] of after) if (n >= this.k.learn_after) counting.add(word);
    }
    const isOwn = (word) => !this.lexicon.has(word) && isSuggestible(word, this.k);
    const words = [...counting].filter(isOwn).sort();
    const isSame = (word, place) => word === last.words[place];
    const lexicon = last?.words.length === words.length && words.every(isSame)
      ? last : new Lexicon(words.map((word, id) => ({ word, key: word, id })), this.layout, this.k);
    this.#own = { version, lexicon };
    return lexicon;
  }

  /** How the second word of a name is written (new york, Harry Potter): as the first one is; undefined: it is no such word. */
  #second(key, { text }) {
    const { second_names } = this.k;
    if (!Object.hasOwn(second_names, key)) return undefined;
    const first = LAST_WORD.exec(text.slice(-40))?.[1];
    if (first === undefined || !second_names[key].includes(first.toLowerCase())) return undefined;
    return isCapital(first[0]) ? capitalised(key) : key;
  }

  #slot(lexicon, place, context, kind) {
    const { text: before, typed } = context;
    if (this.#sentence.before !== before) this.#sentence = { before, starts: startsSentence(before, this.k) };
    const { shift } = context; // what a person did with the shift key counts more than the text
    const starts = shift ? (shift === "lock" ? "lock" : shift === "once") : this.#sentence.starts;
    const key = lexicon.keys[place], written = this.personal.written(key) ?? this.#second(key, context);
    const forms = written ? new Map([[lexicon.words[place], written]]) : this.#forms;
    const text = display(lexicon.words[place], typed, starts, forms, this.k);
    return { text, word: key, kind: kind !== "correction" && text === typed ? "literal" : kind };
  }

  #emoji(word, { emoji }) {
    const pictures = this.#tables.emoji.words;
    if (!emoji || !Object.hasOwn(pictures, word)) return null;
    if (this.personal.blocked.has(word) || this.personal.blocked.has(this.#fold(pictures[word]))) return null;
    return { text: pictures[word], word, kind: "emoji" };
  }

  #fold(word) {
    return fold(word, this.k.plain_joints);
  }
}

/** The n highest finite scores of those that come by, in the order of their places; ties go to the first. */
class Best {
  #n;
  #scores = [];
  #places = [];

  constructor(n) {
    this.#n = n;
  }

  take(score, place) {
    const scores = this.#scores, places = this.#places;
    if (scores.length === this.#n ? !(score > scores[this.#n - 1]) : !(score > -Infinity)) return;
    if (scores.length === this.#n) scores.pop(), places.pop();
    let at = scores.length;
    while (at > 0 && scores[at - 1] < score) at--;
    scores.splice(at, 0, score);
    places.splice(at, 0, place);
  }

  /** [score, place], best first. */
  entries() {
    return this.#scores.map((score, i) => [score, this.#places[i]]);
  }
}

const NO_FORMS = new Map();

/** How words are written: a listed word as the dictionary has it, which leaves may or May to the text. */
function formsOf(forms, { words, forms: always, both }) {
  const found = new Map(Object.entries(forms));
  for (const word of found.keys()) if (isIn(words, word) && !both.has(word)) found.delete(word);
  for (const [word, form] of always) found.set(word, form);
  return found;
}

/** The letters of a word that no plain keyboard has, é or ß: whoever types one means it. */
function markedLetters(word) {
  return PLAIN.test(word) ? [] : [...word.normalize("NFC").toLowerCase()].filter((c) => c > "\x7f" && belongs(c));
}

/** Whether a word has all of these letters. */
function keepsLetters(word, letters) {
  if (!letters.length) return true;
  const found = [...word.normalize("NFC")];
  return letters.every((letter) => {
    const at = found.indexOf(letter);
    if (at >= 0) found.splice(at, 1);
    return at >= 0;
  });
}

/** Whether a word is among ascending ones. */
function isIn(words, word) {
  let from = 0, to = words.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (words[middle] < word) from = middle + 1;
    else to = middle;
  }
  return words[from] === word;
}

/** The slots of [score, slot], best first, without those that read like a better one. */
function unlike(found) {
  const slots = new Map();
  for (const [, slot] of found.sort((a, b) => b[0] - a[0])) if (!slots.has(slot.text)) slots.set(slot.text, slot);
  return [...slots.values()];
}

/** The best in the middle, the second left, the third or the emoji right. */
function three([middle = null, left = null, right = null], emoji) {
  return [left, middle, emoji ?? right];
}
