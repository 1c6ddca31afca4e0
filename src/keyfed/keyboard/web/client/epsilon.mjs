/**
 * What Gaussian releases cost: ε of a zero-concentrated ρ at a δ, and the sensitivity of a noise tree, as
 * `keyfed/private/dp/accounting.py` has them.
 */

const ROOT = Math.SQRT2;
const NEAR = 1, TERMS = 200; // from 1 on the continued fraction converges within so many terms

/** ln Φ(x), the logarithm of the standard normal distribution, to about 1e-14 relative. */
function logNormal(x) {
  const t = Math.abs(x) / ROOT;
  if (t < NEAR) return Math.log1p(-0.5 * (x < 0 ? 1 + erf(t) : 1 - erf(t)));
  const tail = scaledTail(t); // erfc(t)·e^{t²}
  return x < 0 ? Math.log(tail / 2) - t * t : Math.log1p(-0.5 * tail * Math.exp(-t * t));
}

/** erf(t) = 2/√π e^{−t²} Σ 2^n t^{2n+1}/(2n+1)!!, for small t. */
function erf(t) {
  let term = t, sum = t;
  for (let n = 1; term > sum * 1e-17; n++) sum += (term *= (2 * t * t) / (2 * n + 1));
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-t * t) * sum;
}

/** erfc(t) e^{t²} = 1/√π · 1/(t + ½/(t + 1/(t + 3/2/(t + …)))), for t that is not small. */
function scaledTail(t) {
  let below = t;
  for (let n = TERMS; n >= 1; n--) below = t + n / 2 / below;
  return 1 / (Math.sqrt(Math.PI) * below);
}

/** ln δ of a Gaussian mechanism of sensitivity 1 (Balle and Wang 2018, equation 6). */
function logDelta(sigma, epsilon) {
  const middle = epsilon * sigma + 1 / (2 * sigma);
  const x = logNormal(1 / sigma - middle), y = epsilon + logNormal(-middle);
  return y <= x ? x + Math.log1p(-Math.exp(y - x)) : -Infinity;
}

/** ε at δ of a Gaussian mechanism with ρ = 1/(2σ²): exact, and not the bound ρ + 2√(ρ ln(1/δ)). */
export function rhoToEpsilon(rho, delta) {
  if (rho === 0) return 0;
  if (!(rho < Infinity)) return Infinity;
  const sigma = Math.sqrt(1 / (2 * rho)), wanted = Math.log(delta);
  if (logDelta(sigma, 0) < wanted) return 0;
  let low = 0, high = 1;
  while (logDelta(sigma, high) > wanted) [low, high] = [high, 10 * high];
  for (let n = 0; n < 200 && high - low > 1e-13 * high; n++) {
    const middle = (low + high) / 2;
    if (logDelta(sigma, middle) > wanted) low = middle;
    else high = middle;
  }
  return (low + high) / 2;
}

const blocks = new Map();

/** Within a tree of 2^height leaves, after waiting: [times, wait after it, Σ |P ∩ block|²]; `_block` of Python. */
function block(height, wait, gap, most) {
  const key = `${height} ${wait} ${gap} ${most}`, known = blocks.get(key);
  if (known) return known;
  const size = 2 ** height, found = new Map([[`0 ${Math.max(0, wait - size)}`, [0, Math.max(0, wait - size), 0]]]);
  const keep = (count, after, worth) => {
    const at = `${count} ${after}`;
    if (!((found.get(at)?.[2] ?? -1) >= worth)) found.set(at, [count, after, worth]);
  };
  if (size <= gap) {
    if (wait < size && most) keep(1, Math.max(0, wait + gap - size), height + 1);
  } else {
    for (const [left, between, first] of block(height - 1, wait, gap, most)) {
      for (const [right, after, second] of block(height - 1, between, gap, most)) {
        if (left + right <= most) keep(left + right, after, first + second + (left + right) ** 2);
      }
    }
  }
  const kept = []; // of the same number of times, a longer wait is only kept where it is worth more
  for (const one of [...found.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (!kept.some(([count, after, worth]) => count === one[0] && after <= one[1] && worth >= one[2])) kept.push(one);
  }
  if (blocks.size > 50_000) blocks.clear();
  blocks.set(key, kept);
  return kept;
}

/**
 * The squared sensitivity of all nodes of a noise forest over so many leaves to one client of clip 1 that takes part at
 * most `times` times, any two at least `gap` apart. Exact.
 */
export function forestSensitivity(leaves, gap, times) {
  const most = Math.min(times, Math.ceil(leaves / gap));
  let reached = new Map([["0 0", [0, 0, 0]]]);
  for (let height = Math.floor(Math.log2(leaves)); height >= 0; height--) {
    if (Math.floor(leaves / 2 ** height) % 2 === 0) continue;
    const following = new Map();
    for (const [used, wait, value] of reached.values()) {
      for (const [count, after, worth] of block(height, wait, gap, most)) {
        const key = `${used + count} ${after}`;
        if (used + count <= most && !((following.get(key)?.[2] ?? -1) > value + worth)) following.set(key, [used + count, after, value + worth]);
      }
    }
    reached = following;
  }
  return Math.max(...[...reached.values()].map(([, , value]) => value));
}
