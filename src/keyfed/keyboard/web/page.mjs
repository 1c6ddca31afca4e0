/** Start-up and wiring: text field, strip, keys, panel and the worker that holds the engine. */

import { Dialog } from "./page/dialog.mjs";
import { Draft } from "./page/draft.mjs";
import { Editor } from "./page/editor.mjs";
import { handOver } from "./page/handover.mjs";
import { Keyboard } from "./page/keys.mjs";
import { Meter } from "./page/meter.mjs";
import { Pictures } from "./page/pictures.mjs";
import { keepOffline } from "./page/offline.mjs";
import { KEYBOARD, PAGE, scriptAddress } from "./page/scripts.mjs";
import { Seal } from "./page/seal.mjs";
import { SettingsPanel } from "./page/settings.mjs";
import { FORGOTTEN_KEY, PERSONAL_KEY, SETTINGS_KEY, Store } from "./page/store.mjs";
import { SuggestionStrip } from "./page/strip.mjs";
import { startsSentence } from "./decoder/casing.mjs";
import { collectEarly } from "./decoder/collect.mjs";

const MODEL = new URL("model/", PAGE);
const REPORT = 200; // milliseconds between two updates of the figures
const EMPTY = { slots: [null, null, null], correction: null };
const WIDE = "(min-width: 860px)"; // as in the style sheet
const NOTHING = { format: 1, words: {}, pairs: {}, dictionary: [], blocked: [] };
const INSIDE_ADDRESS = ".:=&?~+"; // marks that end a word, or stand inside an address
const REPLACING = ["forgetAll", "importJSON"];
const byId = (id) => document.getElementById(id);
const milliseconds = (value) => (value === null ? "–" : `${value < 99.5 ? value.toFixed(1) : value.toFixed(0)} ms`);

async function table(name) {
  const answer = await fetch(new URL(`data/${name}.json`, PAGE));
  if (!answer.ok) throw new Error(`data/${name}.json is missing (${answer.status})`);
  return answer.json();
}

class Page {
  #constants;
  #store;
  #settings;
  #unsaved = {}; // what was set while incognito: written when that ends
  #forgotten; // when everything was forgotten last, as far as this tab knows
  #personal = "";
  #meter = new Meter();
  #worker = null;
  #ready = false;
  #seal = new Seal();
  #later = null; // {action, value} on what was learnt, once there is an engine
  #replacing = 0; // how many actions are under way that put something else in the place of all that was learnt
  #overtaken = null; // what was told meanwhile
  #about = null;
  #actions = new Map(); // id → resolve
  #nextAction = 1;
  #report = 0; // the timer of the next report
  /** Called when the engine is there, a setting has changed or everything is forgotten, here or in another tab: for a page that does more. */
  watch = () => {};

  /** @param {Store} store  then the tables of these names */
  constructor(store, layouts, constants, { groups }) {
    [this.#store, this.#constants] = [store, constants];
    const names = Object.keys(layouts);
    [this.#settings, this.#forgotten] = [this.#store.settings(names), this.#store.forgotten];
    this.strip = new SuggestionStrip(byId("strip"), byId("live"), {
      pick: (slot, _, time) => {
        this.editor.pick(slot, time);
        this.keyboard.useShift();
      },
      block: (slot) => this.#block(slot),
      leave: () => this.editor.focus(),
    });
    this.editor = new Editor(byId("text"), {
      ask: (kind, message) => this.#askEditor(kind, message),
      settings: () => this.#engineSettings(),
      show: ({ version, ...strip }) => this.#show(version, strip),
      say: (text) => this.strip.say(text),
      changed: () => this.#changed(),
      separates: separator(constants),
      inside: (char) => char !== "" && INSIDE_ADDRESS.includes(char),
      joins: (char) => constants.no_blank_around.includes(char),
      capital: (before) => this.#settings.capitals && startsSentence(before, constants),
      shift: () => this.keyboard.shift,
      typed: () => this.keyboard.useShift(),
    });
    this.pictures = new Pictures({
      groups, recent: this.#store.emoji(), keeps: () => !this.#settings.incognito,
      chosen: (emoji, time) => {
        this.editor.type(emoji, null, time);
        if (!this.#settings.incognito) this.#store.saveEmoji(this.pictures.recent);
      },
    });
    this.keyboard = new Keyboard(byId("keyboard"), {
      layouts, layout: this.#settings.layout, numbers: this.#settings.numbers, pictures: this.pictures,
      slide: (steps, unit) => this.editor.slide(steps, unit),
      press: (key) => this.#press(key),
      swipe: ({ points, time }) => this.editor.swipe(points, time),
      shift: () => this.editor.refresh(),
      say: (text) => this.strip.say(text),
    });
    this.panel = new SettingsPanel(byId("panel-body"), {
      layouts: names, learnAfter: constants.learn_after,
      on: {
        change: (name, value) => this.#change(name, value),
        act: (action, value) => this.#act(action, value),
        exported: () => this.#personal,
      },
    });
    this.panel.showSettings(this.#settings);
    this.draft = new Draft(this.#store, byId("text"));
    if (this.draft.restore()) this.#seal.close(byId("text").value); // it was learnt when it was typed
    this.#sayPlace();
    this.#apply();
    this.#listen();
    this.#changed();
  }

  // ---------------------------------------------------------------- the worker

  get settings() {
    return { ...this.#settings };
  }

  get isReady() {
    return this.#ready;
  }

  /** Send something to the worker, and ask for the strip of the text as it stands. */
  tell(kind, message) {
    this.#ask(kind, message);
    this.editor.refresh();
  }

  #ask(kind, message) {
    if (this.#ready) this.#worker.postMessage({ kind, ...message });
    return this.#ready;
  }

  /** What the text field asks: with how much of the text may not be learnt. */
  #askEditor(kind, message) {
    if (!this.#seal.holds || (kind !== "finish" && kind !== "undo")) return this.#ask(kind, message);
    const { value, selectionStart } = byId("text");
    const sealed = this.#seal.within(message.request.before, value, selectionStart);
    return this.#ask(kind, { ...message, request: { ...message.request, sealed } });
  }

  /** A message of the worker. */
  receive(worker, data) {
    this.#worker = worker;
    if (data.kind === "strip") this.#show(data.version, data.strip);
    else if (data.kind === "edit") this.editor.receive(data);
    else if (data.kind === "swiped") this.editor.receiveSwipe(data);
    else if (data.kind === "personal") this.#learnt(data.json);
    else if (data.kind === "changed") this.#acted(data);
    else if (data.kind === "ready") this.#started(data);
    else if (data.kind === "loading") byId("model-line").textContent = `loading … ${data.name} is here`;
    else if (data.kind === "failed") this.failed(data.message);
    else if (data.kind === "trouble") this.#notice(`Something went wrong: ${data.message}`, true);
  }

  #started({ manifest, ngram, lost }) {
    this.#ready = true;
    this.#about = manifest;
    const { model, run } = manifest;
    const method = `${run.method}, round ${run.rounds}`;
    byId("model-line").textContent = "";
    const counts = ngram ? ` · with counts, k ${manifest.counts.k}` : "";
    this.panel.fact("Model", `${model.name} · ${(model.parameters / 1e6).toFixed(2)} M · ${manifest.precision}${counts}`);
    this.panel.fact("Trained by", method);
    this.panel.fact("Corpus", run.data);
    this.panel.offerSources({ ngram });
    if (!ngram && ["ngram", "network"].includes(this.#settings.source)) this.#settings.source = "personal";
    if (lost) this.#notice(`What was learnt before could not be read (${lost}); it is left out, and kept until you forget everything.`, true);
    else this.#notice("");
    if (this.#later) this.#send(this.#later.action, this.#later.value);
    else if (lost) this.#store.setAside();
    this.#later = null;
    this.#sayPlace();
    this.panel.showSettings(this.#settings);
    this.#apply();
    document.documentElement.dataset.state = "ready";
    this.editor.refresh();
    this.#keepOffline();
    setTimeout(collectEarly, 1000);
    this.watch("ready");
  }

  failed(message) {
    this.#ready = false;
    byId("model-line").textContent = "no suggestions";
    this.#notice(`No suggestions: ${message}. You can still type.`, true);
    document.documentElement.dataset.state = "failed";
    this.#keepOffline(); // a newer version may be whole
  }

  #keepOffline() {
    keepOffline((text) => this.panel.fact("Works offline", text));
  }

  #notice(text, error = false) {
    const notice = byId("notice");
    notice.textContent = text;
    notice.classList.toggle("error", error);
    notice.hidden = !text;
  }

  // ---------------------------------------------------------------- typing

  #press({ kind, char, tap, time }) {
    if (kind === "char") this.editor.type(char, tap, time);
    else if (kind === "backspace") this.editor.backspace(time);
    else if (kind === "backspace-word") this.editor.backspaceWord(time);
  }

  #show(version, strip) {
    const start = this.editor.current(version);
    if (start === null) return this.#meter.superseded();
    this.strip.show(strip);
    this.#meter.record(start, strip.timing);
    this.#report ||= setTimeout(() => this.#measured(), REPORT);
  }

  /** The text or the cursor changed. */
  #changed() {
    if (this.#seal.holds) this.#seal.follow(byId("text").value);
    this.draft.changed();
    this.keyboard.autoShift(startsSentence(this.editor.before(), this.#constants));
    this.#report ||= setTimeout(() => this.#measured(), REPORT);
  }

  /** The figures, a few times a second: they must not cost what they measure. */
  #measured() {
    this.#report = 0;
    const { keys, chars } = this.editor.count;
    const saved = Math.max(0, chars - keys);
    const share = chars > 0 ? Math.round((100 * saved) / chars) : 0;
    this.panel.fact("Keystrokes saved", `${saved.toLocaleString()} of ${Math.max(0, chars).toLocaleString()} (${share} %)`);
    const [last, middle] = [milliseconds(this.#meter.last), milliseconds(this.#meter.median())];
    this.panel.fact("Latency", `${last}, median ${middle}`);
    this.panel.fact("To the screen", `median ${milliseconds(this.#meter.paintedMedian)}`);
  }

  // ---------------------------------------------------------------- settings

  #engineSettings() {
    const { theme, keep, numbers, capitals, ...settings } = this.#settings;
    return settings;
  }

  #change(name, value) {
    // Going incognito is written down (so that a reload does not silently begin to learn); after that nothing is.
    const stored = !this.#settings.incognito || name === "incognito";
    this.#unsaved[name] = value;
    if (stored) {
      this.#store.saveSettings(this.#unsaved);
      this.#unsaved = {};
    }
    this.#set(name, value);
  }

  #set(name, value) {
    this.#settings = { ...this.#settings, [name]: value };
    if (name === "incognito" || name === "learn") this.#seal.close(byId("text").value);
    if (name === "layout" || name === "numbers") this.keyboard.setLayout(this.#settings.layout, this.#settings.numbers);
    if (name === "keep" && !value) this.draft.forget();
    this.#sayPlace();
    this.#apply();
    this.editor.refresh();
    this.watch("settings");
  }

  #sayPlace() {
    this.panel.fact("Kept in", this.#store.place);
  }

  #apply() {
    const { theme, incognito, keep } = this.#settings;
    this.draft.want(keep && !incognito);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    byId("incognito-sign").hidden = !incognito;
  }

  // ---------------------------------------------------------------- what was learnt

  /**
   * The worker tells what there is now. It is stored also while incognito: what comes then was learnt before or is
   * what a person took away or put in by hand. Until the engine is ready it is just what was stored.
   */
  #learnt(json) {
    if (this.#replacing) this.#overtaken = json;
    if (this.#replacing || this.#later?.action === "forgetAll") return;
    this.#personal = json;
    this.panel.showPersonal(JSON.parse(json));
    if (this.#ready) this.#store.savePersonal(json);
    this.#sayPlace();
  }

  async #block({ kind, text, word }) {
    const failure = await this.#act("block", kind === "emoji" ? text : word); // the word of an emoji stays
    this.strip.say(failure || `${text} will not be suggested again`);
    if (failure) this.#notice(failure, true);
  }

  /** Do something to what was learnt; answers the message of a failure, or "". */
  #act(action, value) {
    if (action === "forgetAll") this.#forgetStored(), this.watch("forgotten");
    if (this.#ready) return this.#send(action, value);
    if (action !== "forgetAll") return Promise.resolve("the model is not loaded yet");
    this.#later = { action };
    return Promise.resolve("");
  }

  #send(action, value) {
    const id = this.#nextAction++;
    if (REPLACING.includes(action)) this.#replacing++;
    this.#ask("personal", { id, action, value });
    return new Promise((resolve) => this.#actions.set(id, { action, resolve }));
  }

  #acted({ id, message }) {
    const { action, resolve } = this.#actions.get(id);
    this.#actions.delete(id);
    if (REPLACING.includes(action)) this.#replacing--;
    const told = action === "importJSON" ? this.#overtaken : null; // it may have been refused; forgetting never is
    if (!this.#replacing) this.#overtaken = null;
    if (told && !this.#replacing) this.#learnt(told);
    resolve(message);
    this.editor.refresh();
  }

  #forgetStored() {
    this.#store.forgetPersonal();
    this.#store.sayForgotten();
    this.#forgetHere();
  }

  /** What this tab holds: the others have copies of their own. */
  #forgetHere() {
    this.#forgotten = this.#store.forgotten;
    this.draft.forget();
    this.pictures.forget();
    this.#seal.close(byId("text").value); // what stands there is not learnt now either
    this.#personal = JSON.stringify(NOTHING);
    this.panel.showPersonal(NOTHING);
    this.#sayPlace();
  }

  /** Another tab forgot or learnt something: what is stored counts here too. */
  #storedElsewhere(key, json) {
    if (key === SETTINGS_KEY) return this.#takeIncognito();
    if (key === PERSONAL_KEY && json) return this.#sendLater("importJSON", json);
    if (key === null || this.#store.forgotten !== this.#forgotten) this.#forgetElsewhere(); // once, of two events
  }

  #forgetElsewhere() {
    this.#forgetHere();
    this.#sendLater("forgetAll");
    this.watch("forgotten elsewhere");
  }

  #sendLater(action, value) {
    if (this.#ready) this.#send(action, value);
    else this.#later = { action, value };
  }

  /** Incognito is of all tabs: one that goes on keeping what is typed would undo the other's. */
  #takeIncognito() {
    const { incognito } = this.#store;
    if (typeof incognito !== "boolean" || incognito === this.#settings.incognito) return;
    if (!incognito) this.#store.saveSettings(this.#unsaved);
    this.#unsaved = {};
    this.#set("incognito", incognito);
    this.panel.showSettings(this.#settings);
  }

  /** A page that the browser had put away heard of nothing meanwhile. */
  #cameBack() {
    this.#takeIncognito();
    if (this.#store.forgotten !== this.#forgotten) this.#forgetElsewhere();
  }

  // ---------------------------------------------------------------- the rest

  #listen() {
    document.addEventListener("keydown", (event) => {
      const place = event.altKey && !event.ctrlKey && !event.metaKey ? ["Digit1", "Digit2", "Digit3"].indexOf(event.code) : -1;
      if (place >= 0 && this.strip.pick(place, event.timeStamp)) event.preventDefault();
    });
    byId("text").addEventListener("input", ({ inputType, target }) => {
      if (!inputType?.startsWith("history")) return;
      this.#seal.broughtBack(target.value);
      this.draft.broughtBack();
    });
    window.addEventListener("storage", ({ key, newValue }) => {
      if ([PERSONAL_KEY, FORGOTTEN_KEY, SETTINGS_KEY, null].includes(key)) this.#storedElsewhere(key, newValue);
    });
    window.addEventListener("pageshow", ({ persisted }) => persisted && this.#cameBack());
    new Dialog(byId("panel"), document.querySelector("main"), byId("open-panel"), byId("close-panel"), WIDE);
    handOver({ copy: byId("copy"), share: byId("share"), area: byId("text"), say: (text) => this.strip.say(text) });
    this.strip.show(EMPTY);
    const page = this;
    Object.defineProperty(window, "keyfedStats", {
      get: () => Object.freeze({ ...page.#meter.numbers(), ...page.editor.count, ready: page.#ready, about: structuredClone(page.#about) }),
    });
  }

}

/** Whether a character ends a word: neither a letter, a mark, a digit nor a joint that words may have inside. */
function separator({ closing_joints: joints }) {
  return (char) => !/[\p{L}\p{M}\p{N}]/u.test(char) && !joints.includes(char);
}

/** Start the worker, which loads the model while the page is being made; what it says waits for the page. */
function startWorker(page, store) {
  const failed = (message) => page.then((one) => one.failed(message), () => {});
  try {
    const worker = new Worker(scriptAddress(KEYBOARD), { type: "module", name: "keyfed" });
    worker.onmessage = ({ data }) => page.then((one) => one.receive(worker, data), () => worker.terminate());
    worker.onerror = (event) => failed(event.message || "its script could not be loaded");
    worker.postMessage({ kind: "load", page: PAGE.href, model: MODEL.href, personal: store.personal() });
  } catch (error) {
    failed(`the browser lets no worker run: ${error.message}`);
  }
}

/** The page as it runs; null where it could not start. */
export let running = null;

try {
  const store = new Store();
  const page = Promise.all(["layouts", "constants", "pictures"].map(table)).then((tables) => new Page(store, ...tables));
  startWorker(page, store);
  running = await page;
} catch (error) {
  keepOffline(() => {});
  byId("model-line").textContent = "no keyboard";
  byId("notice").textContent = `The keyboard could not start: ${error.message}. You can still write.`;
  byId("notice").classList.add("error");
  byId("notice").hidden = false;
  document.documentElement.dataset.state = "failed";
}
