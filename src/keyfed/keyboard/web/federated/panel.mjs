/** The cards of a page that trains: what it keeps, what its model is, what it sends, and with whom. */

import { button, card, make, toggle } from "../page/elements.mjs";

const MINUTES = [5, 10, 20, 60];
const short = (text, size = 12) => (text.length > size ? `${text.slice(0, size)}…` : text);
const many = (count, what) => `${count.toLocaleString()} ${what}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const WORK = { tuning: "Tunes the model to you", looking: "Looks at a model with your held-back lines", training: "Trains for the round", counting: "Counts your held-back lines for the round" };

/** How a model does, against the one before it. */
function compared(seen) {
  if (!seen) return "no lines were held back to look at it with";
  const { lines, before, after, isEnough } = seen;
  return `${percent(after.top3)} of your held-back words among the first three (before: ${percent(before.top3)}), ` +
    `${after.nats.toFixed(2)} nats a token (before: ${before.nats.toFixed(2)}), on ${many(lines, "line")}${isEnough ? "" : ", which are too few for a verdict"}`;
}

const modelName = ({ kind, name, run }) => (kind === "tuned" ? "tuned to you on this device" : kind === "federation"
  ? `of the run ${short(run)}, ${name}` : "the one that this page came with");

/** What all uploads cost together: of runs without differential privacy nothing is claimed. */
function costOf(account) {
  if (!account || !(account.uploads || account.open)) return "nothing has been uploaded";
  const { epsilon, delta, uploads, runs, open } = account;
  const counted = uploads ? `${epsilon.toPrecision(3)} (δ = ${delta}) for ${many(uploads, "upload")} to ${many(runs, "private run")}` : "";
  return [counted, open ? `${many(open, "run")} without differential privacy, of which no ε is claimed` : ""].filter(Boolean).join("; ");
}

/** A list of facts. */
class Facts {
  #places = new Map();

  constructor(names) {
    this.list = make("dl", { className: "facts" });
    for (const name of names) {
      const place = make("dd", {}, "–");
      this.#places.set(name, place);
      this.list.append(make("dt", {}, name), place);
    }
  }

  set(values) {
    for (const [name, text] of Object.entries(values)) {
      const place = this.#places.get(name);
      if (place.textContent !== text) place.textContent = text;
    }
  }
}

/**
 * @typedef {object} On
 * @property {(agreed: boolean) => void} agree
 * @property {(name: string, value: unknown) => void} change  a setting of this page
 * @property {(kind: string, message?: object) => void} act   something for the worker
 */

export class FederatedPanel {
  #on;
  #parts;
  #facts;
  #link = null;
  #strangers = ""; // the hash of a roster that may be trusted
  #isAgreed = false;
  #hasMore = { model: false, client: false }; // what there is to see without consent: another model, an identity
  /** Whether something may have been kept, which can be forgotten without consent, too. */
  isThere = false;
  /** Where one line says what goes on. */
  note = make("p", { className: "note", role: "status", id: "federated-note" });

  /** @param {HTMLElement} body  @param {object} settings  @param {On} on */
  constructor(body, settings, on) {
    this.#on = on;
    this.#facts = {
      kept: new Facts(["Kept for training", "Held back", "Today"]),
      model: new Facts(["In the strip", "Work"]),
      client: new Facts(["Server", "Name", "Page", "State", "Own ε", "Roster"]),
      sent: new Facts(["Run and round", "Upload", "Hides among", "Trained on", "First bytes"]),
    };
    this.#parts = { ...this.#consent(settings), ...this.#text(settings), ...this.#model(), ...this.#client(settings) };
    const { consentCard, textCard, modelCard, clientCard } = this.#parts;
    body.prepend(consentCard, textCard, modelCard, clientCard);
    this.agreed(settings.consent);
  }

  // ---------------------------------------------------------------- the cards

  #consent({ consent }) {
    const { label, input } = toggle("consent", "Keep what I type for training", "Encrypted, on this device. Never while incognito.", (value) => this.#on.agree(value));
    input.checked = consent;
    const trouble = make("p", { className: "explain", id: "last-trouble", hidden: true });
    const consentCard = card("Training on this device",
      make("p", { className: "explain" }, "This page can train the model on what you type. Nothing leaves this device by that. " +
        "If you join a federation, sums leave it that are masked: the server can open the sum of many, not yours."),
      label, this.note, trouble);
    return { consentCard, consent: input, trouble };
  }

  #text(settings) {
    const list = make("ul", { className: "words", id: "kept-lines", hidden: true });
    const show = button("Show the lines", () => {
      if (list.hidden) return this.#on.act("list");
      list.hidden = true;
      show.textContent = "Show the lines";
    });
    show.id = "show-lines";
    const forget = this.#sure("Forget what was kept", "Really forget it?", () => this.#on.act("forget"));
    forget.id = "forget-kept";
    const out = toggle("out", "Also while this tab is out of sight", "Else only while you can see it.", (value) => this.#on.change("out", value));
    out.input.checked = settings.out;
    const minutes = make("select", { id: "minutes", name: "minutes" }, ...MINUTES.map((n) => make("option", { value: String(n), selected: n === settings.minutes }, `${n} minutes a day`)));
    minutes.addEventListener("change", () => this.#on.change("minutes", Number(minutes.value)));
    const textCard = card("What is kept", this.#facts.kept.list, out.label,
      make("div", { className: "row" }, make("label", { htmlFor: "minutes" }, "Trains at most"), minutes),
      make("div", { className: "row" }, show, forget), list);
    return { textCard, list, show, out: out.input, minutes };
  }

  #model() {
    const progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress of the training" });
    const tune = button("Tune the model to me", () => this.#on.act("tune")), undo = button("Use the shared model", () => this.#on.act("undo"));
    const stop = button("Stop", () => this.#on.act("end"));
    [tune.id, undo.id, stop.id] = ["tune", "undo", "stop-work"];
    const looked = make("p", { className: "explain", id: "looked" });
    const consider = button("Look at the new model", () => this.#on.act("consider")), take = button("Use it", () => this.#on.act("take"));
    const refuse = button("Refuse it", () => this.#on.act("refuse"), "action danger");
    [consider.id, take.id, refuse.id] = ["consider", "take", "refuse"];
    const offer = make("div", { className: "question", role: "group", "aria-label": "A new model", hidden: true });
    const offered = make("p", {});
    offer.append(offered, make("div", { className: "row" }, consider, take, refuse));
    const modelCard = card("The model", this.#facts.model.list, progress, make("div", { className: "row" }, tune, undo, stop), looked, offer);
    return { modelCard, progress, tune, undo, stop, looked, offer, offered, consider, take, refuse };
  }

  #client(settings) {
    const name = make("input", { type: "text", id: "client-name", maxLength: 60, autocomplete: "off", spellcheck: false, placeholder: "A name (or the server's choice)", "aria-label": "Name in the federation" });
    const join = button("Join", () => this.#on.act("join", { ...this.#link, name: name.value.trim() }));
    join.id = "join";
    const invited = make("div", { className: "question", role: "group", "aria-label": "Join a federation", hidden: true });
    const server = make("p", {});
    invited.append(server, make("div", { className: "row" }, name, join));
    const go = button("Take part", () => this.#on.act("go")), stop = button("Stop taking part", () => this.#on.act("stop"));
    const leave = this.#sure("Leave", "Really leave?", () => this.#on.act("leave"));
    [go.id, stop.id, leave.id] = ["go", "stop-rounds", "leave"];
    const preview = toggle("preview", "Ask me before every upload", "Without an answer until the deadline nothing is sent.", (value) => this.#on.change("preview", value));
    preview.input.checked = settings.preview;
    const send = button("Send it", () => this.#on.act("send", { isWanted: true })), keep = button("Do not send it", () => this.#on.act("send", { isWanted: false }), "action danger");
    [send.id, keep.id] = ["send", "do-not-send"];
    const asked = make("div", { className: "row", hidden: true }, send, keep);
    const sent = make("div", { id: "sent", hidden: true }, make("p", { className: "explain" }, "The last upload"), this.#facts.sent.list, asked);
    const doing = make("p", { className: "note", role: "status", id: "rounds-note" });
    const floor = this.#number("floor", { min: 3, max: 4096, step: 1 }), budget = this.#number("budget", { min: 0, max: 1000, step: "any" });
    const strangers = make("div", { className: "question", role: "group", "aria-label": "A new roster", hidden: true });
    const roster = make("p", {}), trust = button("Trust this roster", () => this.#on.act("trust", { hash: this.#strangers }));
    trust.id = "trust";
    strangers.append(roster, make("div", { className: "row" }, trust));
    const clientCard = card("Federation", this.#facts.client.list, doing, invited, strangers, preview.label,
      make("div", { className: "row" }, make("label", { htmlFor: "floor" }, "Hide among at least"), floor, "clients"),
      make("div", { className: "row" }, make("label", { htmlFor: "budget" }, "Own ε at most"), budget, "0: no limit"),
      sent, make("div", { className: "row" }, go, stop, leave));
    [floor.value, budget.value] = [settings.floor, settings.budget];
    return { clientCard, doing, invited, server, join, go, stopRounds: stop, leave, sent, asked, preview: preview.input, floor, budget, strangers, roster };
  }

  /** A field for a number that is a setting; what is none of it is put back. */
  #number(name, { min, max, step }) {
    const field = make("input", { type: "number", id: name, min, max, step, inputMode: "decimal" });
    let last = "";
    field.addEventListener("focus", () => { last = field.value; });
    field.addEventListener("change", () => {
      if (field.value === "" || !field.checkValidity()) field.value = last;
      else this.#on.change(name, Number(field.value));
    });
    return field;
  }

  /** A button that asks once more. */
  #sure(text, question, clicked) {
    const ask = (isAsked) => {
      found.dataset.sure = isAsked ? "yes" : "";
      found.textContent = isAsked ? question : text;
    };
    const found = button(text, () => {
      if (found.dataset.sure === "yes") clicked();
      ask(found.dataset.sure !== "yes");
    }, "action danger");
    found.addEventListener("blur", () => ask(false));
    return found;
  }

  // ---------------------------------------------------------------- what is shown

  /** Whether this page may keep and train: the other cards are there then. */
  agreed(consent) {
    const { textCard, modelCard, clientCard } = this.#parts;
    this.#isAgreed = this.#parts.consent.checked = consent;
    textCard.hidden = !consent && !this.isThere;
    modelCard.hidden = !consent && !this.#hasMore.model;
    clientCard.hidden = !consent && !this.#link && !this.#hasMore.client;
  }

  /** Another tab has changed what its owner asks for. */
  settings({ out, preview, minutes, floor, budget }) {
    const parts = this.#parts;
    [parts.out.checked, parts.preview.checked, parts.minutes.value, parts.floor.value, parts.budget.value] = [out, preview, String(minutes), floor, budget];
  }

  /** One line of what goes on. */
  say(line, isTrouble = false) {
    this.note.textContent = line;
    this.note.classList.toggle("error", isTrouble);
  }

  /** A link to join by was opened. */
  invite(link, consent) {
    this.#link = link;
    this.#parts.invited.hidden = !link;
    if (link) this.#parts.server.textContent = `You were invited to the federation of ${link.server}. Agree above to keep what you type, then join.`;
    this.agreed(consent);
    this.#parts.join.disabled = !consent;
  }

  page({ version, hash }) {
    this.#facts.client.set({ Page: `keyfed ${version}, hash ${hash}` });
  }

  progress(work) {
    const { progress } = this.#parts;
    progress.hidden = !work.name;
    progress.value = work.steps ? work.step / work.steps : 0;
    const where = work.steps ? `, step ${work.step} of ${work.steps}` : "";
    this.#facts.model.set({ Work: work.name ? `${WORK[work.name]}${where}${work.waits ? ` (waits: ${work.waits})` : ""}` : "none" });
  }

  lines(lines) {
    const { list, show } = this.#parts;
    list.hidden = false;
    show.textContent = "Do not show them";
    list.replaceChildren(...lines.slice(0, 300).map(({ id, text }) => {
      const gone = button("×", () => this.#on.act("remove", { id }), "");
      gone.setAttribute("aria-label", "Forget this line");
      return make("li", {}, make("span", { className: "word" }, text), gone);
    }));
  }

  forgotten() {
    this.#parts.list.hidden = true;
    this.#parts.list.replaceChildren();
    this.#parts.show.textContent = "Show the lines";
  }

  show(state) {
    const { kept, work, client, using, tune, numbers, arrived, offered, server, minutes, waits, trouble, doing } = state, parts = this.#parts;
    this.isThere = true;
    this.#hasMore = { model: using.kind !== "export", client: Boolean(client) || state.isKnown };
    this.agreed(this.#isAgreed);
    this.say(state.line, state.isTrouble);
    parts.trouble.hidden = !trouble || [state.line, doing.line].includes(trouble.line);
    if (trouble) parts.trouble.textContent = `Last trouble, ${new Date(trouble.at).toLocaleString()}: ${trouble.line}`;
    this.#facts.kept.set({
      "Kept for training": `${kept.lines.toLocaleString()} lines of at most ${(kept.most ?? 0).toLocaleString()}`, "Held back": `${kept.held.toLocaleString()} lines, to look at models with`,
      Today: `${minutes.worked.toFixed(1)} of ${minutes.most} minutes${waits ? `; waits: ${waits}` : ""}`,
    });
    this.#facts.model.set({ "In the strip": modelName(using) });
    this.progress(work);
    parts.tune.disabled = Boolean(work.name) || !this.#isAgreed;
    parts.undo.hidden = using.kind !== "tuned";
    parts.stop.hidden = !work.name;
    parts.looked.textContent = tune ? `Your own model: ${compared(tune.seen)}${tune.isTaken ? "" : "; it is not used"}.` : "";
    parts.offer.hidden = !arrived;
    parts.consider.hidden = Boolean(offered);
    parts.take.hidden = parts.refuse.hidden = !offered;
    if (arrived) parts.offered.textContent = `A model has come: ${modelName(arrived)}, checksum ${short(arrived.digest, 16)}.${offered ? ` It does ${offered.seen?.isWorse ? "worse" : "no worse"} for you: ${compared(offered.seen)}.` : ""}`;
    else if (offered?.isTaken) parts.looked.textContent = `The new model: ${compared(offered.seen)}.`;
    this.#showClient(client, state, server);
    parts.sent.hidden = !numbers;
    if (numbers) this.#showSent(numbers);
  }

  #showClient(client, { isFirst, isRunning, isJoining, doing, account, isKnown, roster, strangers }, server) {
    const parts = this.#parts, other = server && !server.isAlike ? `; the server's page is keyfed ${server.version}, hash ${short(server.hash, 16)}` : "";
    const idle = client ? "stopped" : "not joined";
    this.#strangers = strangers;
    parts.strangers.hidden = !strangers;
    if (strangers) parts.roster.textContent = `More than half of the server's roster is new to this page. Its hash is ${strangers}: compare it with what the operator and other people see, then trust it, or leave.`;
    this.#facts.client.set({ Roster: roster ? `${many(roster.clients, "client")}, hash ${roster.hash}` : "none", Server: client?.server ?? "none", Name: client?.name ?? "none", "Own ε": costOf(account), State: `${!isFirst ? "another tab of this page takes part" : isRunning ? "takes part" : idle}${other}` });
    parts.doing.textContent = doing.line;
    parts.doing.classList.toggle("error", doing.isTrouble);
    parts.go.hidden = !client || isRunning || !isFirst || !this.#isAgreed;
    parts.stopRounds.hidden = !isRunning;
    parts.leave.hidden = !client && !isKnown;
    parts.join.disabled = isJoining || !parts.consent.checked;
  }

  #showSent({ run, round, purpose, bytes, words, members, amongAtLeast, tokens, first, isWaiting, isSent }) {
    const state = isWaiting ? "waits for your word" : isSent ? "sent" : "not sent";
    this.#facts.sent.set({
      "Run and round": `${short(run)}, ${round === null ? "" : `round ${round}, `}${purpose}`, Upload: `${words.toLocaleString()} masked numbers, ${bytes.toLocaleString()} bytes: ${state}`,
      "Hides among": `${members} clients; the sum opens with ${amongAtLeast} at least`, "Trained on": tokens === null ? "nothing; it counts held-back lines" : `${tokens.toLocaleString()} tokens`,
      "First bytes": first,
    });
    this.#parts.asked.hidden = !isWaiting;
  }
}
