/**
 * The text field. Typing is never held up: a character stands in the text at once, and what the engine makes of it (a
 * correction, a blank) arrives as an edit of the characters it was asked about; if these have changed meanwhile the
 * edit is dropped. Input methods that compose (IME, dead keys) are left alone until they are done.
 */

const SLICE = 1000; // the text sent along starts at a multiple of this …
const ENOUGH = 6000; // … and has at least this many characters, more than the engine reads
const LARGE = 10_000; // characters of a paste that the page writes itself

/**
 * @typedef {object} Surroundings
 * @property {(kind: string, message: object) => boolean} ask  send to the worker; false: there is no engine (yet)
 * @property {() => object} settings
 * @property {(strip: object) => void} show  put suggestions of a swipe into the strip
 * @property {(text: string) => void} say    for the live region
 * @property {() => void} changed            the text or the cursor changed
 * @property {(char: string) => boolean} separates  whether a character ends a word
 */

export class Editor {
  #field;
  #to;
  #version = 0;
  #started = new Map(); // version → time of its input event
  #next = 1;
  #waiting = new Map(); // id → an edit or a swipe that was asked for
  #taps = [];
  #tapsEnd = -1; // the taps belong to the characters that end here
  #cursor = 0;
  #touched = 0; // counts what the user did to the text
  #own = false; // whether we are changing the field ourselves
  #undoable = null; // {end, text}
  #swiped = null; // the last swipe until it is settled: {before, start, text, slots, chosen}
  #composing = false;
  #lengthBefore = 0;
  count = { keys: 0, chars: 0 };

  /** @param {HTMLTextAreaElement} field  @param {Surroundings} to */
  constructor(field, to) {
    [this.#field, this.#to] = [field, to];
    field.addEventListener("beforeinput", (event) => this.#beforeInput(event));
    field.addEventListener("input", (event) => this.#input(event));
    field.addEventListener("paste", (event) => this.#paste(event));
    field.addEventListener("compositionstart", () => { this.#composing = true; });
    field.addEventListener("compositionend", (event) => {
      this.#composing = false;
      this.#user();
      this.refresh(event.timeStamp);
    });
    document.addEventListener("selectionchange", () => this.#moved());
  }

  focus() {
    this.#field.focus({ preventScroll: true });
  }

  /** The text left of the cursor, its end if it is long. */
  before() {
    const end = this.#field.selectionStart;
    const start = Math.max(0, Math.floor((end - ENOUGH) / SLICE) * SLICE);
    return this.#field.value.slice(start, end);
  }

  /** Ask for the strip of the text as it stands. */
  refresh(time = performance.now()) {
    this.#cursor = this.#field.selectionStart;
    this.#askStrip(this.before(), this.#currentTaps(), time);
    this.#to.changed();
  }

  #askStrip(before, taps, time) {
    this.#remember(++this.#version, time);
    this.#to.ask("strip", { version: this.#version, request: { before, taps, settings: this.#to.settings() } });
  }

  /** When the input of a strip began, if it is still the one to show; else null. */
  current(version) {
    return version === this.#version ? this.#started.get(version) ?? null : null;
  }

  // ---------------------------------------------------------------- the on-screen keyboard

  type(char, tap, time) {
    this.focus();
    const { selectionStart: start, selectionEnd: end } = this.#field;
    if (start !== end || this.#to.separates(char)) {
      this.#write(start, end, char);
      return this.#typed(char, tap, time);
    }
    // The worker ranks while the browser writes the letter and lays the field out, which takes longer.
    this.#letter(start + 1, tap);
    this.#askStrip(this.before() + char, [...this.#taps], time);
    this.#write(start, end, char);
    this.#to.changed();
  }

  backspace(time) {
    this.focus();
    if (this.#undo(time) || this.#unswipe(time)) return;
    const was = this.#field.value.length;
    this.#ownEdit(() => document.execCommand("delete"));
    this.#deleted(was, time);
  }

  /** Delete back to the blank before the last word: what a long hold of backspace does. */
  backspaceWord(time) {
    this.focus();
    const { selectionStart: end, value } = this.#field;
    const start = end - (value.slice(Math.max(0, end - 500), end).match(/\S*\s*$/u)?.[0].length || 1);
    this.#write(Math.max(0, start), end, "");
    this.#deleted(value.length, time);
  }

  /** Take a suggestion. */
  pick(slot, time) {
    if (this.#swiped?.slots.includes(slot)) return this.#swap(slot, time);
    this.#settle();
    this.#user();
    this.count.keys++;
    const before = this.before();
    const end = this.#field.selectionStart;
    const request = { before, picked: slot, settings: this.#to.settings() };
    this.#finish({ request, end, tail: "", time, picked: true });
  }

  // ---------------------------------------------------------------- what happens to the text

  #beforeInput(event) {
    if (this.#own || this.#composing || event.isComposing) return;
    if (event.inputType !== "deleteContentBackward") return;
    if (this.#undo(event.timeStamp) || this.#unswipe(event.timeStamp)) event.preventDefault();
    else this.#lengthBefore = this.#field.value.length;
  }

  #input(event) {
    if (this.#own || this.#composing || event.isComposing) return;
    const typed = event.inputType === "insertLineBreak" ? "\n" : event.data;
    const typing = event.inputType === "insertText" || event.inputType === "insertLineBreak";
    if (typing && typed?.length === 1) this.#typed(typed, null, event.timeStamp);
    else if (event.inputType === "deleteContentBackward") this.#deleted(this.#lengthBefore, event.timeStamp);
    else {
      this.#settle(); // pasted, cut, dropped, undone by the browser
      this.#user();
      this.#forgetTaps();
      this.refresh(event.timeStamp);
    }
  }

  /** Chromium keeps a pasted novel in a form that makes every later key ten times slower; one set as a value it does not. */
  #paste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length < LARGE) return;
    event.preventDefault();
    this.#settle();
    this.#user();
    this.#forgetTaps();
    const { value, selectionStart, selectionEnd } = this.#field;
    this.#ownEdit(() => {
      this.#field.value = value.slice(0, selectionStart) + text + value.slice(selectionEnd);
      const end = this.#field.value.length - (value.length - selectionEnd); // line ends may have been made one character
      this.#field.setSelectionRange(end, end);
      this.#field.scrollTop = this.#field.scrollHeight * (end / this.#field.value.length);
    });
    this.refresh(event.timeStamp);
  }

  /** A character was typed and stands left of the cursor. */
  #typed(char, tap, time) {
    const end = this.#field.selectionStart;
    if (!this.#to.separates(char)) {
      this.#letter(end, tap);
      return this.refresh(time);
    }
    this.#oneMore();
    const before = this.before().slice(0, -1);
    const taps = this.#tapsEnd === end - 1 ? this.#taps : [];
    this.#forgetTaps();
    const settings = this.#to.settings();
    // Splitting a word in two is no reason to correct its first half.
    const split = this.#wordAfter(end) > 0;
    const request = { before, separator: char, taps, settings: split ? { ...settings, autocorrect: false } : settings };
    this.#finish({ request, end, tail: char, time, picked: false });
  }

  /** A letter that ends at `end` goes on with the word before it. */
  #letter(end, tap) {
    this.#oneMore();
    if (this.#tapsEnd !== end - 1) this.#taps = [];
    this.#taps.push(tap);
    this.#tapsEnd = end;
  }

  #oneMore() {
    this.#settle();
    this.#user();
    this.count.keys++;
    this.count.chars++;
  }

  #deleted(lengthBefore, time) {
    const gone = lengthBefore - this.#field.value.length;
    this.#settle();
    this.#user();
    this.count.keys++;
    this.count.chars -= gone;
    const end = this.#field.selectionStart;
    if (gone === 1 && this.#tapsEnd === end + 1) {
      this.#taps.pop();
      this.#tapsEnd = end;
    } else this.#forgetTaps();
    this.refresh(time);
  }

  /** The cursor moved without any input of ours. */
  #moved() {
    if (document.activeElement !== this.#field || this.#composing || this.#own) return;
    if (this.#field.selectionStart === this.#cursor) return;
    this.#settle();
    this.#user();
    this.#forgetTaps();
    this.refresh();
  }

  // ---------------------------------------------------------------- edits by the engine

  #finish({ request, end, tail, time, picked }) {
    this.#remember(++this.#version, time);
    this.#cursor = this.#field.selectionStart;
    const id = this.#next++;
    const known = { before: request.before, end, tail, picked, version: this.#version };
    if (this.#to.ask("finish", { id, version: this.#version, request })) this.#waiting.set(id, known);
    this.#to.changed();
  }

  /** An edit arrived. */
  receive({ id, edit }) {
    const asked = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (!asked) return;
    if (!edit) return this.#nothingToUndo(asked);
    const old = asked.before.slice(edit.start) + asked.tail;
    const start = asked.end - old.length;
    const { value } = this.#field;
    if (start < 0 || value.slice(start, asked.end) !== old) return this.#stale(asked);
    // A picked word takes the place of the whole word around the cursor, and of the blank after it.
    let stop = asked.end;
    if (asked.picked) {
      stop += old ? this.#wordAfter(stop) : 0;
      if (edit.text.endsWith(" ") && value[stop] === " ") stop++;
    }
    const replaced = value.slice(start, stop);
    if (replaced !== edit.text) this.#replace(start, stop, edit.text);
    const delta = edit.text.length - replaced.length;
    this.count.chars += delta;
    for (const other of this.#waiting.values()) if (other.end >= stop) other.end += delta;
    this.#undoable = edit.correction && !asked.undo ? { end: start + edit.text.length, text: edit.text } : null;
    if (this.#undoable) this.#to.say(`${edit.correction.typed} corrected to ${edit.correction.chosen}`);
    const overtaken = asked.version !== this.#version && replaced !== edit.text;
    if (asked.undo) this.refresh(asked.time);
    // The strip that is under way was asked for before this edit changed its context.
    else if (overtaken) this.refresh(this.#started.get(this.#version));
    else this.#to.changed();
  }

  #stale(asked) {
    if (asked.version === this.#version) this.refresh();
  }

  /** Backspace right after a correction: the engine gives the typed word back. */
  #undo(time) {
    const { selectionStart: end, selectionEnd, value } = this.#field;
    const last = this.#undoable;
    this.#undoable = null;
    const here = last && end === last.end && end === selectionEnd && value.slice(end - last.text.length, end) === last.text;
    if (!here) return false;
    this.#user();
    this.count.keys++;
    const id = this.#next++;
    const before = this.before();
    if (!this.#to.ask("undo", { id, request: { before, settings: this.#to.settings() } })) return false;
    this.#waiting.set(id, { before, end, tail: "", undo: true, time, version: this.#version });
    return true;
  }

  #nothingToUndo(asked) {
    if (!asked.undo || this.#field.selectionStart !== asked.end || asked.end === 0) return;
    this.#replace(asked.end - 1, asked.end, "");
    this.refresh(asked.time);
  }

  // ---------------------------------------------------------------- swipes

  /** A swipe over the keys: the best word is written, the others stand in the strip. */
  swipe(points, time) {
    this.focus();
    this.#settle();
    if (/[^\s([{“„«"'’-]$/u.test(this.before())) this.type(" ", null, time);
    this.#user();
    this.count.keys++;
    const id = this.#next++;
    const request = { before: this.before(), points, settings: this.#to.settings() };
    const asked = { swipe: true, before: request.before, end: this.#field.selectionStart, touched: this.#touched, time };
    if (this.#to.ask("swipe", { id, request })) this.#waiting.set(id, asked);
  }

  receiveSwipe({ id, slots }) {
    const asked = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (!asked || asked.touched !== this.#touched) return;
    if (!slots.length) {
      this.#to.say("No word found for this swipe");
      return this.refresh(asked.time);
    }
    const at = this.#field.selectionStart;
    const text = `${slots[0].text} `;
    this.#replace(at, this.#field.selectionEnd, text);
    this.count.chars += text.length;
    // `before` again: a correction may have been made to the word before while the swipe was decoded.
    this.#swiped = { before: this.before().slice(0, -text.length), start: at, text, slots, chosen: slots[0] };
    this.#showSwipe(asked.time);
  }

  #showSwipe(time) {
    const { slots, chosen } = this.#swiped;
    const others = slots.filter((slot) => slot !== chosen);
    this.#remember(++this.#version, time);
    this.#cursor = this.#field.selectionStart;
    this.#to.show({ slots: [others[0] ?? null, chosen, others[1] ?? null], correction: null, version: this.#version });
    this.#to.changed();
  }

  /** Another reading of the swipe. */
  #swap(slot, time) {
    const { start, text } = this.#swiped;
    this.#user();
    if (slot === this.#swiped.chosen || this.#field.value.slice(start, start + text.length) !== text) {
      this.#settle();
      return this.refresh(time);
    }
    this.count.keys++;
    const next = `${slot.text} `;
    this.#replace(start, start + text.length, next);
    this.count.chars += next.length - text.length;
    Object.assign(this.#swiped, { text: next, chosen: slot });
    this.#showSwipe(time);
  }

  /** The user goes on: the swiped word was meant, so it is learnt and its blank is an automatic one. */
  #settle() {
    if (!this.#swiped) return;
    const { before, chosen } = this.#swiped;
    this.#swiped = null;
    this.#to.ask("finish", { id: 0, version: null, request: { before, picked: chosen, settings: this.#to.settings() } });
  }

  /** Backspace right after a swipe takes the whole word away; it was not meant. */
  #unswipe(time) {
    if (!this.#swiped) return false;
    const { start, text } = this.#swiped;
    const end = start + text.length;
    this.#swiped = null;
    if (this.#field.selectionStart !== end || this.#field.value.slice(start, end) !== text) return false;
    this.#user();
    this.count.keys++;
    this.count.chars -= text.length;
    this.#replace(start, end, "");
    this.refresh(time);
    return true;
  }

  // ---------------------------------------------------------------- small parts

  #user() {
    this.#touched++;
  }

  #remember(version, time) {
    this.#started.set(version, time);
    if (this.#started.size > 64) this.#started.delete(this.#started.keys().next().value);
  }

  #currentTaps() {
    return this.#tapsEnd === this.#field.selectionStart ? [...this.#taps] : [];
  }

  #forgetTaps() {
    this.#taps = [];
    this.#tapsEnd = -1;
  }

  /** How many characters right of `at` belong to a word that goes on there. */
  #wordAfter(at) {
    return this.#field.value.slice(at, at + 100).match(/^[\p{L}\p{M}\p{N}]+/u)?.[0].length ?? 0;
  }

  /** Replace a range; the cursor stays where it is in the text. */
  #replace(start, end, text) {
    const { selectionStart, selectionEnd } = this.#field;
    const moved = (at) => (at >= end ? at + text.length - (end - start) : Math.min(at, start + text.length));
    this.#write(start, end, text);
    this.#ownEdit(() => this.#field.setSelectionRange(moved(selectionStart), moved(selectionEnd)));
    this.#cursor = this.#field.selectionStart;
  }

  #write(start, end, text) {
    this.#ownEdit(() => {
      const field = this.#field;
      let done = false;
      if (document.activeElement === field) {
        field.setSelectionRange(start, end);
        // The one way of changing a field that the browser's own undo (Ctrl+Z) knows about.
        done = text ? document.execCommand("insertText", false, text) : start === end || document.execCommand("delete");
      }
      if (!done) field.setRangeText(text, start, end, "end");
    });
  }

  #ownEdit(action) {
    this.#own = true;
    try {
      action();
    } finally {
      this.#own = false;
    }
    this.#cursor = this.#field.selectionStart;
  }
}
