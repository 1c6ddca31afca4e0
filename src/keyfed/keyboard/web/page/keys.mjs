/**
 * The on-screen keyboard: draws the keys of `keyplan.mjs`, turns pointers into taps with positions (in key widths of
 * the layout), swipes, held keys and repeated backspaces. It writes nothing itself; its owner gets
 * `press({kind, char, tap, time})` and `swipe({points, time})`.
 */

import { plan, shiftAt } from "./keyplan.mjs";
import { Trail } from "./trail.mjs";

const HOLD = 380; // milliseconds until a key counts as held
const REPEAT_FROM = 420; // … until backspace repeats, and then every REPEAT_EVERY, faster with time
const REPEAT_EVERY = 70;
const SWIPE_FROM = 0.7; // key widths a finger must travel before a tap becomes a swipe
const SLIDE_FROM = 0.4; // key widths a finger must travel on the space bar until it moves the cursor …
const SLIDE = 0.28; // … by one character for each of these
const DOUBLE = 350; // two presses of shift within this lock capitals
const ONE = 54; // pixels: a single bubble with its frame, as in the style sheet
const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  shift: "M12 4l8 9h-4.5v6h-7v-6H4z",
  backspace: "M8.5 5H20a1.5 1.5 0 0 1 1.5 1.5v11A1.5 1.5 0 0 1 20 19H8.5L2.5 12zM11.5 9l6 6m0-6l-6 6",
  emoji: "M12 20.5a8.5 8.5 0 1 0 0-17 8.5 8.5 0 0 0 0 17zM9 9.8v.4m6-.4v.4M8.3 14q3.7 3.6 7.4 0",
  enter: "M20 5v6a3 3 0 0 1-3 3H5m4.5-4.5L5 14l4.5 4.5",
};

function icon(kind) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[kind]);
  svg.append(path);
  return svg;
}

export class Keyboard {
  #root;
  #layouts;
  #on;
  #pages;
  #pictures;
  #page = "letters";
  #shift = "off"; // "off", "once" (the next letter), "lock"
  #auto = true; // whether that was set by the text, not by the user
  #wanted = null; // what the text wanted last
  #shiftTime = 0;
  #keys = []; // {key, button, box} of the page shown
  #touches = new Map(); // pointer id → a finger that is down
  #trail;
  #popup;
  #shownFor = null; // the finger that the bubble belongs to
  #offered = null; // the same without a finger: a key whose characters are shown until one is taken
  #unit = { width: 1, height: 1 };
  #width = 0; // of the whole keyboard

  /**
   * @param {HTMLElement} root
   * @param {{layouts: object, layout: string, numbers: boolean, pictures: import("./pictures.mjs").Pictures,
   *   press: Function, swipe: Function, slide: Function, shift: () => void,
   *   say: (text: string) => void}} given
   */
  constructor(root, { layouts, layout, numbers, pictures, press, swipe, slide, shift, say }) {
    this.#root = root;
    this.#layouts = layouts;
    this.#pictures = pictures;
    this.#on = { press, swipe, slide, shift, say };
    this.setLayout(layout, numbers);
    root.addEventListener("pointerdown", (event) => this.#down(event));
    root.addEventListener("pointermove", (event) => this.#move(event));
    root.addEventListener("pointerup", (event) => this.#up(event));
    root.addEventListener("pointercancel", (event) => this.#cancel(event));
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("keydown", (event) => this.#walk(event));
    root.addEventListener("focusout", () => this.#withdraw());
    root.addEventListener("contextmenu", (event) => event.preventDefault());
    new ResizeObserver(() => this.#measure()).observe(root);
  }

  setLayout(name, numbers) {
    this.#pages = plan(this.#layouts[name], numbers);
    this.#root.dataset.layout = name;
    this.#root.style.setProperty("--rows", this.#pages.letters.rows.length); // all pages are as high as the letters
    this.#show("letters");
  }

  /** The text says whether a sentence starts here; what the user locked stays, what they pressed stays until it is used. */
  autoShift(wanted) {
    if (wanted === this.#wanted) return;
    const isMeant = !this.#auto && this.#wanted !== null && this.#shift === "once";
    this.#wanted = wanted;
    if (this.#shift !== "lock" && !isMeant && (this.#shift === "once") !== wanted) this.#setShift(wanted ? "once" : "off", true);
  }

  /** What the user did with the shift key; undefined: nothing, the text decides. */
  get shift() {
    return this.#auto ? undefined : this.#shift;
  }

  /** A letter or a word was written: shift for one is over. */
  useShift() {
    if (this.#shift === "once") this.#setShift("off", true);
    else if (this.#shift === "off") this.#auto = true;
    this.#wanted = null;
    this.#shiftTime = -Infinity; // what was pressed before a letter is no first half of a double press
  }

  // ---------------------------------------------------------------- drawing

  #show(page) {
    this.#page = page;
    const { rows, columns } = this.#pages[page];
    this.#keys = [];
    const drawn = rows.map((row, r) => {
      const line = document.createElement("div");
      line.className = "keyrow";
      for (const key of row) line.append(this.#draw(key, r));
      return line;
    });
    this.#popup = document.createElement("div");
    this.#popup.append(this.#bubble("", true));
    this.#popup.className = "popup single";
    this.#popup.setAttribute("aria-hidden", "true");
    if (page === "emoji") drawn.unshift(this.#pictures.root);
    this.#root.dataset.page = page;
    this.#root.replaceChildren(...drawn, this.#popup);
    this.#trail = new Trail(this.#root);
    this.#root.style.setProperty("--columns", columns);
    this.#keys[0].button.tabIndex = 0;
    this.#setShift(this.#shift, this.#auto);
    this.#measure();
  }

  #draw(key, row) {
    if (key.kind === "gap") {
      const gap = document.createElement("span");
      gap.style.flexGrow = key.units;
      return gap;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.tabIndex = -1;
    button.className = `key ${key.kind}`;
    button.dataset.key = key.id;
    button.style.flexGrow = key.units;
    button.setAttribute("aria-label", key.name);
    const picture = ICONS[key.to] ? key.to : key.kind;
    if (ICONS[picture]) button.append(icon(picture));
    const label = document.createElement("span");
    label.className = "label";
    label.textContent = key.label;
    if (key.label && !ICONS[picture]) button.append(label);
    if (key.hint) {
      const hint = document.createElement("span");
      hint.className = "hint";
      hint.textContent = key.hint;
      button.append(hint);
    }
    this.#keys.push({ key, button, label, row, box: null });
    return button;
  }

  #measure() {
    const origin = this.#root.getBoundingClientRect();
    this.#width = this.#root.clientWidth;
    for (const entry of this.#keys) {
      const box = entry.button.getBoundingClientRect();
      entry.box = { x: box.x - origin.x, y: box.y - origin.y, width: box.width, height: box.height };
    }
    const rows = this.#root.querySelectorAll(".keyrow");
    const { columns, above = 0 } = this.#pages[this.#page];
    const first = rows[above].getBoundingClientRect();
    const height = rows.length > 1 ? rows[above + 1].getBoundingClientRect().y - first.y : first.height;
    this.#unit = { width: first.width / columns || 1, height: height || 1, x: first.x - origin.x, y: first.y - origin.y };
  }

  #setShift(state, auto) {
    [this.#shift, this.#auto] = [state, auto];
    this.#root.dataset.shift = state;
    for (const { key, button, label } of this.#keys) {
      if (key.kind === "letter") label.firstChild.nodeValue = this.#cased(key.id);
      if (key.kind === "shift") button.setAttribute("aria-pressed", String(state !== "off"));
      if (key.kind === "shift") button.setAttribute("aria-label", state === "lock" ? "Capitals locked" : "Shift");
    }
  }

  #cased(char) {
    return this.#shift === "off" ? char : char.toLocaleUpperCase();
  }

  // ---------------------------------------------------------------- pointers

  /** Where an event is; the keyboard stays in its place as long as a finger is down, so it is looked up once a touch. */
  #at(event, origin) {
    return [event.clientX - origin.x, event.clientY - origin.y];
  }

  /** The key whose box is nearest to a point: the gaps between keys belong to their neighbours. */
  #nearest(x, y) {
    let [best, least] = [null, Infinity];
    for (const entry of this.#keys) {
      const { box } = entry;
      const dx = Math.max(box.x - x, 0, x - box.x - box.width);
      const dy = Math.max(box.y - y, 0, y - box.y - box.height);
      const distance = dx * dx + dy * dy;
      if (distance < least) [best, least] = [entry, distance];
    }
    return best;
  }

  /** Where a key was hit, in the layout's key widths; null where the key is no letter. */
  #tap({ key, box }, x, y) {
    if (!key.centre) return null;
    return [
      key.centre[0] + (x - box.x - box.width / 2) / this.#unit.width,
      key.centre[1] + (y - box.y - box.height / 2) / this.#unit.height,
    ];
  }

  #layoutPoint(x, y) {
    const [ux, uy] = [(x - this.#unit.x) / this.#unit.width, (y - this.#unit.y) / this.#unit.height];
    return [ux + shiftAt(this.#pages[this.#page].shifts, uy), uy];
  }

  #down(event) {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    if (event.target.closest?.(".pictures")) return; // no key, and it scrolls
    event.preventDefault(); // the text field keeps the focus
    for (const other of this.#touches.values()) this.#commit(other, event.timeStamp); // a second thumb: the first is done
    const origin = this.#root.getBoundingClientRect();
    const [x, y] = this.#at(event, origin);
    const entry = this.#nearest(x, y);
    if (!entry) return;
    try {
      this.#root.setPointerCapture(event.pointerId);
    } catch {
      // A pointer that is already gone cannot be captured; its release ends the press all the same.
    }
    const touch = { id: event.pointerId, entry, origin, x, y, points: [[x, y]], swiping: false, done: false, choice: null, timer: 0 };
    this.#touches.set(event.pointerId, touch);
    entry.button.classList.add("pressed");
    const { key } = entry;
    if (key.kind === "backspace") {
      this.#on.press({ kind: "backspace", time: event.timeStamp });
      this.#repeat(touch, REPEAT_FROM, 0);
    } else if (key.kind === "shift") this.#pressShift(event.timeStamp);
    else if (key.kind === "page") this.#turn(touch);
    else {
      if (key.kind !== "space" && key.kind !== "enter") this.#preview(touch);
      if (key.variants) touch.timer = setTimeout(() => this.#offer(touch), HOLD);
    }
  }

  #move(event) {
    const touch = this.#touches.get(event.pointerId);
    if (!touch || touch.done) return;
    const [x, y] = this.#at(event, touch.origin);
    if (touch.choices) return this.#choose(touch, x);
    const { kind } = touch.entry.key;
    if (kind === "space") return this.#slide(touch, x, y);
    if (kind !== "letter") return;
    for (const part of event.getCoalescedEvents?.() ?? []) touch.points.push(this.#at(part, touch.origin));
    touch.points.push([x, y]);
    if (!touch.swiping && Math.hypot(x - touch.x, y - touch.y) > SWIPE_FROM * this.#unit.width) {
      touch.swiping = true;
      clearTimeout(touch.timer);
      this.#popup.classList.remove("shown");
      touch.entry.button.classList.remove("pressed");
      this.#root.classList.add("swiped"); // from the first swipe on there is a canvas for the trail
    }
    if (touch.swiping) this.#trail.add(x, y);
  }

  /** The cursor follows a finger on the space bar: by characters, and by lines where it goes up or down far. */
  #slide(touch, x, y) {
    touch.sliding ??= null;
    if (!touch.sliding && Math.hypot(x - touch.x, y - touch.y) > SLIDE_FROM * this.#unit.width) {
      touch.sliding = { x, y };
      touch.entry.button.classList.add("sliding");
    }
    const from = touch.sliding;
    if (!from) return;
    for (const [unit, axis, at, size] of [["character", "x", x, SLIDE * this.#unit.width], ["line", "y", y, 0.8 * this.#unit.height]]) {
      const steps = Math.trunc((at - from[axis]) / size);
      if (steps) this.#on.slide(steps, unit);
      from[axis] += steps * size;
    }
  }

  #up(event) {
    const touch = this.#touches.get(event.pointerId);
    if (!touch) return;
    if (touch.swiping) touch.points.push(this.#at(event, touch.origin));
    this.#commit(touch, event.timeStamp);
    this.#touches.delete(event.pointerId);
  }

  #cancel(event) {
    const touch = this.#touches.get(event.pointerId);
    if (touch) this.#release(touch);
    this.#touches.delete(event.pointerId);
  }

  #release(touch) {
    touch.done = true;
    clearTimeout(touch.timer);
    // The character comes first, the looks of the key with the next frame.
    requestAnimationFrame(() => {
      touch.entry.button.classList.remove("pressed", "sliding");
      if (this.#shownFor === touch) this.#popup.classList.remove("shown");
    });
  }

  #commit(touch, time) {
    if (touch.done) return;
    this.#release(touch);
    const { key } = touch.entry;
    if (touch.swiping) {
      this.#on.swipe({ points: touch.points.map(([x, y]) => this.#layoutPoint(x, y)), time });
      this.useShift();
    } else if (touch.sliding) return; // no blank
    else if (touch.choices) this.#send("char", touch.choices[touch.choice], null, time);
    else if (["letter", "char", "digit"].includes(key.kind)) {
      this.#send("char", key.kind === "letter" ? this.#cased(key.id) : key.id, this.#tap(touch.entry, touch.x, touch.y), time);
    } else if (key.kind === "space" || key.kind === "enter") this.#send("char", key.id, null, time);
  }

  #send(kind, char, tap, time) {
    this.#on.press({ kind, char, tap, time });
    if ((this.#page === "symbols" || this.#page === "more") && char === " ") this.#show("letters");
  }

  // ---------------------------------------------------------------- keys that do something

  #repeat(touch, wait, times) {
    touch.timer = setTimeout(() => {
      if (touch.done) return;
      this.#on.press({ kind: times > 20 ? "backspace-word" : "backspace", time: performance.now() });
      this.#repeat(touch, times > 20 ? 2 * REPEAT_EVERY : REPEAT_EVERY, times + 1);
    }, wait);
  }

  #pressShift(time) {
    const twice = time - this.#shiftTime < DOUBLE && this.#shift !== "lock";
    this.#shiftTime = time;
    if (twice) this.#setShift("lock", false);
    else this.#setShift(this.#shift === "off" ? "once" : "off", false);
    this.#on.shift();
  }

  #turn(touch) {
    this.#release(touch);
    this.#show(touch.entry.key.to);
  }

  // ---------------------------------------------------------------- the bubble above a key

  #preview(touch) {
    const { entry } = touch;
    this.#shownFor = touch;
    const char = entry.key.kind === "letter" ? this.#cased(entry.key.id) : entry.key.id;
    if (this.#popup.childElementCount > 1) this.#popup.replaceChildren(this.#bubble(char, true));
    else this.#popup.firstChild.firstChild.nodeValue = char;
    this.#place(entry);
  }

  #offer(touch) {
    if (touch.done || touch.swiping) return;
    const variants = [...touch.entry.key.variants].map((char) => this.#cased(char));
    const width = variants.length > 7 ? 34 : 40; // of a bubble with its gap, as in the style sheet
    this.#popup.classList.toggle("many", variants.length > 7);
    // The first variant stands above the finger, the next ones right of it as far as there is room, the rest left of it.
    const middle = touch.entry.box.x + touch.entry.box.width / 2;
    const right = Math.min(variants.length - 1, Math.max(0, Math.floor((this.#width - 8 - middle - width / 2) / width)));
    touch.choices = [...variants.slice(right + 1).reverse(), ...variants.slice(0, right + 1)];
    touch.choice = variants.length - 1 - right;
    this.#popup.replaceChildren(...touch.choices.map((char, i) => this.#bubble(char, i === touch.choice)));
    this.#shownFor = touch;
    this.#place(touch.entry, middle - (touch.choice + 0.5) * width - 4);
  }

  #bubble(char, chosen) {
    const bubble = document.createElement("span");
    bubble.className = chosen ? "bubble chosen" : "bubble";
    bubble.append(document.createTextNode(char));
    return bubble;
  }

  /** Show the bubbles above a key, their left edge at `left`; in its middle where none is named. */
  #place({ box }, left = box.x + box.width / 2 - ONE / 2) {
    const popup = this.#popup, many = popup.childElementCount > 1;
    popup.classList.add("shown");
    popup.classList.toggle("single", !many);
    const room = this.#width - (many ? popup.offsetWidth : ONE) - 4;
    const x = Math.min(Math.max(left, 4), Math.max(room, 4));
    popup.style.transform = `translate(${x}px, ${box.y - 6}px) translateY(-100%)`;
  }

  #choose(touch, x) {
    const origin = this.#root.getBoundingClientRect();
    const bubbles = [...this.#popup.children];
    const middles = bubbles.map((b) => { const box = b.getBoundingClientRect(); return box.x - origin.x + box.width / 2; });
    // What is chosen at first stands above a finger that has not moved.
    const moved = Math.abs(x - touch.x) > 8;
    const distances = middles.map((middle) => Math.abs(middle - x));
    touch.choice = moved ? distances.indexOf(Math.min(...distances)) : touch.choice;
    bubbles.forEach((bubble, i) => bubble.classList.toggle("chosen", i === touch.choice));
  }

  // ---------------------------------------------------------------- without a pointer

  /** A click that no pointer made: a screen reader, or Enter on a focused key. */
  #click(event) {
    const button = event.target.closest(".key");
    if (!button || event.detail !== 0) return;
    const entry = this.#keys.find((e) => e.button === button);
    const { key } = entry;
    const time = event.timeStamp;
    const offered = this.#withdraw();
    if (key.kind === "backspace") this.#on.press({ kind: "backspace", time });
    else if (key.kind === "shift") this.#pressShift(time);
    else if (key.kind === "page") this.#show(key.to);
    else if (offered) this.#send("char", offered.choices[offered.choice], null, time);
    else this.#send("char", key.kind === "letter" ? this.#cased(key.id) : key.id, null, time);
    // The text was written to and has the focus; who walks over the keys is still at this one.
    this.#focus(this.#keys.find((one) => one.key.id === key.id) ?? this.#keys[0]);
  }

  #focus({ button }) {
    for (const one of this.#keys) one.button.tabIndex = one.button === button ? 0 : -1;
    button.focus();
  }

  /** The menu key, or Shift and F10, shows what holding the key would; left and right choose, a press takes. */
  #offerWithout(entry) {
    this.#withdraw();
    if (!entry.key.variants) return;
    this.#offered = { entry, done: false, swiping: false };
    this.#offer(this.#offered);
    this.#chooseNext(0);
  }

  #chooseNext(step) {
    const offered = this.#offered, { length } = offered.choices;
    offered.choice = (offered.choice + step + length) % length;
    [...this.#popup.children].forEach((bubble, i) => bubble.classList.toggle("chosen", i === offered.choice));
    this.#on.say(`${offered.choices[offered.choice]}, ${offered.choice + 1} of ${length}`);
  }

  /** Show no characters any more; those that were shown. */
  #withdraw() {
    const offered = this.#offered;
    if (offered) this.#popup.classList.remove("shown");
    this.#offered = null;
    return offered;
  }

  /** Arrow keys walk over the keys; only one of them is a stop of the tab order. */
  #walk(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const from = this.#keys.find((e) => e.button === document.activeElement);
    if (!from) return;
    const isMenu = event.key === "ContextMenu" || (event.key === "F10" && event.shiftKey);
    if (this.#offered && (step?.[0] || event.key === "Escape")) {
      event.preventDefault();
      return step ? this.#chooseNext(step[0]) : this.#withdraw();
    }
    if (isMenu) event.preventDefault();
    if (isMenu) return this.#offerWithout(from);
    if (!step) return;
    event.preventDefault();
    const [x, y] = [from.box.x + from.box.width / 2, from.box.y + from.box.height / 2];
    const ahead = this.#keys.filter((e) => e !== from && (step[1] ? e.row === from.row + step[1] : e.row === from.row
      && Math.sign(e.box.x - from.box.x) === step[0]));
    const far = (e) => Math.hypot(e.box.x + e.box.width / 2 - x, e.box.y + e.box.height / 2 - y);
    const to = ahead.sort((a, b) => far(a) - far(b))[0];
    if (!to) return;
    this.#focus(to);
  }
}
