/**
 * The worker of a page that trains: it keeps the text, tunes the model to this person, and takes part in a federation.
 * The page starts it when its owner has agreed. It works only while the page says that it may: no key is being typed,
 * the battery is charged, the day's minutes are not used up, this is not incognito.
 */

import { modelOf, unpack } from "../client/messages.mjs";
import { Session } from "../client/session.mjs";
import { Store } from "../client/store.mjs";
import { Learner, LIMITS } from "../client/learner.mjs";
import { Rejected } from "../secure/bytes.mjs";
import { openDatabase, Unkept, valuesOf } from "./database.mjs";
import { Away, Endpoint, Refusal } from "./endpoint.mjs";
import { exportedModel, look, tuned, vocabOf } from "./models.mjs";
import { Rounds, wait } from "./rounds.mjs";
import { isHeld, Kept, MOST, streamsOf, worthKeeping } from "./text.mjs";

const FLOOR = 3; // clients that this one hides among, at least
const SECOND = 1_000, MINUTE = 60 * SECOND, NOTED = 5 * SECOND; // of work, between two notes of how much it was
const MOST_HEAD = 16 << 20;
const TAB = "keyfed.federated"; // the name of the lock: one tab is the client
const IDLE = Object.freeze({ name: "", step: 0, steps: 0 });

class Trainer {
  #database;
  #values; // of the page
  #kept;
  #address; // of the export
  #exported = null;
  #using; // the model in the strip
  #settings;
  #why = "the page has just been opened";
  #day = { day: "", worked: 0 };
  #since = 0; // when the work in hand began or was noted last
  #stop = new AbortController(); // of taking part and of tuning
  #isFirst = false;
  #isJoining = false;
  #work = IDLE;
  #line = "";
  #isTrouble = false;
  #doing = { line: "", isTrouble: false }; // of taking part
  #client = null;
  #last = null; // the last model of a run
  #offered = null; // a model that waits for the owner's word, and how it does
  #tune = null; // how the tuned model does
  #done = null;
  #numbers = null; // of the last upload
  #account = null; // what all uploads together cost
  #session = null;
  #decide = null; // lets an upload go, or not
  #about = null; // of the run in progress
  #lines = { lines: 0, held: 0, bytes: 0 };
  #server = null; // what it says of itself
  #rounds = null; // while this page takes part
  #tabs = new BroadcastChannel(TAB);
  #page; // its version and hash

  /** @param {{model: string, page: {version: string, hash: string}, settings: object}} start */
  async start({ model, page, settings }) {
    [this.#address, this.#page, this.#settings] = [model, page, settings];
    this.#database = await openDatabase(() => this.#say("This browser has cleared what this page kept: reload it, and join again with a new link.", true));
    this.#values = valuesOf(this.#database, "page");
    this.#kept = new Kept(this.#database);
    const kept = await Promise.all(["client", "day", "last", "tuned", "shared"].map((key) => this.#values.get(key)));
    [this.#client, this.#day, this.#last] = [kept[0] ?? null, kept[1] ?? this.#day, kept[2] ?? null];
    this.#using = kept[3] ?? kept[4] ?? null;
    if (this.#using) post("adopt", { model: this.#using });
    await this.#count();
    this.#show();
    this.#tabs.onmessage = () => this.#forgot().catch(trouble);
    navigator.locks.request(TAB, async () => {
      this.#isFirst = true;
      this.#takePart();
      await new Promise(() => {}); // until the tab closes
    });
  }

  // ---------------------------------------------------------------- what the page asks for

  settings({ settings }) {
    this.#settings = settings;
    this.#show();
  }

  allow({ why }) {
    if (why === this.#why) return;
    this.#why = why;
    this.#show();
  }

  async keep({ text }) {
    const lines = worthKeeping(text);
    if (!lines.length) return;
    await this.#kept.add(lines);
    await this.#count();
    this.#show();
  }

  async list() {
    post("lines", { lines: (await this.#kept.lines()).reverse() });
  }

  async remove({ id }) {
    await this.#kept.remove(id);
    await this.#count();
    await this.list();
    this.#show();
  }

  /** Forget the text, and the model that was tuned to it. */
  async forget() {
    this.#halt();
    await this.#kept.forget();
    await this.#values.delete("tuned");
    this.#tabs.postMessage("forgotten");
    await this.#forgot();
  }

  /** Here or in another tab: nothing made of the forgotten text is used on. */
  async #forgot() {
    this.#halt();
    await this.#use((await this.#values.get("shared")) ?? null);
    this.#tune = null;
    await this.#count();
    this.#say("What was kept for training is forgotten, and so is the model that was tuned to it.");
    this.#takePart();
    post("forgotten");
  }

  /** Stop whatever is being done; taking part begins again with `go`. */
  stop({ line = this.#client ? "Stopped: this page does not take part." : "Stopped." }) {
    this.#halt();
    this.#say(line);
  }

  go() {
    this.#takePart();
  }

  // ---------------------------------------------------------------- the model of this person

  async tune() {
    if (this.#work.name) return;
    const { signal } = this.#stop, lines = await this.#kept.lines();
    this.#begin("tuning");
    try {
      const shared = await this.#shared(), pause = (done) => this.#pause(signal, done);
      const made = await tuned(shared, lines, pause);
      this.#begin("looking");
      const seen = await look(shared, made.model, lines, pause);
      this.#tune = { seen, isTaken: !seen?.isWorse };
      if (seen?.isWorse) this.#say("The model that was tuned here does worse on your held-back lines: it is not used.", true);
      else {
        await this.#values.set("tuned", made.model);
        await this.#use(made.model);
        this.#say("The strip is of your own model now. Nothing was sent.");
      }
    } catch (error) {
      if (!(error instanceof Rejected)) throw error;
      this.#say(error.reason === "no text" ? "There is too little kept text to tune the model with: write some more." : `Tuning stopped (${error.detail}).`, error.reason !== "not now");
    } finally {
      this.#end();
    }
  }

  /** Put the shared model back into the strip. */
  async undo() {
    await this.#values.delete("tuned");
    this.#tune = null;
    await this.#use((await this.#values.get("shared")) ?? null);
    this.#say("The strip is of the shared model again.");
  }

  /** The model that all have: of the last federation, or of the export. */
  async #shared() {
    return (await this.#values.get("shared")) ?? (this.#exported ??= await exportedModel(this.#address));
  }

  async #use(model) {
    this.#using = model;
    post("adopt", { model });
    this.#show();
  }

  // ---------------------------------------------------------------- a model that arrived

  /** Look at the last model of a run, and take it, unless it does worse for this person. */
  async consider() {
    const last = this.#last;
    if (!last || this.#work.name) return;
    this.#begin("looking");
    const { signal } = this.#stop;
    try {
      const lines = await this.#kept.lines(), before = this.#using ?? (await this.#shared());
      const seen = await look(before, last, lines, (done) => this.#pause(signal, done));
      if (this.#last !== last) return;
      this.#offered = { seen, isTaken: false };
      if (seen?.isWorse) this.#say("The new model does worse on your held-back lines: look at the figures, then take it or refuse it.", true);
      else await this.take();
    } catch (error) {
      if (!(error instanceof Rejected)) throw error;
      this.#say(`The new model was not looked at (${error.detail}); it is not used yet.`, true);
    } finally {
      this.#end();
    }
  }

  async take() {
    const last = this.#last;
    if (!last) return;
    await this.#values.set("shared", last);
    await this.#values.delete("tuned");
    [this.#last, this.#offered, this.#tune] = [null, this.#offered && { ...this.#offered, isTaken: true }, null];
    await this.#values.delete("last");
    await this.#use(last);
    this.#say(`The strip is of the federation's model now (${last.from.name}).`);
  }

  async refuse() {
    [this.#last, this.#offered] = [null, null];
    await this.#values.delete("last");
    this.#say("The new model is refused and forgotten; the strip stays as it is.");
  }

  /** A train message was accepted: its model is the newest that there is. */
  async #met(body) {
    const { head, tensors } = unpack(body, MOST_HEAD), { learner, vocab, reading } = this.#about;
    const from = { kind: "federation", run: head.run, name: nameOf(head), digest: head.model };
    if (this.#last?.from.name === from.name && this.#last.from.digest === from.digest) return;
    this.#last = { model: learner.model, reading, vocab, weights: modelOf(tensors, learner.shapes), from };
    this.#offered = null;
    await this.#values.set("last", this.#last).catch((error) => this.#say(error.message, true)); // it is still in memory
  }

  // ---------------------------------------------------------------- taking part

  async join({ token, server, name }) {
    if (this.#isJoining) return;
    this.#isJoining = true;
    this.#say("Joins …");
    try {
      const store = this.#store(), endpoint = new Endpoint(server, await store.identity());
      this.#compare(await endpoint.about());
      const enrolled = await endpoint.enrol(token, name);
      this.#client = { server, name: enrolled };
      await this.#values.set("client", this.#client);
      post("joined");
      this.#say(`Joined as ${enrolled}.`);
      this.#takePart();
    } catch (error) {
      if (error instanceof Away) this.#say("The server is away: try the link again later; it is not used yet.", true);
      else if (error instanceof Refusal) this.#say(error.type === "link" ? "This link is used, expired or wrong: ask for a new one." : `The server refuses this page: ${error.message}`, true);
      else throw error;
    } finally {
      this.#isJoining = false;
      this.#show();
    }
  }

  async leave() {
    this.#halt();
    try {
      await this.#leaveServer();
      this.#say("Left: the server has taken this page off its roster, and this page has forgotten its keys.");
    } catch (error) {
      if (!(error instanceof Away) && !(error instanceof Refusal)) throw error;
      this.#say("This page has forgotten its keys and takes part no more; the server could not be reached, its roster may still name it.", true);
    }
  }

  async #leaveServer() {
    const { server, name } = this.#client, endpoint = new Endpoint(server, await this.#store().identity(), name);
    const client = valuesOf(this.#database, "client");
    this.#client = null;
    try {
      await endpoint.leave();
    } finally {
      await this.#values.delete("client");
      for (const key of await client.keys()) await client.delete(key);
      this.#show();
    }
  }

  #store() {
    return new Store(valuesOf(this.#database, "client"));
  }

  /** Whether the page is that of the server. */
  #compare(about) {
    const { version, hash } = this.#page;
    this.#server = { ...about, isAlike: about.hash === hash };
    if (about.version !== version) this.#say(`This page is of keyfed ${version}, the server of ${about.version}: reload the page, or get it again.`, true);
    else if (about.skew) this.#say(`This device's clock is ${Math.abs(about.skew)} seconds ${about.skew > 0 ? "slow" : "fast"}; the server's is used.`, true);
  }

  async #takePart() {
    if (!this.#client || !this.#isFirst || this.#rounds) return this.#show();
    const { signal } = this.#stop, { server, name } = this.#client;
    const store = this.#store(), endpoint = new Endpoint(server, await store.identity(), name);
    const ready = () => (this.#work.name ? "another model is being trained" : this.#waits());
    const session = (this.#session = new Session(name, store, (about) => this.#learner(about, signal), { floor: FLOOR, ready }));
    const rounds = (this.#rounds = new Rounds(endpoint, session, {
      say: (line, isTrouble) => this.#do(line, isTrouble), why: () => this.#waits(), done: () => this.#done, floor: () => FLOOR,
      show: (numbers, until, stopped) => this.#before(numbers, until, stopped),
      met: (body) => this.#met(body), over: () => this.#ended(),
      lost: () => {
        this.#client = null;
        this.#values.delete("client").catch(trouble);
      },
    }));
    await this.#reckon();
    for (let failures = 0; !signal.aborted; failures++) {
      const about = await endpoint.about(signal).catch((error) => (error instanceof Refusal ? this.#say(error.message, true) : null) ?? null);
      if (about) this.#compare(about);
      if (about || failures > 2) break; // the rounds say what is wrong, and wait
      await wait(SECOND, signal);
    }
    await rounds.run(signal);
    if (this.#rounds === rounds) this.#rounds = null;
    else return;
    this.#show();
  }

  async #learner(about, signal) {
    const vocab = vocabOf(about.vocab), lines = await this.#kept.lines();
    const learner = new Learner(about, streamsOf(lines, vocab), { limits: LIMITS, pause: (done) => this.#pause(signal, done) });
    this.#about = { learner, vocab, reading: about.page.batches.kind === "packed" ? "lines" : "stream" };
    const solve = learner.solve.bind(learner);
    learner.solve = async (theta, task) => {
      this.#begin("training");
      try {
        const done = await solve(theta, task);
        this.#done = { tokens: done.tokens };
        return done;
      } finally {
        this.#end();
      }
    };
    return learner;
  }

  /** Show what is about to be sent; where the owner wants to be asked, wait for the answer until the deadline. */
  async #before(numbers, until, signal) {
    this.#numbers = { ...numbers, isWaiting: this.#settings.preview, isSent: !this.#settings.preview };
    await this.#reckon();
    if (!this.#settings.preview) return true;
    this.#do("An upload waits for your word.");
    const isWanted = await Promise.race([new Promise((resolve) => { this.#decide = resolve; }), wait(Math.max(0, until - Date.now()), signal).then(() => false)]);
    this.#decide = null;
    this.#numbers = { ...numbers, isWaiting: false, isSent: isWanted };
    this.#show();
    return isWanted;
  }

  /** Read what all uploads of this page cost together. */
  async #reckon() {
    try {
      this.#account = await this.#session.account();
    } catch (error) {
      if (!(error instanceof Rejected)) throw error;
      this.#say(`The account of what left this page cannot be read (${error.detail}).`, true);
    }
    this.#show();
  }

  send({ isWanted }) {
    this.#decide?.(isWanted);
  }

  async #ended() {
    this.#say("The run is over.");
    this.consider().catch(trouble); // the server's message is answered first
  }

  // ---------------------------------------------------------------- when it works

  /** Why no work begins now; null: it may. */
  #waits() {
    if (this.#why !== null) return this.#why;
    return this.#left() > 0 ? null : `today's ${this.#settings.minutes} minutes are used`;
  }

  #left() {
    const day = new Date().toDateString();
    if (this.#day.day !== day) this.#day = { day, worked: 0 };
    return this.#settings.minutes * MINUTE - this.#day.worked;
  }

  #begin(name) {
    this.#work = { ...IDLE, name };
    this.#since = performance.now();
    this.#show();
  }

  #end() {
    this.#work = IDLE;
    this.#note(true).catch(trouble);
    this.#show();
  }

  /** Book the time that was worked. */
  async #note(isEnd = false) {
    const now = performance.now();
    if (!isEnd && now - this.#since < NOTED) return;
    this.#left();
    this.#day.worked += now - this.#since;
    this.#since = now;
    await this.#values.set("day", this.#day);
  }

  /** Between two steps: lets messages in, waits while it may not work; false: stop. */
  async #pause(signal, done) {
    if (done?.steps) this.#work = { ...this.#work, step: done.step, steps: done.steps, epoch: done.epoch + 1, nats: done.nats / Math.max(1, done.tokens) };
    await this.#note();
    post("progress", { work: this.#work });
    await wait(0, signal);
    while (!signal.aborted && this.#waits() !== null) {
      await this.#note(true);
      post("progress", { work: { ...this.#work, waits: this.#waits() } });
      await wait(SECOND / 2, signal);
      this.#since = performance.now();
    }
    return !signal.aborted;
  }

  #halt() {
    this.#stop.abort();
    [this.#rounds, this.#doing] = [null, { line: "", isTrouble: false }];
    this.#stop = new AbortController();
  }

  // ---------------------------------------------------------------- what the page shows

  async #count() {
    const lines = await this.#kept.lines();
    this.#lines = { lines: lines.length, held: lines.filter(isHeld).length, bytes: lines.reduce((sum, { text }) => sum + text.length, 0), most: MOST.lines };
  }

  #say(line, isTrouble = false) {
    if (line === this.#line && isTrouble === this.#isTrouble) return;
    [this.#line, this.#isTrouble] = [line, isTrouble];
    this.#show();
  }

  #do(line, isTrouble = false) {
    if (line === this.#doing.line) return;
    this.#doing = { line, isTrouble };
    this.#show();
  }

  #show() {
    post("state", {
      state: {
        kept: this.#lines, work: this.#work, line: this.#line, isTrouble: this.#isTrouble, waits: this.#waits(), client: this.#client,
        isFirst: this.#isFirst, isRunning: Boolean(this.#rounds), doing: this.#doing, isJoining: this.#isJoining, using: this.#using?.from ?? { kind: "export" },
        tune: this.#tune, numbers: this.#numbers, account: this.#account, arrived: this.#last?.from ?? null, offered: this.#offered, server: this.#server,
        minutes: { worked: this.#day.worked / MINUTE, most: this.#settings.minutes },
      },
    });
  }
}

/** What the model of a message is called. The test text is counted with the model that the run has chosen. */
const nameOf = ({ purpose, evaluate, round }) =>
  (purpose !== "evaluation" ? `its model after ${round} rounds` : evaluate === "test" ? "its final model" : "its latest model");
const post = (kind, more = {}) => self.postMessage({ kind, ...more });
const trouble = (error) => post("trouble", { line: error instanceof Unkept ? error.message : `Something went wrong: ${error?.message ?? error}` });
const ASKED = ["start", "settings", "allow", "keep", "list", "remove", "forget", "stop", "go", "tune", "undo", "consider", "take", "refuse", "join", "leave", "send"];
const trainer = new Trainer();
let started = null;

self.onmessage = async ({ data }) => {
  try {
    if (!ASKED.includes(data.kind)) throw new Error(`there is nothing named ${data.kind}`);
    if (data.kind === "start") started = trainer.start(data);
    await started;
    if (data.kind !== "start") await trainer[data.kind](data);
  } catch (error) {
    trouble(error);
  }
};
