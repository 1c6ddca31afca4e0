/**
 * The spelling list of an export (`keyfed.keyboard.dictionary` says what is in its file): what is a word, how frequent,
 * how it is written.
 */

import { capitalised } from "./casing.mjs";
import { readTensors } from "./safetensors.mjs";

const COLUMNS = ["shared", "length", "letters", "frequency", "form", "written"];
const LOWER = 0, CAPITAL = 1, BOTH = 2, WRITTEN = 3;
const STEPS = 25; // of a power of ten

/**
 * @typedef {object} Dictionary
 * @property {string[]} words  folded, ascending
 * @property {Float64Array} logs  log of the share of all words that people write
 * @property {Map<string, string>} forms  how those are written that are never in lower case
 * @property {Set<string>} both  those that are also written with a capital
 */

/** No word at all: where an export has none. @type {Dictionary} */
export const EMPTY = Object.freeze({ words: [], logs: new Float64Array(0), forms: new Map(), both: new Set() });

/**
 * @param {ArrayBuffer | Uint8Array} file
 * @returns {Dictionary}
 * @throws {Error} one line that says what is damaged
 */
export function readDictionary(file) {
  const tensors = readTensors(file);
  const columns = COLUMNS.map((name) => tensors.get(name)?.data);
  if (tensors.size !== COLUMNS.length || !columns.every((data) => data instanceof Uint8Array)) {
    throw damaged(`it holds ${[...tensors.keys()].join(", ").slice(0, 80) || "nothing"}`);
  }
  const [shared, length, , frequency, form] = columns;
  const [letters, written] = [columns[2], columns[5]].map(textOf);
  const n = shared.length;
  if (length.length !== n || frequency.length !== n || form.length !== n) throw damaged("its columns differ in length");
  const others = written === "" ? [] : written.split("\n");
  const words = new Array(n), logs = new Float64Array(n), forms = new Map(), both = new Set();
  let at = 0, before = "", other = 0;
  for (let i = 0; i < n; i++) {
    const word = before.slice(0, shared[i]) + letters.slice(at, at + length[i]);
    at += length[i];
    if (shared[i] > before.length || !(word > before)) throw damaged(`${shown(word)} does not follow ${shown(before)}`);
    if (form[i] === CAPITAL) forms.set(word, capitalised(word));
    else if (form[i] === BOTH) both.add(word);
    else if (form[i] === WRITTEN && other < others.length) forms.set(word, others[other++]);
    else if (form[i] !== LOWER) throw damaged(`${shown(word)} has the form ${form[i]}`);
    words[i] = before = word;
    logs[i] = (-frequency[i] / STEPS) * Math.LN10;
  }
  if (at !== letters.length || other !== others.length) throw damaged("its letters or forms do not fit its words");
  return { words, logs, forms, both };
}

function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw damaged("it is not UTF-8");
  }
}

const shown = (word) => JSON.stringify(word.slice(0, 40));
const damaged = (what) => new Error(`damaged dictionary: ${what}`);
