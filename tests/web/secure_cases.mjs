// Clients of secure sums, driven from stdin line by line: {op, …} in, {value} or {refused, accused, evidence} or {error} out.
// Bytes travel in hexadecimal.

import { createHash } from "node:crypto";
import { createInterface } from "node:readline";

const folder = new URL("../../src/keyfed/keyboard/web/secure/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, folder));
const [bytes, keys, sharing, { Member, termsOf }] = await Promise.all(["bytes", "keys", "sharing", "member"].map(load));
const [{ Session }, { Store }, { Learner, LIMITS }, epsilon, ledger] =
  await Promise.all(["session", "store", "learner", "epsilon", "ledger"].map((name) => load(`../client/${name}`)));
const { fromHex, hex } = bytes;
const read = (text) => fromHex(text, text.length / 2);

// The tests' fixed entropy: SHA-256 of the seed and a counter, byte after byte.
function entropy(seed) {
  let blocks = 0, left = Buffer.alloc(0);
  return (size) => {
    while (left.length < size) left = Buffer.concat([left, createHash("sha256").update(`${seed}/${blocks++}`).digest()]);
    const taken = Uint8Array.from(left.subarray(0, size));
    left = left.subarray(size);
    return taken;
  };
}

const oneTime = new Map(), members = new Map(), pages = new Map();
const mapOf = (object) => new Map(Object.entries(object).map(([name, text]) => [name, read(text)]));
const objectOf = (map) => Object.fromEntries([...map].map(([name, value]) => [name, hex(value)]));

async function openPage(as, opened, kept) {
  const { name, limits = {}, floor, busy = null, budget = null } = opened;
  const values = {
    get: async (key) => structuredClone(kept.get(key)), set: async (key, value) => void kept.set(key, structuredClone(value)),
    delete: async (key) => void kept.delete(key), keys: async () => [...kept.keys()],
  };
  const store = new Store(values);
  const page = { kept, opened, trained: [], duringTraining: null };
  const streams = () => Object.fromEntries(Object.entries(opened.text).map(([part, ids]) => [part, Int32Array.from(ids)]));
  const make = async (about) => {
    const learner = new Learner(about, streams(), { limits: { ...LIMITS, ...limits } }), solve = learner.solve.bind(learner);
    learner.solve = async (...given) => {
      const done = await solve(...given);
      page.trained.push(done.tokens);
      page.duringTraining?.();
      return done;
    };
    return learner;
  };
  page.session = new Session(name, store, make, { floor, ready: () => busy, budget });
  pages.set(as, page);
  return hex((await store.identity()).public);
}

const operations = {
  async keys({ client, serial, identity, random }) {
    const own = await keys.Identity.fromBytes(read(identity));
    const made = await keys.makeKeys(own, client, serial, random ? entropy(random) : undefined);
    oneTime.set(client, made.own);
    return { posted: keys.keysToJson(made.posted), public: hex(own.public) };
  },
  async join({ client, cohort, threshold, length, context, identities, floor, random }) {
    const terms = await termsOf({ cohort: cohort.map(keys.keysFromJson), threshold, length, context: read(context) });
    members.set(client, await Member.join(client, oneTime.get(client), terms, mapOf(identities), {
      floor, random: random ? entropy(random) : undefined,
    }));
    return hex(terms.digest);
  },
  shares: async ({ client }) => objectOf(await members.get(client).shares()),
  async masked({ client, values, alive, received, signatures }) {
    const sent = await members.get(client).masked(Uint32Array.from(values), alive, mapOf(received), mapOf(signatures ?? {}));
    return hex(new Uint8Array(sent.buffer));
  },
  unmask: async ({ client, survivors }) => hex(await members.get(client).unmask(survivors)),
  async mask({ key, words, sign }) {
    const vector = new Uint32Array(words);
    await sharing.addMask(vector, read(key), sign);
    return createHash("sha256").update(new Uint8Array(vector.buffer)).digest("hex");
  },
  agree: async ({ secret, key }) => hex(await keys.agree(read(secret), read(key))),
  derive: async ({ secret, info }) => hex(await keys.derive(read(secret), ...info.map(read))),
  sign: async ({ secret, text }) => hex(await (await keys.Identity.fromBytes(read(secret))).sign(read(text))),
  signed: ({ signature, text, key }) => keys.isSignature(read(signature), read(text), read(key)),
  seal: async ({ agreed, digest, from, to, committed, shares, nonce }) =>
    hex(await sharing.seal(read(agreed), read(digest), from, to, read(committed), shares.map(read), read(nonce))),
  unseal: async ({ agreed, digest, from, to, sealed }) =>
    (await sharing.unseal(read(agreed), read(digest), from, to, read(sealed))).map(hex),
  // ε of each ρ at δ, and what so many uploads of a run cost; ∞ is null in JSON.
  epsilons: ({ rhos, delta }) => rhos.map((rho) => epsilon.rhoToEpsilon(rho, delta)),
  costs: ({ spends }) => spends.map(({ uploads, ...spend }) => ledger.rhoOf(spend, uploads)),
  sorted: ({ names }) => bytes.sortedNames(names),
  possessed: async ({ posted }) => keys.isPossessed(keys.keysFromJson(posted)),
  // A page as a client: opened with its text in tokens, and again with what it kept; then one message at a time. A fork
  // is another page that kept the same and has the same name, for messages that must leave the first one as it is.
  async open({ name, again = false, ...how }) {
    return openPage(name, { name, ...how }, again ? pages.get(name).kept : new Map());
  },
  async fork({ name, to, ...how }) {
    const { kept, opened } = pages.get(name);
    return openPage(to, { ...opened, ...how }, new Map([...kept].map(([key, value]) => [key, structuredClone(value)])));
  },
  handle: async ({ name, kind, body }) => hex(await pages.get(name).session.handle(kind, read(body))),
  // Two messages at the same time: what is said of each.
  both: async ({ name, kind, bodies }) => Promise.all(bodies.map(async (body) => {
    try {
      return hex(await pages.get(name).session.handle(kind, read(body)));
    } catch (error) {
      if (error instanceof bytes.Rejected) return error.message;
      throw error;
    }
  })),
  // The owner changes the text: now, or while the page trains next.
  change({ name, text, isLater = false }) {
    const page = pages.get(name), change = () => {
      page.duringTraining = null;
      page.opened.text = text;
      page.session.textChanged();
    };
    if (isLater) page.duringTraining = change;
    else change();
    return null;
  },
  limit({ name, ...limits }) {
    pages.get(name).session.limit(limits);
    return null;
  },
  trained: ({ name }) => pages.get(name).trained,
  account: ({ name }) => pages.get(name).session.account(),
  // What a page kept under a key is changed, or removed.
  spoil: ({ name, key, to }) => void (to === null ? pages.get(name).kept.delete(key) : pages.get(name).kept.set(key, to)),
  kept: ({ name }) => [...pages.get(name).kept.keys()].sort(),
  async answer({ identity, client, kind, answer }) {
    return hex(await keys.signedAnswer(await keys.Identity.fromBytes(read(identity)), client, kind, read(answer)));
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { op, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: await operations[op](given) };
  } catch (error) {
    if (error instanceof bytes.Refused) {
      answer = { refused: error.message, accused: error.accused, evidence: error.evidence && hex(error.evidence) };
    } else if (error instanceof bytes.Rejected) answer = { rejected: [error.reason, error.detail] };
    else if (error instanceof bytes.SecureSumError) answer = { error: error.message };
    else throw error; // a mistake of ours
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
