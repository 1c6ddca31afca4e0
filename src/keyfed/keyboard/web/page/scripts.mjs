/** The addresses of scripts that are started at run time: the only ones that the policy lets through. */

export const PAGE = new URL("./", document.baseURI);
const named = (name) => document.querySelector(`meta[name="${name}"]`)?.content;

/** The worker that holds the engine; the page of a federation names its own, and one that trains. */
export const KEYBOARD = named("keyboard-worker") ?? "worker.mjs", TRAINING = named("training-worker");
const NAMES = [KEYBOARD, TRAINING, "service-worker.js"].filter(Boolean);
const ADDRESSES = NAMES.map((name) => new URL(name, PAGE).href);
const policy = globalThis.trustedTypes?.createPolicy("keyfed", {
  createScriptURL: (wanted) => {
    if (!ADDRESSES.includes(wanted)) throw new TypeError(`not a script of this page: ${wanted}`);
    return wanted;
  },
});

/** A script of the page by its name, as the browser takes it. */
export function scriptAddress(name) {
  const address = new URL(name, PAGE).href;
  return policy ? policy.createScriptURL(address) : address;
}
