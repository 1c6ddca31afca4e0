// One local epoch of the keyboard's CIFG in JavaScript, in node: seconds, the longest step and memory.
//
//     node benchmarks/keyboard_training.mjs [TOKENS]
//
// The weights and the text are random: neither changes how long a step takes. docs/LOG.md has what was measured.

const web = new URL("../src/keyfed/keyboard/web/", import.meta.url);
const { trainLocally } = await import(new URL("training/descent.mjs", web));
const { shapesOf } = await import(new URL("decoder/network.mjs", web));

const VOCAB = 10_000, LINE = 12, EOS = 2, FIRST = 4;
const tokens = Number(process.argv[2] ?? 2000);
const model = { cell: "cifg", vocab: VOCAB, embed: 96, hidden: 670, layers: 1, dense: null, projection: 96, tied: true, biases: 1 };
const random = (size) => Float32Array.from({ length: size }, () => (Math.random() - 0.5) / 10);
const theta = Object.fromEntries(
  Object.entries(shapesOf(model)).map(([name, shape]) => [name, random(shape.reduce((product, n) => product * n, 1))]));
const word = () => FIRST + Math.floor(Math.random() ** 3 * (VOCAB - FIRST)); // few words are most of a text
const stream = Int32Array.from({ length: tokens }, (_, i) => (i % LINE === LINE - 1 ? EOS : word()));

const local = { kind: "packed", rows: 5, window: 20, epochs: 1, lr: 10, clip: 0.25 };
const started = performance.now();
let last = started, longest = 0, steps = 0;
const found = await trainLocally(model, theta, stream, local, { seed: 1, round: 0, client: "a" }, () => {
  const now = performance.now();
  [longest, last, steps] = [Math.max(longest, now - last), now, steps + 1];
});
const seconds = (performance.now() - started) / 1000;
console.log(`${found.worked} tokens in ${steps} steps: ${seconds.toFixed(2)} s, ${(1000 * seconds / found.worked).toFixed(2)} ms a token,` +
  ` longest step ${longest.toFixed(0)} ms, ${(process.memoryUsage().rss / 1e6).toFixed(0)} MB in all`);
