/**
 * A page's side of a federation: it answers the server's messages as `keyfed/wire/client.py` does, and refuses what it
 * should not answer. A page takes part in secure sums only.
 *
 *   hello → proof of identity and one-time keys; train → encrypted shares; upload → the masked vector; unmask → shares
 *   that open the sum; bye → what was kept of the run is forgotten
 *
 * Under a private run a page sends its clipped upload and nothing else (`promise.mjs`); it takes part in every step
 * once, and steps only go up. What leaves the page is counted in its own ledger, over all runs; what its owner's budget
 * does not cover does not leave.
 */

import { fromHex, hex, joined, Refused, Rejected, SecureSumError } from "../secure/bytes.mjs";
import { parse, plain, written } from "../secure/json.mjs";
import { keysFromJson, keysToJson, SIGNATURE_BYTES, signedAnswer } from "../secure/keys.mjs";
import { Member, mostRatio, termsOf } from "../secure/member.mjs";
import { PRIVATE_RATIO, wordsOf } from "../secure/clipped.mjs";
import { checkPublic } from "../secure/public.mjs";
import { packageText } from "../secure/sharing.mjs";
import { calibrationVector, DoesNotFit, evaluationVector, uploadVector } from "../secure/vector.mjs";
import { digestOf, helloText, isObject, modelOf, mostHead, pack, sumContext, textDigest, textIn, unpack, wholeNumber } from "./messages.mjs";
import { checkRound, isPrivate } from "./promise.mjs";

const PURPOSES = ["upload", "calibration", "evaluation"], MOST_MEMBERS = 4096, MOST_HALVINGS = 64, USUAL_FLOOR = 3;

/** A run's name as the ledger keeps it; it comes from outside and may be long. */
const markOf = async (run) => (await textDigest(run)).slice(0, 16);

/** What one upload of a run costs; null for a run that promises nothing. */
const spendOf = (promise) => promise && { z: promise.noise, gap: promise.separation, rounds: promise.rounds };

/** A page as one client of a server. */
export class Session {
  #name;
  #store;
  #make;
  #floor;
  #ready;
  #ledger;
  #edition = 0; // of the owner's text: what was made of an earlier one is not used
  #learner = null; // {run, edition, learner, spec} of the run in progress
  #work = null;
  #solved = null;
  #last = Promise.resolve(); // the message before

  /**
   * @param {string} name  that it was enrolled under
   * @param {import("./store.mjs").Store} store
   * @param {(about: {page: object, vocab: string, config: object}) => Promise<import("./learner.mjs").Learner>} make  text ready for a run
   * @param {{floor?: number, ready?: () => string | null, trusted?: string, budget?: number | null}} [how]
   *   ready: why not now; null: it is. budget: the owner's ε over all runs; null for none
   */
  constructor(name, store, make, { floor = USUAL_FLOOR, ready = () => null, trusted = "", budget = null } = {}) {
    [this.#name, this.#store, this.#make, this.#ready] = [name, store, make, ready];
    this.trusted = trusted;
    this.limit({ floor, budget });
  }

  /** What the owner asks for from now on. @param {{floor: number, budget: number | null}} limits */
  limit({ floor, budget }) {
    this.#floor = floor;
    this.#ledger = this.#store.ledger(budget);
  }

  /** The owner's text has changed: nothing that was made of the text before leaves any more. */
  textChanged() {
    this.#edition += 1;
    this.#learner = this.#solved = null;
    this.#last = this.#last.then(() => this.#work?.isSent === false && this.#drop());
  }

  /** What the page's owner is shown of the own account; see `OwnLedger.shown`. */
  account() {
    return this.#ledger.shown();
  }

  /**
   * Answer a message. They are answered one after the other: two that overlap could take the same keys.
   * @param {string} kind
   * @param {Uint8Array} body
   * @returns {Promise<Uint8Array>}
   * @throws {Rejected}  it must not be answered; the reason is typed
   */
  handle(kind, body) {
    const answer = this.#last.then(() => this.#answer(kind, body));
    this.#last = answer.catch(() => undefined);
    return answer;
  }

  async #answer(kind, body) {
    const { exact, head, tensors } = unpack(body, mostHead(kind));
    if (kind === "who") return pack({ name: this.#name });
    if (kind === "hello") return this.#hello(exact, head);
    if (kind === "bye") return this.#bye(textIn(head, "run"));
    let answer;
    if (kind === "train") answer = await this.#train(exact, head, tensors);
    else if (kind === "upload") answer = await this.#upload(this.#workOf(head), head);
    else if (kind === "unmask") answer = await this.#unmask(this.#workOf(head), head);
    else throw new Rejected("malformed", `a message of kind "${kind.slice(0, 20)}"`);
    return signedAnswer(await this.#store.identity(), this.#name, kind, answer);
  }

  async #hello(exact, head) {
    const run = textIn(head, "run"), nonce = textIn(head, "nonce");
    if (head.secure !== true) throw new Rejected("not secure", "a page takes part in secure sums only");
    if (!isObject(exact.page) || !isObject(exact.page.spec)) throw new Rejected("other method", "a run that has no place for pages");
    if (await textDigest([exact.page.spec, !isPrivate(head.config)]) !== textIn(head, "method")) {
      throw new Rejected("other method", "the method that pages are told is not that of the run");
    }
    await this.#store.meet(head.roster, this.trusted);
    const { page, vocab, config } = head;
    await this.#store.begin(run, exact, { page, pages: written(exact.page), spec: written(exact.page.spec), vocab, config });
    this.#learner = null;
    const { learner } = await this.#learnerOf(run);
    await this.#affords(run, learner.promise);
    const floor = await this.#hidesAmong(run), identity = await this.#store.identity();
    const proof = hex(await identity.sign(helloText(this.#name, run, nonce, floor)));
    const answer = { proof, keys: keysToJson(await this.#store.newKeys(this.#name)), hide_among: floor };
    const last = await this.#store.lastUpload(run);
    return pack(last === null ? answer : { ...answer, step: last.step });
  }

  async #hidesAmong(run) {
    const { config } = (await this.#store.begun(run)).about;
    return Math.max(this.#floor, wholeNumber(config.secure ?? {}, "floor", 2, MOST_MEMBERS));
  }

  async #learnerOf(run) {
    if (this.#learner?.run !== run) {
      const edition = this.#edition, { about } = await this.#store.begun(run);
      const made = { run, edition, learner: await this.#make(about), spec: parse(about.spec) };
      this.#refuseOld(edition);
      this.#learner = made;
    }
    return this.#learner;
  }

  #refuseOld(edition) {
    if (edition !== this.#edition) throw new Rejected("not now", "the page's owner has changed the text meanwhile");
  }

  async #bye(run) {
    this.#drop();
    this.#learner = this.#solved = null;
    await this.#store.forget(run);
    return pack({});
  }

  // What leaves the page, as its owner counts it.

  /** Refuse a run of which not even one upload fits into the owner's budget. */
  async #affords(run, promise) {
    await this.#ledger.allow(await markOf(run), spendOf(promise));
  }

  /** Refuse a call that comes earlier after the last upload than the run promised, or a second time. */
  async #refuseEarly({ run, clipping, learner: { promise } }) {
    if (!clipping) return;
    await this.#store.refuseEarly(run, clipping.step, promise.separation ?? 1);
    await this.#affords(run, promise);
  }

  /** Note, before it is sent, that an upload leaves this page in this step of a private run. */
  async #book(work) {
    await this.#refuseEarly(work);
    if (!work.clipping) return;
    await this.#ledger.book(await markOf(work.run), spendOf(work.learner.promise));
    await this.#store.tookPart(work.run, work.clipping);
  }

  async #train(exact, head, tensors) {
    this.#drop();
    const why = this.#ready();
    if (why !== null) throw new Rejected("not now", why);
    const run = textIn(head, "run"), begun = await this.#store.begun(run);
    const { learner, spec, edition } = await this.#learnerOf(run);
    const theta = modelOf(tensors, learner.shapes);
    const work = { ...(await this.#accept(run, learner, spec, exact, head, theta)), edition };
    await this.#refuseEarly(work);
    if (!work.clipping) { // noted before anything leaves: a run that promises nothing
      await this.#affords(run, null);
      await this.#ledger.book(await markOf(run), null);
    }
    if (work.part !== null) work.score = await learner.evaluate(theta, work.part);
    if (work.purpose !== "evaluation") work.done = await this.#solve(work, wholeNumber(begun.about.config.train ?? {}, "seed"));
    work.member = await this.#join(work, head, begun.digest);
    const identity = await this.#store.identity(), parcels = Object.create(null);
    for (const [to, sealed] of await work.member.shares()) {
      parcels[to] = hex(joined([sealed, await identity.sign(packageText(work.member.terms.digest, this.#name, to, sealed))]));
    }
    this.#refuseOld(work.edition);
    this.#work = work; // only now: a client that refused the terms has nothing to be asked for
    return pack({ ...work.named, parcels, keys: keysToJson(await this.#store.newKeys(this.#name)) });
  }

  /** Check what a training message is about. */
  async #accept(run, learner, spec, exact, head, theta) {
    const round = wholeNumber(head, "round"), attempt = wholeNumber(head, "attempt"), purpose = textIn(head, "purpose");
    if (!PURPOSES.includes(purpose)) throw new Rejected("malformed", `a purpose "${purpose.slice(0, 20)}"`);
    const model = await digestOf(theta, learner.shapes);
    if (model !== textIn(head, "model")) throw new Rejected("other model", "the model is not the one that the message names");
    if (!Object.values(theta).every((w) => w.every(Number.isFinite))) throw new Rejected("non-finite model", "the model holds numbers that are not finite");
    await this.#store.see(run, { attempt, round, model });
    const part = head.evaluate ?? null;
    if (!["valid", "test", null].includes(part) || (purpose === "evaluation" && part === null)) {
      throw new Rejected("malformed", `an evaluation of "${String(part).slice(0, 20)}"`);
    }
    const { promise } = learner;
    const clipping = promise && checkRound(promise, head.public, { round, purpose, part }, await this.#store.lastUpload(run));
    if (purpose !== "evaluation" && !clipping) checkPublic(head.public, Object.keys(learner.shapes));
    const halvings = head.halvings === undefined ? 0 : wholeNumber(head, "halvings", 0, MOST_HALVINGS);
    return {
      run, round, attempt, purpose, part, clipping, model, learner, spec, theta, halvings, members: wholeNumber(head, "members", 1, MOST_MEMBERS),
      publicNumbers: isObject(head.public) ? exact.public : Object.create(null), named: { run, round, attempt }, done: null, score: null, member: null, isSent: false,
    };
  }

  /** What was trained; in a private run null, for zeros, where nothing could be: that this page is lost would tell of its text. */
  async #solve(work, seed) {
    const key = `${work.run} ${work.round} ${work.model} ${work.halvings} ${work.clipping?.step} ${work.clipping?.clip}`;
    if (this.#solved?.key === key) return this.#solved.done;
    this.#solved = null;
    try {
      const done = await work.learner.solve(work.theta, { seed, round: work.round, client: this.#name, halvings: work.halvings });
      this.#refuseOld(work.edition);
      this.#solved = { key, done };
      return done;
    } catch (error) {
      if (work.clipping && error.reason !== "not now") return null; // the owner may stop at any time
      throw error;
    }
  }

  /** Join a secure sum on the server's terms, if they are acceptable. */
  async #join(work, head, about) {
    const me = this.#name;
    if (!Array.isArray(head.cohort) || !isObject(head.identities) || head.cohort.length !== work.members) {
      throw new Rejected("malformed", "a secure round without its cohort's keys");
    }
    try {
      const cohort = head.cohort.map(keysFromJson);
      const identities = new Map(Object.entries(head.identities).map(([name, key]) => [name, fromHex(key, 32)]));
      if ([...identities.values()].includes(null)) throw new SecureSumError("an identity that is no key");
      const own = cohort.find(({ client }) => client === me), identity = await this.#store.identity();
      if (!own || hex(identities.get(me) ?? []) !== hex(identity.public)) {
        throw new Rejected("refused by client", "the cohort has no keys of this client, or others");
      }
      const context = await sumContext({ ...work, about, shapes: work.learner.shapes });
      const length = work.clipping ? wordsOf(work.learner.shapes) : this.#vector(work, null).length, threshold = wholeNumber(head, "threshold", 1, MOST_MEMBERS);
      const terms = await termsOf({ context, cohort, threshold, length });
      if (work.clipping && mostRatio(threshold) < PRIVATE_RATIO) {
        throw new Refused(`${me} refuses the threshold ${threshold} of a private sum: at least ${PRIVATE_RATIO + 1}`);
      }
      const among = new Map(terms.names.filter((name) => identities.has(name)).map((name) => [name, identities.get(name)]));
      await this.#store.refuseStrangers(among, me);
      const keys = await this.#store.takeKeys(own.serial);
      const member = await Member.join(me, keys, terms, identities, { floor: await this.#hidesAmong(work.run) });
      await this.#store.pin(among);
      return member;
    } catch (error) {
      if (error instanceof Refused) throw new Rejected("refused by client", error.message);
      if (error instanceof SecureSumError) throw new Rejected("malformed", `terms of a secure sum that make no sense (${error.message})`);
      throw error;
    }
  }

  #workOf(head) {
    const work = this.#work, round = wholeNumber(head, "round");
    if (!work) throw new Rejected("restarted", "this page has nothing trained; it may have been reloaded");
    if (textIn(head, "run") !== work.run || round !== work.round || wholeNumber(head, "attempt") !== work.attempt) {
      throw new Rejected("stale", `round ${round}, and this page is in round ${work.round}`);
    }
    return work;
  }

  async #upload(work, head) {
    if (!Array.isArray(head.alive) || !isObject(head.parcels)) throw new Rejected("malformed", "an upload without the others' shares");
    if (work.isSent) throw new Rejected("stale", "this page has uploaded already");
    try {
      this.#refuseOld(work.edition);
      const parcels = Object.entries(head.parcels).map(([name, text]) => [name, fromHex(text, String(text).length / 2)]);
      if (parcels.some(([, bytes]) => bytes === null || bytes.length < SIGNATURE_BYTES)) throw new SecureSumError("shares that are not hexadecimal");
      const received = new Map(parcels.map(([name, bytes]) => [name, bytes.slice(0, -SIGNATURE_BYTES)]));
      const signatures = new Map(parcels.map(([name, bytes]) => [name, bytes.slice(-SIGNATURE_BYTES)]));
      await this.#store.begun(work.run); // refuses a run that has ended since it was trained
      await this.#store.refuseSecond(work.run, work.round, work.purpose, work.part);
      await this.#book(work);
      const vector = this.#vector(work, mostRatio(work.member.terms.threshold));
      const masked = await work.member.masked(vector, head.alive.map(String), received, signatures);
      this.#refuseOld(work.edition);
      work.isSent = true;
      const words = new Int32Array(masked.buffer);
      return pack(work.named, [{ name: "masked", dtype: "I32", shape: [words.length], data: words }]);
    } catch (error) {
      this.#drop();
      if (error instanceof DoesNotFit) throw new Rejected(error.isRange ? "out of range" : "does not fit", "a number is outside of what the sum holds; nothing was sent");
      if (error instanceof Refused && error.accused !== null) {
        return pack({ ...work.named, accuses: error.accused, evidence: error.evidence && hex(error.evidence) });
      }
      if (error instanceof Refused || error instanceof SecureSumError) throw new Rejected("refused by client", error.message);
      throw error;
    }
  }

  /** What this client adds to the sum. Without a ratio its length is what counts, and nothing is refused for its size. */
  #vector({ purpose, learner, done, publicNumbers, members, score, clipping }, ratio) {
    if (clipping) return done ? learner.clipped(done, clipping.clip) : new Uint32Array(wordsOf(learner.shapes));
    if (purpose === "evaluation") return evaluationVector(score, members);
    if (purpose === "calibration") return calibrationVector(done, learner.rule, members);
    const numbers = plain(publicNumbers);
    if (ratio !== null) return uploadVector(done, learner.rule, { ...numbers, rule: numbers.rule }, members, ratio, score);
    const still = Object.fromEntries(Object.entries(done.upload).map(([name, change]) => [name, new Float32Array(change.length)]));
    return uploadVector({ ...done, upload: still }, learner.rule, numbers, members, 1, score);
  }

  async #unmask(work, head) {
    if (!Array.isArray(head.survivors)) throw new Rejected("malformed", "a request to open a sum that this page is not in");
    try {
      return pack({ ...work.named, shares: hex(await work.member.unmask(head.survivors.map(String))) });
    } catch (error) {
      if (error instanceof Refused || error instanceof SecureSumError) throw new Rejected("refused by client", error.message);
      throw error;
    } finally {
      this.#drop();
    }
  }

  /** Forget the round in progress and its secrets. */
  #drop() {
    this.#work?.member?.forget();
    this.#work = null;
  }
}
