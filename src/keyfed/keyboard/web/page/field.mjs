/** The text area itself: reading around a place, and changing a range so that the browser's own undo still works. */

const SLICE = 1000; // the text sent along starts at a multiple of this …
const ENOUGH = 6000; // … and has at least this many characters, more than the engine reads

const REST = /^(?:['’‐‑-]?[\p{L}\p{M}\p{N}])+/u; // of a word
const WORD_BEFORE = /[\p{L}\p{M}\p{N}]['’‐‑-]?$/u;

/** Whether a cut at `at` leaves half a character on either side. */
export const splitsPair = (text, at) => /^[\uD800-\uDBFF][\uDC00-\uDFFF]/.test(text.slice(Math.max(0, at - 1), at + 1));

export class TextField {
  #area;
  #length = 0; // of the text when it was looked at last
  own = false; // whether we are changing the text ourselves
  cursor = 0; // where the cursor was when we looked last

  /** @param {HTMLTextAreaElement} area */
  constructor(area) {
    this.#area = area;
  }

  get value() {
    return this.#area.value;
  }

  get selectionStart() {
    return this.#area.selectionStart;
  }

  get selectionEnd() {
    return this.#area.selectionEnd;
  }

  get isFocused() {
    return document.activeElement === this.#area;
  }

  focus() {
    if (!this.isFocused) this.#area.focus({ preventScroll: true }); // it lays the page out even where it changes nothing
  }

  /** Move the cursor as the arrow keys do: by characters, or by lines. */
  moveCursor(steps, unit) {
    const { selectionStart, selectionEnd } = this.#area;
    const collapses = selectionStart !== selectionEnd;
    for (let n = collapses ? 1 : 0; n < Math.abs(steps); n++) getSelection().modify("move", steps < 0 ? "backward" : "forward", unit);
    if (collapses) this.#area.setSelectionRange(...Array(2).fill(steps < 0 ? selectionStart : selectionEnd));
  }

  /** By how much the text has grown since this was asked last; our own replacements do not count. */
  growth() {
    const delta = this.#area.value.length - this.#length;
    this.#length += delta;
    return delta;
  }

  /** The text left of the cursor (or of `end`), its end if it is long. */
  before(end = this.#area.selectionStart) {
    const start = Math.max(0, Math.floor((end - ENOUGH) / SLICE) * SLICE);
    return this.#area.value.slice(start, end);
  }

  putCursor(at) {
    this.edit(() => this.#area.setSelectionRange(at, at));
  }

  /** The nearest place from `at` on where a word may begin. */
  outsideWord(at) {
    const { value } = this.#area;
    const place = Math.min(at, value.length);
    if (splitsPair(value, place)) return place + 1;
    return /[\p{L}\p{M}\p{N}]$/u.test(value.slice(Math.max(0, place - 2), place)) ? place + this.wordAfter(place) : place;
  }

  /** The word around the cursor goes on with this; "" where none does. */
  rest() {
    const { selectionStart: at, selectionEnd, value } = this.#area;
    if (at !== selectionEnd || at === value.length || !WORD_BEFORE.test(value.slice(Math.max(0, at - 3), at))) return "";
    return value.slice(at, at + this.wordAfter(at));
  }

  /** How many characters right of `at` belong to a word that goes on there. */
  wordAfter(at) {
    return this.#area.value.slice(at, at + 100).match(REST)?.[0].length ?? 0;
  }

  /** Replace a range; the cursor stays where it is in the text. */
  replace(start, end, text) {
    const { selectionStart, selectionEnd } = this.#area;
    const moved = (at) => (at >= end ? at + text.length - (end - start) : Math.min(at, start + text.length));
    this.write(start, end, text);
    this.edit(() => this.#area.setSelectionRange(moved(selectionStart), moved(selectionEnd)));
    this.#length = this.#area.value.length;
  }

  write(start, end, text) {
    this.edit(() => {
      const field = this.#area;
      let done = false;
      if (document.activeElement === field) {
        if (field.selectionStart !== start || field.selectionEnd !== end) field.setSelectionRange(start, end);
        // The one way of changing a field that the browser's own undo (Ctrl+Z) knows about.
        done = text ? document.execCommand("insertText", false, text) : start === end || document.execCommand("delete");
      }
      if (!done) field.setRangeText(text, start, end, "end");
    });
  }

  /** Chromium keeps a pasted novel in a form that makes every later key ten times slower; one set as a value it does not. */
  setLarge(text) {
    const area = this.#area;
    const { value, selectionStart, selectionEnd } = area;
    this.edit(() => {
      area.value = value.slice(0, selectionStart) + text + value.slice(selectionEnd);
      const end = area.value.length - (value.length - selectionEnd); // line ends may have been made one character
      area.setSelectionRange(end, end);
      area.scrollTop = area.scrollHeight * (end / area.value.length);
    });
  }

  /** Whatever `action` does to the text is not the user's typing. */
  edit(action) {
    this.own = true;
    try {
      action();
    } finally {
      this.own = false;
    }
    this.cursor = this.#area.selectionStart;
  }
}
