/**
 * One client's numbers as one vector of 32-bit words: what `keyfed/engine/sums/codec.py` and `secure_round.py` write,
 * word for word. The client weighs itself by public numbers (`keyfed/federated/public/rules.py`): by its tokens, like
 * everybody else, or by how far its layers moved. Its scales lie within [1/r, 1], whatever the server asks.
 */

import { SecureSumError } from "./bytes.mjs";

const LIMB = 16, LIMBS = 3, FACT_BITS = 15, MOST_MEMBERS = 1 << 15;
const ROOMS = [-8, -4, -2, -1, 0, 1, 2, 3, 4, 6, 10, 18], SATURATED = ROOMS.indexOf(0) + 1;
const SIZES = 32, LEAST_SCORE = 0.05, SCORE_RATIO = 1.03, SCORES = 360, LEAST_LOG = -700;
const SMALLEST_RANGE = -20, MAGNITUDES = 28 - SMALLEST_RANGE + 2;
const MOST_NATS = 2 ** 31;
const EVALUATED = ["clients", "tokens", "nats", "top1", "top3", "words", "words_top1", "words_top3", "unknown"];

/** A number of this client does not fit; nothing is sent. `isRange`: the range of a layer is to blame. */
export class DoesNotFit extends SecureSumError {
  constructor(message, isRange = false) {
    super(message);
    this.isRange = isRange;
  }
}

/**
 * What a client has done in a round.
 * @typedef {{upload: Object<string, Float32Array | Float64Array>, tokens: number, worked: number, loss: number,
 *   distance?: Object<string, number>}} Done
 */

/** To the nearest whole number, halves to the even one. */
function rounded(x) {
  const up = Math.round(x);
  return Math.abs(x % 1) === 0.5 && up % 2 !== 0 ? up - 1 : up;
}

const oneHot = (place, length) => {
  const row = new Array(length).fill(0);
  row[Math.min(Math.max(place, 0), length - 1)] = 1;
  return row;
};
const roomOf = (octaves) => oneHot(ROOMS.filter((edge) => octaves >= edge).length, ROOMS.length + 1);

// How a client weighs itself. Each rule: share(report, layer, public) → [scale, mass]; facts and first by name.

const byTokens = {
  scale: ({ tokens }, layer, { most }) => Math.min(tokens / most, 1),
  facts: ({ tokens }, layers, { most }) => ({ room: roomOf(Math.log2(most / Math.max(1, tokens))) }),
  first: ({ tokens }) => ({ sizes: oneHot(tokens > 1 ? Math.ceil(Math.log2(tokens)) : 0, SIZES) }),
};

const alike = { scale: () => 1, facts: () => ({}), first: () => ({}) };

function byDistance({ temperature, bound = null }) {
  const score = ({ distance }, layer) => Math.min(distance[layer] / temperature, bound ?? Infinity);
  const bucket = (s) => (s <= LEAST_SCORE ? 0 : Math.ceil(Math.log(s / LEAST_SCORE) / Math.log(SCORE_RATIO) - 1e-9));
  const named = (what, layers, row) => Object.fromEntries(layers.map((layer) => [`${what}/${layer}`, row(layer)]));
  return {
    scale: (done, layer, { caps }) => Math.exp(Math.max(Math.min(score(done, layer), caps[layer]) - caps[layer], LEAST_LOG)),
    facts: (done, layers, { caps }) => named("room", layers, (layer) => roomOf((caps[layer] - score(done, layer)) / Math.LN2)),
    first: (done, layers) => named("scores", layers, (layer) => oneHot(bucket(score(done, layer)), SCORES)),
  };
}

/**
 * The rule of a mediator.
 * @param {{name: "tokens" | "uniform" | "distance", temperature?: number, bound?: number | null}} mediator
 */
export function ruleOf(mediator) {
  if (mediator.name === "tokens") return byTokens;
  if (mediator.name === "uniform") return alike;
  if (mediator.name === "distance") return byDistance(mediator);
  throw new SecureSumError(`a page cannot weigh itself by "${mediator.name}"; it knows tokens, uniform and distance`);
}

// Writing

const bitsOf = (members) => {
  if (!(members >= 1 && members <= MOST_MEMBERS)) throw new SecureSumError(`a secure sum of ${members} clients; expected 1 to ${MOST_MEMBERS}`);
  return 31 - (32 - Math.clz32(members - 1));
};

/** A number of at least 0 and below 2³² in limbs of 16 bits, the smallest first. */
function limbs(x, what) {
  const whole = Number.isFinite(x) ? rounded(x * 2 ** LIMB) : -1;
  if (!(whole >= 0 && whole < 2 ** (LIMB * LIMBS))) throw new DoesNotFit(`${what} is ${x}; a secure sum counts from 0 to below 2**32`);
  return Array.from({ length: LIMBS }, (_, n) => Math.floor(whole / 2 ** (LIMB * n)) % 2 ** LIMB);
}

const factWords = (facts, names) => names.flatMap((name) => facts[name].map((x) => rounded(x * 2 ** FACT_BITS)));

const countWords = (counts) => Object.entries(counts).flatMap(([name, x]) => limbs(x, name));

const evaluatedCounts = (score) => Object.fromEntries(
  EVALUATED.map((name) => [`evaluated/${name}`, score === null ? 0 : name === "clients" ? 1 : name === "nats" ? Math.min(Number.isNaN(score.nats) ? Infinity : score.nats, MOST_NATS) : score[name]]));

const largestOf = (change) => change.reduce((most, x) => (Math.abs(x) > most ? Math.abs(x) : most), 0);

/** One layer, scaled, in steps of 2^(exponent − bits), written to `out`. */
function writeLayer(out, name, change, scale, exponent, bits) {
  const step = 2 ** (exponent - bits), most = 2 ** bits - 1;
  for (let i = 0; i < change.length; i++) {
    const number = rounded((change[i] * scale) / step);
    if (!Number.isFinite(number)) throw new DoesNotFit(`layer ${name} has a number that is not finite; nothing was sent`);
    if (!(Math.abs(number) <= most)) {
      throw new DoesNotFit(`layer ${name} has a number beyond the public range 2**${exponent}; nothing was sent`, true);
    }
    out[i] = number; // modulo 2³²
  }
}

/**
 * The vector of a round's sum.
 * @param {Done} done
 * @param {ReturnType<typeof ruleOf>} rule
 * @param {{rule: object, ranges: Object<string, number>}} publicNumbers  calibrated
 * @param {number} members
 * @param {number} ratio          r of the sum's terms
 * @param {object | null} score   what was counted on held-out text
 * @returns {Uint32Array}
 */
export function uploadVector(done, rule, publicNumbers, members, ratio, score = null) {
  const layers = Object.keys(done.upload), bits = bitsOf(members), { ranges } = publicNumbers;
  const own = Object.fromEntries(layers.map((name) => [name, rule.scale(done, name, publicNumbers.rule)]));
  for (const scale of Object.values(own)) {
    if (!(scale > 0)) throw new DoesNotFit("a scale of 0 in a secure sum leaves the other clients alone in it; nothing was sent");
    if (scale > 1) throw new DoesNotFit(`a scale of ${scale}, and a secure sum holds shares within 0 and 1; nothing was sent`);
  }
  const sent = Object.fromEntries(layers.map((name) => [name, Math.max(own[name], 1 / ratio)]));
  const shown = rule.facts(done, layers, publicNumbers.rule);
  const isAbove = (name) => shown[name]?.slice(0, SATURATED).some((x) => x > 0);
  const isClamped = layers.some((name) => sent[name] > own[name] || (own[name] === 1 && (isAbove("room") || isAbove(`room/${name}`))));
  const facts = { ...shown, clamped: [Number(isClamped)] };
  for (const name of layers) {
    const largest = largestOf(done.upload[name]) * sent[name], range = 2 ** ranges[name];
    facts[`large/${name}`] = [Number(largest > range / 2)];
    facts[`small/${name}`] = [Number(largest > 0 && largest <= range / 8)];
  }
  const names = [...Object.keys(shown), ...layers.flatMap((name) => [`large/${name}`, `small/${name}`]), "clamped"];
  const { tokens, worked, loss } = done;
  const counts = { count: 1, tokens, worked, nats: Math.min(loss * tokens, MOST_NATS), loss: Math.min(loss, MOST_NATS), ...evaluatedCounts(score) };
  const fraction = (x) => rounded(x * 2 ** (bits - 1));
  const shares = layers.flatMap((name) => [sent[name], sent[name], sent[name] ** 2, 0].map(fraction));
  const numbers = [...shares, ...countWords(counts), ...factWords(facts, names)];
  const size = layers.reduce((sum, name) => sum + done.upload[name].length, 0);
  const vector = new Uint32Array(size + numbers.length);
  let at = 0;
  for (const name of layers) {
    const { length } = done.upload[name];
    writeLayer(vector.subarray(at, at + length), name, done.upload[name], sent[name], ranges[name], bits);
    at += length;
  }
  vector.set(numbers, at);
  return vector;
}

/** The vector of the calibration: histograms, from which the first public numbers are made. */
export function calibrationVector(done, rule, members) {
  bitsOf(members);
  const layers = Object.keys(done.upload);
  const bucket = (largest) => (largest === 0 ? 0 : Math.max(1, Math.ceil(Math.log2(largest)) - SMALLEST_RANGE + 1));
  const facts = rule.first(done, layers);
  for (const name of layers) facts[`magnitude/${name}`] = oneHot(bucket(largestOf(done.upload[name])), MAGNITUDES);
  return Uint32Array.from(factWords(facts, Object.keys(facts)));
}

/** The vector of an evaluation on held-out text. */
export function evaluationVector(score, members) {
  bitsOf(members);
  return Uint32Array.from(countWords(evaluatedCounts(score)));
}
