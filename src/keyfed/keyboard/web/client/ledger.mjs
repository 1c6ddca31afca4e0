/**
 * A page's own account: what all uploads that ever left it cost together, whichever run they were for, as
 * `keyfed/private/dp/own_ledger.py` counts it. A page cannot check how it was drawn, so every upload counts at rate 1:
 *
 *   ρ = Σ_r s_r/(2 z_r²),  ε = ε_Gauss(ρ, δ)
 *
 * with z the noise multiplier that run r said it adds, and s_r the uploads that left for it (under tree noise the
 * squared sensitivity of a whole tree to that many). The account lies under two keys: all entries with their checksum,
 * and number and checksum of the last state. A damaged, older or missing one is an error and never a smaller ε.
 */

import { hex, Rejected, sha256, utf8 } from "../secure/bytes.mjs";
import { forestSensitivity, rhoToEpsilon } from "./epsilon.mjs";

const BODY = "spent", HEAD = "spent head", MOST_ENTRIES = 5_000;
export const DELTA = 1e-6;
const DAMAGED = "the account of what left this page is damaged, missing or older: until the page leaves the federation and enrols anew, it takes no part";

/** What an upload of a run costs. @typedef {{z: number, gap: number | null, rounds: number}} Spend */
/** @typedef {{entries: [string, number, number | null, number, number][], open: string[], number: number}} Account
 *   entries: run, z, gap, rounds and how many uploads; open: runs without differential privacy */

/** The zero-concentrated cost of so many uploads; ∞ without noise. */
export function rhoOf({ z, gap, rounds }, uploads) {
  if (!uploads) return 0;
  if (!(z > 0 && z < Infinity)) return Infinity;
  if (gap === null) return uploads / (2 * z ** 2);
  // A whole tree of twice the rounds or more, as the server may release some again; all uploads have room in it.
  const most = Math.max(rounds, uploads * gap), leaves = 2 ** (Math.floor(Math.log2(most)) + 2);
  return forestSensitivity(leaves, gap, uploads) / (2 * z ** 2);
}

/** ε at `DELTA` of everything that left for private runs. @param {Account} account */
export const epsilonOf = ({ entries }) =>
  rhoToEpsilon(entries.reduce((sum, [, z, gap, rounds, uploads]) => sum + rhoOf({ z, gap, rounds }, uploads), 0), DELTA);

/** The account after another upload of a run; no spend for a run that promises nothing. @returns {Account} */
export function withUpload({ entries, open, number }, run, spend) {
  if (spend === null) return { entries, open: [...new Set([...open, run])].sort(), number: number + 1 };
  const { z, gap, rounds } = spend, isIt = (entry) => entry[0] === run && entry[1] === z && entry[2] === gap && entry[3] === rounds;
  const before = entries.find(isIt), after = [run, z, gap, rounds, (before?.[4] ?? 0) + 1];
  return { entries: before ? entries.map((entry) => (entry === before ? after : entry)) : [...entries, after], open, number: number + 1 };
}

const sumOf = async (text) => hex(await sha256(utf8(text)));
const isCount = (n, least) => Number.isSafeInteger(n) && n >= least;
const isEntry = (one) => Array.isArray(one) && one.length === 5 && typeof one[0] === "string" && typeof one[1] === "number" &&
  (one[2] === null || isCount(one[2], 1)) && isCount(one[3], 1) && isCount(one[4], 1);

/** The account in a page's store, and the budget of its owner. */
export class OwnLedger {
  #values;
  #budget;

  /** @param {import("./store.mjs").Values} values @param {number | null} budget  ε that nothing may lead beyond */
  constructor(values, budget = null) {
    [this.#values, this.#budget] = [values, budget];
  }

  /** @returns {Promise<Account>} @throws {Rejected}  it is not the one that was written last */
  async read() {
    const body = (await this.#values.get(BODY)) ?? null, head = (await this.#values.get(HEAD)) ?? null;
    if (body === null && head === null) return { entries: [], open: [], number: 0 };
    try {
      const { entries, open, number } = JSON.parse(body.text), last = head ?? { number: 0, sum: "" };
      const isWhole = body.sum === (await sumOf(body.text)) && entries.every(isEntry) && open.every((run) => typeof run === "string") && isCount(number, 1);
      const isNewest = number === last.number && body.sum === last.sum;
      if (isWhole && (isNewest || number === last.number + 1)) return { entries, open, number }; // ended between the two
    } catch (error) {
      if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
    }
    throw new Rejected("over budget", DAMAGED);
  }

  /** Refuse another upload of a run that the budget does not cover. @param {Spend | null} spend */
  async allow(run, spend) {
    const before = await this.read();
    if (this.#budget === null) return;
    if (spend === null) throw new Rejected("over budget", `this run has no differential privacy, and this page keeps to ε = ${this.#budget} over all its runs`);
    const after = epsilonOf(withUpload(before, run, spend));
    if (!(after <= this.#budget)) {
      throw new Rejected("over budget", `another upload would make this page's own ε ${after.toPrecision(3)} (δ = ${DELTA}, all runs); its budget is ${this.#budget}`);
    }
  }

  /** Write an upload down; only then may it leave. @param {Spend | null} spend */
  async book(run, spend) {
    const before = await this.read();
    if (spend === null && before.open.includes(run)) return;
    const after = withUpload(before, run, spend);
    if (after.entries.length + after.open.length > MOST_ENTRIES) throw new Rejected("over budget", `${MOST_ENTRIES} runs are counted, and no more fit`);
    const text = JSON.stringify(after), sum = await sumOf(text);
    await this.#values.set(BODY, { text, sum });
    await this.#values.set(HEAD, { number: after.number, sum });
  }

  /**
   * What the owner is shown: ε at δ, of how many uploads for how many private runs, and how many runs promised nothing.
   * @returns {Promise<{epsilon: number, delta: number, uploads: number, runs: number, open: number, budget: number | null}>}
   */
  async shown() {
    const account = await this.read(), { entries, open } = account;
    const uploads = entries.reduce((sum, [, , , , count]) => sum + count, 0), runs = new Set(entries.map(([run]) => run)).size;
    return { epsilon: epsilonOf(account), delta: DELTA, uploads, runs, open: open.length, budget: this.#budget };
  }
}
