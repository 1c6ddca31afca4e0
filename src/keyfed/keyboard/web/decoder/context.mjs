/**
 * From the text left of the cursor to what the model reads. The words are those of `keyfed.text.vocab.words_of`, to the
 * character: letters, digits, marks and lower case are Unicode's, the same for every character that the Unicode versions
 * of both sides know; white space is spelt out because Python and JavaScript do not agree on it.
 */

import { fold } from "./layout.mjs";

export const BOS = 1, EOS = 2, UNK = 3;
export const SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"];

/** What Python's `str.isspace` calls white space. */
export const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
/** A mark that belongs to the letter before it, or a joiner. */
const MARK = "(?:(?=[\\u0300-\\ufb4f])[\\p{Mn}\\p{Mc}]|[\\u200c\\u200d])";

const CHUNK = new RegExp(`[^${SPACE}]+`, "gu");
const PIECE = pattern();

function pattern() {
  const letter = `(?:[\\p{L}\\p{N}]${MARK}*)`;
  const modifier = "[\\ufe0e\\ufe0f\\u20e3\\u{1f3fb}-\\u{1f3ff}\\u{e0020}-\\u{e007f}]";
  const symbol = `[^${SPACE}]${modifier}*`;
  return new RegExp(
    `${SPECIALS.join("|")}` +
    `|\\p{Nd}+(?:[.,:]\\p{Nd}+)+${letter}*` +
    `|(?<word>${letter}+(?:['’‐‑-]${letter}+)*)` +
    "|[\\u{1f1e6}-\\u{1f1ff}]{2}" +
    `|${symbol}(?:\\u200d${symbol})*`, "gu");
}

/**
 * The words, numbers, punctuation marks and symbols of one line.
 * @param {string} line
 * @param {{tokenised: boolean, lower: boolean}} how  a vocabulary
 * @returns {string[]}
 */
export function wordsOf(line, { tokenised, lower }) {
  if (tokenised) return (lower ? line.toLowerCase() : line).match(CHUNK) ?? [];
  return (line.match(CHUNK) ?? []).flatMap((chunk) => piecesOf(chunk, lower));
}

/** The pieces of chunks that were cut lately: the words before the cursor are read again with every new one. */
const pieces = { lower: new Map(), asWritten: new Map() };
const REMEMBERED = 4096, LONG = 64;

function piecesOf(chunk, lower) {
  const known = lower ? pieces.lower : pieces.asWritten;
  let cut = known.get(chunk);
  if (!cut) {
    if (known.size >= REMEMBERED) known.clear();
    cut = Array.from((lower ? chunk.toLowerCase() : chunk).matchAll(PIECE), (found) =>
      (found.groups.word === undefined ? found[0] : plainJoints(found[0])));
    if (chunk.length <= LONG) known.set(chunk, cut);
  }
  return cut;
}

const plainJoints = (word) => word.replaceAll("’", "'").replace(/[‐‑]/g, "-");

const LETTER = /^[\p{L}\p{N}]$/u, BELONGS = new RegExp(`^(?:[\\p{L}\\p{N}]|${MARK})$`, "u");
const WORDLIKE = /[\p{L}\p{N}]/u, BLANK = new RegExp(`[${SPACE}]`, "u");
const NUMBER = /\p{N}/u, CONTROL = /(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}]/u;
const PAIR = /[\ud800-\udbff]/; // quick to rule out where a text has none
const ONLY_SPACE = new RegExp(`^[${SPACE}]+$`, "u");

/** Whether a character is a letter or a number of any script. */
export const isLetter = (c) => LETTER.test(c);
/** Whether a token is a word or number, not a mark or symbol. */
export const isWordlike = (word) => WORDLIKE.test(word);
/** Whether a word holds a digit or another number sign (Unicode N; 三 is a letter). */
export const hasNumber = (word) => NUMBER.test(word);
/** Whether a word holds a control, direction or surrogate character; the joiners of many scripts are none. */
export const hasControl = (word) => CONTROL.test(word);
/** Whether a text holds white space. */
export const hasBlank = (text) => BLANK.test(text);
/** Whether a text holds white space and nothing else, Python's `str.isspace`. */
export const isSpace = (text) => ONLY_SPACE.test(text);
/** Whether a character is a letter, a number or a mark that belongs to one. */
export const belongs = (c) => c !== undefined && BELONGS.test(c);

/** The code point that ends at a UTF-16 offset. */
function characterBefore(text, at) {
  if (at < 1) return undefined;
  return text.slice(at - (at > 1 && isPair(text, at - 2) ? 2 : 1), at);
}

const characterAt = (text, at) => (at < text.length ? String.fromCodePoint(text.codePointAt(at)) : undefined);

/**
 * The word being typed at the end of a text, or "": letters, numbers and the joints between them; a full stop only
 * between two letters (addresses). It may end in an apostrophe or hyphen ("don'"), and begin with an "@".
 * @param {string} before
 * @param {object} k  constants.json
 */
export function typedPart(before, k) {
  let at = before.length;
  for (;;) {
    const c = characterBefore(before, at);
    if (c === undefined) break;
    const isInside = c === "."
      ? belongs(characterAt(before, at)) && belongs(characterBefore(before, at - 1))
      : k.joints.includes(c) || belongs(c);
    if (!isInside) break;
    at -= c.length;
  }
  for (let c = characterAt(before, at); c !== undefined; c = characterAt(before, at)) {
    if (isLetter(c) || k.opening_joints.includes(c)) break;
    at += c.length;
  }
  const last = at < before.length ? characterBefore(before, before.length) : undefined;
  return belongs(last) || (last !== undefined && k.closing_joints.includes(last)) ? before.slice(at) : "";
}

/**
 * What is looked at of a long text: its end, from behind a blank, in steps so that it seldom moves.
 * @param {string} text
 * @param {object} k  constants.json
 */
export function lastPart(text, k) {
  if (text.length <= k.most_text) return text; // the limits count code points, of which there are not more
  const hasPairs = PAIR.test(text);
  const size = hasPairs ? sizeOf(text) : text.length;
  if (size <= k.most_text) return text;
  const skip = k.text_step * Math.ceil((size - k.most_text) / k.text_step);
  let from = skip - 1, start = skip; // the last character before the cut, and the first behind it
  if (hasPairs) {
    start = 0;
    for (let n = 0; n < skip; n++) {
      from = start;
      start += isPair(text, start) ? 2 : 1;
    }
  }
  const blank = text.slice(from).search(BLANK);
  return text.slice(blank < 0 ? start : from + blank + 1);
}

/** Whether two UTF-16 units from `at` on are one code point. */
const isPair = (text, at) => (text.charCodeAt(at) & 0xfc00) === 0xd800 && (text.charCodeAt(at + 1) & 0xfc00) === 0xdc00;

/** Number of code points. */
export function sizeOf(text) {
  let pairs = 0;
  for (let at = 0; at < text.length; at++) if (isPair(text, at)) pairs++;
  return text.length - pairs;
}

/**
 * The last word of the current line, folded; "" where punctuation or nothing stands there.
 * @param {string} text
 * @param {object} k  constants.json
 */
export function previousWord(text, k) {
  const word = wordsOf(text.slice(text.lastIndexOf("\n") + 1), { tokenised: false, lower: false }).at(-1);
  return word !== undefined && isWordlike(word) ? fold(word, k.plain_joints) : "";
}

/** A vocabulary that gives words their numbers; no text can name the specials. */
export class Numbers {
  /** @param {{kind: "word"|"char", words: string[], lower: boolean, tokenised: boolean}} vocab  vocab.json */
  constructor(vocab) {
    this.vocab = vocab;
    /** @type {Map<string, number>} */
    this.index = new Map(vocab.words.map((word, id) => [word, id]).slice(SPECIALS.length));
  }

  /** The tokens of a text that goes on: EOS between its lines, none at the end. */
  encode(text) {
    const { kind, lower } = this.vocab;
    const ids = [];
    for (const line of text.split("\n")) {
      const tokens = kind === "word" ? wordsOf(line, this.vocab) : lower ? line.toLowerCase() : line;
      for (const token of tokens) ids.push(this.index.get(token) ?? UNK);
      ids.push(EOS);
    }
    ids.pop();
    return ids;
  }
}

/** What the model reads: EOS and the tokens from the anchor on. */
export function anchored(tokens, k) {
  const from = k.anchor * Math.max(0, Math.floor(tokens.length / k.anchor) - 1);
  return Int32Array.from([EOS, ...tokens.slice(from)]);
}

/** What a model of single lines reads of that: BOS and what stands behind the last EOS. */
export function lineRead(ids) {
  return Int32Array.from([BOS, ...ids.slice(ids.lastIndexOf(EOS) + 1)]);
}

/**
 * What a keyboard knows of the text left of the cursor.
 * @typedef {object} Context
 * @property {Int32Array} ids  what the model reads
 * @property {string} previous the word before the one being typed, folded; "" at a line start and behind punctuation
 * @property {string} text     the text before the typed part (of a long one, its end)
 * @property {string} typed    the part of a word being typed
 */

/**
 * Cut the text left of the cursor into context and typed part.
 * @param {string} before
 * @param {Numbers} numbers
 * @param {object} k  constants.json
 * @param {Context | null} [last]  what was read before; while a word is being typed, its tokens are taken over
 * @returns {Context}
 */
export function readContext(before, numbers, k, last = null) {
  const kept = lastPart(before, k);
  const typed = typedPart(kept, k);
  const text = kept.slice(0, kept.length - typed.length);
  if (last?.text === text) return { ...last, typed };
  return { ids: anchored(numbers.encode(text), k), previous: previousWord(text, k), text, typed };
}
