/**
 * The keyboard without its page: text left of the cursor in, suggestions and edits out. It joins the language model
 * (given as a source of log-probabilities), the decoder (`predict.mjs`) and what was learnt on this device
 * (`personal.mjs`). It knows no DOM, no network and no storage, so that it runs in a worker and in node alike.
 */

/**
 * A language model over words. `ids` is a text from a zero state: EOS, then tokens; the engine has already cut it so
 * that its start moves only every 32 tokens (`context.mjs`), so a source that keeps the states of its last `ids` by
 * position reads one token a word. The answer, log p(w | ids) of every word of the vocabulary (specials too), belongs
 * to the caller of `scores` only until the next call; the engine copies what it keeps.
 * @typedef {object} Source
 * @property {(ids: Int32Array, signal?: Signal) => Promise<Float32Array | Float64Array>} scores
 */

/**
 * A language model over characters (`vocab.kind === "char"`). `begin` reads `ids` from a zero state. `step` reads one
 * more character for each of several rows: row j goes on from row `rows[j]` of `state` with `tokens[j]`. `state` is
 * whatever the source likes; it is never changed by a later call.
 * @typedef {object} CharacterSource
 * @property {(ids: Int32Array, signal?: Signal) => Promise<{logp: Float32Array, state: unknown}>} begin
 * @property {(tokens: number[], state: unknown, rows: number[]) =>
 *   Promise<{logp: Float32Array[], state: unknown}>} step
 */

/**
 * Whether a call is still wanted; an `AbortSignal` is one. It is asked before every expensive part, after the engine
 * has let other messages of the worker in.
 * @typedef {{aborted: boolean}} Signal
 */

/**
 * @typedef {object} Settings
 * @property {"ngram" | "federated" | "personal"} source  n-gram; federated model; federated model + this device's words
 * @property {boolean} autocorrect  a separator may replace the typed word
 * @property {boolean} learn        finished words are counted
 * @property {boolean} incognito    nothing is learnt, and what was learnt is not suggested
 * @property {boolean} emoji        an emoji may take the right slot
 * @property {boolean} filter       offensive words are neither suggested nor corrected to
 * @property {string} layout        a name in layouts.json
 */

/** What holds where a caller names no setting. @type {Settings} */
export const SETTINGS = Object.freeze({
  source: "personal", autocorrect: true, learn: true, incognito: false, emoji: true, filter: true, layout: "qwerty",
});

/**
 * `text` is what is shown and put into the text, `word` what is learnt, blocked or forgotten (lower-cased where the
 * vocabulary is), "" for an emoji.
 * @typedef {{text: string, word: string, kind: "word"|"literal"|"completion"|"correction"|"emoji"|"next"}} Slot
 */

/**
 * @typedef {object} Strip
 * @property {[Slot|null, Slot|null, Slot|null]} slots  left, middle (the best), right
 * @property {string | null} correction  what a separator will put in place of the typed word
 * @property {string} typed     the word being typed, as it stands before the cursor
 * @property {{model: number, rank: number}} timing  milliseconds: the source's answer; row and ranking
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
 *   const edit = engine.undo({before});            // null: there is nothing to undo here, delete a character
 *   const found = await engine.gesture({before, points: [[x, y], …], settings, signal});
 *
 * `before` is the text left of the cursor, all of it or its last 4,000 characters and more, the same way at every call.
 * `taps` belong to the last characters of `before` (the last tap to the last character); none may be given.
 * A call that was overtaken (`signal.aborted`) answers null.
 */
export class Engine {
  /**
   * @param {object} given
   * @param {{kind: "word"|"char", words: string[], lower: boolean, tokenised: boolean}} given.vocab  vocab.json
   * @param {Object<string, string>} given.forms   the most frequent written form of a word where it is another
   * @param {{constants: object, layouts: object, emoji: object, offensive: string[]}} given.tables  data/*.json, parsed
   * @param {string} [given.layout]  a name in layouts.json, until a call's settings name another
   * @param {{federated: Source | CharacterSource, ngram?: Source}} given.sources
   */
  constructor({ vocab, forms, tables, layout = SETTINGS.layout, sources }) {
    throw new Error("to come");
  }

  /** What was learnt: list(), forget(word), forgetAll(), block(word), unblock(word), add(word), remove(word),
   * exportJSON(), importJSON(text) (throws an Error with one line to show; then nothing has changed). */
  personal;

  /**
   * The strip for the text left of the cursor.
   * @param {{before: string, taps?: Tap[], settings?: Partial<Settings>, signal?: Signal}} request
   * @returns {Promise<Strip | null>}
   */
  async strip(request) {}

  /**
   * A word is finished: by a separator (one character: blank, punctuation mark, "\n") that was typed after it and is
   * not in `before` yet, or by a picked slot. Corrects, sets case and blanks, learns. After a pick the edit ends with a
   * blank, which the next of [.,!?:;)…] swallows if it comes right after it.
   * @param {{before: string, separator?: string, picked?: Slot, taps?: Tap[], settings?: Partial<Settings>}} request
   * @returns {Promise<Edit>}
   */
  async finish(request) {}

  /**
   * Right after a correction: gives the typed word back and learns it as known (unless in incognito or learn is off).
   * @param {{before: string, settings?: Partial<Settings>}} request
   * @returns {Edit | null}
   */
  undo(request) {}

  /**
   * The words a swipe over the keys may mean, best first. Picking one is `finish({before, picked})`.
   * @param {{before: string, points: [number, number][], count?: number, settings?: Partial<Settings>,
   *   signal?: Signal}} request
   * @returns {Promise<Slot[] | null>}
   */
  async gesture(request) {}
}
