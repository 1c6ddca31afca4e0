/**
 * The text that is kept for training, a record a line, encrypted by a key that this browser does not let anything read
 * out. It is bounded: the oldest lines go first. One line in `HELD` is held back: no model is trained on it here, and new
 * models are looked at with it.
 */

import { Numbers } from "../decoder/context.mjs";
import { utf8 } from "../secure/bytes.mjs";
import { within } from "./database.mjs";

/** Where the model lies that was tuned to the text. */
export const TUNED = "tuned";
export const MOST = Object.freeze({ lines: 4_000, bytes: 400_000 });
const HELD = 8, NONCE = 12, LONGEST = 2_000; // characters of a line
const PURPOSE = utf8("keyfed kept text 1");
const KEY = "text key", KEY_NAME = "text key name"; // among what the page notes
const EOS = 2;

/** The lines of a text that are worth keeping: two words at least. */
export function worthKeeping(text) {
  return text.split("\n").map((line) => line.trim().slice(0, LONGEST)).filter((line) => /\p{L}\P{L}+\p{L}/u.test(line));
}

/** The kept text of this browser. Several tabs may add to it and forget it, so its key is read anew each time. */
export class Kept {
  #database;

  /** @param {IDBDatabase} database */
  constructor(database) {
    this.#database = database;
  }

  /** Keep lines, and let the oldest go that are too many. Lines on their way while all is forgotten are forgotten, too. */
  async add(lines) {
    const { key, name } = await this.#key(), records = await Promise.all(lines.map((line) => sealed(key, line)));
    await within(this.#database, ["text", "page"], "readwrite", async ([text, page], done) => {
      const isSame = (await done(page.get(KEY))) !== undefined && (await done(page.get(KEY_NAME))) === name;
      if (!isSame) return;
      for (const record of records) text.add(record);
      const [ids, all] = [await done(text.getAllKeys()), await done(text.getAll())];
      let bytes = all.reduce((sum, record) => sum + record.sealed.byteLength, 0);
      for (let n = 0; n < all.length && (all.length - n > MOST.lines || bytes > MOST.bytes); n++) {
        bytes -= all[n].sealed.byteLength;
        text.delete(ids[n]);
      }
    });
  }

  /** The key and its name, made where there is none; of two tabs one makes it. */
  async #key() {
    const read = async (page, done) => ({ key: await done(page.get(KEY)), name: await done(page.get(KEY_NAME)) });
    const kept = await within(this.#database, "page", "readonly", read);
    if (kept.key) return kept;
    const key = await crypto.subtle.generateKey({ name: "AES-GCM", length: 256 }, false, ["encrypt", "decrypt"]), name = crypto.randomUUID();
    return within(this.#database, "page", "readwrite", async (page, done) => {
      const found = await read(page, done);
      if (found.key) return found;
      page.put(key, KEY);
      page.put(name, KEY_NAME);
      return { key, name };
    });
  }

  /** Every line with its number, the oldest first; one that cannot be opened is left out. @returns {Promise<{id: number, text: string}[]>} */
  async lines() {
    const [key, ids, records] = await within(this.#database, ["text", "page"], "readonly", async ([text, page], done) =>
      [await done(page.get(KEY)), await done(text.getAllKeys()), await done(text.getAll())]);
    const decoder = new TextDecoder();
    const opened = key ? records.map(({ nonce, sealed: data }) =>
      crypto.subtle.decrypt({ name: "AES-GCM", iv: nonce, additionalData: PURPOSE }, key, data).then(
        (bytes) => decoder.decode(bytes), () => null)) : [];
    return (await Promise.all(opened)).map((text, n) => ({ id: ids[n], text })).filter(({ text }) => text !== null);
  }

  remove(id) {
    return within(this.#database, "text", "readwrite", (store, done) => done(store.delete(id)));
  }

  /** Forget all of it, its key, and the model that was tuned to it. */
  forget() {
    return within(this.#database, ["text", "page"], "readwrite", ([text, page]) => {
      text.clear();
      for (const key of [KEY, KEY_NAME, TUNED]) page.delete(key);
    });
  }
}

async function sealed(key, line) {
  const nonce = crypto.getRandomValues(new Uint8Array(NONCE));
  return { nonce, sealed: await crypto.subtle.encrypt({ name: "AES-GCM", iv: nonce, additionalData: PURPOSE }, key, utf8(line)) };
}

/** Whether a line is held back; by its number, so that it stays so. */
export const isHeld = ({ id }) => id % HELD === HELD - 1;

/**
 * Lines as the tokens of a vocabulary, an EOS behind every line: to learn from, and held back. A run evaluates models
 * by a "valid" and a "test" text; here both are what is held back.
 */
export function streamsOf(lines, vocab) {
  const numbers = new Numbers({ ...vocab, tokenised: false });
  const tokens = (some) => Int32Array.from(some.flatMap(({ text }) => [...numbers.encode(text), EOS]));
  const held = tokens(lines.filter(isHeld));
  return { train: tokens(lines.filter((line) => !isHeld(line))), valid: held, test: held };
}
