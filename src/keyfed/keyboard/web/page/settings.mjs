/**
 * The panel: what runs here and how fast, where suggestions come from, switches, and everything this device has learnt
 * with a way to delete each piece of it.
 */

import { button, card, choice, make, toggle } from "./elements.mjs";

const MOST_SHOWN = 300; // entries of a list in the page; the search field finds the others
const LARGEST_FILE = 20_000_000; // bytes of an imported file
const LAYOUT_NAMES = { qwerty: "QWERTY", qwertz: "QWERTZ", azerty: "AZERTY" };
const FACTS = ["Model", "Trained by", "Corpus", "Latency", "To the screen", "Keystrokes saved", "Kept in", "Works offline"];

/**
 * @typedef {object} Panel
 * @property {(name: string, value: unknown) => void} change  a setting was changed
 * @property {(action: string, value?: string) => Promise<string>} act  on what was learnt; the message of a failure or ""
 * @property {() => string} exported  what was learnt, as JSON
 */

export class SettingsPanel {
  #on;
  #controls = {};
  #facts = new Map();
  #personal = { words: {}, dictionary: [], blocked: [] };
  #learnAfter;
  #lists = {};
  #notes = new Map(); // card → where it says what happened

  /** @param {HTMLElement} body  @param {{layouts: string[], learnAfter: number, on: Panel}} given */
  constructor(body, { layouts, learnAfter, on }) {
    this.#on = on;
    this.#learnAfter = learnAfter;
    body.append(this.#status(), this.#source(), this.#typing(layouts), this.#privacy(), this.#learnt(),
      this.#wordList("dictionary", "My dictionary", "Words that are always known and offered.", "add", "forget"),
      this.#wordList("blocked", "Never suggested", "Not offered by anything, not corrected to.", "block", "unblock"));
  }

  /** Put the controls where the settings are. */
  showSettings(settings) {
    for (const [name, control] of Object.entries(this.#controls)) {
      if (control instanceof Map) control.get(settings[name]).checked = true;
      else control.checked = settings[name];
    }
  }

  /** Which sources there are: an export may come without n-grams. */
  offerSources({ ngram }) {
    for (const name of ["ngram", "network"]) this.#controls.source.get(name).disabled = !ngram;
  }

  fact(name, text) {
    const place = this.#facts.get(name);
    if (place.textContent !== text) place.textContent = text;
  }

  /** What was learnt, as the engine exports it. */
  showPersonal(personal) {
    this.#personal = personal;
    for (const list of Object.values(this.#lists)) list();
  }

  // ---------------------------------------------------------------- the cards

  #status() {
    const list = make("dl", { className: "facts" });
    for (const name of FACTS) {
      const place = make("dd", {}, "–");
      this.#facts.set(name, place);
      list.append(make("dt", {}, name), place);
    }
    return card("Status", list);
  }

  #source() {
    const both = [["federated", "federated"], ["personal", "federated + personal"]];
    const title = "Counts alone, the network alone, both, both and your words";
    return card("Suggestions from", this.#choice("source", title, [["ngram", "counts"], ["network", "network"], ...both]));
  }

  #typing(layouts) {
    return card("Typing",
      this.#toggle("autocorrect", "Autocorrect", "A blank corrects the word before it; backspace takes that back."),
      this.#toggle("emoji", "Emoji", "Offered on the right, never in the middle."),
      this.#toggle("fullstop", "Two blanks for a full stop", "The second one right after the first; backspace takes that back."),
      this.#toggle("capitals", "Capitals on a physical keyboard", "The first letter of a sentence, as on the screen."),
      this.#toggle("filter", "Leave offensive words out", "They can always be typed."),
      this.#toggle("numbers", "Row of digits", "Above the letters."),
      this.#choice("layout", "Layout", layouts.map((name) => [name, LAYOUT_NAMES[name] ?? name])),
      this.#choice("theme", "Colours", [["auto", "As the system"], ["light", "Light"], ["dark", "Dark"]]));
  }

  #privacy() {
    const forget = button("Forget everything", () => {
      if (forget.dataset.sure === "yes") {
        this.#act("learnt", "forgetAll", undefined, "Everything learnt is forgotten, and the text is not kept.");
        ask(false);
      } else ask(true);
    }, "action danger");
    forget.id = "forget-all";
    const ask = (sure) => {
      forget.dataset.sure = sure ? "yes" : "";
      forget.textContent = sure ? "Really forget everything?" : "Forget everything";
    };
    forget.addEventListener("blur", () => ask(false));
    return card("Privacy",
      this.#toggle("learn", "Learn from my typing", `A new word is suggested once you used it ${this.#learnAfter} times. All of it stays on this device.`),
      this.#toggle("keep", "Keep the text over a reload", "In this browser, never while incognito."),
      this.#toggle("incognito", "Incognito", "Nothing is learnt or stored, nothing learnt is offered."),
      make("div", { className: "row" }, forget));
  }

  #learnt() {
    const search = make("input", { type: "search", placeholder: "Find a word", "aria-label": "Find a learnt word", autocomplete: "off", spellcheck: false });
    const list = make("ul", { className: "words", id: "learnt" });
    const summary = make("p", { className: "explain" });
    const question = make("div", { className: "question", role: "group", "aria-label": "Import", hidden: true });
    const file = make("input", { type: "file", accept: ".json,application/json", hidden: true, id: "import-file" });
    file.addEventListener("change", () => this.#import(file, question));
    const redraw = () => {
      const all = Object.entries(this.#personal.words ?? {}).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
      const known = all.filter(([, uses]) => uses >= this.#learnAfter).length;
      summary.textContent = all.length
        ? `${known.toLocaleString()} learnt, ${(all.length - known).toLocaleString()} seen fewer than ${this.#learnAfter} times.`
        : "Nothing yet.";
      const wanted = search.value.trim().toLowerCase();
      const shown = all.filter(([word]) => word.toLowerCase().includes(wanted)).slice(0, MOST_SHOWN);
      list.replaceChildren(...shown.map(([word, uses]) => {
        const item = this.#entry(word, `Forget ${word}`, () => this.#act("learnt", "forget", word, `“${word}” is forgotten.`));
        item.firstChild.append(make("span", { className: "uses" }, `× ${uses}`));
        item.classList.toggle("early", uses < this.#learnAfter);
        return item;
      }));
    };
    search.addEventListener("input", redraw);
    this.#lists.words = redraw;
    redraw();
    return card("What was learnt here", summary, make("div", { className: "row" }, search), list, make("div", { className: "row" },
      button("Export to a file", () => this.#export()), button("Import from a file", () => file.click()), file), question, this.#note("learnt"));
  }

  /** A list of words with a field to add one. */
  #wordList(name, title, explanation, add, remove) {
    const list = make("ul", { className: "words", id: name });
    const input = make("input", { type: "text", "aria-label": `Add a word: ${title}`, placeholder: "Add a word", maxLength: 40, autocomplete: "off", spellcheck: false });
    const form = make("form", { className: "row" }, input, make("button", { type: "submit", className: "action" }, "Add"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const word = input.value.trim();
      input.value = "";
      if (word) this.#act(name, add, word, "");
    });
    const redraw = () => {
      const words = [...(this.#personal[name] ?? [])].sort();
      list.replaceChildren(...words.slice(0, MOST_SHOWN).map((word) =>
        this.#entry(word, `Take ${word} off this list`, () => this.#act(name, remove, word, ""))));
    };
    this.#lists[name] = redraw;
    return card(title, make("p", { className: "explain" }, explanation), list, form, this.#note(name));
  }

  #entry(word, label, clicked) {
    const gone = button("×", clicked, "");
    gone.setAttribute("aria-label", label);
    return make("li", {}, make("span", { className: "word" }, word), gone);
  }

  // ---------------------------------------------------------------- actions

  #toggle(name, title, explanation) {
    const { label, input } = toggle(name, title, explanation, (value) => this.#on.change(name, value));
    this.#controls[name] = input;
    return label;
  }

  #choice(name, title, options) {
    const { group, inputs } = choice(name, title, options, (value) => this.#on.change(name, value));
    this.#controls[name] = inputs;
    return group;
  }

  #note(name) {
    const note = make("p", { className: "note", role: "status", id: `${name}-note` });
    this.#notes.set(name, note);
    return note;
  }

  /** Do something and say in the card it belongs to how it went. */
  async #act(card, action, value, done) {
    this.#say(card, await this.#on.act(action, value), done);
  }

  #say(card, failure, done) {
    for (const [name, note] of this.#notes) {
      note.textContent = name === card ? failure || done : "";
      note.classList.toggle("error", name === card && Boolean(failure));
    }
  }

  #export() {
    const address = URL.createObjectURL(new Blob([this.#on.exported()], { type: "application/json" }));
    make("a", { href: address, download: "keyfed-learnt.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  async #import(file, question) {
    const [chosen] = file.files;
    if (!chosen) return;
    const text = chosen.size > LARGEST_FILE ? null : await chosen.text();
    file.value = ""; // so that the same file can be chosen again
    if (text === null) return this.#say("learnt", `${chosen.name} is too large to be what this page exported`, "");
    const failure = await this.#on.act("checkJSON", text);
    if (failure) return this.#say("learnt", failure, "");
    const { words, dictionary, blocked } = this.#personal;
    if (!Object.keys(words).length && !dictionary.length && !blocked.length) {
      return this.#act("learnt", "importJSON", text, `${chosen.name} was imported.`);
    }
    const answered = (action, done) => () => {
      question.hidden = true;
      if (action) this.#act("learnt", action, text, done);
    };
    const add = button("Add to what is here", answered("mergeJSON", `${chosen.name} was added.`));
    question.replaceChildren(make("p", {}, `What shall ${chosen.name} do?`), make("div", { className: "row" }, add,
      button("Replace what is here", answered("importJSON", `${chosen.name} took the place of what was learnt.`), "action danger"),
      button("Cancel", answered())));
    question.hidden = false;
    add.focus();
  }
}
