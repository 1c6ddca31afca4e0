/**
 * What travels between server and page, byte for byte as in `keyfed/wire/messages.py`: "KFM" and the version, the
 * length of a JSON head, the head, and tensors as safetensors. What a server sends is hostile until checked.
 */

import { eightBytes, hex, joined, Rejected, SecureSumError, sha256, sortedNames, utf8 } from "../secure/bytes.mjs";
import { Numeral, parse, plain, written } from "../secure/json.mjs";
import { readTensors } from "../decoder/safetensors.mjs";

const PROTOCOL = 2, MARK = utf8("KFM"), START = 8;
const BEGIN_HEAD = 16 << 20, COHORT_HEAD = (64 << 10) + (1 << 10) * 4096, LARGEST_COUNT = 2 ** 53;

/** Bytes that the head of a kind of message may have. */
export const mostHead = (kind) => (kind === "hello" ? BEGIN_HEAD : kind === "bye" || kind === "who" ? 64 << 10 : COHORT_HEAD);

/**
 * Read a message.
 * @param {Uint8Array} message
 * @param {number} most  bytes that its head may have
 * @returns {{exact: any, head: any, tensors: Uint8Array}}  exact: with the numbers as written
 */
export function unpack(message, most) {
  const version = message[3] - 48;
  if (message.length < START || MARK.some((byte, i) => message[i] !== byte)) throw new Rejected("malformed", "not a message of this protocol");
  if (version !== PROTOCOL) {
    const older = version > PROTOCOL ? "this page" : "the server";
    throw new Rejected("other protocol", `this page speaks protocol ${PROTOCOL}, the server ${version}: update keyfed on ${older}`);
  }
  const length = new DataView(message.buffer, message.byteOffset).getUint32(4, true);
  if (length > Math.min(most, message.length - START)) {
    throw new Rejected("malformed", `a head of ${length} bytes in a message of ${message.length}; expected at most ${most}`);
  }
  let exact;
  try {
    exact = parse(new TextDecoder("utf-8", { fatal: true }).decode(message.subarray(START, START + length)));
  } catch (error) {
    if (error instanceof SecureSumError || error instanceof TypeError) throw new Rejected("malformed", "a head that is no JSON of ours");
    throw error;
  }
  if (!isObject(exact)) throw new Rejected("malformed", "a head that is no object");
  return { exact, head: plain(exact), tensors: message.subarray(START + length) };
}

/** Whether a value of JSON is an object. */
export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Numeral);

/**
 * Write a message.
 * @param {object} head
 * @param {{name: string, dtype: "I32" | "F32", shape: number[], data: Int32Array | Float32Array}[]} [tensors]
 */
export function pack(head, tensors = null) {
  const text = utf8(JSON.stringify(head)), length = new Uint8Array(4);
  new DataView(length.buffer).setUint32(0, text.length, true);
  const start = [MARK, utf8(String(PROTOCOL)), length, text];
  if (!tensors) return joined(start);
  let at = 0;
  const entries = tensors.map(({ name, dtype, shape, data }) => [name, { dtype, shape, data_offsets: [at, (at += data.byteLength)] }]);
  const described = utf8(JSON.stringify(Object.fromEntries(entries)));
  const bodies = tensors.map(({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  return joined([...start, eightBytes(described.length).reverse(), described, ...bodies]);
}

/**
 * Tensors that must have exactly these names and shapes, in float32, in the order of `shapes`.
 * @param {Uint8Array} bytes
 * @param {Object<string, number[]>} shapes
 * @returns {Object<string, Float32Array>}
 */
export function modelOf(bytes, shapes) {
  const size = Object.values(shapes).reduce((sum, shape) => sum + 4 * shape.reduce((product, n) => product * n, 1), 0);
  if (bytes.length > size + 1024 + 400 * Object.keys(shapes).length) throw new Rejected("too large", `a model in ${bytes.length} bytes; expected about ${size}`);
  let found;
  try {
    found = readTensors(bytes);
  } catch (error) {
    throw new Rejected("malformed", `tensors that cannot be read (${error.message.slice(0, 80)})`);
  }
  if (found.size !== Object.keys(shapes).length) throw new Rejected("wrong tensors", `${found.size} tensors; expected ${Object.keys(shapes).length}`);
  return Object.fromEntries(Object.entries(shapes).map(([name, shape]) => {
    const tensor = found.get(name);
    if (!tensor) throw new Rejected("wrong tensors", `tensor "${name}" is missing`);
    if (!(tensor.data instanceof Float32Array)) throw new Rejected("wrong type", `"${name}" is not float32`);
    if (String(tensor.shape) !== String(shape)) throw new Rejected("wrong shape", `"${name}" is [${tensor.shape}]; expected [${shape}]`);
    return [name, tensor.data];
  }));
}

const raw = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

/** SHA-256 of a model: names, shapes, types and numbers, in the order of names; `digest_of` of Python. */
export async function digestOf(params, shapes) {
  const pieces = sortedNames(Object.keys(params)).flatMap((name) => {
    const shape = shapes[name], tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
    return [utf8(`${name}|${tuple}|torch.float32|`), raw(params[name])];
  });
  return hex(await sha256(joined(pieces)));
}

/** SHA-256 of plain values, written as Python's JSON with sorted keys. */
export const textDigest = async (value) => hex(await sha256(utf8(written(value))));

/** SHA-256 of what a run is about: what every client must have been told alike. */
export const aboutDigest = (exact) => textDigest(Object.fromEntries(
  ["config", "vocab", "method", "secure"].map((key) => [key, exact[key] ?? null])));

/** What a client signs to prove who it is. */
export const helloText = (name, run, nonce, hideAmong) => utf8(written(["keyfed hello", name, run, nonce, hideAmong]));

/**
 * What a secure sum's masks are bound to: clients that were told another run, model, round or public number share no
 * mask. `context_of` and `sum_context` of Python.
 * @param {{run: string, attempt: number, about: string, part: string | null, purpose: string, round: number,
 *   spec: any, publicNumbers: any, halvings: number, theta: Object<string, Float32Array>,
 *   shapes: Object<string, number[]>}} agreed  spec and public numbers with their numbers as written
 */
export async function sumContext({ run, attempt, about, part, purpose, round, spec, publicNumbers, halvings, theta, shapes }) {
  const layers = Object.fromEntries(Object.entries(shapes).map(([name, shape]) => [name, [shape, "torch.float32"]]));
  const all = { purpose, round, method: spec.name, spec, public: publicNumbers, layers, ...(halvings ? { halvings } : {}) };
  const round_ = await sha256(joined([utf8(written(all)), ...Object.values(theta).map(raw)]));
  return sha256(joined([utf8(written([run, attempt, about, part])), round_]));
}

/** A whole number of a head within bounds. */
export function wholeNumber(head, key, low = 0, high = LARGEST_COUNT) {
  const got = head[key];
  if (!Number.isSafeInteger(got) || got < low || got > high) {
    throw new Rejected("malformed", `"${key}" is ${String(got).slice(0, 40)}; expected a whole number from ${low} to ${high}`);
  }
  return got;
}

/** A short text of a head. */
export function textIn(head, key, most = 200) {
  const got = head[key];
  if (typeof got !== "string" || got.length > most) throw new Rejected("malformed", `"${key}" is no text of at most ${most} characters`);
  return got;
}
