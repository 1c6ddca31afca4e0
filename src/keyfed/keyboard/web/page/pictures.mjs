/** The page of emoji: those used last, then Unicode's groups. One stop of the tab order; arrows walk over all of it. */

import { make } from "./elements.mjs";

const LAST_USED = 24;
const CELL = 42; // pixels, as in the style sheet

export class Pictures {
  #groups;
  #recent;
  #keeps;
  #chosen;
  #root = null;
  #list = null;
  #sections = [];

  /**
   * @param {{groups: {name: string, emoji: string}[], recent: string[], keeps: () => boolean,
   *   chosen: (emoji: string, time: number) => void}} given  keeps: whether one that is chosen now counts as used
   */
  constructor({ groups, recent, keeps, chosen }) {
    [this.#groups, this.#recent, this.#keeps, this.#chosen] = [groups, recent, keeps, chosen];
  }

  /** What was used last, newest first. */
  get recent() {
    return [...this.#recent];
  }

  forget() {
    this.#recent = [];
    this.#showRecent();
  }

  /** The element; made when it is first wanted, and then kept. */
  get root() {
    if (!this.#root) this.#make();
    this.#showRecent();
    requestAnimationFrame(() => this.#measure()); // once it has its place
    return this.#root;
  }

  #make() {
    const groups = [{ name: "Used last", emoji: "" }, ...this.#groups];
    const list = make("div", { className: "picture-list" });
    const tabs = make("div", { className: "picture-tabs" });
    for (const { name, emoji } of groups) {
      const all = emoji.split(" ").filter(Boolean);
      const cells = make("div", { className: "picture-cells" }, ...all.map(picture));
      const section = make("section", { className: "picture-group", "aria-label": name }, make("h3", {}, name), cells);
      const tab = make("button", { type: "button", className: "picture-tab", tabIndex: -1, "aria-label": name }, all[0] ?? "🕘");
      tab.addEventListener("click", () => { list.scrollTop = section.offsetTop; });
      list.append(section);
      tabs.append(tab);
      this.#sections.push({ section, cells, tab });
    }
    list.addEventListener("scroll", () => this.#mark(), { passive: true });
    this.#list = list;
    this.#root = make("div", { className: "pictures" }, tabs, list);
    this.#root.addEventListener("mousedown", (event) => event.preventDefault()); // the text keeps the focus
    this.#root.addEventListener("click", (event) => {
      const cell = event.target.closest(".picture");
      if (cell) this.#take(cell.textContent, event.timeStamp);
    });
    this.#root.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** How many lines each group has, before it is drawn: groups out of sight are not. */
  #measure() {
    const columns = Math.max(1, Math.floor((this.#list.clientWidth - 8) / CELL));
    for (const { section, cells } of this.#sections) section.style.setProperty("--lines", Math.ceil(cells.childElementCount / columns));
    this.#mark();
  }

  #mark() {
    const { scrollTop, clientHeight, scrollHeight } = this.#list;
    const isEnd = scrollHeight > clientHeight && scrollTop + clientHeight > scrollHeight - 4;
    const top = isEnd ? Infinity : scrollTop + 8;
    const shown = this.#sections.findLast(({ section }) => !section.hidden && section.offsetTop <= top) ?? this.#sections[1];
    for (const { tab } of this.#sections) tab.classList.toggle("current", tab === shown.tab);
  }

  #take(emoji, time) {
    if (this.#keeps()) this.#recent = [emoji, ...this.#recent.filter((one) => one !== emoji)].slice(0, LAST_USED);
    this.#chosen(emoji, time);
  }

  /** Only when the page is opened: what is under a finger does not move. */
  #showRecent() {
    if (!this.#root) return;
    const [{ section, cells, tab }] = this.#sections;
    cells.replaceChildren(...this.#recent.map(picture));
    section.hidden = tab.hidden = this.#recent.length === 0;
    if (!this.#root.querySelector('[tabindex="0"]')) this.#list.querySelector("section:not([hidden]) .picture").tabIndex = 0;
  }

  #walk(event) {
    const stops = [...this.#root.querySelectorAll("button")].filter((one) => !one.closest("[hidden]"));
    const from = stops.indexOf(document.activeElement);
    if (from < 0 || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const to = step ? stops[from + step] : this.#inNextRow(stops, from, event.key === "ArrowDown" ? 1 : -1);
    if (!to) return;
    this.#root.querySelector('[tabindex="0"]').tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  /** The nearest stop of the row below (1) or above (−1). */
  #inNextRow(stops, from, sign) {
    const { x, y } = stops[from].getBoundingClientRect();
    const ahead = stops.map((stop) => ({ stop, box: stop.getBoundingClientRect() })).filter(({ box }) => sign * (box.y - y) > 4);
    const far = ({ box }) => 100 * Math.abs(box.y - y) + Math.abs(box.x - x);
    return ahead.sort((a, b) => far(a) - far(b))[0]?.stop;
  }
}

const picture = (emoji) => make("button", { type: "button", className: "picture", tabIndex: -1 }, emoji);
