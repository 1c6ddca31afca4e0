/**
 * The fragment of the page's address, which may hold a token to join by: it is taken out of the address before the rest
 * of the page is loaded, so that it is not on the screen, nor in what is copied or shared from there. The browser's own
 * history may keep the address as it was opened: a link serves one page, and ends after some hours.
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
