/**
 * A client's side of a secure sum: what `keyfed/private/secagg/terms.py` and `member.py` are in Python, message for
 * message. A browser and a Python client are members of the same masked sum.
 */

import { eightBytes, framed, isSame, joined, Refused, SecureSumError, sha256, sortedNames, systemRandom } from "./bytes.mjs";
import { evidence } from "./curve.mjs";
import { agree, isPossessed, isSignature, isSigned } from "./keys.mjs";
import { addMask, answerTag, commitment, NONCE_BYTES, packageText, pairKey, seal, selfKey, split, unseal } from "./sharing.mjs";

const PROTOCOL = "keyfed secure sum 2", CHECK_WORDS = 4, MOST_RATIO = 16, SEED_BYTES = 32, MOST_WORDS = 2 ** 48;
const USUAL_FLOOR = 3;

/** How many times the least scale of a layer the largest may be, from the threshold. */
export const mostRatio = (threshold) => Math.max(1, Math.min(MOST_RATIO, threshold - 1));

/** How many members must have shared before one of them uploads. */
export const leastAlive = (members, threshold) =>
  Math.max(threshold, Math.floor((members * (members - threshold)) / threshold) + 2);

/**
 * One secure sum: who takes part with which keys, over how many words, and how many have to stay.
 * @param {{context: Uint8Array, cohort: import("./keys.mjs").SignedKeys[], threshold: number, length: number}} given
 * @throws {SecureSumError}  terms that cannot be
 */
export async function termsOf({ context, cohort, threshold, length }) {
  const byName = new Map(cohort.map((keys) => [keys.client, keys]));
  const names = sortedNames([...byName.keys()]), members = names.map((name) => byName.get(name));
  if (names.length !== cohort.length) throw new SecureSumError("a client stands twice in one cohort");
  if (new Set(members.flatMap(({ mask, channel }) => [String(mask), String(channel)])).size !== 2 * cohort.length) {
    throw new SecureSumError("a public key stands twice in one cohort");
  }
  if (!Number.isSafeInteger(threshold) || threshold < 1 || threshold > cohort.length) {
    throw new SecureSumError(`a threshold of ${threshold} in a cohort of ${cohort.length} clients`);
  }
  if (!Number.isSafeInteger(length) || length < 1 || length >= MOST_WORDS) {
    throw new SecureSumError(`a secure sum over ${length} words; at least one is needed`);
  }
  const numbers = [threshold, mostRatio(threshold), length, cohort.length].map(eightBytes);
  const keys = members.flatMap(({ client, serial, mask, channel }) => [client, eightBytes(serial), mask, channel]);
  return { names, members, threshold, length, digest: await sha256(framed(PROTOCOL, context, ...numbers, ...keys)) };
}

/** Raise `Refused` unless a client can safely take part in a sum on these terms. */
async function checkTerms(me, keys, { names, members, threshold }, identities, floor) {
  if (!Number.isSafeInteger(floor) || floor < 2) throw new SecureSumError(`a floor of ${floor} clients hides nothing: the least is 2, the usual 3`);
  const n = names.length;
  if (n < floor) throw new Refused(`${me} refuses a cohort of ${n}: it takes part among ${floor} or more`);
  if (2 * threshold <= n) throw new Refused(`${me} refuses the threshold ${threshold} of ${n}: it has to be more than half`);
  if (threshold < floor) {
    throw new Refused(`${me} refuses the threshold ${threshold}: so many could open a sum, and it takes part among ${floor} or more`);
  }
  const own = members.find(({ client }) => client === me);
  if (!own || own.serial !== keys.serial || !isSame(own.mask, keys.mask) || !isSame(own.channel, keys.channel)) {
    throw new Refused(`${me} refuses the cohort: its own one-time keys (serial ${keys.serial}) ${own ? "were altered" : "are missing"}`);
  }
  for (const member of members) {
    const identity = identities.get(member.client);
    if (!identity) throw new Refused(`${me} refuses ${member.client}: no identity of that client is known here`);
    if (!(await isSigned(member, identity))) {
      throw new Refused(`${me} refuses the cohort: the one-time keys of ${member.client} (serial ${member.serial}) are not signed by its identity: they were altered, or the client has to enrol again`);
    }
  }
  if (new Set(names.map((name) => String(identities.get(name)))).size !== n) {
    throw new Refused(`${me} refuses the cohort: two of its clients have the same identity`);
  }
}

/**
 * One client in one secure sum: `shares`, then `masked`, then `unmask`, each once. It refuses whatever could show its
 * values. A call at the wrong time is refused and changes nothing; a call with wrong content ends the sum for this
 * client, and its secrets are forgotten.
 */
export class Member {
  #stage = "new";
  #pair;
  #secrets = null;
  #held = new Map();
  #identities;
  #least;
  #random;

  constructor(me, pair, terms, identities, floor, random) {
    [this.me, this.terms] = [me, terms];
    this.#pair = pair;
    this.#identities = identities;
    this.#least = Math.max(terms.threshold, floor);
    this.#random = random;
  }

  /**
   * @param {string} me
   * @param {import("./keys.mjs").OneTime} keys
   * @param {Awaited<ReturnType<typeof termsOf>>} terms
   * @param {Map<string, Uint8Array>} identities  public keys that this client knows by name
   * @param {{floor?: number, random?: (size: number) => Uint8Array}} [how]  floor: the fewest clients it hides among
   */
  static async join(me, keys, terms, identities, { floor = USUAL_FLOOR, random = systemRandom } = {}) {
    await checkTerms(me, keys, terms, identities, floor);
    const pair = keys.take();
    if (!pair) throw new Refused(`${me} refuses a second sum: the one-time keys with serial ${keys.serial} were used before: make new ones`);
    return new Member(me, pair, terms, identities, floor, random);
  }

  /** An encrypted package for every other member. @returns {Promise<Map<string, Uint8Array>>} */
  shares() {
    return this.#during("new", "shared", async () => {
      const { names, members, threshold, digest } = this.terms, pair = this.#pair;
      this.#pair = null;
      const seed = this.#random(SEED_BYTES);
      const ofSeed = split(seed, threshold, names.length, this.#random), ofMask = split(pair.mask, threshold, names.length, this.#random);
      const committed = await commitment(seed, digest, this.me);
      const agreed = new Map(), sealed = new Map();
      for (const { client, channel } of members) if (client !== this.me) agreed.set(client, await this.#agree(pair.channel, client, channel));
      for (const [place, name] of names.entries()) {
        if (name === this.me) continue;
        const both = [ofSeed[place], ofMask[place]];
        sealed.set(name, await seal(agreed.get(name), digest, this.me, name, committed, both, this.#random(NONCE_BYTES)));
      }
      const place = names.indexOf(this.me);
      this.#secrets = { pair, seed, agreed, own: [ofSeed[place], ofMask[place]] };
      return sealed;
    });
  }

  /**
   * The values under the masks, and the words behind them that show whether the masks cancel.
   * @param {Uint32Array} values
   * @param {string[]} alive
   * @param {Map<string, Uint8Array>} received    the package of every other member alive
   * @param {Map<string, Uint8Array>} [signatures]  of the senders under their packages
   * @returns {Promise<Uint32Array>}
   */
  masked(values, alive, received, signatures = new Map()) {
    return this.#during("shared", "masked", async () => {
      const { names, members, length, digest } = this.terms, secrets = this.#secrets;
      this.#secrets = null;
      if (!(values instanceof Uint32Array) || values.length !== length) {
        throw new SecureSumError(`${this.me}: the values to hide are ${values?.length} words, the terms say ${length}`);
      }
      const others = this.#checkedList("alive", alive, names).filter((name) => name !== this.me);
      this.#checkListsCannotOpen(alive.length);
      const wrong = sortedNames([...new Set([...others, ...received.keys()])]).filter((name) => others.includes(name) !== received.has(name));
      if (wrong.length) throw new Refused(`${this.me} refuses to upload: shares missing from, or not due from, ${wrong.join(", ")}`);
      for (const name of others) {
        this.#held.set(name, await this.#open(secrets, name, received.get(name), signatures.get(name) ?? new Uint8Array(0)));
      }
      this.#held.set(this.me, secrets.own);
      const sent = new Uint32Array(length + CHECK_WORDS).fill(1, length);
      sent.set(values);
      await addMask(sent, await selfKey(secrets.seed, digest, this.me), 1);
      const own = names.indexOf(this.me);
      for (const name of others) {
        const place = names.indexOf(name);
        const agreed = await this.#agree(secrets.pair.mask, name, members[place].mask);
        await addMask(sent, await pairKey(agreed, digest, this.me, name), own < place ? 1 : -1);
      }
      return sent;
    });
  }

  /**
   * One share per member alive: of a survivor's seed, of a lost member's mask key, never of both.
   * @param {string[]} survivors
   * @returns {Promise<Uint8Array>}
   */
  unmask(survivors) {
    return this.#during("masked", "over", async () => {
      const held = this.#held;
      this.#held = new Map();
      const alive = sortedNames([...held.keys()]), stayed = this.#checkedList("survivors", survivors, alive);
      const shares = alive.map((name) => held.get(name)[stayed.includes(name) ? 0 : 1]);
      return joined([await answerTag(this.terms.digest, alive, stayed), ...shares]);
    });
  }

  /** Drop every secret: the sum is over for this client. */
  forget() {
    this.#stage = "over";
    this.#pair = this.#secrets = null;
    this.#held = new Map();
  }

  async #during(due, then, work) {
    if (this.#stage !== due) {
      throw new Refused(`${this.me} refuses a call out of order: this sum is ${this.#stage}, the call wants it ${due}`);
    }
    this.#stage = then;
    try {
      return await work();
    } catch (error) {
      this.forget();
      throw error;
    }
  }

  async #agree(secret, name, publicKey) {
    try {
      return await agree(secret, publicKey);
    } catch (error) {
      if (error instanceof SecureSumError) throw new Refused(`${this.me} refuses ${name}: ${error.message}`, name);
      throw error;
    }
  }

  async #open({ pair, agreed }, sender, sealed, signature) {
    const { digest, members } = this.terms;
    try {
      return await unseal(agreed.get(sender), digest, sender, this.me, sealed);
    } catch (error) {
      if (!(error instanceof SecureSumError)) throw error;
      const keys = members.find(({ client }) => client === sender), own = members.find(({ client }) => client === this.me);
      const isOwn = await isSignature(signature, packageText(digest, sender, this.me, sealed), this.#identities.get(sender));
      // Else the key may be made from an honest client's, and what is shown would be that client's secret.
      const shown = isOwn && (await isPossessed(keys))
        ? await evidence(pair.channel, own.channel, keys.channel, framed(digest, this.me, sender), this.#random) : null;
      throw new Refused(`${this.me} refuses to upload: ${error.message}`, sender, shown);
    }
  }

  /** The names sorted, if they are distinct, known, enough, and this client is among them. */
  #checkedList(what, names, known) {
    if (new Set(names).size !== names.length) throw new Refused(`${this.me} refuses a list of ${what} that names a client twice`);
    const strangers = sortedNames(names.filter((name) => !known.includes(name)));
    if (strangers.length) throw new Refused(`${this.me} refuses ${what} it does not know from before: ${strangers.join(", ")}`);
    if (names.length < this.#least) throw new Refused(`${this.me} refuses ${names.length} ${what}: its floor and the threshold want ${this.#least}`);
    if (!names.includes(this.me)) throw new Refused(`${this.me} refuses a list of ${what} without itself`);
    return sortedNames(names);
  }

  #checkListsCannotOpen(alive) {
    const { names, threshold } = this.terms, least = leastAlive(names.length, threshold);
    if (alive < least) {
      throw new Refused(`${this.me} refuses to upload among ${alive} alive of ${names.length}: at the threshold ${threshold} a server that tells clients different lists could open its values; it wants ${least}, or a higher threshold`);
    }
  }
}
