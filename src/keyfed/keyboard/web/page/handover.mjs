/** Copy and share: the two doors by which the text leaves the page, when a person opens one. */

/**
 * @param {{copy: HTMLElement, share: HTMLElement, area: HTMLTextAreaElement, say: (text: string) => void}} given
 */
export function handOver({ copy, share, area, say }) {
  let timer = 0;
  const done = (worked) => {
    say(worked ? "Copied" : "This browser lets the page copy nothing: select the text and copy it");
    copy.classList.toggle("done", worked);
    clearTimeout(timer);
    timer = setTimeout(() => copy.classList.remove("done"), 1600);
  };
  copy.addEventListener("click", async () => {
    if (area.value === "") say("Nothing to copy"); // what the clipboard holds stays
    else done(await copied(area));
  });
  share.hidden = typeof navigator.share !== "function";
  share.addEventListener("click", async () => {
    try {
      await navigator.share({ text: area.value });
    } catch (error) {
      if (error.name !== "AbortError") say(`Nothing was shared: ${error.message}`); // AbortError: the person changed their mind
    }
  });
}

/** Copy the selection or else the whole text; whether that worked. */
async function copied(area) {
  const { selectionStart: start, selectionEnd: end, value } = area;
  const text = start === end ? value : value.slice(start, end);
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not over plain http, or refused: the old command may still do it.
  }
  area.focus({ preventScroll: true });
  if (start === end) area.select();
  const worked = document.execCommand("copy");
  area.setSelectionRange(start, end);
  return worked;
}
