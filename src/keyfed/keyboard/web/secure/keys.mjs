/**
 * Keys of a client: a lasting Ed25519 identity, and pairs of X25519 keys that serve one secure sum each. The bytes are
 * those of `keyfed/private/secagg/keys.py`. WebCrypto does the curves; a private half of X25519 is in our hands because
 * it is shared among the others.
 */

import { eightBytes, framed, fromHex, hex, joined, SecureSumError, sha256, systemRandom, utf8 } from "./bytes.mjs";
import { possession, signingKey } from "./curve.mjs";

export const KEY_BYTES = 32, SIGNATURE_BYTES = 64;
const NAME_BYTES = 255, MOST_SERIAL = 2n ** 63n;
const SIGNED_AS = "keyfed one-time keys 1", POSSESSED_AS = "keyfed channel key 1";
const PKCS8 = { X25519: "302e020100300506032b656e04220420", Ed25519: "302e020100300506032b657004220420" };
const NINE = Uint8Array.from({ length: KEY_BYTES }, (_, i) => (i ? 0 : 9)); // the base point of X25519

const pkcs8 = (kind, secret) => joined([fromHex(PKCS8[kind], PKCS8[kind].length / 2), secret]);

/** A 32-byte key for one purpose: HKDF-SHA256 without salt, `info` framed. */
export async function derive(secret, ...info) {
  const key = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  const how = { name: "HKDF", hash: "SHA-256", salt: new Uint8Array(0), info: framed(...info) };
  return new Uint8Array(await crypto.subtle.deriveBits(how, key, 8 * KEY_BYTES));
}

/** The secret that two X25519 keys share (RFC 7748 §6.1); the all-zero one is an error. */
export async function agree(secret, publicKey) {
  try {
    const own = await crypto.subtle.importKey("pkcs8", pkcs8("X25519", secret), "X25519", false, ["deriveBits"]);
    const other = await crypto.subtle.importKey("raw", publicKey, "X25519", false, []);
    const shared = new Uint8Array(await crypto.subtle.deriveBits({ name: "X25519", public: other }, own, 8 * KEY_BYTES));
    if (shared.some((byte) => byte !== 0)) return shared;
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
  }
  throw new SecureSumError(`the X25519 key ${hex(publicKey)} is of low order or no key: take no part with it`);
}

/** A client's lasting key, by which its one-time keys are known to be its own. The private half cannot be read. */
export class Identity {
  /** @param {CryptoKey} key  private, Ed25519, not to be read out @param {Uint8Array} publicKey */
  constructor(key, publicKey) {
    this.key = key;
    this.public = publicKey;
  }

  /** @param {Uint8Array} secret  32 bytes */
  static async fromBytes(secret) {
    if (secret.length !== KEY_BYTES) throw new SecureSumError(`an identity's private key has ${KEY_BYTES} bytes, not ${secret.length}`);
    const stored = pkcs8("Ed25519", secret);
    const open = await crypto.subtle.importKey("pkcs8", stored, "Ed25519", true, ["sign"]);
    const { x } = await crypto.subtle.exportKey("jwk", open);
    const publicKey = Uint8Array.from(atob(x.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    return new Identity(await crypto.subtle.importKey("pkcs8", stored, "Ed25519", false, ["sign"]), publicKey);
  }

  static make(random = systemRandom) {
    return Identity.fromBytes(random(KEY_BYTES));
  }

  async sign(message) {
    return new Uint8Array(await crypto.subtle.sign("Ed25519", this.key, message));
  }
}

/**
 * What a client posts for one secure sum.
 * @typedef {{client: string, serial: bigint, mask: Uint8Array, channel: Uint8Array, signature: Uint8Array,
 *   proof: Uint8Array}} SignedKeys
 */

/** The private halves of the keys for one secure sum; `take` hands them out once. */
export class OneTime {
  #pair;

  constructor(serial, pair, { mask, channel }) {
    [this.serial, this.mask, this.channel] = [serial, mask, channel];
    this.#pair = pair;
  }

  /** @returns {{mask: Uint8Array, channel: Uint8Array} | null}  null: they were used before */
  take() {
    const pair = this.#pair;
    this.#pair = null;
    return pair;
  }
}

/** Draw the keys for one secure sum. @returns {Promise<{own: OneTime, posted: SignedKeys}>} */
export async function makeKeys(identity, client, serial, random = systemRandom) {
  const drawn = random(2 * KEY_BYTES), number = checkedSerial(serial);
  const pair = { mask: drawn.slice(0, KEY_BYTES), channel: drawn.slice(KEY_BYTES) };
  const mask = await agree(pair.mask, NINE), channel = await agree(pair.channel, NINE);
  const text = signedText({ client, serial: number, mask, channel });
  const proof = await possession(pair.channel, channel, framed(POSSESSED_AS, text));
  const posted = { client, serial: number, mask, channel, signature: await identity.sign(text), proof };
  return { own: new OneTime(number, pair, posted), posted };
}

/** Whether this browser has what keys are made of. */
export async function hasCurves() {
  try {
    await makeKeys(await Identity.make(), "probe", 0);
    return true;
  } catch {
    return false;
  }
}

/** What `SignedKeys.to_json` of Python gives, as JSON; a serial beyond 2⁵³ is refused by both sides of a page. */
export function keysToJson({ client, serial, mask, channel, signature, proof }) {
  return { client, serial: Number(serial), mask: hex(mask), channel: hex(channel), signature: hex(signature), proof: hex(proof) };
}

/** Read what `keysToJson` gave; anything else is an error. @returns {SignedKeys} */
export function keysFromJson(data) {
  const fields = ["client", "serial", "mask", "channel", "signature", "proof"];
  if (data === null || typeof data !== "object" || String(Object.keys(data).sort()) !== String([...fields].sort())) {
    throw new SecureSumError(`signed keys are a JSON object with exactly ${[...fields].sort().join(", ")}`);
  }
  checkedName(data.client);
  const out = { client: data.client, serial: checkedSerial(data.serial) };
  for (const [field, size] of [["mask", KEY_BYTES], ["channel", KEY_BYTES], ["signature", SIGNATURE_BYTES], ["proof", SIGNATURE_BYTES]]) {
    out[field] = fromHex(data[field], size);
    if (!out[field]) throw new SecureSumError(`the keys of ${data.client}: ${field} is not ${size} bytes in hexadecimal`);
  }
  return out;
}

/** Whether the keys carry the signature of this identity for this client's name and serial. */
export const isSigned = (keys, identity) => isSignature(keys.signature, signedText(keys), identity);

/** Whether the owner of these keys has proved that it knows the private half of its channel key. */
export async function isPossessed(keys) {
  const key = signingKey(keys.channel);
  return key !== null && isSignature(keys.proof, framed(POSSESSED_AS, signedText(keys)), key);
}

/** Whether a signature of a message is this identity's. */
export async function isSignature(signature, message, identity) {
  try {
    const key = await crypto.subtle.importKey("raw", identity, "Ed25519", false, ["verify"]);
    return await crypto.subtle.verify("Ed25519", key, signature, message);
  } catch (error) {
    if (error instanceof DOMException) return false;
    throw error;
  }
}

/** An answer with its client's signature behind it: of the name, the kind of message and all its bytes. */
export async function signedAnswer(identity, client, kind, answer) {
  const text = framed("keyfed answer 1", checkedName(client), kind, await sha256(answer));
  return joined([answer, await identity.sign(text)]);
}

function signedText({ client, serial, mask, channel }) {
  return framed(SIGNED_AS, checkedName(client), eightBytes(serial), mask, channel);
}

function checkedName(client) {
  const name = typeof client === "string" && client.isWellFormed() ? utf8(client) : new Uint8Array(0);
  if (name.length > 0 && name.length <= NAME_BYTES) return name;
  throw new SecureSumError(`a client's name is text of 1 to ${NAME_BYTES} bytes`);
}

function checkedSerial(serial) {
  const isWhole = typeof serial === "bigint" || Number.isSafeInteger(serial);
  if (isWhole && serial >= 0 && BigInt(serial) < MOST_SERIAL) return BigInt(serial);
  throw new SecureSumError("a serial is a whole number from 0 below 2**63");
}
