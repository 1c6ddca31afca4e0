/**
 * The fragment of the page's address, which may hold a token to join by: it is taken out of the address before anything
 * else is loaded, so that it stands in no history and on no screen.
 */

let taken = take(), heard = null;

function take() {
  const { hash } = location;
  if (hash) history.replaceState(null, "", location.pathname + location.search);
  return hash;
}

window.addEventListener("hashchange", () => {
  const fragment = take();
  if (fragment) heard?.(fragment);
});

/** Hear of the fragment that the page was opened with, and of later ones. @param {(fragment: string) => void} hear */
export function nextLink(hear) {
  heard = hear;
  if (taken) hear(taken);
  taken = "";
}
