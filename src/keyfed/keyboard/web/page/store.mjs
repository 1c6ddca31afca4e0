/**
 * What the page keeps between visits: the settings and what was learnt (counts of words and pairs, the user's
 * dictionary, the never-suggest list), the text in the field and the emoji used last. Where the browser lets pages keep nothing (blocked cookies, a
 * sandbox, a full disk) everything still works from memory, and `place` says so. What cannot be read is never written over.
 */

import { SETTINGS } from "../decoder/defaults.mjs";

export const SETTINGS_KEY = "keyfed.settings", PERSONAL_KEY = "keyfed.personal";
export const FORGOTTEN_KEY = "keyfed.forgotten"; // when everything was forgotten last: for the other tabs
const DRAFT_KEY = "keyfed.text", EMOJI_KEY = "keyfed.emoji";
const ASIDE_KEY = "keyfed.unread"; // and a time: what was learnt, but could not be read any more
const THEMES = ["auto", "light", "dark"];
const SOURCES = ["ngram", "network", "federated", "personal"];

/** The engine's settings and the page's own. */
export const DEFAULTS = Object.freeze({ ...SETTINGS, theme: "auto", keep: true, numbers: false, capitals: false });

/** Settings of any origin, made whole: unknown names and values of the wrong kind fall back to the defaults. */
export function checkedSettings(given, layouts) {
  const known = { theme: THEMES, source: SOURCES, layout: layouts };
  const settings = { ...DEFAULTS };
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const value = given?.[name];
    const fits = known[name] ? known[name].includes(value) : typeof value === typeof standard;
    if (fits) settings[name] = value;
  }
  return settings;
}

/** A `Storage` if the browser gives one, else null. */
function reachable(getStorage) {
  try {
    return getStorage() ?? null;
  } catch {
    return null;
  }
}

export class Store {
  #storage;
  #failed = new Set(); // what could not be written the last time
  #locked = false; // whether what was learnt may not be written: there is something unread in its place

  /** @param {() => Storage} getStorage  may throw, as `window.localStorage` does where it is blocked */
  constructor(getStorage = () => globalThis.localStorage) {
    this.#storage = reachable(getStorage);
    if (!this.#write("keyfed.probe", "1")) this.#failed.add(SETTINGS_KEY).add(PERSONAL_KEY);
    this.#failed.delete("keyfed.probe");
    this.#remove("keyfed.probe");
  }

  /** Where things are kept now, in words. */
  get place() {
    if (!this.#failed.size && !this.#locked) return "this browser";
    const isOld = this.personal() !== null || this.#read(SETTINGS_KEY) !== null;
    return `memory, until the page closes${isOld ? "; this browser still has what was kept before" : ""}`;
  }

  settings(layouts) {
    return checkedSettings(this.#parsed(SETTINGS_KEY), layouts);
  }

  /** Write some settings; what another tab has written of the others stays. */
  saveSettings(changed) {
    const found = this.#parsed(SETTINGS_KEY);
    this.#write(SETTINGS_KEY, JSON.stringify({ ...(typeof found === "object" && !Array.isArray(found) ? found : {}), ...changed }));
  }

  /** Whether another tab is incognito, as far as is stored; null: nothing is. */
  get incognito() {
    return this.#parsed(SETTINGS_KEY)?.incognito ?? null;
  }

  /** When everything was forgotten last, by whatever tab; null: never. */
  get forgotten() {
    return this.#read(FORGOTTEN_KEY);
  }

  /** The text of the last visit: {text, cursor}, or null. */
  draft() {
    return this.#parsed(DRAFT_KEY);
  }

  saveDraft(draft) {
    this.#write(DRAFT_KEY, JSON.stringify(draft));
  }

  forgetDraft() {
    if (this.#read(DRAFT_KEY) !== null) this.#remove(DRAFT_KEY);
  }

  /** The emoji used last. @returns {string[]} */
  emoji() {
    const found = this.#parsed(EMOJI_KEY);
    return Array.isArray(found) ? found.filter((one) => typeof one === "string").slice(0, 24) : [];
  }

  saveEmoji(used) {
    this.#write(EMOJI_KEY, JSON.stringify(used));
  }

  /** What was learnt, as the engine exported it, or null. */
  personal() {
    return this.#read(PERSONAL_KEY);
  }

  savePersonal(json) {
    if (!this.#locked) this.#write(PERSONAL_KEY, json);
  }

  /** Put what could not be read out of the way; where there is no room for that nothing learnt is kept from now on. */
  setAside() {
    const json = this.personal(), key = `${ASIDE_KEY}.${Date.now()}`;
    if (json === null) return;
    this.#locked = !this.#write(key, json);
    this.#failed.delete(key);
    if (!this.#locked) this.#remove(PERSONAL_KEY);
  }

  /** Remove what was learnt, also what was set aside, the text and the emoji used last. */
  forgetPersonal() {
    const isOurs = (key) => [PERSONAL_KEY, DRAFT_KEY, EMOJI_KEY].includes(key) || key.startsWith(`${ASIDE_KEY}.`);
    for (const key of this.#keys().filter(isOurs)) this.#remove(key);
    this.#locked = false;
  }

  /** Say to other tabs that everything is forgotten. */
  sayForgotten() {
    const now = String(Math.max(Date.now(), Number(this.forgotten ?? 0) + 1)); // a new value, or no tab hears of it
    this.#write(FORGOTTEN_KEY, now);
    this.#failed.delete(FORGOTTEN_KEY); // nothing of anybody's is lost
  }

  #keys() {
    try {
      return Object.keys(this.#storage ?? {});
    } catch {
      return [PERSONAL_KEY, DRAFT_KEY, EMOJI_KEY];
    }
  }

  #read(key) {
    try {
      return this.#storage?.getItem(key) ?? null;
    } catch {
      return null;
    }
  }

  /** What is stored there, or null: nothing, or damaged by hand or by another version. */
  #parsed(key) {
    try {
      return JSON.parse(this.#read(key));
    } catch {
      return null;
    }
  }

  /** Whether it could be written: not if the storage is full, or was withdrawn. */
  #write(key, value) {
    try {
      this.#storage.setItem(key, value);
      this.#failed.delete(key);
    } catch {
      this.#failed.add(key);
    }
    return !this.#failed.has(key);
  }

  #remove(key) {
    try {
      this.#storage?.removeItem(key);
    } catch {
      // Withdrawn: `place` says what is still there.
    }
  }
}
