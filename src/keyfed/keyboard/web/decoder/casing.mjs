/** How a word is written, and the blanks around it. */

import { isSpace } from "./context.mjs";


/**
 * Whether the next word starts a sentence: at the beginning, on a new line, or after an end mark and blanks.
 * @param {string} text
 * @param {object} k  constants.json
 */
export function startsSentence(text, k) {
  let size = text.length; // without the blanks at the end
  while (size > 0 && isSpace(text[size - 1])) size--;
  if (size === 0 || text.includes("\n", size)) return true;
  if (size === text.length) return false;
  let at = size;
  while (at > 0 && k.sentence_close.includes(text[at - 1])) at--;
  return at > 0 && k.sentence_end.includes(text[at - 1]);
}

/** Whether a character has another lower case. */
export const isCapital = (c) => c.toLowerCase() !== c;

/** Whether a word has at least two letters, all of them capitals (marks and digits do not count). */
export function allCapitals(typed) {
  const letters = [...typed].filter((c) => c.toLowerCase() !== c.toUpperCase());
  return letters.length >= 2 && letters.every(isCapital);
}

/** Whether a word has a capital behind its first letter, as no start of a sentence gives it one. */
export const hasInnerCapital = (word) => [...word].slice(1).some(isCapital);

/** A word with its first letter upper case; one whose upper case is several letters stays (ß). */
export function capitalised(word) {
  const [first = ""] = word;
  const upper = first.toUpperCase();
  return [...upper].length === 1 ? upper + word.slice(first.length) : word;
}

/**
 * A word as it is shown.
 * @param {string} word       as the vocabulary has it
 * @param {string} typed      the part that was typed: its capitals are kept
 * @param {boolean | "lock"} sentence  whether the word starts a sentence or has a capital for another reason; counts
 *   where nothing was typed. "lock": all of it in capitals, also behind one typed capital
 * @param {Map<string, string>} forms  the form most often written of words that are not simply lower case
 * @param {object} k  constants.json
 */
export function display(word, typed, sentence, forms, k) {
  const shown = Object.hasOwn(k.capital_i, word) ? k.capital_i[word] : (forms.get(word) ?? word);
  const [first] = typed;
  if (allCapitals(typed) || (sentence === "lock" && (!typed || (typed === first && isCapital(typed))))) return shown.toUpperCase();
  return (first === undefined ? sentence : isCapital(first)) ? capitalised(shown) : shown;
}

/**
 * A text and whether the blank at its end was put there automatically.
 * @typedef {{text: string, automatic: boolean}} Written
 */

/**
 * Put a picked suggestion in the place of the typed part, with a blank behind it.
 * @returns {Written}
 */
export function pick(before, typed, chosen) {
  return { text: `${before.slice(0, before.length - typed.length)}${chosen} `, automatic: true };
}

/** Whether a blank that is typed twice after this text makes a full stop of it: a word and one blank. */
export const isWordAndBlank = (text) => /[\p{L}\p{M}\p{N}"'”’»)\]}] $/u.test(text.slice(-3));

/**
 * Type one character; a mark takes the place of an automatic blank and gets one behind it. A blank is the one that is
 * there already, and what joins words ("'s", "-") or ends the line leaves none.
 * @param {Written} written
 * @param {string} c
 * @param {object} k  constants.json
 * @returns {Written}
 */
export function put(written, c, k) {
  const { text, automatic } = written;
  if (automatic && text.endsWith(" ")) {
    if (c === " ") return { text, automatic: false };
    if (k.no_blank_before.includes(c)) return { text: `${text.slice(0, -1)}${c} `, automatic: true };
    if (k.no_blank_around.includes(c)) return { text: text.slice(0, -1) + c, automatic: false };
  }
  return { text: text + c, automatic: false };
}
