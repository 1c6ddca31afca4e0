/**
 * The keyboard's work, off the page's thread: loads the export, holds the engine, answers in order. Of the requests for
 * a strip only the newest is worth an answer: an older one that waits or runs is dropped.
 */

import { othersFirst } from "./decoder/breath.mjs";
import { collectEarly } from "./decoder/collect.mjs";
import { readDictionary } from "./decoder/dictionary.mjs";
import { Engine } from "./decoder/engine.mjs";
import { LoadError, fetchedJSON, loadExport, sourceOf } from "./decoder/model.mjs";
import { Mixture, NGram } from "./decoder/ngram.mjs";

// What these import: named here, all of it is requested at once and not one layer after the other.
import "./decoder/cache.mjs";
import "./decoder/casing.mjs";
import "./decoder/characters.mjs";
import "./decoder/context.mjs";
import "./decoder/defaults.mjs";
import "./decoder/gesture.mjs";
import "./decoder/layout.mjs";
import "./decoder/lexicon.mjs";
import "./decoder/mixture.mjs";
import "./decoder/network.mjs";
import "./decoder/personal.mjs";
import "./decoder/predict.mjs";
import "./decoder/safetensors.mjs";
import "./decoder/trie.mjs";
import "./decoder/typed.mjs";

// Typed once before anybody types, behind the text that is there: the first run of every function is several times
// slower than the later ones.
const WARM = ["t", "th", "the", "the ", "the q", "the qu", "the qui", "the quic", "the quikc", "the quick ", "the quick b"];
const TABLES = ["constants", "layouts", "emoji", "offensive"];

let engine = null;
let made = null; // what it is made of, and the manifest of the export
let saved = ""; // what the page was told last, so that it is told changes only
let wanted = { aborted: false }; // the signal of the newest request for a strip
let queue = Promise.resolve();
let telling = 0;
let isWarm = false;

self.onmessage = ({ data }) => {
  let signal = null;
  if (data.kind === "strip" || data.kind === "finish" || data.kind === "swipe") {
    wanted.aborted = true;
    wanted = { aborted: false };
    if (data.kind !== "swipe") signal = wanted; // a swipe is always decoded: its word would be lost
  }
  queue = queue.then(() => answer(data, signal)).catch((error) => {
    post("trouble", { message: `${data.kind}: ${error?.message ?? error}` });
  });
};

function post(kind, given = {}) {
  self.postMessage({ kind, ...given });
}

async function answer(data, signal) {
  if (data.kind === "load") await load(data);
  else if (!engine) return;
  else if (data.kind === "strip") await strip(data, signal);
  else if (data.kind === "finish") await finish(data, signal);
  else if (data.kind === "swipe") await swipe(data);
  else if (data.kind === "undo") {
    post("edit", { id: data.id, edit: engine.undo(data.request) });
    tellSoon();
  } else if (data.kind === "personal") change(data);
}

// ---------------------------------------------------------------- loading

async function load({ page, model, personal }) {
  try {
    const [tables, exported] = await Promise.all([
      Promise.all(TABLES.map((name) => fetchedJSON(new URL(`data/${name}.json`, page)))),
      loadExport(model, (name) => post("loading", { name })),
    ]);
    const vocab = JSON.parse(new TextDecoder().decode(exported.files["vocab.json"]));
    const { manifest } = exported, network = sourceOf(exported);
    const counts = exported.files["ngram.safetensors"];
    const ngram = counts && NGram.read(counts, vocab.words.length, manifest.reading === "lines");
    const federated = ngram && manifest.counts.mixture ? new Mixture(network, ngram, manifest.counts.mixture) : network;
    const words = exported.files["dictionary.safetensors"];
    made = {
      vocab, forms: vocab.forms ?? {}, dictionary: words && readDictionary(words),
      tables: Object.fromEntries(TABLES.map((name, i) => [name, tables[i]])),
      sources: { federated, network, ...(ngram && { ngram }) }, manifest,
    };
    engine = new Engine(made);
    const lost = restore(personal);
    tellPersonal();
    post("ready", { manifest, ngram: Boolean(ngram), lost });
  } catch (error) {
    post("failed", { message: error instanceof LoadError ? error.message : `the keyboard could not start: ${error?.message}` });
  }
}

/**
 * Put an engine of other parts in the place of this one, with what was learnt: for a page whose model changes while it
 * is open.
 * @param {(made: object) => object} change  from what the export gave to what the next engine is made of
 */
export function rebuild(change) {
  queue = queue.then(() => {
    if (!engine) return;
    const learnt = engine.personal.exportJSON(), next = new Engine(change(made));
    next.personal.importJSON(learnt);
    engine = next;
  }).catch((error) => post("trouble", { message: `another model: ${error?.message ?? error}` }));
  return queue;
}

/** Take what was learnt on earlier visits; damaged data is left out and said. */
function restore(json) {
  if (!json) return "";
  try {
    engine.personal.importJSON(json);
    return "";
  } catch (error) {
    return error.message;
  }
}

// ---------------------------------------------------------------- typing

async function strip({ version, request }, signal) {
  if (signal.aborted) return;
  const found = await engine.strip({ ...request, signal });
  if (found && !signal.aborted) post("strip", { version, strip: found });
  if (!isWarm) await warm(request, signal);
}

/** After the first strip, until the next one is wanted. */
async function warm({ before, settings }, signal) {
  isWarm = true;
  for (const more of WARM) {
    if (signal.aborted) return;
    await engine.strip({ before: before + more, settings, signal });
    await othersFirst();
  }
  collectEarly(); // what loading left behind
}

/** Finish a word, then say at once what may follow it (`version` null: nobody asks). */
async function finish({ id, version, request }, signal) {
  const edit = await engine.finish(request);
  post("edit", { id, edit });
  tellSoon();
  if (version === null) return;
  const { settings } = request;
  await strip({ version, request: { before: request.before.slice(0, edit.start) + edit.text, settings } }, signal);
}

async function swipe({ id, request }) {
  let slots = [];
  try {
    slots = await engine.gesture({ ...request, count: 6 });
  } finally {
    post("swiped", { id, slots }); // the page waits for it before it sends the next
  }
}

// ---------------------------------------------------------------- what was learnt

const CHANGES = new Set(["forget", "forgetAll", "block", "unblock", "add", "checkJSON", "importJSON", "mergeJSON"]);

function change({ id, action, value }) {
  try {
    if (!CHANGES.has(action)) throw new Error(`there is no action ${action}`);
    engine.personal[action](value);
    if (action === "forgetAll") saved = engine.personal.exportJSON(); // the page stored that; later it would undo what another tab has learnt since
    post("changed", { id, message: "" });
  } catch (error) {
    post("changed", { id, message: error.message });
  }
  tellPersonal();
}

/** After typing: not for every word, the list may be long. */
function tellSoon() {
  clearTimeout(telling);
  telling = setTimeout(tellPersonal, 250);
}

function tellPersonal() {
  clearTimeout(telling);
  const json = engine.personal.exportJSON();
  if (json === saved) return;
  saved = json;
  post("personal", { json });
}
