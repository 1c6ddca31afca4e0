// Taking part, with a server and a session that the cases make, under a clock that the cases move: {op, …} in, a value out.

import { answerCases } from "./case_loop.mjs";

const folder = new URL("../../src/keyfed/keyboard/web/", import.meta.url);
const { Rounds } = await import(new URL("federated/rounds.mjs", folder));
const { Away, Endpoint, Refusal } = await import(new URL("federated/endpoint.mjs", folder));
const { Rejected } = await import(new URL("secure/bytes.mjs", folder));
const { Identity } = await import(new URL("secure/keys.mjs", folder));
const { pack } = await import(new URL("client/messages.mjs", folder));

const really = setTimeout;
let now = 1e12, timers = [];
Date.now = () => now;
globalThis.setTimeout = (work, milliseconds = 0) => {
  const timer = { work, at: now + Math.max(0, milliseconds) };
  timers.push(timer);
  return timer;
};
globalThis.clearTimeout = (timer) => { timers = timers.filter((other) => other !== timer); };
const settled = () => new Promise((resolve) => really(resolve, 5));

/** Let so many milliseconds pass, timer by timer. */
async function pass(milliseconds) {
  const until = now + milliseconds;
  for (await settled(); ; await settled()) {
    const next = timers.filter(({ at }) => at <= until).sort((a, b) => a.at - b.at)[0];
    if (!next) break;
    now = Math.max(now, next.at);
    clearTimeout(next);
    next.work();
  }
  now = until;
}

const never = (signal) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
const errors = { away: () => new Away("the server does not answer"), late: () => new Refusal("late", "over"), strange: () => new Refusal("not enrolled", "who?") };

/**
 * A page that takes part. `polls` is what the server says to one poll after another: an error, "none", or a message
 * {id, kind, seconds}; then it says nothing. `working` is what it says while the page works, `answers` to answers.
 */
function started({ polls = [], working = [], answers = [], handle }) {
  const log = { said: [], trouble: [], handled: [], sent: [], polls: 0, refused: [], lost: 0 }, stop = new AbortController();
  const endpoint = {
    async next(signal, id) {
      const next = id ? working.shift() : (log.polls++, polls.shift());
      if (next?.jump) {
        now += next.jump;
        throw errors.away();
      }
      if (errors[next]) throw errors[next]();
      if (next === "none") return null;
      if (!next) return never(signal);
      return { id: next.id, kind: next.kind, deadline: now + 1_000 * next.seconds, body: new Uint8Array(0) };
    },
    async answer({ id }, answer, signal) {
      const next = answers.shift();
      log.sent.push([id, answer instanceof Uint8Array ? [...answer] : answer.reason]);
      if (next === "hang") return never(signal);
      if (next) throw errors[next]();
    },
  };
  const session = { handle: (kind) => (log.handled.push(kind), handle(kind)) };
  const rounds = new Rounds(endpoint, session, {
    say: (line, isTrouble) => log[isTrouble ? "trouble" : "said"].push(line), why: () => null, done: () => null, floor: () => 3,
    show: async () => true, met: async () => {}, over: async () => {}, lost: async () => void log.lost++, refused: ({ reason }) => log.refused.push(reason),
  });
  rounds.run(stop.signal);
  return { log, stop, rounds };
}

const answer = async () => Uint8Array.of(1, 2, 3);
const message = (id, seconds = 60) => ({ id, kind: "who", seconds });

const operations = {
  async slept() {
    const { log, stop } = started({ polls: [{ jump: 600_000 }, "away"] });
    await pass(2_000);
    stop.abort();
    return log;
  },
  async pauses() {
    const { log, stop } = started({ polls: Array(50).fill("none") });
    await pass(10_000);
    stop.abort();
    return log;
  },
  // The server does not await the first message any more, or its time is over while the server is away.
  async dead({ working }) {
    let rounds = null;
    const work = async () => {
      for (let n = 0; n < 900; n++) {
        await new Promise((resolve) => setTimeout(resolve, 500));
        if (rounds.isOver) throw new Rejected("not now", "the page's owner stopped the training");
      }
      return answer();
    };
    let count = 0;
    const page = started({ polls: [message("a", 30), message("b")], working, handle: () => (count++ ? answer() : work()) });
    rounds = page.rounds;
    await pass(5_000);
    const soon = page.log.handled.length;
    await pass(40_000);
    page.stop.abort();
    return { ...page.log, soon };
  },
  async resent() {
    const { log, stop } = started({ polls: [message("a"), message("a"), message("b")], answers: ["away"], handle: answer });
    await pass(5_000);
    stop.abort();
    return log;
  },
  // The text changes while an upload is on its way, or waits for the server to come back.
  async abandoned({ answers }) {
    const { log, stop, rounds } = started({
      polls: [{ ...message("a"), kind: "upload" }, { ...message("a"), kind: "upload" }, message("b")], answers,
      handle: async () => {
        if (log.handled.length > 1) throw new Rejected("stale", "this page has uploaded already");
        return pack({}, []);
      },
    });
    await pass(500);
    rounds.abandon();
    await pass(5_000);
    stop.abort();
    return log;
  },
  async refused({ reason }) {
    const handle = async () => { throw new Rejected(reason, "so it is"); };
    const { log, stop } = started({ polls: [message("a")], handle });
    await pass(1_000);
    stop.abort();
    return log;
  },
  async forgotten() {
    const { log, stop } = started({ polls: ["strange"] });
    await pass(1_000);
    stop.abort();
    return log;
  },
  // How long a request is waited for: seconds until it is given up.
  async patience({ what, seconds }) {
    let ended = null;
    const called = new Promise((resolve) => { globalThis.fetch = (_, { signal }) => (resolve(), never(signal)); });
    const endpoint = new Endpoint("https://a.test", await Identity.make(), "page"), from = now;
    const asked = what === "next" ? endpoint.next() : endpoint.answer({ id: "a", deadline: now + 1_000 * seconds }, Uint8Array.of(1));
    asked.catch(() => { ended = (now - from) / 1_000; });
    await called; // it is signed first, which takes real time
    await pass(1_000_000);
    return ended;
  },
  // A message that comes piece by piece, one every so many seconds.
  async slow({ pieces, every }) {
    let count = 0;
    const read = async () => {
      await new Promise((resolve) => setTimeout(resolve, 1_000 * every));
      return count++ < pieces ? { done: false, value: Uint8Array.of(7) } : { done: true };
    };
    const headers = new Headers({ "keyfed-kind": "train", "keyfed-id": "0".repeat(32), "keyfed-deadline": "2000000000" });
    const called = new Promise((resolve) => {
      globalThis.fetch = async (_, { signal }) => (resolve(), {
        ok: true, status: 200, headers, body: { getReader: () => ({ read: () => Promise.race([read(), never(signal)]), cancel: async () => {} }) },
      });
    });
    let found = null;
    new Endpoint("https://a.test", await Identity.make(), "page").next().then(({ body }) => { found = body.length; }, (error) => { found = error.message; });
    await called;
    await pass(1_000_000);
    return found;
  },
};

await answerCases(operations);
