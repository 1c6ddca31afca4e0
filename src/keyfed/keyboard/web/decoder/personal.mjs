/**
 * What this device learnt of its user: words, pairs of words, a dictionary, words never to be suggested, and a cache in
 * which old words fade (`cache.mjs`). All of it can be seen, taken away and carried to another device as JSON; nothing
 * leaves the device by itself. Words are folded.
 */

import { Cache, EPOCH } from "./cache.mjs";
import { hasBlank, hasControl, hasNumber, isWordlike, sizeOf } from "./context.mjs";
import { fold } from "./layout.mjs";

const FORMAT = 1;

/** Counts of one user. */
export class Personal {
  #room = 0; // entries that fit for certain; counted anew when used up

  /** @param {object} constants  constants.json */
  constructor(constants) {
    this.constants = constants;
    /** Uses of each word. @type {Map<string, number>} */
    this.words = new Map();
    /**
     * Uses of each word after each word; the word before is "" at a line start.
     * @type {Map<string, Map<string, number>>}
     */
    this.pairs = new Map();
    /** The user's own words, folded → as written. @type {Map<string, string>} */
    this.dictionary = new Map();
    /**
     * How a word is written that is not simply lower case, and by how many votes: each use of another form takes one
     * away (Boyer and Moore's majority). @type {Map<string, [string, number]>}
     */
    this.forms = new Map();
    /** Words never suggested, by anything. @type {Set<string>} */
    this.blocked = new Set();
    /** The words and pairs of `words` and `pairs` that were typed lately. */
    this.cache = new Cache(constants);
    /** Goes up with every change that suggestions depend on. */
    this.version = 0;
    /** Goes up when everything is forgotten or something else takes its place. */
    this.replacements = 0;
  }

  #fold(word) {
    return fold(word, this.constants.plain_joints);
  }

  /**
   * Count a finished word and its pair with the word before.
   * @param {string | null} [form]  the word, if the user chose its capitals: it does not just start a sentence
   * @param {{share: number, paired: boolean} | null} [explained]  how much of the word the cache explained, if known
   * @returns {boolean} whether it may be learnt
   */
  learn(word, previous = "", form = null, explained = null) {
    if (!this.learnable(word)) return false;
    const key = this.#fold(word), before = this.#fold(previous);
    this.words.set(key, (this.words.get(key) ?? 0) + 1);
    const isPair = before === "" || this.learnable(before);
    if (isPair) { // a number or an address is not kept as the word before either
      if (!this.pairs.has(before)) this.pairs.set(before, new Map());
      const after = this.pairs.get(before);
      after.set(key, (after.get(key) ?? 0) + 1);
    }
    this.cache.add(key, isPair ? before : null, explained);
    if (form !== null) this.#vote(key, form);
    this.#makeRoom(3);
    this.version++;
    return true;
  }

  #vote(key, form) {
    const [held, votes] = this.forms.get(key) ?? [form, 0];
    if (held === form) {
      if (form !== key) this.forms.set(key, [form, votes + 1]);
    } else if (votes > 1) this.forms.set(key, [held, votes - 1]);
    else this.forms.delete(key);
  }

  /** How the user writes a word: as in the dictionary, or as voted twice; undefined: nothing is known. */
  written(key) {
    const [form, votes] = this.forms.get(key) ?? [undefined, 0];
    return this.dictionary.get(key) ?? (votes >= 2 ? form : undefined);
  }

  /** Take one use back that `learn` counted: the word was not what the user meant. */
  unlearn(word, previous = "") {
    if (!this.learnable(word)) return;
    const key = this.#fold(word), before = this.#fold(previous);
    const after = this.pairs.get(before);
    if (after) decrease(after, key);
    if (after?.size === 0) this.pairs.delete(before);
    decrease(this.words, key);
    if (!this.words.has(key)) this.forms.delete(key);
    this.cache.takeBack(key, before);
    this.cache.keepOnly(this.words, this.pairs);
    this.version++;
  }

  /**
   * Learn a word at once, as one whose correction was undone. Of "i" and its like only the dictionary tells which form
   * is meant: "I" counts as the same word.
   */
  keep(word) {
    if (!this.learnable(word)) return;
    const key = this.#fold(word);
    this.words.set(key, Math.max(this.words.get(key) ?? 0, this.constants.learn_after));
    this.cache.add(key, null);
    this.#makeRoom(1);
    this.version++;
    if (Object.hasOwn(this.constants.capital_i, key)) this.add(word);
  }

  /** Whether a word may be learnt: no digits, no address, not too long. */
  learnable(word) {
    if (!isWordlike(word) || !isOneWord(word, this.constants) || hasNumber(word)) return false;
    if (this.constants.closing_joints.includes(word.at(-1))) return false; // a closing quote
    return ![...word].some((c) => this.constants.unlearnt.includes(c));
  }

  /**
   * Put a word into the user's dictionary; it counts as used `learn_after` times.
   * @throws {Error} no word, one that is too long, or the lists are full
   */
  add(word) {
    const longest = this.constants.longest_word;
    if (!isWordlike(word) || !isOneWord(word, this.constants)) {
      throw new Error(`${shown(word)} cannot be a word of the dictionary: expected 1 to ${longest} characters, ` +
        "no blank, at least one letter");
    }
    this.#checkLists(this.dictionary.has(this.#fold(word)));
    this.dictionary.set(this.#fold(word), word);
    this.#makeRoom(1);
    this.version++;
  }

  /** Remove a word, its pairs and its dictionary entry. */
  forget(word) {
    const key = this.#fold(word);
    this.words.delete(key);
    this.forms.delete(key);
    this.dictionary.delete(key);
    this.pairs.delete(key);
    for (const [before, after] of this.pairs) {
      after.delete(key);
      if (!after.size) this.pairs.delete(before);
    }
    this.cache.keepOnly(this.words, this.pairs);
    this.version++;
  }

  /** Remove everything: counts, cache, dictionary and list of blocked words. */
  forgetAll() {
    for (const held of [this.words, this.pairs, this.forms, this.dictionary, this.blocked, this.cache]) held.clear();
    this.replacements++;
    this.version++;
  }

  /**
   * Never suggest a word (or an emoji) again, nor correct to it.
   * @throws {Error} not one word, as an import would refuse it, or the lists are full
   */
  block(word) {
    const key = this.#fold(word);
    if (!isOneWord(key, this.constants)) {
      throw new Error(`${shown(word)} cannot be blocked: expected one word of 1 to ${this.constants.longest_word} ` +
        "characters, no blank or control character");
    }
    this.#checkLists(this.blocked.has(key));
    this.blocked.add(key);
    this.#makeRoom(1);
    this.version++;
  }

  /** Allow a blocked word again. */
  unblock(word) {
    this.blocked.delete(this.#fold(word));
    this.version++;
  }

  /** Refuse one more word on the user's own lists if an export could not hold it: these are never cut down. */
  #checkLists(isThere) {
    const most = this.constants.most_entries;
    if (!isThere && this.dictionary.size + this.blocked.size >= most) {
      throw new Error(`the dictionary and the blocked words are full: at most ${most} are kept`);
    }
  }

  /** How many entries an export has. */
  #entries() {
    let entries = this.words.size + this.forms.size + this.dictionary.size + this.blocked.size;
    for (const after of this.pairs.values()) entries += after.size;
    return entries;
  }

  /**
   * Forget the pairs and words of the lowest counts, the oldest first, once an import would refuse the export. A tenth
   * is cleared at once, and entries are counted only when they might not fit: most words cost nothing.
   */
  #makeRoom(added) {
    this.#room -= added;
    if (this.#room >= 0) return;
    const most = this.constants.most_entries, excess = this.#entries() - Math.floor((most * 9) / 10);
    if (this.#entries() > most) {
      const rare = [...this.pairs.values(), this.words].flatMap((table) => [...table].map(([word, n]) => ({ n, table, word })));
      for (const { table, word } of rare.sort((a, b) => a.n - b.n).slice(0, excess)) table.delete(word);
      for (const [before, after] of this.pairs) if (!after.size) this.pairs.delete(before);
      for (const word of [...this.forms.keys()]) if (!this.words.has(word)) this.forms.delete(word);
      this.cache.keepOnly(this.words, this.pairs);
    }
    this.#room = most - this.#entries();
  }

  /** u of the words that count, dictionary included. @returns {Map<string, number>} */
  uses() {
    const least = this.constants.learn_after;
    const counting = new Map([...this.words].filter(([, n]) => n >= least));
    for (const word of this.dictionary.keys()) counting.set(word, Math.max(least, this.words.get(word) ?? 0));
    return counting;
  }

  /** b of the words that count after a word. @returns {Map<string, number>} */
  usesAfter(previous) {
    return new Map([...(this.pairs.get(previous) ?? [])].filter(([, n]) => n >= this.constants.learn_after));
  }

  /** Whether a word counts or is in the dictionary; also while incognito, so that it is not corrected away. */
  knows(word) {
    const key = this.#fold(word);
    return this.dictionary.has(key) || (this.words.get(key) ?? 0) >= this.constants.learn_after;
  }

  /**
   * What there is to see and delete: every word with its uses, most used first, and the blocked words.
   * @returns {{words: {word: string, text: string, uses: number, counts: boolean, dictionary: boolean}[],
   *   blocked: string[]}}
   */
  list() {
    const keys = new Set([...this.words.keys(), ...this.dictionary.keys()]);
    const words = [...keys].map((word) => ({
      word,
      text: this.written(word) ?? word,
      uses: this.words.get(word) ?? 0,
      counts: this.knows(word),
      dictionary: this.dictionary.has(word),
    }));
    words.sort((a, b) => b.uses - a.uses || byCodePoints(a.word, b.word));
    return { words, blocked: [...this.blocked].sort(byCodePoints) };
  }

  /** Everything that was learnt as one JSON object. */
  exportJSON() {
    return JSON.stringify({
      format: FORMAT,
      words: Object.fromEntries(this.words),
      pairs: Object.fromEntries([...this.pairs].map(([before, after]) => [before, Object.fromEntries(after)])),
      ...(this.forms.size ? { forms: Object.fromEntries(this.forms.values()) } : {}),
      dictionary: [...this.dictionary.values()],
      blocked: [...this.blocked].sort(byCodePoints),
      ...(this.words.size ? { cache: this.cache.kept() } : {}),
    });
  }

  /**
   * Put what `exportJSON` wrote in the place of what is here, or refuse it whole.
   * @param {string} text
   * @throws {Error} what is wrong with it, in one line; nothing is changed then
   */
  importJSON(text) {
    const found = checked(text, this.constants);
    const folded = (counts) => new Map(Object.entries(counts).map(([word, n]) => [this.#fold(word), n]));
    this.words = folded(found.words);
    this.pairs = new Map(Object.entries(found.pairs).map(([before, after]) => [this.#fold(before), folded(after)]));
    this.forms = new Map(Object.entries(found.forms ?? {}).map(([form, votes]) => [this.#fold(form), [form, votes]]));
    this.dictionary = new Map(found.dictionary.map((word) => [this.#fold(word), word]));
    this.blocked = new Set(found.blocked.map((word) => this.#fold(word)));
    if (found.cache) this.cache.take(found.cache, (word) => this.#fold(word));
    else this.cache.begin(this.words, this.pairs);
    this.cache.keepOnly(this.words, this.pairs);
    this.#room = 0;
    this.replacements++;
    this.version++;
  }

  /** Refuse what `importJSON` would refuse; nothing is changed. */
  checkJSON(text) {
    checked(text, this.constants);
  }

  /**
   * Add what `exportJSON` wrote to what is here, or refuse it whole. Of two counts the larger one holds, so that a file
   * can be added twice.
   * @param {string} text
   * @throws {Error} as `importJSON`; also where both together are too many
   */
  mergeJSON(text) {
    const other = new Personal(this.constants);
    other.importJSON(text);
    const lists = new Set([...this.dictionary.keys(), ...other.dictionary.keys()]).size + new Set([...this.blocked, ...other.blocked]).size;
    if (lists > this.constants.most_entries) throw refused(`both dictionaries have ${lists} entries; at most ${this.constants.most_entries} are kept`);
    raise(this.words, other.words);
    for (const [before, after] of other.pairs) {
      if (!this.pairs.has(before)) this.pairs.set(before, new Map());
      raise(this.pairs.get(before), after);
    }
    this.cache.merge(other.cache);
    for (const [key, form] of other.forms) if (!this.forms.has(key)) this.forms.set(key, form);
    for (const [key, word] of other.dictionary) if (!this.dictionary.has(key)) this.dictionary.set(key, word);
    for (const key of other.blocked) this.blocked.add(key);
    this.#room = 0;
    this.#makeRoom(1);
    this.version++;
  }
}

function decrease(counts, key) {
  const left = (counts.get(key) ?? 0) - 1;
  if (left > 0) counts.set(key, left);
  else counts.delete(key);
}

function raise(counts, others) {
  for (const [word, n] of others) counts.set(word, Math.max(n, counts.get(word) ?? 0));
}

/** An exported document if it is one. */
function checked(text, k) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw refused("not JSON");
  }
  if (!isObject(found) || found.format !== FORMAT) {
    throw refused(`expected an object with "format": ${FORMAT}, as the keyboard exports it`);
  }
  for (const [key, fits, kind] of [["words", isObject, "an object"], ["pairs", isObject, "an object"],
    ["dictionary", Array.isArray, "a list"], ["blocked", Array.isArray, "a list"]]) {
    if (!Object.hasOwn(found, key) || !fits(found[key])) throw refused(`"${key}" should be ${kind}`);
  }
  const forms = found.forms ?? {}; // exports of before have none
  if (!isObject(forms)) throw refused('"forms" should be an object');
  const pairs = Object.entries(found.pairs);
  for (const [before, after] of pairs) {
    if (!isObject(after)) throw refused(`the pairs of ${sized(before)} should be an object`);
  }
  const cache = checkedCache(found.cache), cached = Object.entries(cache.pairs);
  const tables = [found.words, forms, ...pairs.map(([, after]) => after)].map((table) => Object.entries(table));
  const faded = [cache.words, ...cached.map(([, after]) => after)].map((table) => Object.entries(table));
  const entries = tables.reduce((sum, table) => sum + table.length, found.dictionary.length + found.blocked.length);
  if (entries > k.most_entries) throw refused(`${entries} entries; at most ${k.most_entries} are taken`);
  const held = faded.reduce((sum, table) => sum + table.length, 0);
  if (held > k.most_entries) throw refused(`a cache of ${held} entries; at most ${k.most_entries} are taken`);
  for (const [word, n] of [...tables, ...faded].flat()) {
    checkWord(word, k);
    if (!Number.isSafeInteger(n) || n < 1) {
      throw refused(`${sized(word)} has no count; expected a positive integer`);
    }
  }
  const befores = [...pairs, ...cached].map(([before]) => before).filter((before) => before !== "");
  for (const word of [...found.dictionary, ...found.blocked, ...befores]) checkWord(word, k);
  return found;
}

/** The cache of a document; documents of before have none. */
function checkedCache(cache = EMPTY_CACHE) {
  const isShare = (one) => Array.isArray(one) && one.length === 2 && 0 < one[0] && one[0] < one[1] && one.every(Number.isFinite);
  const fits = isObject(cache) && isObject(cache.words) && isObject(cache.pairs) && Object.values(cache.pairs).every(isObject)
    && Number.isSafeInteger(cache.age) && cache.age >= 0 && cache.age <= EPOCH
    && Array.isArray(cache.weighed) && cache.weighed.length === 2 && cache.weighed.every(isShare);
  if (!fits) throw refused('"cache" should be as the keyboard exports it');
  return cache;
}

const EMPTY_CACHE = { words: {}, pairs: {}, age: 0, weighed: [[1, 10], [1, 10]] };

function isOneWord(word, k) {
  return word !== "" && !hasBlank(word) && sizeOf(word) <= k.longest_word && !hasControl(word);
}

function checkWord(word, k) {
  if (typeof word !== "string" || !isOneWord(word, k)) {
    const expected = `1 to ${k.longest_word} characters, no blank or control character`;
    throw refused(`${sized(word)} is not a word: expected ${expected}`);
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const shown = (value) => JSON.stringify(String(value).slice(0, 40));
/** What a message says of an entry: it is somebody's text, and is not quoted. */
const sized = (value) => `an entry of ${sizeOf(String(value))} characters`;
const refused = (what) => new Error(`learnt words: ${what}`);

/** Sorts texts as Python does: by code points, not by UTF-16 units. */
export function byCodePoints(a, b) {
  const left = a[Symbol.iterator](), right = b[Symbol.iterator]();
  for (;;) {
    const x = left.next(), y = right.next();
    if (x.done || y.done) return Number(!x.done) - Number(!y.done);
    if (x.value !== y.value) return x.value.codePointAt(0) - y.value.codePointAt(0);
  }
}
