// What a real browser computes of the page's modules: a local round, and a secure sum with fixed entropy. Served next to them.

import { fromHex, hex } from "./secure/bytes.mjs";
import { Identity, keysFromJson, keysToJson, makeKeys } from "./secure/keys.mjs";
import { Member, termsOf } from "./secure/member.mjs";
import { trainLocally } from "./training/descent.mjs";

const read = (text) => fromHex(text, text.length / 2);
const bytesIn = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

/** Entropy that was drawn before: a stream that is read once. */
function drawn(text) {
  const bytes = read(text);
  let at = 0;
  return (size) => bytes.slice(at, (at += size));
}

/** A round from weights in base64, of numbers of that type; the weights after it as lists. */
export async function train({ weights, type, model, stream, local, task }) {
  const Kind = { float64: Float64Array, float32: Float32Array }[type];
  const theta = Object.fromEntries(Object.entries(weights).map(([name, text]) => [name, new Kind(bytesIn(text).buffer)]));
  const found = await trainLocally(model, theta, Int32Array.from(stream), local, { ...task, seed: BigInt(task.seed) });
  return { loss: found.loss, weights: Object.fromEntries(Object.entries(found.weights).map(([name, w]) => [name, [...w]])) };
}

/** A sum of the transcript from keys to answers, as its clients write it. */
export async function sum({ names, lost, threshold, serial, context, identities, keys, shares, vectors }) {
  const known = new Map(), own = {}, posted = {}, members = {};
  for (const name of names) {
    const identity = await Identity.fromBytes(read(identities[name]));
    known.set(name, identity.public);
    const made = await makeKeys(identity, name, serial, drawn(keys[name]));
    [own[name], posted[name]] = [made.own, keysToJson(made.posted)];
  }
  const words = Object.fromEntries(names.map((name) => [name, new Uint32Array(read(vectors[name]).buffer)]));
  const cohort = names.map((name) => keysFromJson(posted[name]));
  const terms = await termsOf({ context: read(context), cohort, threshold, length: words[names[0]].length });
  const packages = {}, masked = {}, answers = {};
  for (const name of names) {
    members[name] = await Member.join(name, own[name], terms, known, { random: drawn(shares[name]) });
    packages[name] = await members[name].shares();
  }
  for (const name of names) {
    const received = new Map(names.filter((other) => other !== name).map((other) => [other, packages[other].get(name)]));
    const sent = await members[name].masked(words[name], names, received);
    masked[name] = hex(new Uint8Array(sent.buffer));
  }
  const survivors = names.filter((name) => name !== lost);
  for (const name of survivors) answers[name] = hex(await members[name].unmask(survivors));
  const sealed = Object.fromEntries(names.map((name) => [name, Object.fromEntries([...packages[name]].map(([to, one]) => [to, hex(one)]))]));
  return { posted, digest: hex(terms.digest), packages: sealed, masked, answers };
}
