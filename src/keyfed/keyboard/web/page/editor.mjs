/**
 * The text field. Typing is never held up: a character stands in the text at once, and what the engine makes of it (a
 * correction, a blank) arrives as an edit of the characters it was asked about; if these have changed meanwhile the
 * edit is dropped. Input methods that compose (IME, dead keys) are left alone until they are done.
 */

import { TextField, splitsPair } from "./field.mjs";

const LARGE = 10_000; // characters of a paste that the page writes itself
const NEEDS_BLANK = /[^\s([{“„«"'’-]$/u; // a word that follows is set off with a blank
const QUICK = 1100; // milliseconds between two blanks that make a full stop
const GOES_ON = /^[\p{Ll}\p{Lo}\p{N}/\\_@]/u; // behind a mark: it was the inside of an address or a number
const HAS_END = /[\s.,!?:;)\]}…”»]/u; // a word before it is not

/**
 * @typedef {object} Surroundings
 * @property {(kind: string, message: object) => boolean} ask  send to the worker; false: there is no engine (yet)
 * @property {() => object} settings
 * @property {(strip: object) => void} show  put suggestions of a swipe into the strip
 * @property {(text: string) => void} say    for the live region
 * @property {() => void} changed            the text or the cursor changed
 * @property {(before: string) => boolean} capital  whether a letter typed on a physical keyboard becomes a capital here
 * @property {(char: string) => boolean} separates  whether a character ends a word
 * @property {(char: string) => boolean} inside  whether a character that ends a word may also stand inside an address
 * @property {(char: string) => boolean} joins  whether a character that ends no word takes the place of an automatic blank
 * @property {() => void} typed  a character was typed: what the user did with the shift key is used up
 * @property {() => ("once"|"lock"|"off"|undefined)} shift  what the user did with the shift key, if anything
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
  #touched = 0; // counts what the user did to the text
  #held = []; // answers that came while an input method composed
  #undoable = null; // the last correction: {end, text, typed, before}, `before` as the engine knows it
  #swiped = null; // the last swipe until it is settled: {before, start, text, slots, chosen}
  #blank = { end: -1, time: 0 }; // where the last blank ends, and when it was typed
  #automatic = -1; // where the blank ends that was put there last
  #composing = false;
  #lengthBefore = 0;
  count = { keys: 0, chars: 0 };

  /** @param {HTMLTextAreaElement} field  @param {Surroundings} to */
  constructor(field, to) {
    [this.#field, this.#to] = [new TextField(field), to];
    field.addEventListener("beforeinput", (event) => this.#beforeInput(event));
    field.addEventListener("input", (event) => this.#input(event));
    field.addEventListener("paste", (event) => this.#paste(event));
    field.addEventListener("compositionstart", () => { this.#composing = true; });
    field.addEventListener("compositionend", (event) => {
      this.#composing = false;
      this.#user();
      this.refresh(event.timeStamp);
      setTimeout(() => this.#release()); // the browser is not done with the field yet
    });
    document.addEventListener("selectionchange", () => this.#moved());
  }

  focus() {
    this.#field.focus();
  }

  /** The text left of the cursor, its end if it is long. */
  before() {
    return this.#field.before();
  }

  /** Ask for the strip of the text as it stands. */
  refresh(time = performance.now()) {
    this.#field.cursor = this.#field.selectionStart;
    this.#askStrip(this.before(), this.#currentTaps(), time);
    this.#to.changed();
  }

  #askStrip(before, taps, time) {
    this.#remember(++this.#version, time);
    let settings = this.#settings();
    const rest = this.#field.rest();
    if (rest) { // a blank would cut the word in two and correct nothing
      [before, settings] = [before + rest, { ...settings, autocorrect: false }];
      taps = taps.concat(Array.from(rest, () => null));
    }
    this.#to.ask("strip", { version: this.#version, request: { before, taps, settings } });
  }

  #settings() {
    return { ...this.#to.settings(), shift: this.#to.shift() };
  }

  /** When the input of a strip began, if it is still the one to show; else null. */
  current(version) {
    return version === this.#version ? this.#started.get(version) ?? null : null;
  }

  // ---------------------------------------------------------------- the on-screen keyboard

  type(char, tap, time) {
    this.focus();
    if (this.#isThere(char, time)) return;
    const { selectionStart: start, selectionEnd: end } = this.#field;
    if (start !== end || this.#separates(char, start)) {
      this.#field.write(start, end, char);
      return this.#typed(char, tap, time);
    }
    this.#goesOn(start, char);
    // The worker ranks while the browser writes the letter and lays the field out, which takes longer.
    const at = this.#field.selectionStart;
    this.#letter(at + 1, tap);
    this.#askStrip(this.before() + char, [...this.#taps], time);
    this.#field.write(at, at, char);
    this.#follow();
    this.#to.changed();
  }

  /** Move the cursor: a finger that slides on the space bar. */
  slide(steps, unit) {
    this.focus();
    this.#field.moveCursor(steps, unit);
  }

  backspace(time) {
    this.focus();
    if (this.#undo(time) || this.#unswipe(time)) return;
    const was = this.#field.value.length;
    this.#field.edit(() => document.execCommand("delete"));
    this.#deleted(was, time);
  }

  /** Delete back to the blank before the last word: what a long hold of backspace does. */
  backspaceWord(time) {
    this.focus();
    const { selectionStart, selectionEnd: end, value } = this.#field;
    let start = selectionStart;
    if (start === end) start -= value.slice(Math.max(0, end - 500), end).match(/\S*\s*$/u)?.[0].length ?? 0;
    if (splitsPair(value, start)) start--;
    this.#field.write(start, end, "");
    this.#deleted(value.length, time);
  }

  /** Take a suggestion: for the word around the cursor, or for what is selected. */
  pick(slot, time) {
    if (this.#swiped?.slots.includes(slot)) return this.#swap(slot, time);
    this.#settle();
    this.#user();
    this.count.keys++;
    if (slot.kind === "emoji") this.#field.putCursor(this.#field.selectionEnd + this.#field.rest().length);
    const { selectionStart: end, selectionEnd, value } = this.#field;
    const selected = selectionEnd > end;
    const rest = value.slice(end, selected ? selectionEnd : end + this.#field.wordAfter(end));
    const request = { before: this.before(), picked: slot, settings: this.#settings() };
    this.#finish({ request, end, tail: "", time, picked: { selected, rest } });
  }

  // ---------------------------------------------------------------- what happens to the text

  #beforeInput(event) {
    if (this.#field.own || this.#composing || event.isComposing) return;
    if (event.inputType === "insertText" && this.#isThere(event.data, event.timeStamp)) return event.preventDefault();
    if (event.inputType !== "deleteContentBackward") return;
    if (this.#undo(event.timeStamp) || this.#unswipe(event.timeStamp)) event.preventDefault();
    else this.#lengthBefore = this.#field.value.length;
  }

  #input(event) {
    if (this.#field.own || this.#composing || event.isComposing) return;
    const typed = event.inputType === "insertLineBreak" ? "\n" : event.data;
    const typing = event.inputType === "insertText" || event.inputType === "insertLineBreak";
    if (typing && typed?.length === 1) this.#typed(this.#capital(typed), null, event.timeStamp);
    else if (event.inputType === "deleteContentBackward") this.#deleted(this.#lengthBefore, event.timeStamp);
    else {
      this.#settle(); // pasted, cut, dropped, undone by the browser
      this.#user();
      this.#forgetTaps();
      this.refresh(event.timeStamp);
    }
  }

  /** The letter that was just typed on a physical keyboard, made a capital where that is wanted. */
  #capital(char) {
    const upper = char.toLocaleUpperCase();
    if (upper === char || upper.length > 1 || !this.#to.capital(this.before().slice(0, -1))) return char;
    const end = this.#field.selectionStart;
    this.#field.replace(end - 1, end, upper);
    return upper;
  }

  #paste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length < LARGE) return;
    event.preventDefault();
    this.#settle();
    this.#user();
    this.#forgetTaps();
    this.#field.setLarge(text);
    this.#follow();
    this.refresh(event.timeStamp);
  }

  /** A character was typed and stands left of the cursor. */
  #typed(char, tap, time) {
    const end = this.#field.selectionStart;
    if (!this.#separates(char, end - 1)) {
      this.#goesOn(end - 1, char);
      this.#letter(this.#field.selectionStart, tap);
      return this.refresh(time);
    }
    this.#oneMore();
    const size = char.length; // an emoji has several
    const quick = char === " " && this.#blank.end === end - 1 && time - this.#blank.time < QUICK;
    this.#blank = char === " " ? { end, time } : { end: -1, time: 0 };
    const before = this.before().slice(0, -size);
    const taps = this.#tapsEnd === end - size ? this.#taps : [];
    this.#forgetTaps();
    const settings = this.#settings();
    // Splitting a word in two is no reason to correct its first half.
    const split = this.#field.wordAfter(end) > 0;
    const request = { before, separator: char, taps, quick, settings: split ? { ...settings, autocorrect: false } : settings };
    this.#finish({ request, end, tail: char, time, picked: null });
  }

  /**
   * A letter follows a mark: the mark ended no word, and the correction that it made is taken back. The text that the
   * user typed stands at `at`, right behind the mark, or is about to.
   */
  #goesOn(at, char) {
    const last = this.#undoable;
    if (!last || last.end !== at || !this.#to.inside(last.text.at(-1)) || !GOES_ON.test(char)) return;
    if (this.#field.value.slice(at - last.text.length, at) !== last.text) return;
    this.#undoable = null;
    this.#askUndo(last.before, false);
    this.#giveBack(at, last);
  }

  #giveBack(end, { text, typed }) {
    this.#change(end - text.length, end, typed);
    this.count.chars -= typed.length - text.length;
  }

  #askUndo(before, keep) {
    this.#to.ask("undo", { id: 0, request: { before, keep, settings: this.#settings() } });
  }

  /** A letter that ends at `end` goes on with the word before it. */
  #letter(end, tap) {
    this.#oneMore();
    if (this.#tapsEnd !== end - 1) this.#taps = [];
    this.#taps.push(tap);
    this.#tapsEnd = end;
  }

  /** Whether a character at `at` ends a word; an apostrophe or hyphen behind a blank may be meant to join. */
  #separates(char, at) {
    return this.#to.separates(char) || (this.#to.joins(char) && this.#field.value[at - 1] === " ");
  }

  /** Whether a typed blank is the one that was put there just before: at once, so that no second one is ever seen. */
  #isThere(char, time) {
    const { selectionStart: at, selectionEnd, value } = this.#field;
    if (char !== " " || at !== this.#automatic || at !== selectionEnd || value[at - 1] !== " ") return false;
    this.#automatic = -1;
    this.#settle();
    this.#user();
    this.count.keys++;
    this.#blank = { end: at, time };
    this.refresh(time);
    return true;
  }

  #oneMore() {
    this.#to.typed();
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
    if (!this.#field.isFocused || this.#composing || this.#field.own) return;
    if (this.#field.selectionStart === this.#field.cursor) return;
    this.#settle();
    this.#user();
    this.#forgetTaps();
    this.refresh();
  }

  // ---------------------------------------------------------------- edits by the engine

  #finish({ request, end, tail, time, picked }) {
    this.#remember(++this.#version, time);
    this.#field.cursor = this.#field.selectionStart;
    const id = this.#next++;
    const known = { before: request.before, end, restAt: end, tail, picked, version: this.#version };
    if (this.#to.ask("finish", { id, version: this.#version, request })) this.#waiting.set(id, known);
    this.#to.changed();
  }

  /** An edit arrived. */
  receive(answer) {
    if (this.#composing) return this.#hold(() => this.receive(answer));
    const { id, edit } = answer;
    const asked = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (!asked) return;
    const old = asked.before.slice(edit.start) + asked.tail;
    const start = asked.end - old.length;
    if (start < 0 || this.#field.value.slice(start, asked.end) !== old) return this.#stale(asked);
    const next = this.#field.value.slice(asked.end, asked.end + 2);
    if (edit.correction && this.#to.inside(asked.tail) && GOES_ON.test(next)) { // typed before the answer came
      return this.#askUndo(asked.before.slice(0, edit.start) + edit.text, false);
    }
    const isNew = asked.picked ? this.#applyPick(asked, start, old, edit.text) : this.#change(start, asked.end, edit.text);
    if (edit.correction) this.count.chars -= edit.text.length - old.length; // it saves nobody a key
    this.#undoable = null;
    if (edit.text.endsWith(" ") && asked.tail !== " ") this.#automatic = start + edit.text.length;
    if (edit.correction) {
      const before = asked.before.slice(0, edit.start) + edit.text;
      this.#undoable = { end: start + edit.text.length, text: edit.text, typed: old, before };
      if (edit.text === ". ") this.#automatic = start + edit.text.length;
      if (this.#blank.end === asked.end) this.#blank.end = start + edit.text.length;
      this.#to.say(edit.correction.typed.trim() ? `${edit.correction.typed} corrected to ${edit.correction.chosen}` : "Full stop");
    }
    // The strip that is under way was asked for before this edit changed its context.
    if (asked.version !== this.#version && isNew) this.refresh(this.#started.get(this.#version));
    else this.#to.changed();
  }

  /** A picked word takes the place of the whole word around the cursor, or of the selection, and of the blank after it. */
  #applyPick({ picked, end, restAt }, start, old, text) {
    const { selectionStart, value } = this.#field;
    const replacesRest = (picked.selected || old !== "") && value.startsWith(picked.rest, restAt);
    const length = replacesRest ? picked.rest.length : 0;
    if (restAt !== end) { // what was typed since stands between the word and its rest, and stays
      this.#change(restAt, restAt + length, "");
      return this.#change(start, end, text);
    }
    const stop = end + length + (text.endsWith(" ") && value[end + length] === " " ? 1 : 0);
    const isNew = this.#change(start, stop, text);
    if (selectionStart === end) this.#field.putCursor(start + text.length);
    return isNew;
  }

  #stale(asked) {
    if (asked.version === this.#version) this.refresh();
  }

  /** Nothing is changed under an input method that composes: its owner would lose what it holds. */
  #hold(action) {
    this.#held.push(action);
  }

  #release() {
    if (!this.#composing) for (const action of this.#held.splice(0)) action();
  }

  /** Backspace right after a correction: the typed word is given back, and the engine knows it from now on. */
  #undo(time) {
    const { selectionStart: end, selectionEnd, value } = this.#field;
    const last = this.#undoable;
    this.#undoable = null;
    const here = last && end === last.end && end === selectionEnd && value.slice(end - last.text.length, end) === last.text;
    if (!here) return false;
    this.#user();
    this.count.keys++;
    this.#askUndo(last.before, true);
    this.#giveBack(end, last);
    this.refresh(time);
    return true;
  }

  // ---------------------------------------------------------------- swipes

  /** A swipe over the keys: the best word is written, the others stand in the strip. */
  swipe(points, time) {
    this.focus();
    this.#settle();
    const settings = this.#settings(); // shift counts as it was when the finger moved
    if (NEEDS_BLANK.test(this.before())) this.type(" ", null, time);
    this.#user();
    this.count.keys++;
    const { selectionStart: end, selectionEnd, value } = this.#field;
    const asked = { swipe: points, end, selected: value.slice(end, selectionEnd), touched: this.#touched, time, settings };
    this.#waiting.set(this.#next++, asked);
    this.#askSwipe();
  }

  /** One swipe after the other: the word of the first is the context of the second. */
  #askSwipe() {
    const [id, asked] = [...this.#waiting].find(([, one]) => one.swipe) ?? [];
    if (!asked || asked.sent) return;
    const request = { before: this.#field.before(asked.end), points: asked.swipe, settings: asked.settings };
    asked.sent = this.#to.ask("swipe", { id, request });
    if (!asked.sent) this.#waiting.delete(id);
  }

  receiveSwipe(answer) {
    if (this.#composing) return this.#hold(() => this.receiveSwipe(answer));
    const { id, slots } = answer;
    const asked = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (asked && slots.length) this.#insertSwipe(asked, slots);
    else if (asked) {
      this.#to.say("No word found for this swipe");
      this.refresh(asked.time);
    }
    this.#askSwipe();
  }

  /** The word stands where the swipe was made, although the user may have gone on typing. */
  #insertSwipe({ end, selected, touched, time }, slots) {
    const { value } = this.#field;
    const wentOn = touched !== this.#touched;
    const at = this.#field.outsideWord(end);
    const stop = value.startsWith(selected, at) ? at + selected.length : at;
    const lead = NEEDS_BLANK.test(this.#field.before(at)) ? " " : "";
    const text = slots[0].text + (wentOn && HAS_END.test(value.slice(stop, stop + 1)) ? "" : " ");
    const start = at + lead.length;
    this.#change(at, stop, lead + text);
    this.#swiped = { before: this.#field.before(start), start, text, slots, chosen: slots[0] };
    if (wentOn) {
      this.#settle();
      return this.refresh(this.#started.get(this.#version));
    }
    this.#field.putCursor(start + text.length);
    if (text.endsWith(" ")) this.#automatic = start + text.length;
    this.#showSwipe(time);
  }

  #showSwipe(time) {
    const { slots, chosen } = this.#swiped;
    const others = slots.filter((slot) => slot !== chosen);
    this.#remember(++this.#version, time);
    this.#field.cursor = this.#field.selectionStart;
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
    this.#change(start, start + text.length, next);
    Object.assign(this.#swiped, { text: next, chosen: slot });
    this.#automatic = start + next.length;
    this.#showSwipe(time);
  }

  /** The user goes on: the swiped word was meant, so it is learnt and its blank is an automatic one. */
  #settle() {
    if (!this.#swiped) return;
    const { before, chosen } = this.#swiped;
    this.#swiped = null;
    this.#to.ask("finish", { id: 0, version: null, request: { before, picked: chosen, settings: this.#settings() } });
  }

  /** Backspace right after a swipe takes the whole word away, or keeps it from coming; it was not meant. */
  #unswipe(time) {
    const [id] = [...this.#waiting].find(([, one]) => one.swipe && one.touched === this.#touched) ?? [];
    if (!this.#swiped && id === undefined) return false;
    const { start, text } = this.#swiped ?? { start: this.#field.selectionStart, text: "" };
    const end = start + text.length;
    this.#swiped = null;
    if (this.#field.selectionStart !== end || this.#field.value.slice(start, end) !== text) return false;
    this.#waiting.delete(id);
    this.#user();
    this.count.keys++;
    this.#change(start, end, "");
    this.refresh(time);
    return true;
  }

  // ---------------------------------------------------------------- small parts

  #user() {
    this.#touched++;
    this.#automatic = -1;
    this.#follow();
  }

  /** The user's own edit ends at the cursor: the places of what is waiting move with the text right of it. */
  #follow() {
    const { selectionStart: cursor } = this.#field;
    const delta = this.#field.growth();
    const end = cursor - delta; // of the edited range, in the text as it was
    for (const asked of this.#waiting.values()) {
      asked.end = asked.end > end ? asked.end + delta : Math.min(asked.end, cursor);
      if (asked.picked) asked.restAt = asked.restAt >= end ? asked.restAt + delta : asked.restAt;
    }
  }

  /** Change a range for the engine; what is waiting moves along. Returns whether the text is another now. */
  #change(start, stop, text) {
    const isNew = this.#field.value.slice(start, stop) !== text;
    if (isNew) this.#field.replace(start, stop, text);
    const delta = text.length - (stop - start);
    this.count.chars += delta;
    for (const asked of this.#waiting.values()) {
      if (asked.end >= stop) asked.end += delta;
      if (asked.restAt >= stop) asked.restAt += delta;
    }
    return isNew;
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
}
