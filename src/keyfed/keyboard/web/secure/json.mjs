/**
 * JSON as the messages of a federation have it: hostile until checked, and written back as Python writes it. A number
 * keeps the characters in which it came, because sums are bound to the hash of what the server said, 2.0 and not 2.
 */

import { SecureSumError } from "./bytes.mjs";

const DEEPEST = 12, LONGEST_NUMBER = 40, LARGEST = 1e300;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y, STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const BLANK = /[ \t\n\r]*/y, WORDS = { true: true, false: false, null: null };

/** A number with the characters it was written in. */
export class Numeral {
  constructor(text) {
    this.text = text;
  }

  valueOf() {
    return Number(this.text);
  }
}

/**
 * Read a text in time linear in its length.
 * @param {string} text
 * @param {number} [values]  that it may have
 * @returns {any}  objects without a prototype; numbers are `Numeral`
 * @throws {SecureSumError}  it is no JSON, too deep, of too many values, or has a key twice
 */
export function parse(text, values = 65536) {
  let at = 0, left = values;
  const wrong = (what) => new SecureSumError(`a message that is no JSON of ours: ${what}`);
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0];
    if (found !== undefined) at += found.length;
    return found;
  };
  const string = () => {
    const found = take(STRING);
    if (found === undefined) throw wrong("a text does not end");
    return JSON.parse(found);
  };
  const expect = (character) => {
    take(BLANK);
    if (text[at] !== character) throw wrong(`expected ${character}`);
    at += 1;
  };
  const isNext = (character) => {
    take(BLANK);
    const is = text[at] === character;
    if (is) at += 1;
    return is;
  };
  const read = (depth) => {
    if (depth > DEEPEST) throw wrong(`nested deeper than ${DEEPEST}`);
    if ((left -= 1) < 0) throw wrong(`more than ${values} values`);
    take(BLANK);
    if (text[at] === '"') return string();
    if (isNext("{")) {
      const found = Object.create(null);
      if (isNext("}")) return found;
      do {
        take(BLANK);
        const key = string();
        if (key in found) throw wrong("a key stands twice");
        expect(":");
        found[key] = read(depth + 1);
      } while (isNext(","));
      expect("}");
      return found;
    }
    if (isNext("[")) {
      const found = [];
      if (isNext("]")) return found;
      do found.push(read(depth + 1)); while (isNext(","));
      expect("]");
      return found;
    }
    for (const [word, value] of Object.entries(WORDS)) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return value;
      }
    }
    const number = take(NUMBER);
    if (number === undefined) throw wrong("neither a value nor a number");
    if (number.length > LONGEST_NUMBER || !(Math.abs(Number(number)) <= LARGEST)) throw wrong("a number that is too large");
    return new Numeral(number);
  };
  const found = read(0);
  take(BLANK);
  if (at !== text.length) throw wrong("something stands behind it");
  return found;
}

/** The same with ordinary numbers. */
export function plain(value) {
  if (value instanceof Numeral) return Number(value);
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, plain(inner)]));
}

const byCodePoints = (a, b) => {
  const [x, y] = [Array.from(a), Array.from(b)], at = x.findIndex((c, i) => c !== y[i]);
  return at < 0 ? x.length - y.length : at >= y.length ? 1 : x[at].codePointAt(0) - y[at].codePointAt(0);
};

const escaped = (text) => JSON.stringify(text).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** What Python's `json.dumps(value, sort_keys=sorted)` writes; a number of JavaScript is written as a whole number. */
export function written(value, isSorted = true) {
  if (value instanceof Numeral) return value.text;
  if (typeof value === "string") return escaped(value);
  if (typeof value === "number" || typeof value === "bigint") {
    if (typeof value === "number" && !Number.isSafeInteger(value)) throw new SecureSumError(`${value} is no whole number to be written`);
    return String(value);
  }
  if (value === null || typeof value === "boolean") return String(value);
  if (Array.isArray(value)) return `[${value.map((inner) => written(inner, isSorted)).join(", ")}]`;
  const keys = isSorted ? Object.keys(value).sort(byCodePoints) : Object.keys(value);
  return `{${keys.map((key) => `${escaped(key)}: ${written(value[key], isSorted)}`).join(", ")}}`;
}
