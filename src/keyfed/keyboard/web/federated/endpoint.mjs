/**
 * The server of a federation, by HTTPS: what it says of itself, enrolment by a one-time link, the next message, an
 * answer, leaving. Every request but the first two is signed by this page's identity.
 */

import { hex, joined, sha256, utf8 } from "../secure/bytes.mjs";

const FORMAT = "keyfed-web-1", ENROL = "keyfed-web-enrol-1";
const SECOND = 1_000, PATIENCE = 40 * SECOND; // without a byte of an answer; a poll waits up to 25 seconds
const MOST_SAID = 1 << 16, MOST_MESSAGE = 1 << 26; // bytes of an answer in JSON, and of a message
const MOST_SKEW = 110 * SECOND; // beyond this the server's clock is used: it refuses more than 120 seconds
const TOKEN = /^[A-Za-z0-9_-]{43}$/;

/** The server does not answer, or not now: it is tried again later. */
export class Away extends Error {}

/** The server refuses, with a type of its own and one line. */
export class Refusal extends Error {
  constructor(type, reason) {
    super(reason);
    this.type = type;
  }
}

/**
 * A link to join by, from the fragment of an address: #join=TOKEN[&server=ORIGIN]. The fragment never reaches a server.
 * @param {string} fragment
 * @param {string[]} allowed  origins that this page may speak to, the usual one first
 * @returns {{token: string, server: string} | null}  null: it is no link to join by
 * @throws {Refusal}  it is one that does not serve here
 */
export function linkOf(fragment, allowed) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!given.has("join")) return null;
  const token = given.get("join"), server = given.get("server") ?? allowed[0];
  if (!TOKEN.test(token)) throw new Refusal("link", "This link is damaged: ask for a new one.");
  if (!allowed.includes(server)) {
    throw new Refusal("link", `This link is for the server ${server.slice(0, 100)}, and this page may speak to ${allowed.join(" or ")} only.`);
  }
  return { token, server };
}

/** One server, as one page sees it. */
export class Endpoint {
  #server;
  #identity;
  #skew = 0; // milliseconds that the server's clock is ahead, where that is much
  #last = 0;

  /**
   * @param {string} server  its origin
   * @param {import("../secure/keys.mjs").Identity} identity
   * @param {string} [name]  that this page is enrolled under
   */
  constructor(server, identity, name = "") {
    [this.#server, this.#identity, this.name] = [server, identity, name];
  }

  /** What the server says of itself; notes how far this device's clock is off. */
  async about(signal) {
    const asked = Date.now(), found = said(await this.#fetch("about", { method: "GET" }, { signal }));
    if (found?.format !== FORMAT || !Number.isFinite(found.now)) {
      throw new Refusal("other protocol", "The server speaks another protocol than this page: reload the page, or ask its operator to update it.");
    }
    const skew = SECOND * found.now - (asked + Date.now()) / 2;
    this.#skew = Math.abs(skew) > MOST_SKEW ? skew : 0;
    const { version, hash } = found.page ?? {};
    return { version: String(version).slice(0, 40), hash: String(hash).slice(0, 64), skew: Math.round(this.#skew / SECOND), isEnrolling: found.enrolling === true };
  }

  /** Enrol by a one-time token; an empty name takes that of the link, or the server's choice. @returns {Promise<string>} the name */
  async enrol(token, name, signal) {
    const document = { format: ENROL, identity: hex(this.#identity.public), name, token }; // its keys are sorted
    const signature = hex(await this.#identity.sign(utf8(JSON.stringify(document))));
    const body = JSON.stringify({ ...document, signature }), headers = { "content-type": "application/json" };
    const found = said(await this.#fetch("enrol", { method: "POST", headers, body }, { signal }));
    if (typeof found.name !== "string" || !/^[\x21-\x7e]{1,200}$/.test(found.name)) throw new Refusal("malformed", "The server gave this page no name.");
    this.name = found.name;
    return found.name;
  }

  /**
   * Wait for the next message; null: there was none.
   * @param {string} [working]  the message that this page works on: it only says that it still does
   * @returns {Promise<{kind: string, id: string, deadline: number, body: Uint8Array} | null>}  deadline: by this device's clock
   */
  async next(signal, working = "") {
    const answer = await this.#signed("next", working, new Uint8Array(0), {}, { signal, most: MOST_MESSAGE });
    if (answer.status === 204 || working) return null;
    const kind = answer.headers.get("keyfed-kind") ?? "", id = answer.headers.get("keyfed-id") ?? "";
    const deadline = Number(answer.headers.get("keyfed-deadline"));
    if (!/^[a-z]{1,20}$/.test(kind) || !/^[0-9a-f]{32}$/.test(id) || !(deadline > 0)) throw new Refusal("malformed", "The server sent a message without its headers.");
    return { kind, id, deadline: SECOND * deadline - this.#skew, body: answer.body };
  }

  /**
   * Send an answer, or why there is none; the upload may take until the message's deadline.
   * @param {{id: string, deadline: number}} message
   * @param {Uint8Array | {reason: string, detail: string}} answer
   */
  async answer({ id, deadline }, answer, signal) {
    const how = { signal, patience: Math.max(SECOND, deadline - Date.now()) };
    if (answer instanceof Uint8Array) return void (await this.#signed("answer", id, answer, {}, how));
    const detail = answer.detail.replace(/[^\x20-\x7e]/g, "?").slice(0, 300);
    await this.#signed("answer", id, new Uint8Array(0), { "keyfed-error": answer.reason, "keyfed-reason": detail }, how);
  }

  /** Leave: the server takes this page off its roster. */
  async leave(signal) {
    await this.#signed("leave", "", new Uint8Array(0), {}, { signal });
  }

  async #signed(path, id, body, more, how, isAgain = false) {
    const time = (this.#last = Math.max(Math.round(Date.now() + this.#skew), this.#last + 1)), sum = hex(await sha256(body));
    const text = [FORMAT, `/federation/${path}`, this.name, time, id, sum].join("\n");
    const signature = hex(await this.#identity.sign(utf8(text)));
    const headers = { authorization: `Keyfed ${this.name}.${time}.${signature}`, "keyfed-sum": sum, ...(id && { "keyfed-id": id }), ...more };
    try {
      return await this.#fetch(path, { method: "POST", headers, body }, how);
    } catch (error) {
      if (!(error instanceof Refusal) || error.type !== "clock" || isAgain) throw error;
      await this.about(how.signal); // the server's clock
      return this.#signed(path, id, body, more, how, true);
    }
  }

  /** Status, headers and bytes of an answer; `patience` in milliseconds until it begins, and between two of its pieces. */
  async #fetch(path, how, { signal, patience = PATIENCE, most = MOST_SAID } = {}) {
    const stop = new AbortController(), ends = AbortSignal.any([stop.signal, ...(signal ? [signal] : [])]);
    let timer = 0;
    const goOn = (milliseconds) => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), milliseconds);
    };
    goOn(patience);
    try {
      const answer = await fetch(new URL(`/federation/${path}`, this.#server), {
        ...how, signal: ends, mode: "cors", credentials: "omit", cache: "no-store", redirect: "error", referrerPolicy: "no-referrer",
      });
      const { status, headers } = answer, body = await bytesOf(answer, answer.ok ? most : MOST_SAID, () => goOn(PATIENCE));
      if (!answer.ok) throw refusalOf(status, body);
      return { status, headers, body };
    } catch (cause) {
      signal?.throwIfAborted();
      if (cause instanceof Refusal || cause instanceof Away) throw cause;
      throw new Away("the server does not answer", { cause });
    } finally {
      clearTimeout(timer);
    }
  }
}

/** What an answer that is none says: a refusal, or that it may be tried again. */
function refusalOf(status, body) {
  let found;
  try {
    found = said({ body });
  } catch {
    found = null;
  }
  if (typeof found?.error !== "string" || status >= 500 || status === 429) return new Away(`the server answers ${status}`);
  return new Refusal(found.error.slice(0, 40), String(found.reason).slice(0, 300));
}

function said({ body }) {
  try {
    return JSON.parse(new TextDecoder().decode(body));
  } catch (cause) {
    throw new Away("what the server says cannot be read", { cause });
  }
}

/** The bytes of an answer, at most so many. */
async function bytesOf(answer, most, goOn) {
  const pieces = [];
  let size = 0;
  const reader = answer.body?.getReader();
  for (let isOpen = Boolean(reader); isOpen; ) {
    goOn();
    const { done, value } = await reader.read();
    isOpen = !done;
    if (!value) continue;
    size += value.length;
    if (size > most) {
      await reader.cancel();
      throw new Refusal("too large", `The server sent more than ${most} bytes.`);
    }
    pieces.push(value);
  }
  return joined(pieces);
}
