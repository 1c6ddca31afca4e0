/** A panel that is a dialog where it covers the page, and a part of the page where there is room for both. */

const STOPS = "button, input, select, textarea, a[href], [tabindex]";

export class Dialog {
  #panel;
  #rest;
  #opener;

  /**
   * @param {HTMLElement} panel
   * @param {HTMLElement} rest    everything else, out of reach while the panel covers it
   * @param {HTMLElement} opener  gets the focus back
   * @param {HTMLElement} closer  gets it first
   * @param {string} wide         a media query: both have room
   */
  constructor(panel, rest, opener, closer, wide) {
    [this.#panel, this.#rest, this.#opener] = [panel, rest, opener];
    opener.addEventListener("click", () => {
      this.#set(true);
      closer.focus();
    });
    closer.addEventListener("click", () => this.#close());
    panel.addEventListener("keydown", (event) => {
      if (!this.isOpen) return;
      if (event.key === "Escape") this.#close();
      else if (event.key === "Tab") this.#turn(event);
    });
    window.matchMedia(wide).addEventListener("change", ({ matches }) => matches && this.#set(false));
  }

  get isOpen() {
    return this.#panel.classList.contains("open");
  }

  #set(open) {
    this.#panel.classList.toggle("open", open);
    this.#rest.inert = open;
    this.#opener.setAttribute("aria-expanded", String(open));
    for (const [name, value] of [["role", "dialog"], ["aria-modal", "true"]]) {
      if (open) this.#panel.setAttribute(name, value);
      else this.#panel.removeAttribute(name);
    }
  }

  #close() {
    this.#set(false);
    this.#opener.focus();
  }

  /** From the last stop to the first one and back. */
  #turn(event) {
    const all = [...this.#panel.querySelectorAll(STOPS)].filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility());
    const stops = all.filter((one) => one.type !== "radio" || one.checked); // a group of radio buttons is one stop
    const [from, to] = event.shiftKey ? [stops[0], stops.at(-1)] : [stops.at(-1), stops[0]];
    if (document.activeElement !== from) return;
    event.preventDefault();
    to.focus();
  }
}
