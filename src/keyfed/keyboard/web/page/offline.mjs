/**
 * The page where there is no network. An exported site has a service worker, which its index names; the server on this
 * machine has none: one address of it serves many models.
 *
 * A newer version is fetched while the older one runs. The browser lets it take over when no window of the page is open:
 * so no page is loaded from two versions.
 */

import { scriptAddress } from "./scripts.mjs";

const worker = () => document.querySelector('meta[name="service-worker"]')?.content ?? null;

/**
 * Keep the page for when there is no network.
 * @param {(text: string) => void} say  how it stands, for a person
 */
export async function keepOffline(say) {
  if (!worker()) return say("until it is closed");
  if (!navigator.serviceWorker) return say("no: needs https");
  try {
    const registration = await navigator.serviceWorker.register(scriptAddress(worker()), { updateViaCache: "none" });
    const coming = registration.installing;
    if (registration.active) {
      const saySo = () => say(registration.waiting ? "yes; a newer version starts when this one is closed" : "yes");
      saySo();
      registration.addEventListener("updatefound", () => registration.installing.addEventListener("statechange", saySo));
    } else if (coming) {
      say("being kept …");
      coming.addEventListener("statechange", () => {
        if (coming.state === "redundant") say("no: a file could not be kept");
        else if (coming.state !== "installing") say("yes");
      });
    }
  } catch (error) {
    if (navigator.serviceWorker.controller) return; // kept already; there is no network now
    say(error.name === "SecurityError" ? "no: this browser does not trust the certificate" : "no: the browser keeps nothing");
  }
}
