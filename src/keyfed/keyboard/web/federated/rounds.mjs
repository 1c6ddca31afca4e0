/**
 * Taking part: waits for the server's messages, has them answered by the session, and sends the answers. A page that is
 * closed, sleeps or is stopped in a round is a drop-out: the others' sum opens without it.
 */

import { unpack } from "../client/messages.mjs";
import { hex, Rejected } from "../secure/bytes.mjs";
import { readTensors } from "../decoder/safetensors.mjs";
import { SIGNATURE_BYTES } from "../secure/keys.mjs";
import { Away, Refusal } from "./endpoint.mjs";

const SECOND = 1_000, LONGEST_WAIT = 60 * SECOND, ROUND = 180 * SECOND; // a round is followed, whatever else happens
const SLEPT = "This tab slept; a round may have gone on without it.";
const LATE = "This page was too late for that round, which went on without it.";
const MARGIN = 2 * SECOND; // before a deadline
const MOST_TIMER = 2 ** 31 - 1; // milliseconds; a timer of more ends at once
const MOST_HEAD = 16 << 20, SHOWN = 16; // bytes of a masked vector that are shown

/** Wait; false: stopped. @param {number} milliseconds @param {AbortSignal} [signal] */
export function wait(milliseconds, signal) {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve(false);
    const timer = setTimeout(() => over(true), milliseconds);
    const stopped = () => over(false);
    const over = (isDone) => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", stopped);
      resolve(isDone);
    };
    signal?.addEventListener("abort", stopped);
  });
}

/** What an upload says to the one who makes it: plain numbers, and the first bytes under the masks. */
export function numbersOf(answer, { run, round, purpose, members, threshold, floor }, done) {
  const { tensors } = unpack(answer, MOST_HEAD), { data } = readTensors(tensors.subarray(0, -SIGNATURE_BYTES)).get("masked");
  return {
    run, round: purpose === "evaluation" ? null : round + 1, purpose, members, amongAtLeast: Math.max(threshold, floor), bytes: answer.length, words: data.length,
    first: hex(new Uint8Array(data.buffer, data.byteOffset, Math.min(SHOWN, data.byteLength))),
    tokens: purpose === "evaluation" ? null : done?.tokens ?? null,
  };
}

/**
 * @typedef {object} Surroundings
 * @property {(line: string, isTrouble?: boolean) => void} say
 * @property {() => string | null} why  why the page does not take part now; null: it does
 * @property {() => {tokens: number} | null} done  what was trained for the round
 * @property {() => number} floor
 * @property {(numbers: object, until: number, signal: AbortSignal) => Promise<boolean>} show  what is about to be sent; false: it is not sent
 * @property {(body: Uint8Array) => Promise<void>} met  a model arrived, and the session has accepted it
 * @property {(run: string) => Promise<void>} over    a run has ended
 * @property {(error: Rejected) => void} refused  this page refuses to answer
 * @property {() => Promise<void>} lost  the server does not know this page any more
 */

/** A page that takes part, as long as `run` runs. */
export class Rounds {
  #endpoint;
  #session;
  #to;
  #until = 0; // the page is in a round
  #terms = null; // of the round in progress
  #end = new AbortController(); // of the message in hand: its answer is not awaited any more
  #unsent = null; // {id, deadline, answer}: an answer of which it is not known that it arrived

  /** @param {import("./endpoint.mjs").Endpoint} endpoint  @param {import("../client/session.mjs").Session} session  @param {Surroundings} to */
  constructor(endpoint, session, to) {
    [this.#endpoint, this.#session, this.#to] = [endpoint, session, to];
  }

  /** Whether a message was answered lately that others wait for. */
  get isInRound() {
    return Date.now() < Math.max(this.#until, this.#unsent?.deadline ?? 0);
  }

  /** Whether the message in hand is dead: work for it ends. */
  get isOver() {
    return this.#end.signal.aborted;
  }

  /** The owner has changed the text: an upload that was made of it does not leave. */
  abandon() {
    if (this.#unsent?.kind !== "upload" || !(this.#unsent.answer instanceof Uint8Array)) return;
    this.#end.abort();
    this.#unsent = null;
    this.#to.say("The upload was stopped: the text has changed.");
  }

  /** Take part until stopped. @param {AbortSignal} signal */
  async run(signal) {
    for (let failures = 0; !signal.aborted; ) {
      const why = this.isInRound ? null : this.#to.why();
      if (why !== null) {
        this.#to.say(`Waits: ${why}.`);
        await wait(SECOND, signal);
        continue;
      }
      if (!this.isInRound) this.#to.say("Takes part: waits for a round.");
      const from = Date.now();
      try {
        const message = await this.#endpoint.next(signal);
        failures = 0;
        if (Date.now() - from > LONGEST_WAIT) this.#to.say(SLEPT, true);
        if (message) await this.#work(message, signal);
        else await wait(from + SECOND - Date.now(), signal); // a server may say at once that there is none
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Away && Date.now() - from > LONGEST_WAIT) this.#to.say(SLEPT, true);
        else if (!(await this.#failed(error, failures++, signal))) return;
      }
    }
  }

  /** Say what went wrong, and wait; false: this is the end of taking part. */
  async #failed(error, failures, signal) {
    const pause = Math.min(LONGEST_WAIT, SECOND * 2 ** failures), soon = `tried again in ${Math.round(pause / SECOND)} s`;
    if (error instanceof Away) this.#to.say(`The server is away (${error.message}); ${soon}. Nothing is lost.`, true);
    else if (!(error instanceof Refusal)) throw error;
    else if (error.type === "not enrolled") {
      this.#to.say("The server does not know this page any more. Its keys are deleted, its own ε stays counted: join again with a new link.", true);
      await this.#to.lost();
      return false;
    } else if (error.type === "late") this.#to.say(LATE, true);
    else if (error.type === "clock") this.#to.say(`This device's clock is off (${error.message}); ${soon}.`, true);
    else if (error.type === "elsewhere") this.#to.say(`Another window takes part under this name; ${soon}.`, true);
    else this.#to.say(`The server refuses (${error.type}: ${error.message}); ${soon}.`, true);
    return wait(pause, signal);
  }

  /** Answer a message. One whose answer may not have arrived comes again, and so does its answer. */
  async #work(message, signal) {
    const over = (this.#end = new AbortController()), both = AbortSignal.any([signal, over.signal]);
    const timer = setTimeout(() => over.abort(), Math.min(message.deadline - Date.now(), MOST_TIMER));
    try {
      if (this.#unsent?.id !== message.id) {
        this.#unsent = null;
        const answer = await this.#whileAlive(message, both);
        this.#unsent = answer && { ...message, body: null, answer };
      }
      signal.throwIfAborted();
      if (over.signal.aborted) this.#to.say(LATE, true);
      else if (this.#unsent) await this.#send(both);
      this.#unsent = null;
    } catch (error) {
      if (over.signal.aborted || (error instanceof Refusal && error.type !== "clock")) this.#unsent = null;
      if (!over.signal.aborted) throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  async #send(signal) {
    const { kind, answer } = this.#unsent;
    await this.#endpoint.answer(this.#unsent, answer, signal);
    if (kind === "upload" && answer instanceof Uint8Array) this.#to.say("The masked upload is sent; waits for the others.");
  }

  async #whileAlive(message, signal) {
    const done = new AbortController(), alive = this.#stayAlive(message.id, AbortSignal.any([signal, done.signal]));
    try {
      return await this.#answer(message, signal);
    } finally {
      done.abort();
      await alive;
    }
  }

  /** Let the server know that this page still works on a message; the message ends where the server says so. */
  async #stayAlive(id, signal) {
    for (let isOpen = true; isOpen && !signal.aborted; ) {
      const from = Date.now();
      try {
        await this.#endpoint.next(signal, id);
        await wait(from + SECOND - Date.now(), signal);
      } catch (error) {
        if (error instanceof Refusal && ["late", "not enrolled"].includes(error.type)) this.#end.abort();
        isOpen = !(error instanceof Refusal) && (await wait(SECOND, signal)); // another tab polls, or the server is away
      }
    }
  }

  /** The session's answer, or its refusal. */
  async #answer({ kind, body, deadline }, signal) {
    try {
      if (kind === "train") this.#follow(body);
      if (kind === "train" || kind === "upload") this.#until = Date.now() + ROUND;
      const answer = await this.#session.handle(kind, body);
      if (kind === "train") await this.#to.met(body);
      if (kind === "unmask") this.#until = 0;
      if (kind === "bye") await this.#ended(body);
      const isVector = kind === "upload" && unpack(answer, MOST_HEAD).tensors.length > SIGNATURE_BYTES; // else it accuses somebody
      if (!isVector || !this.#terms) return answer;
      const numbers = numbersOf(answer, { ...this.#terms, floor: this.#to.floor() }, this.#to.done());
      const isWanted = await this.#to.show(numbers, deadline - MARGIN, signal);
      return isWanted ? answer : { reason: "not now", detail: "the page's owner did not send this upload" };
    } catch (error) {
      this.#until = 0;
      if (signal.aborted) return null;
      if (error instanceof Rejected) {
        this.#to.refused(error);
        this.#to.say(`Refused to answer (${error.reason}: ${error.detail}).`, true);
        return { reason: error.reason, detail: error.detail };
      }
      this.#to.say(`This page could not answer: ${error.message}.`, true);
      return { reason: "not now", detail: "this page could not answer" };
    }
  }

  #follow(body) {
    const { head } = unpack(body, MOST_HEAD);
    this.#terms = { run: String(head.run), round: Number(head.round), purpose: String(head.purpose), members: Number(head.members), threshold: Number(head.threshold) };
    this.#to.say(this.#terms.purpose === "evaluation" ? "Counts a model on lines that are held back." : `Round ${this.#terms.round + 1}: trains.`);
  }

  async #ended(body) {
    this.#until = 0;
    this.#terms = null;
    await this.#to.over(String(unpack(body, MOST_HEAD).head.run));
  }
}
