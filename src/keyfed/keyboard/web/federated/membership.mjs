/**
 * This page as a client of a federation: it joins by a link, takes part in rounds, and leaves. Of several tabs one takes
 * part; the others tell it what was done in them. "Stop" holds over a reload, until its owner says otherwise.
 */

import { Learner, LIMITS } from "../client/learner.mjs";
import { modelOf, unpack } from "../client/messages.mjs";
import { Session } from "../client/session.mjs";
import { Store } from "../client/store.mjs";
import { Rejected } from "../secure/bytes.mjs";
import { hasCurves } from "../secure/keys.mjs";
import { valuesOf } from "./database.mjs";
import { Away, Endpoint, Refusal } from "./endpoint.mjs";
import { vocabOf } from "./models.mjs";
import { Rounds, wait } from "./rounds.mjs";
import { streamsOf } from "./text.mjs";

const SECOND = 1_000, MOST_HEAD = 16 << 20;
const LEAST_FLOOR = 3; // clients that this one hides among, at least
const LOCK = "keyfed.federated.join"; // one tab joins or leaves at a time
const NO_CURVES = "This browser can train, but cannot join: it lacks Ed25519 or X25519. A current version has both.";
const SILENT = Object.freeze({ line: "", isTrouble: false });

/**
 * @typedef {object} Host  the worker
 * @property {() => object} settings
 * @property {() => string | null} waits  why no work begins now
 * @property {() => boolean} isBusy
 * @property {() => AbortSignal} work  of the work that begins now
 * @property {(isOver: () => boolean, done?: object) => Promise<boolean>} pause
 * @property {(name: string) => void} begin
 * @property {() => void} end
 * @property {() => Promise<{id: number, text: string}[]>} lines
 * @property {(line: string, isTrouble?: boolean) => void} say
 * @property {(line: string) => void} troubled  notes a line for later
 * @property {() => void} show
 * @property {(model: object) => Promise<void>} met
 * @property {() => void} over  a run has ended
 * @property {(kind: string) => void} post  to the page
 * @property {() => void} tell  the other tabs that something has changed here
 * @property {(error: unknown) => void} failed
 */

export class Membership {
  #values; // of the page
  #store;
  #host;
  #page; // its version and hash
  #client = null;
  #isStopped = false;
  #isFirst = false;
  #isJoining = false;
  #stop = new AbortController();
  #isOn = false;
  #last = Promise.resolve(); // ends when those rounds have ended that were stopped
  #rounds = null;
  #session = null;
  #about = null; // {learner, vocab, reading} of the run in progress
  #doing = SILENT;
  #done = null;
  #numbers = null; // of the last upload
  #decide = null; // lets an upload go, or not
  #account = null; // what all uploads together cost
  #server = null; // what it says of itself
  #trusted = "";
  #strangers = null; // the hash of a roster that waits to be trusted
  #kept = { isKnown: false, roster: null };
  #hasCurves; // of this browser

  /** @param {IDBDatabase} database  @param {{version: string, hash: string}} page  @param {Host} host */
  constructor(database, page, host) {
    [this.#values, this.#store] = [valuesOf(database, "page"), new Store(valuesOf(database, "client"))];
    [this.#page, this.#host] = [page, host];
  }

  /** Read what is kept; another tab may have changed it. Then take part, or stop, as it says. */
  async read() {
    this.#hasCurves ??= await hasCurves();
    const [client, isStopped, trusted] = await Promise.all(["client", "stopped", "trusted"].map((key) => this.#values.get(key)));
    const isSame = client?.name === this.#client?.name && client?.server === this.#client?.server;
    [this.#client, this.#isStopped, this.#trusted] = [client ?? null, isStopped === true, trusted ?? ""];
    if (!isSame || this.#isStopped) this.halt();
    await this.#reckon();
    if (!this.#hasCurves) this.#host.say(NO_CURVES, true);
    this.begin();
  }

  /** This tab is the one that takes part. */
  lead() {
    this.#isFirst = true;
    this.begin();
  }

  /** What the panel is shown. */
  get state() {
    return {
      client: this.#client, isFirst: this.#isFirst, isRunning: this.#isOn, isJoining: this.#isJoining, doing: this.#doing, numbers: this.#numbers,
      account: this.#account, server: this.#server, strangers: this.#strangers, ...this.#kept,
    };
  }

  // ---------------------------------------------------------------- joining and leaving

  join(link) {
    if (this.#isJoining) return;
    this.#isJoining = true;
    this.#host.say("Joins …");
    return navigator.locks.request(LOCK, () => this.#join(link)).finally(() => {
      this.#isJoining = false;
      this.#host.show();
    });
  }

  async #join({ token, server, name }) {
    const { say } = this.#host;
    if (!this.#hasCurves) return say(NO_CURVES, true);
    let isAsked = false;
    try {
      const endpoint = new Endpoint(server, await this.#store.identity());
      this.#compare(await endpoint.about());
      isAsked = true;
      const enrolled = await endpoint.enrol(token, name);
      this.halt();
      this.#client = { server, name: enrolled };
      this.#isStopped = false;
      await this.#values.set("client", this.#client);
      await this.#values.delete("stopped");
      this.#host.post("joined");
      this.#host.tell();
      say(`Joined as ${this.#client.name}.`);
      await this.#reckon();
      this.begin();
    } catch (error) {
      await this.#reckon();
      this.#isJoining = false; // the line may be read and answered at once
      if (error instanceof Away) say(`The server is away: press "Join" again later; the same link${isAsked ? " and this page still fit together, if it arrived" : " is not used yet"}.`, true);
      else if (error instanceof Refusal) say(error.type === "link" ? "This link is used, expired or wrong: ask for a new one." : `The server refuses this page: ${error.message}`, true);
      else throw error;
    }
  }

  leave() {
    this.halt();
    return navigator.locks.request(LOCK, () => this.#leave());
  }

  async #leave() {
    const forgotten = "this page has forgotten its keys and its own ε account";
    const client = this.#client;
    this.#client = null;
    try {
      if (client) await new Endpoint(client.server, await this.#store.identity(), client.name).leave();
      this.#host.say(client ? `Left: the server has taken this page off its roster, and ${forgotten}.` : `Left: ${forgotten}.`);
    } catch (error) {
      if (!(error instanceof Away) && !(error instanceof Refusal)) throw error;
      this.#host.say(`Left: ${forgotten}; the server could not be reached, and its roster may still name this page.`, true);
    } finally {
      await this.#last;
      for (const key of ["client", "stopped", "trusted", "trouble"]) await this.#values.delete(key);
      await this.#store.forgetAll();
      [this.#trusted, this.#strangers, this.#numbers, this.#isStopped] = ["", null, null, false];
      this.#host.tell();
      await this.#reckon();
    }
  }

  /** The server knows this page no more. */
  async #lost() {
    this.#client = null;
    for (const key of ["client", "trusted"]) await this.#values.delete(key);
    await this.#store.forgetIdentity();
    [this.#trusted, this.#strangers] = ["", null];
    this.#host.tell();
    await this.#reckon();
  }

  /** Whether the page is that of the server. */
  #compare(about) {
    const { version, hash } = this.#page;
    this.#server = { ...about, isAlike: about.hash === hash };
    if (about.version !== version) this.#host.say(`This page is of keyfed ${version}, the server of ${about.version}: reload the page, or get it again.`, true);
    else if (about.skew) this.#host.say(`This device's clock is ${Math.abs(about.skew)} seconds ${about.skew > 0 ? "slow" : "fast"}; the server's is used.`, true);
  }

  // ---------------------------------------------------------------- taking part

  async go() {
    this.#isStopped = false;
    const noted = this.#values.delete("stopped");
    this.begin();
    await noted;
    this.#host.tell();
  }

  /** Take part no more, also after a reload. */
  async stop() {
    this.halt();
    this.#isStopped = Boolean(this.#client);
    this.#host.say(this.#client ? "Stopped: this page does not take part." : "Stopped.");
    if (!this.#client) return;
    await this.#values.set("stopped", true);
    this.#host.tell();
  }

  /** End what goes on now. */
  halt() {
    this.#stop.abort();
    [this.#isOn, this.#rounds, this.#session, this.#doing] = [false, null, null, SILENT];
  }

  /** Take part, if this page is a client whose owner has agreed and has not stopped it, and this tab is the one. */
  begin() {
    const isWanted = this.#client && this.#isFirst && !this.#isStopped && this.#host.settings().consent;
    if (!isWanted || this.#isOn) return this.#host.show();
    const { signal } = (this.#stop = new AbortController()), client = this.#client;
    this.#isOn = true;
    this.#last = this.#last.then(() => this.#takePart(client, signal)).catch((error) => this.#host.failed(error)).finally(() => {
      if (this.#stop.signal === signal) [this.#isOn, this.#rounds, this.#session] = [false, null, null];
      this.#host.show();
    });
    this.#host.show();
  }

  /** What the owner asks for at least, of the panel. */
  #limits() {
    const { floor, budget } = this.#host.settings();
    return { floor: Math.max(LEAST_FLOOR, floor), budget: budget > 0 ? budget : null };
  }

  /** The owner has changed a setting. */
  settings() {
    this.#session?.limit(this.#limits());
    this.begin();
  }

  /** The owner's text has changed: what was made of it does not leave. */
  textChanged() {
    this.#session?.textChanged();
    this.#rounds?.abandon();
    this.#decide?.(false);
  }

  /** Trust the roster that was shown, from the next message on. */
  async trust({ hash }) {
    this.#trusted = hash;
    if (this.#session) this.#session.trusted = hash;
    if (this.#strangers === hash) this.#strangers = null;
    this.#host.say("This roster is trusted: the page answers when the server asks again.");
    await this.#values.set("trusted", hash);
  }

  async #takePart({ server, name }, signal) {
    if (signal.aborted) return;
    const host = this.#host, endpoint = new Endpoint(server, await this.#store.identity(), name);
    const ready = () => (host.isBusy() ? "another model is being trained" : host.waits());
    const session = new Session(name, this.#store, (about) => this.#learner(about, signal), { ...this.#limits(), ready, trusted: this.#trusted });
    const rounds = new Rounds(endpoint, session, {
      say: (line, isTrouble) => signal.aborted || this.#do(line, isTrouble), why: () => host.waits(), done: () => this.#done, floor: () => this.#limits().floor,
      show: (numbers, until, ends) => this.#ask(numbers, until, ends), met: (body) => this.#met(body), lost: () => this.#lost(),
      over: async () => {
        host.say("The run is over.");
        host.over();
      },
      refused: ({ roster }) => {
        if (roster) this.#strangers = roster;
        this.#reckon().catch(host.failed);
      },
    });
    if (signal.aborted) return;
    [this.#session, this.#rounds] = [session, rounds];
    await this.#reckon();
    for (let failures = 0; !signal.aborted; failures++) {
      const about = await endpoint.about(signal).catch((error) => (error instanceof Refusal ? host.say(error.message, true) : null) ?? null);
      if (about) this.#compare(about);
      if (about || failures > 2) break; // the rounds say what is wrong, and wait
      await wait(SECOND, signal);
    }
    await rounds.run(signal);
  }

  async #learner(about, signal) {
    const vocab = vocabOf(about.vocab), host = this.#host;
    let ends = signal;
    const isOver = () => ends.aborted || (this.#rounds?.isOver ?? true);
    const learner = new Learner(about, streamsOf(await host.lines(), vocab), { limits: LIMITS, pause: (done) => host.pause(isOver, done) });
    this.#reckon().catch(host.failed); // the roster was met
    this.#about = { learner, vocab, reading: about.page.batches.kind === "packed" ? "lines" : "stream" };
    const solve = learner.solve.bind(learner), evaluate = learner.evaluate.bind(learner);
    const within = async (name, work) => {
      host.begin(name);
      ends = AbortSignal.any([signal, host.work()]);
      try {
        return await work();
      } finally {
        host.end();
      }
    };
    learner.solve = (theta, task) => within("training", async () => {
      const done = await solve(theta, task);
      this.#done = { tokens: done.tokens };
      return done;
    });
    learner.evaluate = (theta, part) => within("counting", () => evaluate(theta, part));
    return learner;
  }

  /** A train message was accepted: its model is the newest that there is. */
  async #met(body) {
    const { head, tensors } = unpack(body, MOST_HEAD), { learner, vocab, reading } = this.#about;
    const from = { kind: "federation", run: head.run, name: nameOf(head), digest: head.model };
    await this.#host.met(from, () => ({ model: learner.model, reading, vocab, weights: modelOf(tensors, learner.shapes), from }));
  }

  /** Show what is about to be sent; where the owner wants to be asked, wait for the answer until the deadline. */
  async #ask(numbers, until, signal) {
    const { preview } = this.#host.settings();
    this.#numbers = { ...numbers, isWaiting: preview, isSent: !preview };
    const answer = preview ? new Promise((resolve) => { this.#decide = resolve; }) : true;
    await this.#reckon();
    if (!preview) return true;
    this.#do("An upload waits for your word.");
    const isWanted = await Promise.race([answer, wait(Math.max(0, until - Date.now()), signal).then(() => false)]);
    this.#decide = null;
    this.#numbers = { ...numbers, isWaiting: false, isSent: isWanted };
    this.#host.show();
    return isWanted;
  }

  send({ isWanted }) {
    this.#decide?.(isWanted);
  }

  /** Read what all uploads of this page cost together, and what it keeps as a client. */
  async #reckon() {
    this.#kept = { isKnown: await this.#store.isKnown(), roster: await this.#store.roster() };
    try {
      this.#account = await this.#store.ledger(this.#limits().budget).shown();
    } catch (error) {
      if (!(error instanceof Rejected)) throw error;
      this.#host.say(`The account of what left this page cannot be read (${error.detail}).`, true);
    }
    this.#host.show();
  }

  #do(line, isTrouble = false) {
    if (line === this.#doing.line) return;
    this.#doing = { line, isTrouble };
    if (isTrouble) this.#host.troubled(line);
    this.#host.show();
  }
}

/** What the model of a message is called. The test text is counted with the model that the run has chosen. */
const nameOf = ({ purpose, evaluate, round }) =>
  (purpose !== "evaluation" ? `its model after ${round} rounds` : evaluate === "test" ? "its final model" : "its latest model");
