/**
 * What the page of a federation keeps: an IndexedDB with three stores. `client` has the values of `client/store.mjs` (its
 * identity is a CryptoKey whose private half cannot be read out), `page` what the page itself notes, `text` the text
 * that was kept for training. It is made when its owner has agreed, not before.
 */

export const NAME = "keyfed.federated";
const STORES = ["client", "page", "text"];

/** The browser keeps nothing, or nothing more: one line for the person at the page. */
export class Unkept extends Error {}

const FULL = "this browser has no room left: nothing more is kept, and what was kept is still here";
const CLOSED = "this browser keeps nothing for this page (a private window, or storage is blocked)";
const GONE = "this browser has cleared what this page kept: reload it, and join again with a new link";

const reasonOf = (error) => (error?.name === "QuotaExceededError" ? FULL : error?.name === "InvalidStateError" ? GONE : CLOSED);

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(new Unkept(reasonOf(request.error), { cause: request.error }));
  });
}

/**
 * Open the database, made if there is none.
 * @param {() => void} [lost]  called when the browser has taken it away
 * @returns {Promise<IDBDatabase>}
 * @throws {Unkept}
 */
export async function openDatabase(lost = () => {}) {
  let request;
  try {
    request = indexedDB.open(NAME, 1);
  } catch (cause) {
    throw new Unkept(CLOSED, { cause });
  }
  request.onupgradeneeded = () => {
    for (const store of STORES) request.result.createObjectStore(store, store === "text" ? { autoIncrement: true } : undefined);
  };
  const database = await done(request);
  database.onclose = lost;
  database.onversionchange = () => {
    database.close();
    lost();
  };
  return database;
}

/** Whether there is such a database; null where the browser does not tell. @returns {Promise<boolean | null>} */
export async function isMade() {
  try {
    return (await indexedDB.databases()).some(({ name }) => name === NAME);
  } catch {
    return null;
  }
}

/**
 * Do something in one transaction, which is on the disk when this resolves.
 * @template T
 * @param {IDBDatabase} database
 * @param {string | string[]} names  of a store, or of several
 * @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore | IDBObjectStore[], done: (request: IDBRequest) => Promise<any>) => T | Promise<T>} work
 * @returns {Promise<T>}
 */
export async function within(database, names, mode, work) {
  let transaction;
  try {
    transaction = database.transaction(names, mode, { durability: "strict" });
  } catch (cause) {
    throw new Unkept(reasonOf(cause), { cause });
  }
  const over = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(new Unkept(reasonOf(transaction.error), { cause: transaction.error }));
  });
  over.catch(() => {}); // what the work throws is said first
  const store = (name) => transaction.objectStore(name);
  const found = await work(Array.isArray(names) ? names.map(store) : store(names), done);
  await over;
  return found;
}

/** A store as values by key. @returns {import("../client/store.mjs").Values} */
export function valuesOf(database, name) {
  const one = (mode, work) => within(database, name, mode, (store, wait) => wait(work(store)));
  return {
    get: (key) => one("readonly", (store) => store.get(key)),
    set: (key, value) => one("readwrite", (store) => store.put(value, key)),
    delete: (key) => one("readwrite", (store) => store.delete(key)),
    keys: () => one("readonly", (store) => store.getAllKeys()),
  };
}
