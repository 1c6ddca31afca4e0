/**
 * Curve25519 as edwards25519, on which points can be added, y = (u − 1)/(u + 1): for the proofs about X25519 keys that
 * WebCrypto does not have. The arithmetic is JavaScript's and not in constant time: it touches private keys that serve
 * one sum, at the client that drew them. See `keyfed/private/secagg/keys.py`; RFC 7748 §4.1, RFC 8032 §5.1.
 */

import { bigNumber, bytesOf, framed, joined, sha512, systemRandom } from "./bytes.mjs";

export const FIELD = 2n ** 255n - 19n;
/** The order of the base point's group; the curve has 8 times as many points. */
export const ORDER = 2n ** 252n + 27742317777372353535851937790883648493n;
const D = mod(-121665n * inverse(121666n));
const ROOT = power(2n, (FIELD - 1n) / 4n); // of −1

/** @typedef {[bigint, bigint, bigint, bigint]} Point  X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z */
const ZERO = [0n, 1n, 1n, 0n];

function mod(x, by = FIELD) {
  const rest = x % by;
  return rest < 0n ? rest + by : rest;
}

function power(base, exponent) {
  let out = 1n;
  for (let b = mod(base); exponent > 0n; exponent >>= 1n, b = (b * b) % FIELD) if (exponent & 1n) out = (out * b) % FIELD;
  return out;
}

function inverse(x) {
  return power(x, FIELD - 2n);
}

/** @returns {Point} */
function plus(p, q) {
  const a = mod((p[1] - p[0]) * (q[1] - q[0])), b = mod((p[1] + p[0]) * (q[1] + q[0]));
  const c = mod(2n * p[3] * q[3] * D), d = mod(2n * p[2] * q[2]);
  const e = b - a, f = d - c, g = d + c, h = b + a;
  return [mod(e * f), mod(g * h), mod(f * g), mod(e * h)];
}

function times(scalar, point) {
  let out = ZERO;
  for (const bit of scalar.toString(2)) {
    out = plus(out, out);
    if (bit === "1") out = plus(out, point);
  }
  return out;
}

const same = (p, q) => mod(p[0] * q[2] - q[0] * p[2]) === 0n && mod(p[1] * q[2] - q[1] * p[2]) === 0n;

/** The point with this y whose x is odd or even; null if there is none. */
function ofHeight(y, odd) {
  const square = mod((y * y - 1n) * inverse(D * y * y + 1n)); // D is no square: below is never zero
  let x = power(square, (FIELD + 3n) / 8n);
  if (mod(x * x) !== square) x = mod(x * ROOT);
  if (mod(x * x) !== square || (x === 0n && odd)) return null;
  if (x !== 0n && x % 2n !== odd) x = FIELD - x;
  return [x, y, 1n, mod(x * y)];
}

const BASE = ofHeight(mod(4n * inverse(5n)), 0n);

/** The point with even x over a u-coordinate, read as X25519 reads it; null for one of the twist. */
function lifted(publicKey) {
  const u = mod(bigNumber(publicKey, true) & (2n ** 255n - 1n));
  return mod(u + 1n) === 0n ? null : ofHeight(mod((u - 1n) * inverse(u + 1n)), 0n);
}

/** A point's 32 bytes: y, and the lowest bit of x. */
function packed(point) {
  const z = inverse(point[2]);
  return bytesOf(mod(point[1] * z) | ((mod(point[0] * z) & 1n) << 255n), 32, true);
}

/** The number that X25519 reads in a private key. */
const clamped = (secret) => (bigNumber(secret, true) & ~7n & (2n ** 255n - 1n)) | (1n << 254n);

const hashed = async (...pieces) => bigNumber(await sha512(joined(pieces)), true) % ORDER;

/** The Ed25519 public key over an X25519 public key; null where there is none. */
export function signingKey(publicKey) {
  const point = lifted(publicKey);
  return point && packed(point);
}

/**
 * A proof that one knows the private half of an X25519 key: a signature of a text under it (XEdDSA).
 * @param {Uint8Array} secret     the private half
 * @param {Uint8Array} publicKey  the public half
 * @param {Uint8Array} text
 */
export async function possession(secret, publicKey, text) {
  const point = lifted(publicKey);
  let own = clamped(secret) % ORDER;
  if (!same(times(own, BASE), point)) own = ORDER - own;
  const label = new TextEncoder().encode("keyfed possession nonce");
  const nonce = await hashed(label, bytesOf(own, 32, true), framed(text));
  const committed = packed(times(nonce, BASE));
  const answer = mod(nonce + (await hashed(committed, packed(point), text)) * own, ORDER);
  return joined([committed, bytesOf(answer, 32, true)]);
}

/**
 * What a private key and the public key of the accused agree on, with the proof (Chaum and Pedersen); see
 * `keyfed/private/secagg/accusation.py`.
 * @param {Uint8Array} secret, publicKey  the accuser's pair
 * @param {Uint8Array} accused            a public key
 * @param {Uint8Array} bound              what the proof is for
 * @returns {Promise<Uint8Array | null>}  null where a key is not on the curve: there is nothing to prove
 */
export async function evidence(secret, publicKey, accused, bound, random = systemRandom) {
  const own = lifted(publicKey), other = lifted(accused);
  if (!own || !other) return null;
  const base = times(8n, BASE), point = times(8n, other);
  let number = (clamped(secret) / 8n) % ORDER;
  if (!same(times(number, base), own)) number = ORDER - number; // the lifted point is one of ±A
  const agreed = times(number, point), nonce = bigNumber(random(64), true) % ORDER;
  const points = [own, point, agreed, times(nonce, base), times(nonce, point)].map(packed);
  const challenge = await hashed(framed("keyfed accusation 1", bound, ...points));
  const answer = mod(nonce + challenge * number, ORDER);
  return joined([packed(agreed), bytesOf(challenge, 32, true), bytesOf(answer, 32, true)]);
}
