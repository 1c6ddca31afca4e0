/** Where the keys lie: one key is one unit wide and high, the upper left corner of the layout is (0, 0). */

const PLAIN = /^[a-z]*$/; // most words: nothing to do

/**
 * A word as the lexicon writes it: lower case, code point by code point, and plain apostrophes and hyphens. A character
 * whose lower case is several code points keeps the first, so that a word never changes its length.
 * @param {string} word
 * @param {Object<string, string>} plainJoints  constants.json
 */
export function fold(word, plainJoints) {
  if (PLAIN.test(word)) return word;
  let folded = "";
  for (const c of word) folded += Object.hasOwn(plainJoints, c) ? plainJoints[c] : firstOf(c.toLowerCase());
  return folded;
}

/**
 * The letter under a character's marks: NFD, first code point, lower case (é → e).
 * @param {string} character  one code point
 */
export function baseOf(character) {
  return firstOf(firstOf(character.normalize("NFD")).toLowerCase());
}

const firstOf = (text) => String.fromCodePoint(text.codePointAt(0));

/** The centres of a layout's keys. */
export class Layout {
  /**
   * @param {string} name
   * @param {{rows: string[], offsets: number[]}} table  an entry of layouts.json
   */
  constructor(name, table) {
    this.name = name;
    /** @type {Map<string, [number, number]>} */
    this.centres = new Map();
    /** Centres of characters that are on no key. @type {Map<string, [number, number] | undefined>} */
    this.others = new Map();
    table.rows.forEach((row, r) => {
      [...row].forEach((character, c) => this.centres.set(character, [table.offsets[r] + c + 0.5, r + 0.5]));
    });
  }

  /**
   * The centre of a character's key; one that is on no key takes the key of its base letter. Undefined: no key.
   * @param {string} character  one code point, lower case
   * @returns {[number, number] | undefined}
   */
  centre(character) {
    const centre = this.centres.get(character);
    if (centre) return centre;
    if (!this.others.has(character)) this.others.set(character, this.centres.get(baseOf(character)));
    return this.others.get(character);
  }
}

/**
 * @param {object} layouts  layouts.json
 * @param {string} name
 */
export function layoutOf(layouts, name) {
  if (!Object.hasOwn(layouts, name)) throw new Error(`layout ${name} does not exist; use ${Object.keys(layouts)}`);
  return new Layout(name, layouts[name]);
}

/** Euclid. */
export function distance(a, b) {
  const x = a[0] - b[0], y = a[1] - b[1];
  return Math.sqrt(x * x + y * y);
}
