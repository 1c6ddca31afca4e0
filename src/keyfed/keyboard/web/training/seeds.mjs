/**
 * The seeds and draws of the Python client, number for number, so that a browser and a Python client that train on the
 * same text take the same steps: `deriveSeed` is `keyfed.federated.cohort.derive_seed` (BLAKE2b of what a seed is for),
 * `Draws` is NumPy's `default_rng` (SeedSequence, PCG64).
 */

const WORD = 0xffffffffffffffffn;
const LONG = 0xffffffffffffffffffffffffffffffffn;

// BLAKE2b (RFC 7693), without a key, of at most a few blocks.
const START = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4], [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13], [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11], [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5], [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const QUARTERS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const BLOCK = 128, ROUNDS = 12;

const rotated = (x, by) => ((x >> by) | (x << (64n - by))) & WORD;

/**
 * The first `size` bytes that BLAKE2b of that digest size gives for `bytes`.
 * @param {Uint8Array} bytes
 * @param {number} size  1 to 64
 */
export function blake2b(bytes, size) {
  const h = [...START];
  h[0] ^= 0x01010000n ^ BigInt(size);
  const blocks = Math.max(1, Math.ceil(bytes.length / BLOCK));
  const padded = new Uint8Array(blocks * BLOCK);
  padded.set(bytes);
  const view = new DataView(padded.buffer);
  for (let block = 0; block < blocks; block++) {
    const m = Array.from({ length: 16 }, (_, i) => view.getBigUint64(block * BLOCK + 8 * i, true));
    const isLast = block === blocks - 1;
    const v = [...h, ...START];
    v[12] ^= BigInt(isLast ? bytes.length : (block + 1) * BLOCK);
    if (isLast) v[14] ^= WORD;
    for (let round = 0; round < ROUNDS; round++) {
      const order = SIGMA[round % SIGMA.length];
      QUARTERS.forEach(([a, b, c, d], i) => {
        for (const [from, first, second] of [[2 * i, 32n, 24n], [2 * i + 1, 16n, 63n]]) {
          v[a] = (v[a] + v[b] + m[order[from]]) & WORD;
          v[d] = rotated(v[d] ^ v[a], first);
          v[c] = (v[c] + v[d]) & WORD;
          v[b] = rotated(v[b] ^ v[c], second);
        }
      });
    }
    for (let i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
  }
  const out = new DataView(new ArrayBuffer(64));
  h.forEach((word, i) => out.setBigUint64(8 * i, word, true));
  return new Uint8Array(out.buffer, 0, size);
}

/**
 * A 62-bit seed from a run's seed and what it is for.
 * @param {bigint | number} seed
 * @param {...(number | bigint | string)} parts
 * @returns {bigint}
 */
export function deriveSeed(seed, ...parts) {
  const text = [seed, ...parts].map((p) => `${typeof p === "string" ? "str" : "int"}:${p}`).join("/");
  const digest = blake2b(new TextEncoder().encode(text), 8);
  return new DataView(digest.buffer, digest.byteOffset, 8).getBigUint64(0) >> 2n;
}

/** Four 64-bit words that NumPy's `SeedSequence(seed)` gives. */
function seedWords(seed) {
  const entropy = [];
  for (let rest = BigInt(seed); rest > 0n; rest >>= 32n) entropy.push(Number(rest & 0xffffffffn));
  let factor = 0x43b0d7e5;
  const hashed = (value) => {
    value = (value ^ factor) >>> 0;
    factor = Math.imul(factor, 0x931e8875) >>> 0;
    value = Math.imul(value, factor) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const joined = (x, y) => {
    const value = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: 4 }, (_, i) => hashed(entropy[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = joined(pool[to], hashed(pool[from]));
  }
  for (const more of entropy.slice(4)) for (let to = 0; to < 4; to++) pool[to] = joined(pool[to], hashed(more));
  let constant = 0x8b51f9dd;
  const halves = Array.from({ length: 8 }, (_, i) => {
    let value = (pool[i % 4] ^ constant) >>> 0;
    constant = Math.imul(constant, 0x58f38ded) >>> 0;
    value = Math.imul(value, constant) >>> 0;
    return BigInt((value ^ (value >>> 16)) >>> 0);
  });
  return [0, 2, 4, 6].map((i) => halves[i] | (halves[i + 1] << 32n));
}

/** What NumPy's `default_rng(seed)` draws. */
export class Draws {
  #state = 0n;
  #step;
  #half = null; // the upper half of a word whose lower half was drawn

  /** @param {bigint | number} seed  not negative */
  constructor(seed) {
    const [a, b, c, d] = seedWords(seed);
    this.#step = (((c << 64n) | d) << 1n | 1n) & LONG;
    this.#advance();
    this.#state = (this.#state + ((a << 64n) | b)) & LONG;
    this.#advance();
  }

  #advance() {
    this.#state = (this.#state * 0x2360ed051fc65da44385df649fccf645n + this.#step) & LONG;
  }

  /** 32 bits. */
  #word() {
    if (this.#half !== null) {
      const half = this.#half;
      this.#half = null;
      return half;
    }
    this.#advance();
    const folded = (this.#state >> 64n) ^ (this.#state & WORD);
    const word = rotated(folded, this.#state >> 122n);
    this.#half = Number(word >> 32n);
    return Number(word & 0xffffffffn);
  }

  /** An integer from 0 to `most`, by rejection under the smallest mask. */
  #interval(most) {
    if (most === 0) return 0;
    const mask = 2 ** (32 - Math.clz32(most)) - 1;
    for (;;) {
      const value = (this.#word() & mask) >>> 0;
      if (value <= most) return value;
    }
  }

  /** `permutation(n)`. @returns {Int32Array} */
  permutation(n) {
    const order = Int32Array.from({ length: n }, (_, i) => i);
    for (let i = n - 1; i > 0; i--) {
      const j = this.#interval(i);
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  }

  /** `integers(0, n)`, for n up to 2³² − 1, by Lemire's method. */
  integer(n) {
    if (n === 1) return 0;
    const range = BigInt(n);
    let product = BigInt(this.#word()) * range;
    if ((product & 0xffffffffn) < range) {
      const least = (0x100000000n - range) % range;
      while ((product & 0xffffffffn) < least) product = BigInt(this.#word()) * range;
    }
    return Number(product >> 32n);
  }
}
