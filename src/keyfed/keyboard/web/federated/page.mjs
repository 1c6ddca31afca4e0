/**
 * The page of a federation: the keyboard, with what keeps, trains and takes part. Before its owner has agreed nothing is
 * kept, nothing is trained, and no server is asked.
 */

import { nextLink } from "./link.mjs";

// The rest comes later: first the token is taken out of the address.
const [{ running }, { PAGE, scriptAddress, TRAINING }, { Collector }, { isMade, openDatabase, Unkept }, { linkOf }, { FederatedPanel }, { isGuarded, UNGUARDED }, { Kept }] = await Promise.all([
  import("../page.mjs"), import("../page/scripts.mjs"), import("./collector.mjs"), import("./database.mjs"), import("./endpoint.mjs"),
  import("./panel.mjs"), import("./policy.mjs"), import("./text.mjs"),
]);

const KEY = "keyfed.federated"; // what its owner has agreed to, in localStorage
const DEFAULTS = Object.freeze({ consent: false, out: false, preview: false, minutes: 10, budget: 0, floor: 3 });
const IDLE = 5_000, LEFT_ALONE = 15_000, LOOK = 1_000; // milliseconds: no key before work begins; before a line counts as finished
const LEAST_CHARGE = 0.3;
const byId = (id) => document.getElementById(id);

function storedSettings() {
  let found;
  try {
    found = JSON.parse(localStorage.getItem(KEY));
  } catch {
    found = null;
  }
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, typeof found?.[name] === typeof usual ? found[name] : usual]));
}

class Federated {
  #page;
  #about;
  #settings = storedSettings();
  #worker = null;
  #isHeard = false; // the worker has said something
  #last = performance.now(); // the last key
  #taken = 0; // the last key when the text was last taken
  #battery = null;
  #why;
  #models = []; // that arrived before the engine

  constructor(page, about) {
    [this.#page, this.#about] = [page, about];
    this.panel = new FederatedPanel(byId("panel-body"), this.#settings, {
      agree: (consent) => this.#agree(consent), change: (name, value) => this.#save({ [name]: value }), act: (kind, message) => this.#act(kind, message),
    });
    this.panel.page(about);
    this.collector = new Collector(byId("text"), () => this.#mayKeep(), (text) => this.#worker?.postMessage({ kind: "keep", text }));
    page.watch = (what) => this.#watched(what);
    const touched = () => { this.#last = performance.now(); };
    for (const kind of ["keydown", "input", "pointerdown"]) document.querySelector("main").addEventListener(kind, touched, { capture: true, passive: true });
    for (const id of ["copy", "share"]) byId(id).addEventListener("click", () => this.collector.take());
    document.addEventListener("visibilitychange", () => document.hidden && this.collector.take());
    nextLink((fragment) => this.#open(fragment));
    window.addEventListener("storage", ({ key }) => key === KEY && this.#elsewhere());
    navigator.getBattery?.().then((battery) => { this.#battery = battery; }, () => {});
    this.#begin();
    setInterval(() => this.#look(), LOOK);
  }

  // ---------------------------------------------------------------- consent

  /** Without consent a worker runs only where something was kept before: to forget it, and to leave. */
  async #begin() {
    const isThere = (await isMade()) ?? localStorage.getItem(KEY) !== null;
    if (isThere) this.panel.isThere = true;
    this.panel.agreed(this.#settings.consent);
    if (isThere || this.#settings.consent) this.#start();
  }

  #agree(consent) {
    this.collector.close(); // what stands there was typed before
    this.#save({ consent });
    this.panel.agreed(consent);
    if (consent) this.#start();
    this.panel.invite(this.link, consent);
  }

  #save(changed) {
    this.#settings = { ...this.#settings, ...changed };
    try {
      const others = localStorage.getItem(KEY) === null ? {} : storedSettings(); // what another tab has changed stays
      localStorage.setItem(KEY, JSON.stringify({ ...this.#settings, ...others, ...changed }));
    } catch {
      this.panel.say("This browser does not remember your choice: it counts until the page is closed.", true);
    }
    this.#changed();
  }

  #changed() {
    this.#act("settings", { settings: this.#settings });
    this.#look();
  }

  /** Another tab has changed what its owner agreed to, or asks for. */
  #elsewhere() {
    const before = this.#settings.consent;
    this.#settings = storedSettings();
    this.panel.settings(this.#settings);
    if (before === this.#settings.consent) return this.#changed();
    this.collector.close();
    this.#changed();
    this.panel.agreed(this.#settings.consent);
    if (this.#settings.consent) this.#start();
    this.panel.invite(this.link, this.#settings.consent);
  }

  // ---------------------------------------------------------------- the worker

  #start() {
    if (this.#worker) return;
    if (!globalThis.crypto?.subtle || !navigator.locks) return this.panel.say("Over plain http a browser lets no page train or take part: open this page over https.", true);
    if (!isGuarded) return this.panel.say(UNGUARDED, true);
    try {
      this.#worker = new Worker(scriptAddress(TRAINING), { type: "module", name: "keyfed training" });
    } catch (error) {
      return this.panel.say(`The browser lets no worker run: ${error.message}`, true);
    }
    this.#worker.onmessage = ({ data }) => this.#received(data);
    this.#worker.onerror = (event) => {
      this.panel.say(`Training does not work here: ${event.message || "its script could not be loaded"}`, true);
      if (!this.#isHeard) this.#worker = null;
    };
    this.#worker.postMessage({ kind: "start", model: new URL("model/", PAGE).href, page: this.#about, settings: this.#settings });
    this.#why = undefined;
    this.#look();
  }

  #act(kind, message = {}) {
    if (this.#worker) this.#worker.postMessage({ kind, ...message });
    else if (kind === "forget") this.#forget();
  }

  /** Forget what was kept where no worker runs. */
  async #forget() {
    try {
      if (!((await isMade()) ?? false)) return;
      const database = await openDatabase();
      await new Kept(database).forget();
      database.close();
      this.#forgotten();
      this.panel.say("What was kept for training is forgotten.");
    } catch (error) {
      if (!(error instanceof Unkept)) throw error;
      this.panel.say(error.message, true);
    }
  }

  /** Nothing of what is in the text field now is kept any more, in this tab or after a reload. */
  #forgotten() {
    this.collector.close();
    this.#page.draft.forget();
    this.panel.forgotten();
  }

  #received(data) {
    this.#isHeard = true;
    if (data.kind === "state") this.panel.show(data.state);
    else if (data.kind === "progress") this.panel.progress(data.work);
    else if (data.kind === "lines") this.panel.lines(data.lines);
    else if (data.kind === "forgotten") this.#forgotten();
    else if (data.kind === "joined") this.#joined();
    else if (data.kind === "trouble") this.panel.say(data.line, true);
    else if (data.kind === "adopt") this.#adopt(data.model);
  }

  /** The strip of the next key is of another model. */
  #adopt(model) {
    if (this.#page.isReady) this.#page.tell("adopt", { model });
    else this.#models = [model];
  }

  #watched(what) {
    if (what === "ready") for (const model of this.#models.splice(0)) this.#adopt(model);
    else if (what === "settings") this.collector.close(); // incognito, or learning, may have been switched
    else if (what.startsWith("forgotten")) this.collector.close();
    if (what === "forgotten") this.#act("forget"); // another tab does it itself
    this.#look();
  }

  // ---------------------------------------------------------------- when it may work

  #mayKeep() {
    const { learn, incognito } = this.#page.settings;
    return this.#settings.consent && learn && !incognito;
  }

  #look() {
    const since = performance.now() - this.#last;
    if (since > LEFT_ALONE && this.#taken !== this.#last) {
      this.#taken = this.#last;
      this.collector.take();
    }
    const why = this.#whyNot(since);
    if (why === this.#why) return;
    this.#why = why;
    this.#worker?.postMessage({ kind: "allow", why });
  }

  #whyNot(since) {
    if (!this.#settings.consent) return "you have not agreed";
    if (this.#page.settings.incognito) return "this is incognito";
    if (document.hidden && !this.#settings.out) return "this tab is out of sight";
    if (this.#battery && !this.#battery.charging && this.#battery.level < LEAST_CHARGE) return `the battery is at ${Math.round(100 * this.#battery.level)} %`;
    return since < IDLE ? "you are typing" : null;
  }

  // ---------------------------------------------------------------- links

  /** Read the fragment of an address: it may be a link to join by. */
  #open(fragment) {
    try {
      this.link = linkOf(fragment, [this.#about.server ?? location.origin, location.origin]);
      if (this.link) this.panel.invite(this.link, this.#settings.consent);
    } catch (error) {
      this.panel.say(error.message, true);
    }
  }

  #joined() {
    this.link = null;
    this.panel.invite(null, this.#settings.consent);
  }
}

const about = await fetch(new URL("page.json", PAGE)).then((answer) => answer.json()).catch(() => null);
if (running && about) {
  const federated = new Federated(running, about);
  federated.panel.note.dataset.ready = "yes";
} else if (running) {
  const lacks = Object.assign(document.createElement("p"), { className: "notice error", id: "federated-note", textContent: "This page cannot train or take part: its page.json is missing or damaged. Load it again, or tell its host." });
  lacks.setAttribute("role", "alert");
  byId("panel-body").prepend(lacks);
}
