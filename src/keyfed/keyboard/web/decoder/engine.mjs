/**
 * The keyboard without its page: text left of the cursor in, suggestions and edits out. It joins the language model
 * (given as a source of log-probabilities), the decoder (`predict.mjs`) and what was learnt on this device
 * (`personal.mjs`). It knows no DOM, no network and no storage, so that it runs in a worker and in node alike.
 */

import { othersFirst } from "./breath.mjs";
import { allCapitals, capitalised, hasInnerCapital, isWordAndBlank, pick, put, startsSentence } from "./casing.mjs";
import { complete } from "./characters.mjs";
import { anchored, belongs, hasBlank, Numbers, previousWord, readContext, sizeOf } from "./context.mjs";
import { SETTINGS } from "./defaults.mjs";
import { fold } from "./layout.mjs";
import { Personal } from "./personal.mjs";
import { Predictor } from "./predict.mjs";

const MODEL = "federated"; // the source that is mixed with what was learnt
const REMEMBERED = 8; // contexts whose scores are kept: a few words back and forth
const REPLACED = 32; // corrections whose typed word is offered again
const BEFORE_NAME = "#$&=~+%^|<`\\"; // a word right behind one of these is a tag, a name of a program, part of an address
const SPELT = 5; // completions of a character model; some may be held back

/**
 * A language model over words. `ids` is a text from a zero state: EOS, then tokens; the engine has already cut it so
 * that its start moves only every 32 tokens (`context.mjs`), so a source that keeps the states of its last `ids` by
 * position reads one token a word. The answer, log p(w | ids) of every word of the vocabulary (specials too), belongs
 * to the caller of `scores` only until the next call: the engine copies it. A source that stopped because the signal
 * says so answers null.
 * @typedef {object} Source
 * @property {(ids: Int32Array, signal?: Signal) => Promise<Float32Array | Float64Array | null>} scores
 */

/**
 * A language model over characters (`vocab.kind === "char"`). `begin` reads `ids` from a zero state. `step` reads one
 * more character for each of several rows: row j goes on from row `rows[j]` of `state` with `tokens[j]`. `state` is
 * whatever the source likes; it is never changed by a later call.
 * @typedef {object} CharacterSource
 * @property {(ids: Int32Array, signal?: Signal) => Promise<{logp: Float32Array, state: unknown} | null>} begin
 * @property {(tokens: number[], state: unknown, rows: number[]) =>
 *   Promise<{logp: Float32Array[], state: unknown}>} step
 */

/**
 * Whether a call is still wanted; an `AbortSignal` is one. It is asked before and after the model is run, and before
 * that the worker's other messages are let in, which may set it.
 * @typedef {{aborted: boolean}} Signal
 */

/** @typedef {import("./defaults.mjs").Settings} Settings */

/**
 * `text` is what is shown and put into the text, `word` what is blocked or forgotten: folded, and for an emoji the word
 * that it stands for (to block an emoji, block its `text`: the word stays).
 * @typedef {{text: string, word: string, kind: "word"|"literal"|"completion"|"correction"|"emoji"|"next"}} Slot
 */

/**
 * @typedef {object} Strip
 * @property {[Slot|null, Slot|null, Slot|null]} slots  left, middle (the best), right
 * @property {string | null} correction  what a separator will put in place of the typed word
 * @property {string} typed     the word being typed, as it stands before the cursor
 * @property {{model: number, rank: number}} timing  milliseconds: reading the text and the source's answer; ranking
 */

/**
 * A change of the text: everything left of the cursor from `start` (a UTF-16 offset into `before`) becomes `text`.
 * @typedef {object} Edit
 * @property {number} start
 * @property {string} text
 * @property {{typed: string, chosen: string} | null} correction  a correction that a backspace undoes now
 */

/**
 * A key that was hit at (x, y) in key widths from the layout's upper left corner; null: typed on another keyboard.
 * @typedef {[number, number] | null} Tap
 */

/**
 * The engine of one page.
 *
 *   const engine = new Engine({vocab, forms, tables, layout, sources});
 *   const strip = await engine.strip({before: "how are y", taps: [[5.2, 0.6]], settings, signal});
 *   const edit = await engine.finish({before: "how are yuo", separator: " ", taps, settings});
 *   const edit = await engine.finish({before: "how are y", picked: strip.slots[1], settings});
 *   const edit = engine.undo({before, settings});  // null: there is nothing to undo here, delete a character
 *   const found = await engine.gesture({before, points: [[x, y], …], settings, signal});
 *
 * `before` is the text left of the cursor, the same way at every call (all of it: only its end is looked at).
 * `taps` belong to the last characters of `before` (the last tap to the last character); none may be given.
 * A call that was overtaken (`signal.aborted`) answers null.
 */
export class Engine {
  #tables;
  #sources;
  #numbers;
  #layout;
  #predictor;
  #context = { before: null };
  #scored = new Map();
  /** The text after the last edit, whether the blank at its end is automatic, and the correction that can be undone. */
  #last = { text: null, automatic: false, undo: null };
  /** The latest corrections, for whoever comes back to one: {typed, chosen, previous}. */
  #replaced = [];
  /** When what was learnt was last replaced as a whole, and whether the last call was to learn nothing. */
  #seen = { replacements: 0, isPrivate: false };

  /**
   * @param {object} given
   * @param {{kind: "word"|"char", words: string[], lower: boolean, tokenised: boolean}} given.vocab  vocab.json
   * @param {Object<string, string>} given.forms   the most frequent written form of a word where it is another
   * @param {import("./dictionary.mjs").Dictionary} [given.dictionary]  words that the vocabulary may lack
   * @param {{constants: object, layouts: object, emoji: object, offensive: object}} given.tables  data/*.json, parsed
   * @param {string} [given.layout]  a name in layouts.json, until a call's settings name another
   * @param {{federated: Source | CharacterSource, network?: Source, ngram?: Source}} given.sources
   */
  constructor({ vocab, forms, dictionary, tables, layout = SETTINGS.layout, sources }) {
    this.#tables = tables;
    this.#sources = sources;
    this.#layout = layout;
    this.#numbers = new Numbers(vocab);
    /** What was learnt: list, forget, forgetAll, block, unblock, add, exportJSON, importJSON (`personal.mjs`). */
    this.personal = new Personal(tables.constants);
    // A model over characters spells its words; there is no lexicon to rank.
    this.#predictor = vocab.kind === "word" ? new Predictor(vocab, forms, tables, layout, this.personal, dictionary) : null;
  }

  get #k() {
    return this.#tables.constants;
  }

  /** Whether a word is one that this keyboard can suggest, without what was learnt. */
  knows(word) {
    return this.#predictor?.lexicon.has(fold(word, this.#k.plain_joints)) ?? false;
  }

  /**
   * Learn a word that was written elsewhere, behind a text, as one that is typed.
   * @param {string} before
   * @param {string} word
   * @param {boolean} [weighs]  false: the model is not run to see how much of the word the cache explained
   */
  async learnt(before, word, weighs = true) {
    const { ids, previous } = this.#read(`${before} `);
    const logp = weighs && this.#predictor && this.personal.learnable(word) ? await this.#scores(ids, SETTINGS.source) : null;
    this.personal.learn(word, previous, null, logp && this.#predictor.explained(logp, word, previous));
  }

  /** Whether a character that is typed after a word finishes it. */
  isSeparator(c) {
    return !belongs(c) && (c === "." || !this.#k.joints.includes(c));
  }

  /**
   * The strip for the text left of the cursor.
   * @param {{before: string, taps?: Tap[], settings?: Partial<Settings>, signal?: Signal}} request
   * @returns {Promise<Strip | null>}
   */
  async strip({ before, taps = [], settings, signal }) {
    const started = performance.now();
    const chosen = this.#chosen(settings);
    const context = { ...this.#read(before), shift: chosen.shift };
    const { typed } = context;
    if (sizeOf(typed) > this.#k.max_typed) {
      return { slots: [null, null, null], correction: null, typed, timing: { model: 0, rank: 0 } };
    }
    if (!this.#predictor) return this.#spelt(context, chosen, signal);
    const logp = await this.#scores(context.ids, chosen.source, signal);
    if (!logp || signal?.aborted) return null;
    const ranking = performance.now();
    const found = this.#predictor.suggest(logp, context, aligned(taps, typed), choiceOf(inContext(chosen, context)));
    const slots = this.#withTyped(found.slots, context);
    return { slots, correction: found.correction, typed, timing: { model: ranking - started, rank: performance.now() - ranking } };
  }

  /**
   * A word is finished: by a separator (one character: blank, punctuation mark, "\n") that was typed after it and is
   * not in `before` yet, or by a picked slot. Corrects, sets blanks, learns. After a pick the edit ends with a blank,
   * which the next of [.,!?:;)…] swallows if it comes right after it. Any other character may be given as a separator
   * too: it is then just typed. The edit is for `before`: a page whose text has gone on meanwhile drops it.
   * Of what begins in the first `sealed` characters nothing is learnt: they may have been typed incognito. `quick`: the
   * key before was a blank, too, and not long ago.
   * @param {{before: string, separator?: string, picked?: Slot, taps?: Tap[], sealed?: number, quick?: boolean,
   *   settings?: Partial<Settings>}} request
   * @returns {Promise<Edit>}
   */
  async finish({ before, separator, picked, taps = [], sealed = 0, quick = false, settings }) {
    const chosen = { ...this.#chosen(settings), sealed, quick };
    return picked ? this.#pick(before, picked, chosen) : this.#separate(before, separator, taps, chosen);
  }

  #pick(before, picked, chosen) {
    const context = this.#read(before);
    const { typed } = context;
    const isAdded = picked.kind === "emoji" && typed !== ""; // the word stays, the emoji follows
    const written = isAdded ? pick(`${before} `, "", picked.text) : pick(before, typed, picked.text);
    if (picked.kind !== "emoji") {
      this.#learn(written.text.slice(0, -1), chosen);
      if (this.#forgetReplaced(context, picked.text)) this.#keep(picked.text, before.length - typed.length, chosen);
    }
    return this.#edited(before.length - (isAdded ? 0 : typed.length), written, null);
  }

  async #separate(before, separator, taps, chosen) {
    const context = this.#read(before);
    const { typed } = context;
    const isFinished = typed !== "" && this.isSeparator(separator);
    const correction = isFinished ? await this.#correction(context, taps, chosen) : null;
    if (correction === null) {
      if (isFinished) this.#learn(before, chosen);
      const automatic = this.#last.automatic && this.#last.text === before;
      if (separator === " " && chosen.fullstop && chosen.quick && isWordAndBlank(before)) {
        const undo = { typed: "  ", chosen: ". ", start: before.length - 1, text: `${before} `, learnt: null };
        return this.#edited(undo.start, { text: `${before.slice(0, -1)}. `, automatic: true }, undo);
      }
      const written = put({ text: before, automatic }, separator, this.#k);
      const isJoined = written.text.length <= before.length && separator !== " "; // it took the place of a blank
      return this.#edited(before.length - (written.automatic || isJoined ? 1 : 0), written, null);
    }
    const start = before.length - typed.length;
    const after = before.slice(0, start) + correction;
    const learnt = this.#learn(after, chosen, true);
    if (start >= chosen.sealed) this.#replaced.push({ typed, chosen: correction, previous: context.previous });
    this.#replaced.splice(0, Math.max(0, this.#replaced.length - REPLACED));
    const undo = { typed, chosen: correction, start, text: before + separator, learnt };
    return this.#edited(start, put({ text: after, automatic: false }, separator, this.#k), undo);
  }

  async #correction(context, taps, chosen) {
    if (!chosen.autocorrect || !this.#predictor?.isCorrectable(context.typed)) return null;
    const logp = await this.#scores(context.ids, chosen.source);
    const choice = choiceOf(inContext(chosen, context));
    return this.#predictor.correct(logp, context, aligned(taps, context.typed), choice)?.text ?? null;
  }

  /** The word that was typed before it was corrected to this one stands on the left. */
  #withTyped(slots, context) {
    const { typed } = this.#replacedBy(context) ?? {};
    if (typed === undefined || slots.some((slot) => slot?.text === typed)) return slots;
    const [left, middle, right] = slots;
    const before = { text: typed, word: fold(typed, this.#k.plain_joints), kind: "literal" };
    return [before, middle, right?.kind === "emoji" ? right : left ?? right];
  }

  #replacedBy({ typed, previous }) {
    return typed === "" ? undefined : this.#replaced.findLast((one) => one.chosen === typed && one.previous === previous);
  }

  /** Whether `text` is what was typed before it was corrected to the word here; it is not offered again. */
  #forgetReplaced(context, text) {
    const found = this.#replacedBy(context);
    if (found?.typed !== text) return false;
    this.#replaced.splice(this.#replaced.indexOf(found), 1);
    return true;
  }

  /** A typed word was taken in the place of its correction: it is known from now on. */
  #keep(word, start, { learn, incognito, sealed }) {
    if (learn && !incognito && start >= sealed) this.personal.keep(word);
  }

  /** @returns {Edit} */
  #edited(start, { text, automatic }, undo) {
    this.#last = { text, automatic, undo };
    return { start, text: text.slice(start), correction: undo && { typed: undo.typed, chosen: undo.chosen } };
  }

  /**
   * Learn the word a text ends in, which was just finished; returns how to unlearn it, null if it was not learnt. Its
   * capitals count where the user set them: not in a correction, at the start of a sentence, or with capitals locked.
   */
  #learn(text, { learn, incognito, sealed }, isCorrection = false) {
    const { typed, previous, text: earlier, ids } = this.#read(text);
    const start = text.length - typed.length;
    if (!learn || incognito || !typed || start < sealed) return null;
    const before = sealed > 0 ? previousWord(unsealed(text.slice(0, start), sealed), this.#k) : previous;
    const isForced = isCorrection || Object.hasOwn(this.#k.capital_i, fold(typed, this.#k.plain_joints))
      || (allCapitals(typed) ? this.knows(typed) : startsSentence(earlier, this.#k) && !hasInnerCapital(typed));
    const logp = this.#predictor && this.#scored.get(scoresOf(MODEL, ids)); // the strip above the word had needed it
    const explained = logp ? this.#predictor.explained(logp, typed, before) : null;
    return this.personal.learn(typed, before, isForced ? null : typed, explained) ? [typed, before] : null;
  }

  /**
   * Right after a correction: gives the typed word back and learns it as known (unless in incognito or learn is off, or
   * `keep` is false: it was no word, but the beginning of an address).
   * @param {{before: string, sealed?: number, keep?: boolean, settings?: Partial<Settings>}} request
   * @returns {Edit | null}  null: nothing to undo here
   */
  undo({ before, sealed = 0, keep = true, settings }) {
    const chosen = { ...this.#chosen(settings), sealed };
    const { text, undo } = this.#last;
    if (!undo || text !== before) return null;
    if (undo.learnt) this.personal.unlearn(...undo.learnt);
    if (keep) this.#keep(undo.typed, undo.start, chosen);
    this.#replaced = this.#replaced.filter((one) => one.typed !== undo.typed || one.chosen !== undo.chosen);
    return this.#edited(undo.start, { text: undo.text, automatic: false }, null);
  }

  /**
   * The words a swipe over the keys may mean, best first. Picking one is `finish({before, picked})`.
   * @param {{before: string, points: [number, number][], count?: number, settings?: Partial<Settings>,
   *   signal?: Signal}} request
   * @returns {Promise<Slot[] | null>}
   */
  async gesture({ before, points, count = 3, settings, signal }) {
    const chosen = this.#chosen(settings);
    if (!this.#predictor) return [];
    const context = { ...this.#read(before), shift: chosen.shift };
    const logp = await this.#scores(context.ids, chosen.source, signal);
    if (!logp || signal?.aborted) return null;
    return this.#predictor.gesture(logp, context, points, choiceOf(chosen), count);
  }

  /** @returns {Settings} */
  #chosen(settings) {
    const chosen = { ...SETTINGS, layout: this.#layout, ...settings };
    this.#predictor?.use(chosen.layout);
    const { replacements } = this.personal, isPrivate = chosen.incognito || !chosen.learn;
    if (replacements !== this.#seen.replacements || (this.#seen.isPrivate && !isPrivate)) this.#forgetTyped();
    this.#seen = { replacements, isPrivate };
    return chosen;
  }

  /** What was typed is offered no more: it was forgotten, or belongs to a time in which nothing was learnt. */
  #forgetTyped() {
    this.#replaced = [];
    this.#last = { text: null, automatic: false, undo: null };
    this.#context = { before: null };
  }

  /** The context of a text; while a word is being typed only that part is read again. */
  #read(before) {
    if (this.#context.before !== before) {
      const last = this.#context.before === null ? null : this.#context;
      this.#context = { ...readContext(before, this.#numbers, this.#k, last), before };
    }
    return this.#context;
  }

  /** The source's scores after `ids`, which are kept for a while; null: not wanted any more. */
  async #scores(ids, source, signal) {
    const name = (source === "ngram" || source === "network") && this.#sources[source] ? source : MODEL;
    const key = scoresOf(name, ids);
    let logp = this.#scored.get(key);
    if (!logp) {
      if (signal) await othersFirst();
      if (signal?.aborted) return null;
      const answer = await this.#sources[name].scores(ids, signal);
      if (!answer || signal?.aborted) return null; // what a source says after it was stopped is not kept
      logp = answer.slice();
    }
    this.#scored.delete(key); // put at the end: the one not asked for longest goes first
    this.#scored.set(key, logp);
    if (this.#scored.size > REMEMBERED) this.#scored.delete(this.#scored.keys().next().value);
    return logp;
  }

  /** The strip of a model over characters. */
  async #spelt({ text, typed }, { filter, emoji, shift }, signal) {
    const started = performance.now();
    if (signal) await othersFirst();
    if (signal?.aborted) return null;
    const source = this.#sources.federated, { vocab } = this.#numbers;
    const ids = anchored(this.#numbers.encode(text + typed), this.#k);
    const step = (tokens, state, rows) => source.step(tokens, state, rows);
    const after = await source.begin(ids, signal);
    if (!after || signal?.aborted) return null;
    const found = await complete(vocab, after, step, SPELT, signal);
    if (!found || signal?.aborted) return null;
    const never = new Set([...this.personal.blocked, ...(filter ? this.#tables.offensive.words : [])]);
    const starts = !typed && (shift ? shift !== "off" : vocab.lower && startsSentence(text, this.#k));
    const key = (word) => fold(word, this.#k.plain_joints);
    const bare = (word) => key(word).replace(/[^\p{L}\p{N}]+$/u, ""); // a mark behind a word hides it from nobody
    const words = found.map(({ rest }) => typed + rest).filter((word) => !never.has(key(word)) && !never.has(bare(word)));
    const slots = words.map((word) => ({
      text: starts ? capitalised(word) : word, word: key(word), kind: typed ? "completion" : "next",
    }));
    if (typed) slots.splice(1, 0, { text: typed, word: key(typed), kind: "literal" });
    const word = typed ? key(typed) : "", pictures = this.#tables.emoji.words;
    const isOffered = emoji && Object.hasOwn(pictures, word) && !never.has(word) && !never.has(key(pictures[word]));
    const picture = isOffered ? pictures[word] : null;
    const [middle = null, left = null, right = null] = slots;
    const last = picture ? { text: picture, word, kind: "emoji" } : right;
    const timing = { model: performance.now() - started, rank: 0 };
    return { slots: [left, middle, last], correction: null, typed, timing };
  }
}

/** Under which name scores are kept. */
const scoresOf = (source, ids) => `${source} ${ids.join(" ")}`;

/** @returns {import("./predict.mjs").Choice} */
const choiceOf = ({ autocorrect, emoji, filter, source, incognito }) =>
  ({ autocorrect, emoji, filter, own: source === "personal" && !incognito });

/** Names of programs and tags (#this, $that) are left as they were typed. */
const inContext = (chosen, { text }) =>
  (text !== "" && BEFORE_NAME.includes(text.at(-1)) ? { ...chosen, autocorrect: false } : chosen);

/** What stands behind the sealed part of a text and the word that it may end in. */
function unsealed(text, sealed) {
  let from = sealed;
  if (!hasBlank(text[from - 1])) while (from < text.length && !hasBlank(text[from])) from++;
  return text.slice(from);
}

/** The taps of the typed characters: the last tap is the last character's. */
function aligned(taps, typed) {
  const size = sizeOf(typed);
  return Array.from({ length: size }, (_, i) => taps[taps.length - size + i] ?? null);
}
