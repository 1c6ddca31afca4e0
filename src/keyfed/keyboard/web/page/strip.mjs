/**
 * The suggestion strip: three buttons, the best in the middle. A tap takes a suggestion; a long press, the context
 * menu or the Delete key offers never to suggest it again. It never takes the focus from the text field.
 */

const HOLD = 500; // milliseconds
const SILENCE = 900; // what a screen reader hears waits until typing pauses this long
const PLACES = ["left", "middle", "right"];

export class SuggestionStrip {
  #root;
  #on;
  #live;
  #slots = [null, null, null];
  #buttons;
  #menu = null;
  #hold = { timer: 0, fired: false };
  #pressed = null; // {place, slot}: what was under the finger when it came down
  #speech = 0;
  #said = "";

  /**
   * @param {HTMLElement} root
   * @param {HTMLElement} live  a live region
   * @param {{pick: (slot: object, place: number, time: number) => void, block: (slot: object) => void,
   *   leave: () => void}} on  `leave`: the focus shall go back to the text
   */
  constructor(root, live, on) {
    [this.#root, this.#live, this.#on] = [root, live, on];
    this.#buttons = PLACES.map((place, i) => this.#button(place, i));
    root.append(...this.#buttons);
    root.addEventListener("pointerdown", (event) => event.preventDefault());
    root.addEventListener("mousedown", (event) => event.preventDefault());
    document.addEventListener("pointerdown", (event) => {
      if (this.#menu && !this.#menu.contains(event.target)) this.#closeMenu();
    });
  }

  /** Write a strip. Only what changed is touched. */
  show({ slots, correction }) {
    this.#slots = slots;
    slots.forEach((slot, i) => {
      const button = this.#buttons[i];
      const text = slot?.text ?? "";
      const label = button.firstChild.firstChild;
      if (label.nodeValue !== text) label.nodeValue = text;
      const kind = slot?.kind ?? "none";
      if (button.dataset.kind !== kind) button.dataset.kind = kind;
      const isComing = kind === "correction" && text === correction; // a blank will take it
      button.classList.toggle("will-correct", isComing);
      const spoken = slot ? spokenFor(slot, isComing) : `No ${PLACES[i]} suggestion`;
      if (button.ariaLabel !== spoken) button.ariaLabel = spoken;
      button.disabled = slot === null && this.#pressed?.place !== i; // a disabled button gets no click
    });
    this.#announce();
  }

  /** The suggestion of Alt+1, Alt+2, Alt+3. */
  pick(place, time, slot = this.#slots[place]) {
    if (slot) this.#on.pick(slot, place, time);
    return slot !== null;
  }

  /** Say something now (a correction, a blocked word). */
  say(text) {
    this.#live.textContent = text;
    this.#said = text;
  }

  #announce() {
    clearTimeout(this.#speech);
    this.#speech = setTimeout(() => {
      const words = [1, 0, 2].map((i) => this.#slots[i]?.text).filter(Boolean);
      const text = words.length ? `Suggestions: ${words.join(", ")}` : "";
      if (text !== this.#said) this.say(text);
    }, SILENCE);
  }

  #button(place, i) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `slot ${place}`;
    button.dataset.place = place;
    button.dataset.kind = "none";
    button.disabled = true;
    const label = document.createElement("span"); // its words change the layout of nothing else
    label.append(document.createTextNode(""));
    button.append(label);
    button.setAttribute("aria-keyshortcuts", `Alt+${i + 1}`);
    button.addEventListener("pointerdown", (event) => this.#press(event, i));
    for (const end of ["pointerup", "pointerleave", "pointercancel"]) {
      button.addEventListener(end, () => clearTimeout(this.#hold.timer));
    }
    button.addEventListener("click", (event) => {
      // The strip may have changed since the finger came down; a click by the keyboard has no finger.
      const slot = event.detail > 0 && this.#pressed?.place === i ? this.#pressed.slot : this.#slots[i];
      this.#pressed = null;
      button.disabled = this.#slots[i] === null;
      if (this.#hold.fired) this.#hold.fired = false;
      else if (!this.#menu) this.pick(i, event.timeStamp, slot);
      if (event.detail === 0 && !this.#menu) this.#on.leave();
    });
    button.addEventListener("contextmenu", (event) => {
      event.preventDefault();
      clearTimeout(this.#hold.timer);
      this.#openMenu(i);
    });
    button.addEventListener("keydown", (event) => {
      if (event.key === "Delete") this.#openMenu(i);
      if (event.key === "Escape") this.#on.leave();
    });
    return button;
  }

  #press(event, i) {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    clearTimeout(this.#hold.timer);
    const slot = this.#slots[i];
    this.#pressed = { place: i, slot };
    this.#hold.fired = false;
    this.#hold.timer = setTimeout(() => {
      this.#hold.fired = true;
      this.#openMenu(i, slot);
    }, HOLD);
  }

  #openMenu(i, slot = this.#slots[i]) {
    this.#closeMenu();
    if (!slot || !slot.word) return;
    const menu = document.createElement("div");
    menu.className = `menu ${PLACES[i]}`;
    menu.setAttribute("role", "menu");
    menu.setAttribute("aria-label", slot.text);
    const item = (name, text, action) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = name;
      button.setAttribute("role", "menuitem");
      button.textContent = text;
      button.addEventListener("click", (event) => {
        event.stopPropagation();
        this.#closeMenu();
        action();
        this.#on.leave();
      });
      return button;
    };
    menu.append(item("block", `Never suggest “${slot.text}”`, () => this.#on.block(slot)), item("keep", "Keep", () => {}));
    menu.addEventListener("keydown", (event) => {
      const items = [...menu.children];
      const at = items.indexOf(document.activeElement);
      if (event.key === "Escape") {
        this.#closeMenu();
        this.#on.leave();
      } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        items[(at + 1) % items.length].focus();
      }
    });
    this.#menu = menu;
    this.#root.append(menu);
    // Opened from the keyboard it takes the focus, opened by a finger the text keeps it.
    if (this.#buttons[i] === document.activeElement) menu.firstChild.focus();
  }

  #closeMenu() {
    this.#menu?.remove();
    this.#menu = null;
  }
}

function spokenFor({ text, kind }, isComing) {
  if (kind === "literal") return `${text}, as typed`;
  if (isComing) return `${text}, correction`;
  if (kind === "emoji") return `${text}, emoji`;
  return text;
}
