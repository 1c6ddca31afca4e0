const SITE = {};
/*
 * The line above is written by `keyfed export --site`: {version, headers, files: {path: {bytes, sha256, type}}}.
 *
 * Keeps one whole version of the page and its model, and answers from it: GETs of the listed files of this folder, and
 * nothing else. A version is taken when every file of it is here with the right sum; until then, and if anything fails,
 * the one before stays. It takes over when no window of the page is open. It sends nothing: it asks for listed files,
 * without what stands behind a "?".
 */
"use strict";

const INDEX = "index.html", OURS = `keyfed ${registration.scope} `, CACHE = OURS + SITE.version;

self.addEventListener("install", (event) => event.waitUntil(fill()));
self.addEventListener("activate", (event) => event.waitUntil(tidy()));
self.addEventListener("fetch", (event) => {
  const path = listed(event.request);
  if (path !== null) event.respondWith(kept(path));
});

/** The path of a file that is answered from here, or null. */
function listed({ method, url }) {
  const { origin, pathname } = new URL(url), folder = new URL(registration.scope);
  if (method !== "GET" || origin !== folder.origin || !pathname.startsWith(folder.pathname)) return null;
  const path = pathname.slice(folder.pathname.length) || INDEX;
  return Object.hasOwn(SITE.files, path) ? path : null;
}

/** A file's address; hosts send the index for the folder, and some send a redirect for its name. */
const address = (path) => new URL(path === INDEX ? "./" : path, registration.scope).href;

/** A file as its sum says, with the policy that a plain host may not send; raises where it is another one. */
async function whole(path) {
  const { bytes, sha256, type } = SITE.files[path];
  const answer = await fetch(address(path), { cache: "no-cache" });
  const body = await answer.arrayBuffer();
  const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", body));
  const hex = [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  if (!answer.ok || body.byteLength !== bytes || hex !== sha256) {
    throw new RangeError(`${path} is not the file of version ${SITE.version}`);
  }
  return new Response(body, { headers: { ...SITE.headers, "content-type": type, "content-length": bytes } });
}

/** Keep every file of this version, or none. */
async function fill() {
  const cache = await caches.open(CACHE);
  const done = await Promise.allSettled(Object.keys(SITE.files).map(async (path) => cache.put(address(path), await whole(path))));
  const failed = done.find(({ status }) => status === "rejected");
  if (!failed) return;
  await caches.delete(CACHE);
  throw failed.reason;
}

/** Drop the other versions of this folder; other folders of this host keep theirs. */
async function tidy() {
  const others = (await caches.keys()).filter((name) => name.startsWith(OURS) && name !== CACHE);
  await Promise.all(others.map((name) => caches.delete(name)));
}

/** A kept file. One that the browser dropped is fetched again; if the host has another one by now, this version ends. */
async function kept(path) {
  const cache = await caches.open(CACHE), found = await cache.match(address(path));
  if (found) return found;
  try {
    await cache.put(address(path), await whole(path));
    return await cache.match(address(path));
  } catch (error) {
    if (error instanceof RangeError) await registration.unregister(); // the next load is the host's
    return Response.error();
  }
}
