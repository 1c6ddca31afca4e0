/**
 * What a person has typed, line by line, for training: finished lines, or the text as it stands when it is left alone.
 * Never what was pasted or dropped in, what stood there before, or anything written while learning was off or incognito
 * was on: all of that is sealed (`page/seal.mjs`).
 */

import { Seal } from "../page/seal.mjs";

const FOREIGN = /^(?:insertFromPaste|insertFromDrop|insertFromYank|historyUndo|historyRedo)/;

export class Collector {
  #area;
  #may;
  #keep;
  #seal = new Seal();

  /**
   * @param {HTMLTextAreaElement} area
   * @param {() => boolean} may  whether what is typed may be kept
   * @param {(text: string) => void} keep
   */
  constructor(area, may, keep) {
    [this.#area, this.#may, this.#keep] = [area, may, keep];
    this.#seal.close(area.value);
    area.addEventListener("beforeinput", ({ inputType }) => FOREIGN.test(inputType) && this.take());
    area.addEventListener("input", (event) => this.#typed(event.inputType ?? ""));
    for (const kind of ["paste", "drop"]) { // a long paste is written by the page, without an event of input
      area.addEventListener(kind, () => {
        this.take();
        setTimeout(() => this.close());
      });
    }
  }

  #typed(kind) {
    if (!this.#may() || FOREIGN.test(kind)) return this.close();
    const { value } = this.#area, from = this.#sealed(value);
    if (value.indexOf("\n", from) >= 0) this.take();
  }

  #sealed(value) {
    return this.#seal.within(value, value, value.length);
  }

  /** Keep what was typed since the last time. */
  take() {
    const { value } = this.#area;
    if (this.#may()) {
      const fresh = value.slice(this.#sealed(value));
      if (fresh.trim()) this.#keep(fresh);
    }
    this.#seal.close(value);
  }

  /** From here on nothing that stands in the text now is kept. */
  close() {
    this.#seal.close(this.#area.value);
  }
}
