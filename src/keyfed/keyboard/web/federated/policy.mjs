/**
 * Whether the worker that trains comes with the page's policy. A worker has the policy of its own headers, not that of
 * the page, and a host of plain files sends none: there the service worker adds them, from the second load on.
 */

import { PAGE, TRAINING } from "../page/scripts.mjs";

const rulesOf = (policy) => policy.split(";").map((rule) => rule.trim());

/** Whether one of the policies in a header has all the rules that the page's index has. */
export function covers(header, index) {
  const wanted = rulesOf(index);
  return (header ?? "").split(",").some((policy) => wanted.every((rule) => rulesOf(policy).includes(rule)));
}

async function look() {
  const index = document.querySelector('meta[http-equiv="Content-Security-Policy"]')?.content;
  if (!index || !TRAINING) return false;
  try {
    const { headers } = await fetch(new URL(TRAINING, PAGE));
    return covers(headers.get("content-security-policy"), index);
  } catch {
    return false;
  }
}

/** Without it the worker that trains is not started: it reads the text, and could send it anywhere. */
export const isGuarded = await look();
export const UNGUARDED = "Reload this page, then open the link again if you have one: its host sends no policy with its programs, and the copy on this device has one. Until then nothing is kept or trained.";
