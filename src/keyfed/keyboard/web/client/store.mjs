/**
 * What a page keeps as a client: its keys, what it has learnt about others' keys, and what it remembers of each run, as
 * `keyfed/wire/device_store.py` does with files. It lies in a store of values by key: IndexedDB in a page, a Map in
 * tests. Nothing of it ever leaves the device but public keys.
 */

import { fromHex, hex, Rejected, sha256, utf8 } from "../secure/bytes.mjs";
import { written } from "../secure/json.mjs";
import { Identity, makeKeys, OneTime } from "../secure/keys.mjs";
import { OwnLedger } from "./ledger.mjs";
import { aboutDigest } from "./messages.mjs";

const MOST_UNUSED = 8, MOST_PINS = 20_000, MOST_ROSTER = 30_000, MOST_RUNS = 20, MOST_ENDED = 1_000;

/** @typedef {{get: (key: string) => Promise<any>, set: (key: string, value: any) => Promise<void>,
 *   delete: (key: string) => Promise<void>, keys: () => Promise<string[]>}} Values */

/** A client's mark on a published roster. */
export const markOf = async (name, identity) => hex(await sha256(utf8(written(["keyfed roster", name, hex(identity)])))).slice(0, 32);

/** The hash by which people compare the roster that each of them was shown. */
export const rosterHash = async (marks) => hex(await sha256(utf8([...new Set(marks)].sort().join("")))).slice(0, 32);

/**
 * One session at a time works on a store: reading and writing a key are two steps. A page that may be open in several
 * tabs holds a lock over them (`navigator.locks`).
 */
export class Store {
  #values;

  /** @param {Values} values */
  constructor(values) {
    this.#values = values;
  }

  /** The account of what left this page. @param {number | null} budget  ε that nothing may lead beyond */
  ledger(budget = null) {
    return new OwnLedger(this.#values, budget);
  }

  /** The lasting key, made on first use. Its private half cannot be read, not by the page either. */
  async identity() {
    const kept = await this.#values.get("identity");
    if (kept) return new Identity(kept.key, kept.public);
    const made = await Identity.make();
    await this.#values.set("identity", { key: made.key, public: made.public });
    return made;
  }

  /** Make one-time keys and keep the private halves; no serial is ever given twice. */
  async newKeys(client) {
    const serial = (await this.#values.get("serial")) ?? 0;
    await this.#values.set("serial", serial + 1);
    const { own, posted } = await makeKeys(await this.identity(), client, serial);
    const unused = (await this.#values.get("keys")) ?? [];
    await this.#values.set("keys", [...unused, { serial, pair: own.take(), mask: own.mask, channel: own.channel }].slice(-MOST_UNUSED));
    return posted;
  }

  /** Posted keys, which are forgotten here: they serve once. */
  async takeKeys(serial) {
    const unused = (await this.#values.get("keys")) ?? [], found = unused.find((keys) => BigInt(keys.serial) === serial);
    if (!found) throw new Rejected("restarted", `the one-time keys ${serial} are used or gone`);
    await this.#values.set("keys", unused.filter((keys) => keys !== found));
    return new OneTime(serial, found.pair, found);
  }

  /** Remember others' identities as first seen; refuse one that has changed. @param {Map<string, Uint8Array>} identities */
  async pin(identities) {
    const known = (await this.#values.get("pins")) ?? new Map(), after = new Map(known);
    for (const [name, key] of identities) {
      if ((known.get(name) ?? hex(key)) !== hex(key)) {
        throw new Rejected("identity changed", `the identity of "${name.slice(0, 64)}" is not the one seen before`);
      }
      after.set(name, hex(key));
    }
    if (after.size > MOST_PINS) throw new Rejected("over limit", `this page remembers ${MOST_PINS} identities of others, and takes no more`);
    await this.#values.set("pins", after);
  }

  /** Keep the roster that a server publishes; refuse one of which more than half is new, after a first one. */
  async meet(listed, trusted = "") {
    if (listed === undefined || listed === null) return;
    if (!Array.isArray(listed) || !listed.every((mark) => typeof mark === "string" && mark.length === 32)) {
      throw new Rejected("malformed", "a roster that is not a list of marks");
    }
    if (listed.length > MOST_ROSTER) throw new Rejected("over limit", `a roster of ${listed.length} clients; this page reads ${MOST_ROSTER}`);
    const published = await rosterHash(listed), known = await this.known(), all = new Set(listed);
    const fresh = [...all].filter((mark) => !known.has(mark)).length;
    if (known.size && 2 * fresh > all.size && published !== trusted) {
      const detail = `${fresh} of the ${all.size} clients on the roster were never seen before; compare its hash ${published} with other people's and the operator's, then trust it`;
      throw Object.assign(new Rejected("strangers", detail), { roster: published });
    }
    const kept = [...new Set([...listed, ...known])].sort().slice(0, MOST_ROSTER);
    await this.#values.set("roster", { hash: published, clients: all.size, known: kept });
  }

  /** Hash and size of the roster that was last accepted; null before the first. */
  async roster() {
    return (await this.#values.get("roster")) ?? null;
  }

  /** Marks of all clients that this one has seen. */
  async known() {
    const pins = [...((await this.#values.get("pins")) ?? [])];
    const marks = await Promise.all(pins.map(([name, key]) => markOf(name, fromHex(key, 32))));
    return new Set([...marks, ...((await this.roster())?.known ?? [])]);
  }

  /** Refuse a cohort of which more than half of the others were never seen before, once somebody was. */
  async refuseStrangers(identities, me) {
    const known = await this.known(), marks = [];
    for (const [name, key] of identities) {
      const mark = await markOf(name, key);
      if (name === me) known.delete(mark);
      else marks.push(mark);
    }
    const fresh = marks.filter((mark) => !known.has(mark)).length;
    if (known.size && 2 * fresh > marks.length) {
      throw new Rejected("strangers", `${fresh} of the ${marks.length} others of this sum are on no roster that this page knows`);
    }
  }

  /** Whether this page has an identity. */
  async isKnown() {
    return (await this.#values.get("identity")) !== undefined;
  }

  /**
   * Forget who this page was to its server, which knows it no more: its identity and keys, and those of others. What
   * left the page stays counted, and so does what it took part in.
   */
  async forgetIdentity() {
    for (const key of ["identity", "keys", "pins", "roster"]) await this.#values.delete(key);
  }

  /** Forget everything, the account too. */
  async forgetAll() {
    for (const key of await this.#values.keys()) await this.#values.delete(key);
  }

  // Of a run; its name comes from outside.

  async #run(run) {
    return `run ${hex(await sha256(utf8(run))).slice(0, 20)}`;
  }

  async #kept(run) {
    const kept = await this.#values.get(await this.#run(run));
    if (!kept || kept.over) throw new Rejected("unknown run", `this page knows nothing of the run ${run.slice(0, 64)}`);
    return kept;
  }

  /** Keep what a run is about; what was said once cannot be changed. */
  async begin(run, exact, about) {
    const key = await this.#run(run), kept = await this.#values.get(key), digest = await aboutDigest(exact);
    if (kept?.over) throw new Rejected("stale", "that run is over");
    if (kept && (kept.digest !== digest || kept.about.pages !== about.pages)) {
      throw new Rejected("other method", "that run began with another configuration or vocabulary");
    }
    if (!kept) await this.#makeRoom(key);
    await this.#values.set(key, { seen: { attempt: 0, round: -1, model: "" }, summed: [], ...kept, about, digest });
  }

  /** End the open runs, and let go the ended ones, that are too many for another; the oldest first. */
  async #makeRoom(key) {
    const runs = ((await this.#values.get("runs")) ?? []).filter((other) => other !== key);
    const kept = await Promise.all(runs.map((other) => this.#values.get(other)));
    const open = runs.filter((_, n) => kept[n] && !kept[n].over);
    for (const other of open.slice(0, Math.max(0, open.length + 1 - MOST_RUNS))) await this.#values.set(other, { over: true });
    const gone = runs.slice(0, Math.max(0, runs.length + 1 - MOST_RUNS - MOST_ENDED));
    for (const other of gone) await this.#values.delete(other);
    await this.#values.set("runs", [...runs.slice(gone.length), key]);
  }

  /** What the server said when a run began: {about, digest}. */
  begun(run) {
    return this.#kept(run);
  }

  /** Note a training; refuse what is old, and another model for the same round. */
  async see(run, now) {
    const key = await this.#run(run), kept = await this.#kept(run), { attempt, round, model } = kept.seen;
    if (now.attempt < attempt || (now.attempt === attempt && now.round < round)) {
      throw new Rejected("stale", `round ${now.round} of attempt ${now.attempt} after round ${round} of ${attempt}`);
    }
    if (now.attempt === attempt && now.round === round && now.model !== model) {
      throw new Rejected("other model", `another model for round ${round} than before`);
    }
    await this.#values.set(key, { ...kept, seen: now });
  }

  /** Note that a masked vector is about to be sent; a second one for the same is refused, whoever asks. */
  async refuseSecond(run, round, purpose, part) {
    const key = await this.#run(run), kept = await this.#kept(run);
    const now = [...(purpose === "evaluation" ? [] : [`${round} ${purpose}`]), ...(part === null ? [] : [`${round} evaluation ${part}`])];
    if (now.some((note) => kept.summed.includes(note))) throw new Rejected("summed before", `this page has sent its upload of round ${round} already`);
    await this.#values.set(key, { ...kept, summed: [...kept.summed, ...now] });
  }

  /** Step and clip of this page's last upload for a private run; null before the first. */
  async lastUpload(run) {
    const { last = null } = await this.#kept(run);
    if (last !== null && !(Number.isSafeInteger(last.step) && last.clip > 0)) {
      throw new Rejected("state lost", "what this page remembers of its last upload is damaged");
    }
    return last;
  }

  /** Refuse a call that comes less than `separation` steps after the last upload, whoever asks. */
  async refuseEarly(run, step, separation) {
    const last = await this.lastUpload(run);
    if (last !== null && step < last.step + separation) {
      throw new Rejected("too soon", `step ${step}; this page took part in step ${last.step} and waits ${separation} steps`);
    }
  }

  /** Remember the step and the clip of an upload, before it leaves. */
  async tookPart(run, { step, clip }) {
    const key = await this.#run(run), kept = await this.#kept(run);
    await this.#values.set(key, { ...kept, last: { step, clip } });
  }

  /** Forget everything of a run but that it is over: its name cannot be used again. */
  async forget(run) {
    await this.#values.set(await this.#run(run), { over: true });
  }
}
