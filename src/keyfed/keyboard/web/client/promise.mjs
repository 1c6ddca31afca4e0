/**
 * What a private run promised when it began, as `keyfed/wire/promise.py`: what a page holds the server to, and what it
 * sends. The clip S_t of round t is one that the run's own rule can have led to from S_0 and from S_u, the clip of this
 * page's last upload, in step u:
 *
 *   S_0 e^{−ηt(1−γ)} ≤ S_t ≤ S_0 e^{ηtγ},  |ln S_t − ln S_u| ≤ η(t − u)
 *
 * That noise is added, after the upload has left, nobody can see from here.
 */

import { Rejected } from "../secure/bytes.mjs";
import { isObject, wholeNumber } from "./messages.mjs";

const SLACK = 1e-9, MOST_TREE_ROUNDS = 50_000;

/** @typedef {{clip: number, quantile: number | null, rate: number, noise: number, rounds: number,
 *   separation: number | null, weightCap: number | null}} Promised */

/** Whether a configuration is that of a private run. */
export const isPrivate = (config) => [config?.privacy?.epsilon, config?.privacy?.noise].some((x) => x !== null && x !== undefined);

/**
 * What a configuration promises; null for a run that promises nothing.
 * @returns {Promised | null}
 * @throws {Rejected}  it leaves out what a client needs to know, or makes no sense
 */
export function promiseOf(config) {
  if (!isPrivate(config)) return null;
  const { noise, delta, mechanism, clip, quantile, clip_rate: rate, separation, weight_cap: weightCap } = config.privacy;
  const isPositive = (x) => typeof x === "number" && Number.isFinite(x) && x > 0, isShare = (x) => isPositive(x) && x < 1;
  if (!isPositive(noise) || !isShare(delta)) {
    throw new Rejected("malformed", "a private run that does not say how much noise it adds, and for which delta");
  }
  const isTree = mechanism === "tree", rounds = wholeNumber(config.train ?? {}, "rounds", 1);
  const isFine = isPositive(clip) && isPositive(rate) && (quantile === null || isShare(quantile)) && (weightCap === null || isPositive(weightCap));
  if (!isFine || !["gaussian", "tree"].includes(mechanism) || (isTree && quantile !== null)) {
    throw new Rejected("malformed", "a private run whose clip or mechanism makes no sense");
  }
  if (isTree && rounds > MOST_TREE_ROUNDS) { // its account is looked at before every upload
    throw new Rejected("over limit", `tree noise over ${rounds} rounds; this page counts ${MOST_TREE_ROUNDS}`);
  }
  if (!isTree && separation !== null) throw new Rejected("malformed", "a private run with a separation and no tree noise");
  const gap = isTree ? wholeNumber(config.privacy, "separation", 1) : null;
  return { clip, quantile, rate, noise, rounds, separation: gap, weightCap };
}

/**
 * Read a round's public numbers; refuse what the promise does not allow.
 * @param {Promised} promised
 * @param {any} numbers                                as they came from the server
 * @param {{round: number, purpose: string, part: string | null}} work
 * @param {{step: number, clip: number} | null} last   this page's last upload
 * @returns {{clip: number, step: number}}
 */
export function checkRound(promised, numbers, { round, purpose, part }, last) {
  const refuse = (what) => new Rejected("refused by client", what);
  if (purpose !== "upload" || part !== null) throw refuse("a private run asks for clipped uploads only, and never for a score");
  if (!isObject(numbers) || String(Object.keys(numbers).sort()) !== "clip,step") throw new Rejected("malformed", "a private round without its clip and step");
  const { clip } = numbers, step = wholeNumber(numbers, "step");
  if (typeof clip !== "number") throw new Rejected("malformed", "a clip that is no number");
  if (round >= promised.rounds) throw refuse(`round ${round + 1} of a run that promised ${promised.rounds}`);
  const { quantile, rate } = promised, moved = Math.log(clip / promised.clip);
  const [low, high] = quantile === null ? [0, 0] : [-rate * round * (1 - quantile), rate * round * quantile];
  if (!(clip > 0 && low - SLACK <= moved && moved <= high + SLACK)) {
    throw refuse(`a clip of ${clip} in round ${round + 1} of a run that began with ${promised.clip}`);
  }
  if (last !== null) {
    const most = quantile === null ? 0 : rate * Math.max(1, step - last.step);
    if (!(Math.abs(Math.log(clip / last.clip)) <= most + SLACK)) throw refuse(`a clip of ${clip} in step ${step} after ${last.clip} in ${last.step}`);
  }
  return { clip, step };
}
