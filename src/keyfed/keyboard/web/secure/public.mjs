/**
 * Which public numbers a client accepts: those that a run of ours can arrive at, as `check_public` of
 * `keyfed/federated/public/numbers.py`. They decide how every client weighs itself, and the server is not trusted
 * with that.
 */

import { Rejected } from "./bytes.mjs";

const NAMES = ["calibrated", "first", "outside", "ranges", "rule"];
const SMALLEST = -20, LARGEST = 30, MOST_RAISED = 8, PATIENCE = 3, DEEPEST = 6;
const MOST_TOKENS = 2 ** 40, MOST_NUMBER = 2 ** 60, MOST_CAP = 4096, LOSS_STEP = 1 / 32, LOSSES = 512;
const NESTED = ["inner", "adaptive", "otherwise"];

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isNumber = (value) => typeof value === "number" && Math.abs(value) <= MOST_NUMBER;
const odd = (what) => new Rejected("malformed", `public numbers that make no sense: ${what}`);

const KNOWN = {
  most: (value) => isNumber(value) && value >= 1 && value <= MOST_TOKENS && Number.isInteger(Math.log2(value)),
  caps: (value, layers) => isObject(value) && isSameSet(Object.keys(value), layers) && Object.values(value).every((cap) => isNumber(cap) && cap >= 0 && cap <= MOST_CAP),
  limit: (value) => value === null || (isNumber(value) && value > 0 && value < LOSSES * LOSS_STEP && Number.isInteger(value / LOSS_STEP)),
  losses: (value) => Array.isArray(value) && value.length === 2 && value.every((x) => x === null || (isNumber(x) && x >= 0)),
};

const isSameSet = (names, layers) => names.length === layers.length && names.every((name) => layers.includes(name));

/**
 * @param {any} numbers   as they came from the server
 * @param {string[]} layers
 * @throws {Rejected}
 */
export function checkPublic(numbers, layers) {
  if (!isObject(numbers) || String(Object.keys(numbers).sort()) !== String(NAMES)) throw odd(`expected exactly ${NAMES.join(", ")}`);
  const { calibrated, ranges, first, outside, rule } = numbers;
  if (typeof calibrated !== "boolean") throw odd("calibrated is neither true nor false");
  const expected = calibrated ? layers : [];
  for (const [what, found] of [["ranges", ranges], ["first", first]]) {
    if (!isObject(found) || !isSameSet(Object.keys(found), expected)) throw odd(`${what} are not those of the model's layers`);
    if (!Object.values(found).every((e) => Number.isInteger(e) && e >= SMALLEST && e <= LARGEST)) throw odd(`${what}: expected whole numbers from ${SMALLEST} to ${LARGEST}`);
  }
  if (Object.entries(ranges).some(([name, e]) => e > first[name] + MOST_RAISED)) throw odd(`a range is over ${MOST_RAISED} bits above the first one`);
  if (!Number.isInteger(outside) || outside < 0 || outside >= PATIENCE) throw odd(`outside is not a whole number from 0 to ${PATIENCE - 1}`);
  checkRule(rule, expected, calibrated, DEEPEST);
}

function checkRule(rule, layers, calibrated, depth) {
  if (!isObject(rule)) throw odd("a rule's numbers are no object");
  for (const [name, value] of Object.entries(rule)) {
    if (calibrated && Object.hasOwn(KNOWN, name) && !KNOWN[name](value, layers)) throw odd(`the number ${name} of the rule is none that a run can have`);
    if (!isPlain(value, depth)) throw odd("a rule's numbers are not finite, or nested too deep");
    if (isObject(value) && NESTED.includes(name)) checkRule(value, layers, calibrated, depth - 1);
  }
}

function isPlain(value, depth) {
  if (isObject(value) || Array.isArray(value)) return depth > 0 && Object.values(value).every((x) => isPlain(x, depth - 1));
  return value === null || typeof value === "boolean" || typeof value === "string" || isNumber(value);
}
