/**
 * The text over a reload: kept in this browser's storage a moment after the last change, as plain text and nowhere else.
 * A text in which something was typed incognito is never written, and one that was forgotten is not written again, until
 * the field was empty once. What the browser's undo brings back after that may be such a text, so it is not kept either.
 */

const PAUSE = 400; // milliseconds
const MOST = 200_000; // characters; a longer text is not kept

export class Draft {
  #store;
  #area;
  #isHeld = false; // whether the text in the field may not be kept
  #wasHeld = false; // whether undo may bring such a text back
  #isWanted = true;
  #timer = 0;

  /** @param {import("./store.mjs").Store} store  @param {HTMLTextAreaElement} area */
  constructor(store, area) {
    [this.#store, this.#area] = [store, area];
    window.addEventListener("pagehide", () => this.#save());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.#save(); });
  }

  /** Put the text of the last visit into an empty field; whether there was one. */
  restore() {
    const { text, cursor } = this.#store.draft() ?? {};
    if (typeof text !== "string" || text === "" || this.#area.value !== "") return false;
    this.#area.value = text;
    const at = Number.isSafeInteger(cursor) ? cursor : text.length;
    this.#area.setSelectionRange(at, at);
    return true;
  }

  /** The text or the cursor changed. */
  changed() {
    if (this.#area.value === "") this.#isHeld = !this.#isWanted;
    if (!this.#timer) this.#timer = setTimeout(() => this.#save(), PAUSE);
  }

  /** The browser's undo or redo changed the text. */
  broughtBack() {
    this.#isHeld ||= this.#wasHeld;
  }

  /** Whether texts are kept from now on; one that is in the field when that is switched off stays out. */
  want(wanted) {
    if (!wanted && this.#isWanted) {
      this.#save();
      this.#isHeld = this.#wasHeld = true;
    }
    this.#isWanted = wanted;
  }

  /** Take the kept text away; the one in the field is not kept any more, nor what is typed while none is wanted. */
  forget() {
    this.#isHeld = this.#area.value !== "" || !this.#isWanted;
    this.#wasHeld ||= this.#isHeld;
    this.#store.forgetDraft();
  }

  #save() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const { value: text, selectionStart: cursor } = this.#area;
    if (text === "") this.#store.forgetDraft();
    else if (this.#isHeld || !this.#isWanted) return;
    else if (text.length > MOST) this.#store.forgetDraft();
    else this.#store.saveDraft({ text, cursor });
  }
}
