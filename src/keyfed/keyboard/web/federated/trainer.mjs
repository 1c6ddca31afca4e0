/**
 * The worker of a page that trains: it keeps the text, tunes the model to this person, and takes part in a federation.
 * The page starts it when its owner has agreed. It works only while the page says that it may: no key is being typed,
 * the battery is charged, the day's minutes are not used up, this is not incognito.
 */

import { Rejected } from "../secure/bytes.mjs";
import { openDatabase, Unkept, valuesOf, within } from "./database.mjs";
import { Membership } from "./membership.mjs";
import { exportedModel, look, tuned } from "./models.mjs";
import { wait } from "./rounds.mjs";
import { isHeld, Kept, MOST, TUNED, worthKeeping } from "./text.mjs";

const SECOND = 1_000, MINUTE = 60 * SECOND, NOTED = 5 * SECOND; // of work, between two notes of how much it was
const TABS = "keyfed.federated"; // the name of the lock, by which one tab is the client, and of the channel between tabs
const IDLE = Object.freeze({ name: "", step: 0, steps: 0 });
const WITHDRAWN = "Nothing more is kept or trained. What was kept is still here until you forget it.";

class Trainer {
  #database;
  #values; // of the page
  #kept;
  #member;
  #tabs; // the other tabs of this page
  #address; // of the export
  #exported = null;
  #using; // the model in the strip
  #settings;
  #why = "the page has just been opened";
  #day = { day: "", worked: 0 };
  #since = 0; // when the work in hand began or was noted last
  #now = new AbortController(); // of the work in hand
  #work = IDLE;
  #line = "";
  #isTrouble = false;
  #trouble = null; // {line, at}: the last one
  #last = null; // the last model of a run
  #offered = null; // a model that waits for the owner's word, and how it does
  #tune = null; // how the tuned model does
  #lines = { lines: 0, held: 0, bytes: 0 };

  /** @param {{model: string, page: {version: string, hash: string}, settings: object}} start */
  async start({ model, page, settings }) {
    [this.#address, this.#settings] = [model, settings];
    this.#database = await openDatabase(() => this.#say("This browser has cleared what this page kept: reload it, and join again with a new link.", true));
    this.#values = valuesOf(this.#database, "page");
    this.#kept = new Kept(this.#database);
    this.#member = new Membership(this.#database, page, this.#host());
    const kept = await Promise.all(["day", "last", TUNED, "shared", "trouble"].map((key) => this.#values.get(key)));
    [this.#day, this.#last, this.#trouble] = [kept[0] ?? this.#day, kept[1] ?? null, kept[4] ?? null];
    this.#using = kept[2] ?? kept[3] ?? null;
    if (this.#using) post("adopt", { model: this.#using });
    await this.#count();
    this.#tabs = new BroadcastChannel(TABS);
    this.#tabs.onmessage = ({ data }) => this.#heard(data).catch(trouble);
    await this.#member.read();
    navigator.locks.request(TABS, async () => {
      this.#member.lead();
      await new Promise(() => {}); // until the tab closes
    });
  }

  /** @returns {import("./membership.mjs").Host} */
  #host() {
    return {
      settings: () => this.#settings, waits: () => this.#waits(), isBusy: () => Boolean(this.#work.name), work: () => this.#now.signal,
      pause: (isOver, done) => this.#pause(isOver, done), begin: (name) => this.#begin(name), end: () => this.#end(), lines: () => this.#kept.lines(),
      say: (line, isTrouble) => this.#say(line, isTrouble), troubled: (line) => this.#troubled(line), show: () => this.#show(),
      met: (from, make) => this.#met(from, make), over: () => this.consider().catch(trouble), // the server's message is answered first
      post, tell: () => this.#tabs.postMessage({ kind: "client" }), failed: trouble,
    };
  }

  /** Another tab of this page has done something. */
  async #heard({ kind, day }) {
    if (kind === "day") this.#day = day;
    else if (kind === "client") await this.#member.read();
    else if (kind === "removed") {
      this.#abandon();
      await this.#count();
    } else if (kind === "forgotten") await this.#forgotten();
    this.#show();
  }

  // ---------------------------------------------------------------- what the page asks for

  settings({ settings }) {
    const hadConsent = this.#settings.consent;
    this.#settings = settings;
    if (hadConsent && !settings.consent) {
      this.#now.abort();
      this.#member.halt();
      this.#say(WITHDRAWN);
    } else if (!hadConsent && settings.consent && this.#line === WITHDRAWN) this.#say("");
    this.#member.settings();
    this.#show();
  }

  allow({ why }) {
    if (why === this.#why) return;
    this.#why = why;
    this.#show();
  }

  async keep({ text }) {
    const lines = worthKeeping(text);
    if (!lines.length || !this.#settings.consent) return;
    await this.#kept.add(lines);
    await this.#count();
    this.#show();
  }

  async list() {
    post("lines", { lines: (await this.#kept.lines()).reverse() });
  }

  async remove({ id }) {
    await this.#kept.remove(id);
    this.#abandon();
    this.#tabs.postMessage({ kind: "removed" });
    await this.#count();
    await this.list();
    if (this.#using?.from.kind === "tuned") this.#say("The line is forgotten. The model that was tuned to you may still know it: tune it again, or use the shared one.");
    this.#show();
  }

  /** Forget the text, and the model that was tuned to it. */
  async forget() {
    await this.#kept.forget();
    await this.#forgotten();
    this.#tabs.postMessage({ kind: "forgotten" });
    this.#say("What was kept for training is forgotten, and so is the model that was tuned to it.");
  }

  async #forgotten() {
    this.#abandon();
    this.#tune = null;
    await this.#values.delete(TUNED); // this tab may just have written it
    await this.#use((await this.#values.get("shared")) ?? null);
    await this.#count();
    post("forgotten");
  }

  /** The text has changed: what is being made of it ends, and nothing that was made of it leaves. */
  #abandon() {
    this.#now.abort();
    this.#now = new AbortController();
    this.#member.textChanged();
  }

  /** Stop the work in hand. Work for a round would begin again in the next one: the page stops taking part. */
  async end() {
    this.#now.abort();
    this.#now = new AbortController();
    if (["training", "counting"].includes(this.#work.name)) await this.#member.stop();
    else this.#say("Stopped.");
  }

  stop() {
    return this.#member.stop();
  }

  go() {
    return this.#member.go();
  }

  join(link) {
    if (this.#settings.consent) return this.#member.join(link);
  }

  async leave() {
    this.#trouble = null;
    await this.#member.leave();
  }

  send(answer) {
    this.#member.send(answer);
  }

  trust(roster) {
    return this.#member.trust(roster);
  }

  // ---------------------------------------------------------------- the model of this person

  async tune() {
    if (this.#work.name || !this.#settings.consent) return;
    this.#begin("tuning");
    const { signal } = this.#now, pause = (done) => this.#pause(() => signal.aborted, done);
    try {
      const lines = await this.#kept.lines(), shared = await this.#shared();
      const made = await tuned(shared, lines, pause);
      this.#begin("looking");
      const seen = await look(shared, made.model, lines, pause);
      if (signal.aborted) return;
      this.#tune = { seen, isTaken: !seen?.isWorse };
      if (seen?.isWorse) this.#say("The model that was tuned here does worse on your held-back lines: it is not used.", true);
      else {
        await this.#values.set(TUNED, made.model);
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
    await this.#values.delete(TUNED);
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
    const { signal } = this.#now;
    try {
      const lines = await this.#kept.lines(), before = this.#using ?? (await this.#shared());
      const seen = await look(before, last, lines, (done) => this.#pause(() => signal.aborted, done));
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
    await this.#values.delete(TUNED);
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

  /** The newest model that there is. */
  async #met(from, make) {
    if (this.#last?.from.name === from.name && this.#last.from.digest === from.digest) return;
    [this.#last, this.#offered] = [make(), null];
    await this.#values.set("last", this.#last).catch((error) => this.#say(error.message, true)); // it is still in memory
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
    if (this.#now.signal.aborted) this.#now = new AbortController();
    this.#work = { ...IDLE, name };
    this.#since = performance.now();
    this.#note(true).catch(trouble); // reads what other tabs have worked
    this.#show();
  }

  #end() {
    this.#work = IDLE;
    this.#note(true).catch(trouble);
    this.#show();
  }

  /** Book the time that was worked, in any tab. */
  async #note(isEnd = false) {
    const now = performance.now(), worked = now - this.#since;
    if (!isEnd && worked < NOTED) return;
    this.#since = now;
    this.#left();
    const { day } = this.#day;
    this.#day = await within(this.#database, "page", "readwrite", async (store, done) => {
      const before = await done(store.get("day")), after = { day, worked: (before?.day === day ? before.worked : 0) + worked };
      store.put(after, "day");
      return after;
    });
    this.#tabs.postMessage({ kind: "day", day: this.#day });
    this.#show();
  }

  /** Between two steps: lets messages in, waits while it may not work; false: stop. */
  async #pause(isOver, done) {
    if (done?.steps) this.#work = { ...this.#work, step: done.step, steps: done.steps, epoch: done.epoch + 1, nats: done.nats / Math.max(1, done.tokens) };
    await this.#note();
    post("progress", { work: this.#work });
    await wait(0);
    if (this.#waits() !== null) await this.#note(true);
    while (!isOver() && this.#waits() !== null) {
      post("progress", { work: { ...this.#work, waits: this.#waits() } });
      await wait(SECOND / 2);
      this.#since = performance.now();
    }
    return !isOver();
  }

  // ---------------------------------------------------------------- what the page shows

  async #count() {
    const lines = await this.#kept.lines();
    this.#lines = { lines: lines.length, held: lines.filter(isHeld).length, bytes: lines.reduce((sum, { text }) => sum + text.length, 0), most: MOST.lines };
  }

  #say(line, isTrouble = false) {
    if (line === this.#line && isTrouble === this.#isTrouble) return;
    [this.#line, this.#isTrouble] = [line, isTrouble];
    if (isTrouble) this.#troubled(line);
    this.#show();
  }

  /** Note what went wrong: the line itself is soon another one. */
  #troubled(line) {
    this.#trouble = { line, at: Date.now() };
    this.#values.set("trouble", this.#trouble).catch(() => {}); // without room it is only shown
  }

  #show() {
    post("state", {
      state: {
        kept: this.#lines, work: this.#work, line: this.#line, isTrouble: this.#isTrouble, trouble: this.#trouble, waits: this.#waits(),
        using: this.#using?.from ?? { kind: "export" }, tune: this.#tune, arrived: this.#last?.from ?? null, offered: this.#offered,
        minutes: { worked: this.#day.worked / MINUTE, most: this.#settings.minutes }, ...this.#member.state,
      },
    });
  }
}

const post = (kind, more = {}) => self.postMessage({ kind, ...more });
const trouble = (error) => post("trouble", { line: error instanceof Unkept ? error.message : `Something went wrong: ${error?.message ?? error}` });
const ASKED = ["start", "settings", "allow", "keep", "list", "remove", "forget", "end", "stop", "go", "tune", "undo", "consider", "take", "refuse", "join", "leave", "send", "trust"];
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
