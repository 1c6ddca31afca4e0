/**
 * How much of the text was written before learning was last switched (incognito, "learn"). Of that part nothing may be
 * learnt any more, not even as the word before a new one: it may have been typed incognito.
 */

const AROUND = 200; // characters between the cursor and the end of a text that is asked about: a swiped word

export class Seal {
  #value = ""; // the text as it was last seen
  #end = 0; // everything left of here is sealed
  #wasClosed = false; // whether undo may bring something sealed back

  /** Whether anything is sealed. */
  get holds() {
    return this.#end > 0;
  }

  /** Seal the whole text. */
  close(value) {
    [this.#value, this.#end, this.#wasClosed] = [value, value.length, true];
  }

  /** The browser's undo or redo made this text: what it brought back may have been sealed. */
  broughtBack(value) {
    if (this.#wasClosed) this.close(value);
  }

  /** The text was edited in one place: the sealed part grows and shrinks with it. */
  follow(value) {
    if (this.#end > 0 && !value.startsWith(this.#value.slice(0, this.#end))) this.#end = this.#moved(value);
    this.#value = this.#end > 0 ? value : "";
  }

  #moved(value) {
    const old = this.#value, most = Math.min(old.length, value.length);
    let first = 0, last = 0; // characters that are the same at the start and at the end
    while (first < most && old[first] === value[first]) first++;
    while (last < most - first && old.at(-1 - last) === value.at(-1 - last)) last++;
    const isInside = this.#end > old.length - last; // something sealed stands right of the edit
    return isInside ? this.#end + value.length - old.length : first;
  }

  /**
   * How many characters of `before`, a part of the text that ends at the cursor or a word left of it, are sealed. More
   * than it has: also what goes on after it. In doubt more, never fewer.
   */
  within(before, value, cursor) {
    this.follow(value);
    if (this.#end === 0) return 0;
    const at = value.indexOf(before, Math.max(0, cursor - before.length - AROUND));
    return at < 0 ? Infinity : Math.max(0, this.#end - at);
  }
}
