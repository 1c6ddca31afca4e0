/**
 * The text that is kept for training, a record a line, encrypted by a key that this browser does not let anything read
 * out. It is bounded: the oldest lines go first. One line in `HELD` is held back: no model is trained on it here, and new
 * models are looked at with it.
 */

import { Numbers } from "../decoder/context.mjs";
import { utf8 } from "../secure/bytes.mjs";
import { within } from "./database.mjs";

export const MOST = Object.freeze({ lines: 4_000, bytes: 400_000 });
const HELD = 8, NONCE = 12, LONGEST = 2_000; // characters of a line
const PURPOSE = utf8("keyfed kept text 1");
const KEY = "text key";
const EOS = 2;

/** The lines of a text that are worth keeping: two words at least. */
export function worthKeeping(text) {
  return text.split("\n").map((line) => line.trim().slice(0, LONGEST)).filter((line) => /\p{L}\P{L}+\p{L}/u.test(line));
}

/** The kept text of this browser; several tabs may add to it. */
export class Kept {
  #database;

  /** @param {IDBDatabase} database */
  constructor(database) {
    this.#database = database;
  }

  /** The key of now: another tab may have forgotten the one of before, with all that was kept under it. */
  async #key() {
    const found = await within(this.#database, "page", "readonly", (store, done) => done(store.get(KEY)));
    if (found) return found;
    const made = await crypto.subtle.generateKey({ name: "AES-GCM", length: 256 }, false, ["encrypt", "decrypt"]);
    return within(this.#database, "page", "readwrite", async (store, done) => { // of two tabs one makes the key
      const other = await done(store.get(KEY));
      if (!other) store.put(made, KEY);
      return other ?? made;
    });
  }

  /** Keep lines, and let the oldest go that are too many. */
  async add(lines) {
    const key = await this.#key();
    const records = await Promise.all(lines.map((line) => sealed(line, key)));
    await within(this.#database, "text", "readwrite", async (store, done) => {
      for (const record of records) store.add(record);
      const [ids, all] = [await done(store.getAllKeys()), await done(store.getAll())];
      let bytes = all.reduce((sum, { sealed }) => sum + sealed.byteLength, 0);
      for (let n = 0; n < all.length && (all.length - n > MOST.lines || bytes > MOST.bytes); n++) {
        bytes -= all[n].sealed.byteLength;
        store.delete(ids[n]);
      }
    });
  }

  /** Every line with its number, the oldest first; one that cannot be opened is left out. @returns {Promise<{id: number, text: string}[]>} */
  async lines() {
    const [ids, records] = await within(this.#database, "text", "readonly", async (store, done) =>
      [await done(store.getAllKeys()), await done(store.getAll())]);
    const decoder = new TextDecoder(), key = await this.#key();
    const opened = records.map(({ nonce, sealed }) =>
      crypto.subtle.decrypt({ name: "AES-GCM", iv: nonce, additionalData: PURPOSE }, key, sealed).then(
        (bytes) => decoder.decode(bytes), () => null));
    return (await Promise.all(opened)).map((text, n) => ({ id: ids[n], text })).filter(({ text }) => text !== null);
  }

  remove(id) {
    return within(this.#database, "text", "readwrite", (store, done) => done(store.delete(id)));
  }

  /** Forget all of it, and the key. */
  async forget() {
    await within(this.#database, "text", "readwrite", (store, done) => done(store.clear()));
    await within(this.#database, "page", "readwrite", (store, done) => done(store.delete(KEY)));
  }
}

async function sealed(line, key) {
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
