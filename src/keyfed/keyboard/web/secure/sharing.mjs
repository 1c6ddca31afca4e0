/**
 * Shares, packages and masks of a secure sum, byte for byte those of `keyfed/private/secagg/shamir.py` and `wire.py`,
 * where they are described. Everything is bound to the digest of the terms.
 */

import { bigNumber, bytesOf, framed, isSame, joined, SecureSumError, sha256, sortedNames } from "./bytes.mjs";
import { derive, KEY_BYTES } from "./keys.mjs";

const PRIME = 2n ** 256n + 297n;
const SECRET_BYTES = 32, SHARE_BYTES = 33, UNIFORM_BYTES = 48;
const HASH_BYTES = 32, TAG_BYTES = 16, OPEN_BYTES = 3 * HASH_BYTES;
export const NONCE_BYTES = 12;
const PACKAGE_BYTES = OPEN_BYTES + NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES;

/**
 * Share a secret among the places 1 to n so that `threshold` of them restore it: f(x) = s + a₁x + … + a_{t−1}x^{t−1}.
 * @returns {Uint8Array[]}  the share of place i at i − 1
 */
export function split(secret, threshold, n, random) {
  if (secret.length !== SECRET_BYTES) throw new SecureSumError(`a secret to share has ${SECRET_BYTES} bytes, not ${secret.length}`);
  if (!(threshold >= 1 && threshold <= n)) throw new SecureSumError(`a threshold of ${threshold} among ${n} places`);
  const noise = random(UNIFORM_BYTES * (threshold - 1));
  const chance = Array.from({ length: threshold - 1 }, (_, i) =>
    bigNumber(noise.subarray(UNIFORM_BYTES * i, UNIFORM_BYTES * (i + 1))) % PRIME);
  const downwards = [...chance, bigNumber(secret)];
  return Array.from({ length: n }, (_, i) =>
    bytesOf(downwards.reduce((value, a) => (value * BigInt(i + 1) + a) % PRIME, 0n), SHARE_BYTES));
}

const isShare = (share) => share.length === SHARE_BYTES && bigNumber(share) < PRIME;

/** The key of the mask between two clients from what their mask keys agree on; the order does not matter. */
export const pairKey = (agreed, digest, one, other) => derive(agreed, "keyfed pair mask", digest, ...sortedNames([one, other]));

/** The key of a client's own mask from its fresh seed. */
export const selfKey = (seed, digest, name) => derive(seed, "keyfed self mask", digest, name);

/** The hash by which a client's seed is recognised, in this sum only. */
export const commitment = (seed, digest, name) => sha256(framed("keyfed seed commitment", digest, name, seed));

const hashesOf = async (shares, digest, sender, addressee) => joined(await Promise.all(
  shares.map((share, i) => sha256(framed("keyfed share", digest, sender, addressee, ["seed", "mask key"][i], share)))));

async function channel(agreed, digest, sender, addressee, head) {
  const key = await crypto.subtle.importKey("raw", await derive(agreed, "keyfed share channel", digest, sender, addressee), "AES-GCM", false, ["encrypt", "decrypt"]);
  return { key, bound: framed(digest, sender, addressee, head) };
}

/** Encrypt (share of the seed, share of the mask key) for one other client. */
export async function seal(agreed, digest, sender, addressee, committed, shares, nonce) {
  const head = joined([committed, await hashesOf(shares, digest, sender, addressee)]);
  const { key, bound } = await channel(agreed, digest, sender, addressee, head);
  const how = { name: "AES-GCM", iv: nonce, additionalData: bound };
  return joined([head, nonce, new Uint8Array(await crypto.subtle.encrypt(how, key, joined(shares)))]);
}

/** Decrypt a package; one that is not exactly as the sender sealed it for this sum is an error. */
export async function unseal(agreed, digest, sender, addressee, sealed) {
  const altered = new SecureSumError(`the shares from ${sender} to ${addressee} were altered or belong to other terms`);
  if (sealed.length !== PACKAGE_BYTES) throw altered;
  const head = sealed.slice(0, OPEN_BYTES), nonce = sealed.slice(OPEN_BYTES, OPEN_BYTES + NONCE_BYTES);
  const { key, bound } = await channel(agreed, digest, sender, addressee, head);
  let both;
  try {
    const how = { name: "AES-GCM", iv: nonce, additionalData: bound };
    both = new Uint8Array(await crypto.subtle.decrypt(how, key, sealed.slice(OPEN_BYTES + NONCE_BYTES)));
  } catch (error) {
    if (error instanceof DOMException) throw altered;
    throw error;
  }
  const shares = [both.slice(0, SHARE_BYTES), both.slice(SHARE_BYTES)];
  const hashes = await hashesOf(shares, digest, sender, addressee);
  if (!isSame(hashes, head.subarray(HASH_BYTES)) || !shares.every(isShare)) {
    throw new SecureSumError(`the shares from ${sender} to ${addressee} are not those that it committed to`);
  }
  return shares;
}

/** What a sender signs of a package: only what it signed can be held against it. */
export const packageText = (digest, sender, addressee, sealed) => framed("keyfed package 1", digest, sender, addressee, sealed);

/** The hash that opens an answer: an answer to another question is recognised. */
export const answerTag = (digest, alive, survivors) => sha256(framed("keyfed unmask", digest, framed(...alive), framed(...survivors)));

const CHUNK = 1 << 18; // words
const ZEROS = new Uint8Array(4 * CHUNK);

/**
 * Add (`sign` 1) or take away (−1) a key's mask, in place, modulo 2³²: the keystream of AES-256 in counter mode from an
 * all-zero block, read as little-endian words.
 * @param {Uint32Array} vector
 */
export async function addMask(vector, key, sign) {
  if (key.length !== KEY_BYTES) throw new SecureSumError(`a mask's key has ${KEY_BYTES} bytes, not ${key.length}`);
  const aes = await crypto.subtle.importKey("raw", key, "AES-CTR", false, ["encrypt"]);
  for (let start = 0; start < vector.length; start += CHUNK) {
    const chunk = vector.subarray(start, start + CHUNK), counter = new Uint8Array(16);
    new DataView(counter.buffer).setBigUint64(8, BigInt(start / 4)); // four words a block
    const stream = await crypto.subtle.encrypt({ name: "AES-CTR", counter, length: 128 }, aes, ZEROS.subarray(0, 4 * chunk.length));
    const words = new Uint32Array(stream);
    if (sign === 1) for (let i = 0; i < chunk.length; i++) chunk[i] += words[i];
    else for (let i = 0; i < chunk.length; i++) chunk[i] -= words[i];
  }
}
