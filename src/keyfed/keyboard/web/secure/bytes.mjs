/** Bytes, numbers and names as the secure sum has them; what goes wrong in it. */

/** What a client will not do, in one line; `accused` names who is to blame, `evidence` proves it to the server. */
export class Refused extends Error {
  constructor(message, accused = null, evidence = null) {
    super(message);
    this.accused = accused;
    this.evidence = evidence;
  }
}

/** A message that must not be answered, or must not count, with a typed reason (`keyfed.federated.types.Reason`). */
export class Rejected extends Error {
  constructor(reason, detail) {
    super(`${reason}: ${detail}`);
    [this.reason, this.detail] = [reason, detail];
  }
}

/** A value that does not belong in a secure sum. */
export class SecureSumError extends Error {}

const encoder = new TextEncoder();

/** The UTF-8 bytes of a text. */
export const utf8 = (text) => encoder.encode(text);

/** @param {Uint8Array[]} pieces */
export function joined(pieces) {
  const out = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    out.set(piece, at);
    at += piece.length;
  }
  return out;
}

/** A whole number in eight bytes, the highest first. */
export function eightBytes(number) {
  const out = new Uint8Array(8);
  new DataView(out.buffer).setBigUint64(0, BigInt(number));
  return out;
}

/** Pieces joined, each behind its length, so that no two lists give the same bytes. Texts are UTF-8. */
export function framed(...pieces) {
  const all = pieces.map((piece) => (typeof piece === "string" ? utf8(piece) : piece));
  return joined(all.flatMap((piece) => [eightBytes(piece.length), piece]));
}

export const isSame = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** The bytes of a hexadecimal text of exactly `size` bytes; null for anything else. */
export function fromHex(text, size) {
  if (typeof text !== "string" || text.length !== 2 * size || !/^[0-9a-f]*$/i.test(text)) return null;
  return Uint8Array.from({ length: size }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
}

/** Bytes as a whole number, the highest byte first or last. */
export const bigNumber = (bytes, isLittle = false) =>
  BigInt(`0x${hex(isLittle ? Uint8Array.from(bytes).reverse() : bytes) || "0"}`);

/** A whole number in so many bytes, the highest byte first or last. */
export function bytesOf(number, size, isLittle = false) {
  const bytes = fromHex(number.toString(16).padStart(2 * size, "0"), size);
  return isLittle ? bytes.reverse() : bytes;
}

/** Names in the order of their code points, as Python sorts them. */
export function sortedNames(names) {
  const points = (name) => Array.from(name, (c) => c.codePointAt(0));
  const keyed = names.map((name) => [points(name), name]);
  const order = ([a], [b]) => {
    const at = a.findIndex((c, i) => c !== b[i]);
    return at < 0 ? a.length - b.length : at >= b.length ? 1 : a[at] - b[at];
  };
  return keyed.sort(order).map(([, name]) => name);
}

/** Random bytes from the browser. */
export const systemRandom = (size) => crypto.getRandomValues(new Uint8Array(size));

export const sha256 = async (bytes) => new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
export const sha512 = async (bytes) => new Uint8Array(await crypto.subtle.digest("SHA-512", bytes));
