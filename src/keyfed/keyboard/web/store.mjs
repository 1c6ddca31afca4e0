/**
 * What the page keeps between visits: the settings and what was learnt (counts of words and pairs, the user's
 * dictionary, the never-suggest list). Never text. Where the browser lets pages keep nothing (blocked cookies, a
 * sandbox, a full disk) everything still works from memory and `persistent` is false.
 */

import { SETTINGS } from "./engine.mjs";

const SETTINGS_KEY = "keyfed.settings";
const PERSONAL_KEY = "keyfed.personal";
const THEMES = ["auto", "light", "dark"];
const SOURCES = ["ngram", "federated", "personal"];

/** The engine's settings and the page's own. */
export const DEFAULTS = Object.freeze({ ...SETTINGS, theme: "auto" });

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

/** A `Storage` if the browser gives one that can be written, else null. */
function usable(getStorage) {
  try {
    const storage = getStorage();
    storage.setItem("keyfed.probe", "1");
    storage.removeItem("keyfed.probe");
    return storage;
  } catch {
    return null;
  }
}

export class Store {
  #storage;

  /** @param {() => Storage} getStorage  may throw, as `window.localStorage` does where it is blocked */
  constructor(getStorage = () => globalThis.localStorage) {
    this.#storage = usable(getStorage);
  }

  get persistent() {
    return this.#storage !== null;
  }

  settings(layouts) {
    let given = null;
    try {
      given = JSON.parse(this.#read(SETTINGS_KEY));
    } catch {
      // Damaged by hand or by another version: the defaults hold.
    }
    return checkedSettings(given, layouts);
  }

  saveSettings(settings) {
    this.#write(SETTINGS_KEY, JSON.stringify(settings));
  }

  /** What was learnt, as the engine exported it, or null. */
  personal() {
    return this.#read(PERSONAL_KEY);
  }

  savePersonal(json) {
    this.#write(PERSONAL_KEY, json);
  }

  forgetPersonal() {
    try {
      this.#storage?.removeItem(PERSONAL_KEY);
    } catch {
      this.#storage = null;
    }
  }

  #read(key) {
    try {
      return this.#storage?.getItem(key) ?? null;
    } catch {
      return null;
    }
  }

  #write(key, value) {
    try {
      this.#storage?.setItem(key, value);
    } catch {
      this.#storage = null; // full or withdrawn: from here on in memory only
    }
  }
}
