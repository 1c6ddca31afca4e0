/**
 * A page's own text under a run's model: what it does for a round (`training/descent.mjs`), and what it counts on text
 * that was held back. What a page does at most is its owner's affair: it refuses a model or work beyond its limits.
 */

import { EOS, UNK } from "../decoder/context.mjs";
import { GATES, shapesOf } from "../decoder/network.mjs";
import { Rejected } from "../secure/bytes.mjs";
import { clippedVector } from "../secure/clipped.mjs";
import { distances, frobenius } from "../secure/distance.mjs";
import { ruleOf } from "../secure/vector.mjs";
import { trainLocally } from "../training/descent.mjs";
import { predicted } from "./look.mjs";
import { isObject } from "./messages.mjs";
import { promiseOf } from "./promise.mjs";

const LARGEST_CHANGE = 1e15; // of an upload's number, as in `keyfed.engine.simulate`
const LEAST_TOKENS = 64; // of held-out text, read at least
const MOST_LAYERS = 8, MOST_STEP_NUMBERS = 2 ** 26;

/** What a page's owner gives a run at most. */
export const LIMITS = Object.freeze({ parameters: 5_000_000, epochs: 5, minutes: 10, tokens: 20_000 });

/** The factor on the step size in a round: `progress` of `keyfed.federated.descent`. */
export function progress({ shape, rounds, warmup, final }, round) {
  const warm = Math.min(Math.floor(warmup * rounds + 0.5), Math.max(0, rounds - 1));
  if (round < warm) return (round + 1) / (warm + 1);
  if (shape === "constant") return 1;
  const done = Math.min((round - warm) / Math.max(1, rounds - warm), 1);
  const left = shape === "linear" ? 1 - done : (1 + Math.cos(Math.PI * done)) / 2;
  return final + (1 - final) * left;
}

/**
 * What a method's specification says of its clients: all of it is bound into the masks of a sum, so a server cannot tell
 * pages another method than the others.
 * @throws {Rejected}  a method that a page cannot follow
 */
function planOf({ name, options, mediator, keep, quantise, schedule }) {
  const weights = Object.hasOwn(WEIGHTS, name) ? WEIGHTS[name](options) : null;
  const cannot = (what) => new Rejected("other method", `a page does not take part in runs with ${what}`);
  if (!weights) throw cannot(`the method ${String(name).slice(0, 30)}`);
  if (mediator !== null || keep !== 1 || quantise !== "none") throw cannot("a mediator of their own, or compressed uploads");
  if (options.optimiser !== "sgd") throw cannot("a local optimiser other than sgd");
  if (options.noise) throw cannot("noise on uploads");
  const { lr, decay, clip, momentum, epochs, batch_size: rows } = options;
  const isPositive = (x) => Number.isFinite(x) && x > 0;
  const isFine = isPositive(lr) && isPositive(decay) && (clip === null || isPositive(clip)) && momentum >= 0 && momentum < 1;
  if (!isFine || ![epochs, rows].every((n) => Number.isSafeInteger(n) && n >= 1)) throw cannot("options that make no sense");
  return { lr, decay, clip, momentum, epochs, rows, mu: options.mu ?? 0, schedule, ...weights };
}

const tokens = () => ({ mediator: { name: "tokens" }, norm: null });
const WEIGHTS = {
  fedavg: tokens, fedavgm: tokens, fednesterov: tokens, fedadam: tokens, fedyogi: tokens, fedadagrad: tokens,
  fedprox: ({ by_tokens: isByTokens }) => ({ mediator: { name: isByTokens ? "tokens" : "uniform" }, norm: null }),
  fedatt: ({ temperature, bound, norm }) => ({ mediator: { name: "distance", temperature, bound }, norm }),
};

/** Refuse what pages are told if it differs from the configuration that all clients were told. */
function checkAlike({ model, batches }, { data = {}, model: told = {} }) {
  const pairs = [
    ["data.window", data.window, batches.window], ["data.max_tokens", data.max_tokens, batches.max_tokens],
    ["data.batches", data.batches, batches.kind], ["model.dropout", told.dropout, model.dropout],
  ];
  for (const [name, said, own] of pairs) {
    const isFree = said === null && name !== "data.max_tokens"; // decided by the data, or by the model's name
    if (!isFree && said !== own) throw new Rejected("other method", `pages are told ${name}=${own}, and the run has ${said}`);
  }
}

const STOPPED = () => new Rejected("not now", "the page's owner stopped the training");
const LEAST_LOG = -700;

/**
 * How a client weighs itself in a private run, by no other client's numbers: `_weighing` of
 * `keyfed/private/dp/private_method.py`. By tokens min(n/cap, 1) with a public cap, 1 without; by distance
 * exp(min(s, c) − c), which the server divides by its own sum.
 * @param {{mediator: {name: string, temperature?: number, bound?: number | null}}} plan
 * @param {number | null} weightCap
 * @returns {{isRatio: boolean, scale: (done: import("../secure/vector.mjs").Done, layer: string) => number}}
 */
function privateShare({ mediator: { name, temperature, bound } }, weightCap) {
  if (name === "tokens" && weightCap !== null) return { isRatio: false, scale: ({ tokens }) => Math.min(tokens / weightCap, 1) };
  if (name !== "distance") return { isRatio: false, scale: () => 1 };
  if (!(bound > 0)) throw new Rejected("other method", "a private run whose attention has no bound");
  return { isRatio: true, scale: ({ distance }, layer) => Math.exp(Math.max(Math.min(distance[layer] / temperature, bound) - bound, LEAST_LOG)) };
}

/** Refuse a model, or an amount of work, that is none of ours or more than the page's owner gives; return its shapes. */
function checkSize(model, { window }, { rows, epochs }, limits) {
  const sides = ["vocab", "embed", "hidden", "layers"].map((side) => model[side]);
  if (!Object.hasOwn(GATES, model.cell) || ![...sides, window].every((n) => Number.isSafeInteger(n) && n >= 1 && n < 2 ** 24)) {
    throw new Rejected("other method", "a model or a window that is none of ours");
  }
  if (model.layers > MOST_LAYERS) throw new Rejected("over limit", `a model of ${model.layers} layers; this page takes at most ${MOST_LAYERS}`);
  const shapes = shapesOf(model);
  const parameters = Object.values(shapes).reduce((sum, shape) => sum + shape.reduce((product, n) => product * n, 1), 0);
  if (!(parameters <= limits.parameters)) throw new Rejected("over limit", `a model of ${parameters} parameters; this page takes at most ${limits.parameters}`);
  if (epochs > limits.epochs) throw new Rejected("over limit", `${epochs} epochs a round; this page takes at most ${limits.epochs}`);
  const numbers = rows * window * (GATES[model.cell] * model.hidden * model.layers + 2 * model.embed + model.vocab);
  if (numbers > MOST_STEP_NUMBERS) throw new Rejected("over limit", `steps of ${rows} lines of ${window} tokens; this page has no room for them`);
  return shapes;
}

/** A client's text, ready for a run. */
export class Learner {
  /**
   * @param {{page: {spec: object, model: object, batches: {kind: string, window: number, max_tokens: number | null}},
   *   config: object}} about  what the server says of the run; the masks of its sums are bound to the configuration
   * @param {{train: Int32Array, valid: Int32Array, test: Int32Array}} text  tokens, an EOS behind every line
   * @param {{limits?: typeof LIMITS, now?: () => number, pause?: (done?: object) => Promise<unknown>}} [how]
   *   pause: awaited between steps, with how far it is (`trainLocally`); false stops the training
   */
  constructor({ page, config }, text, { limits = LIMITS, now = () => performance.now(), pause = async () => true } = {}) {
    if (![page.model, page.batches].every(isObject)) throw new Rejected("other method", "a run that does not say what a page is to do");
    const plan = planOf(page.spec), { kind, window, max_tokens: maxTokens } = page.batches;
    checkAlike(page, config);
    if (!["stream", "packed"].includes(kind)) throw new Rejected("other method", `a page does not cut text as ${String(kind).slice(0, 20)}`);
    this.shapes = checkSize(page.model, page.batches, plan, limits);
    this.rule = ruleOf(plan.mediator);
    this.promise = promiseOf(config);
    this.share = this.promise && privateShare(plan, this.promise.weightCap);
    this.model = page.model;
    // Who is refused in a private run sends zeros: a bound would let the server choose who is left in the sum.
    this.bound = this.promise ? null : (config.upload?.bound ?? null);
    this.most = { valid: config.train?.valid_tokens ?? null, test: config.train?.test_tokens ?? null };
    this.local = { ...plan, kind, window, dropout: page.model.dropout, maxTokens: Math.min(maxTokens ?? Infinity, limits.tokens) };
    [this.text, this.limits, this.now, this.pause] = [text, limits, now, pause];
    if (Object.values(text).some((ids) => ids.some((id) => id >= page.model.vocab))) {
      throw new Rejected("other method", `words beyond the ${page.model.vocab} that the model has: another vocabulary than the run's`);
    }
    this.isEnough = text.train.length > window;
    if (!this.isEnough && !this.promise) throw this.#noText(); // a private run must not notice: zeros are sent
  }

  #noText() {
    return new Rejected("no text", `too little text to learn from: a window has ${this.local.window} tokens`);
  }

  /**
   * Train for a round.
   * @returns {Promise<import("../secure/vector.mjs").Done>}
   */
  async solve(theta, { seed, round, client, halvings }) {
    const { model, local, limits } = this;
    if (!this.isEnough) throw this.#noText();
    const lr = local.lr * local.decay ** round * (local.schedule ? progress(local.schedule, round) : 1) * 0.5 ** halvings;
    const found = await trainLocally(model, theta, this.text.train, { ...local, lr }, { seed, round, client }, this.#look(limits));
    if (!found) throw STOPPED();
    const upload = Object.fromEntries(Object.keys(theta).map((name) => [name, found.weights[name].map((w, i) => w - theta[name][i])]));
    if (!(found.tokens > 0)) throw new Rejected("no text", "what this page trained is not sent");
    const largest = Object.values(upload).reduce((most, change) => change.reduce((m, x) => (Math.abs(x) <= m ? m : Math.abs(x)), most), 0);
    if (!Number.isFinite(found.loss)) throw new Rejected("non-finite report", "what this page trained is not sent");
    if (!(largest <= LARGEST_CHANGE)) throw new Rejected(Number.isFinite(largest) ? "exploding upload" : "non-finite upload", "what this page trained is not sent");
    const distance = local.norm ? distances(upload, this.shapes, local.norm) : {};
    const norm = Math.hypot(...Object.values(upload).map(frobenius));
    if (this.bound !== null && Math.max(norm, ...Object.values(distance)) > this.bound) {
      throw new Rejected("exploding upload", "what this page trained is not sent");
    }
    return { upload, tokens: found.tokens, worked: found.worked, loss: found.loss, distance };
  }

  /** What a client of a private run adds to the sum: its upload, clipped to the round's clip. @returns {Uint32Array} */
  clipped(done, clip) {
    const scales = Object.fromEntries(Object.keys(done.upload).map((name) => [name, this.share.scale(done, name)]));
    return clippedVector(done.upload, scales, clip, this.share.isRatio);
  }

  /** What is called between pieces of work: lets the page's keys in, and stops after the owner's minutes. */
  #look({ minutes }) {
    const until = this.now() + 60_000 * minutes;
    return (done) => {
      if (this.now() > until) throw new Rejected("over limit", `the round took longer than this page's ${minutes} minutes`);
      return this.pause(done);
    };
  }

  /** Counts over text that was held back, as `keyfed.model.output.Score`. @param {"valid" | "test"} part */
  async evaluate(theta, part) {
    const { model, local } = this, isLines = local.kind === "packed", look = this.#look(this.limits);
    const most = this.most[part] === null ? Infinity : Math.max(LEAST_TOKENS, this.most[part]);
    const stream = this.text[part].subarray(0, most);
    const score = { tokens: 0, nats: 0, top1: 0, top3: 0, words: 0, words_top1: 0, words_top3: 0, unknown: 0 };
    await predicted({ model, weights: theta }, stream, isLines, look, ({ token, nats, rank }) => {
      const isWord = token !== UNK && token !== EOS;
      score.tokens += 1;
      score.nats += nats;
      score.top1 += Number(rank === 0);
      score.top3 += Number(rank < 3);
      score.words += Number(isWord);
      score.words_top1 += Number(isWord && rank === 0);
      score.words_top3 += Number(isWord && rank < 3);
      score.unknown += Number(token === UNK);
    });
    return score;
  }
}
