/** How long keystrokes take, from the input event to the strip's DOM written, and to the next painted frame. */

const KEPT = 1000;

export class Meter {
  #written = [];
  #painted = [];
  #model = [];
  #rank = [];
  #superseded = 0;
  #frame = new MessageChannel();
  #starts = []; // of the keys whose frame is being painted

  constructor() {
    this.#frame.port1.onmessage = () => push(this.#painted, performance.now() - this.#starts.shift());
  }

  /** A strip was just written into the DOM for an input event at `start`. */
  record(start, timing) {
    push(this.#written, performance.now() - start);
    if (timing) {
      push(this.#model, timing.model);
      push(this.#rank, timing.rank);
    }
    // The frame callback runs before the paint of that frame, a message sent from it after.
    requestAnimationFrame(() => {
      this.#starts.push(start);
      this.#frame.port2.postMessage(null);
    });
  }

  /** A strip came too late: newer input was there. */
  superseded() {
    this.#superseded++;
  }

  get last() {
    return this.#written.at(-1) ?? null;
  }

  median(which = this.#written) {
    if (!which.length) return null;
    return [...which].sort((a, b) => a - b)[which.length >> 1];
  }

  get paintedMedian() {
    return this.median(this.#painted);
  }

  clear() {
    for (const list of [this.#written, this.#painted, this.#model, this.#rank]) list.length = 0;
    this.#superseded = 0;
  }

  /** A copy for tests and benchmarks. */
  numbers() {
    return {
      written: [...this.#written], painted: [...this.#painted], model: [...this.#model], rank: [...this.#rank],
      superseded: this.#superseded,
    };
  }
}

function push(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}
