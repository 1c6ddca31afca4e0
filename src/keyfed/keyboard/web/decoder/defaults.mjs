/** The engine's settings, apart from it: the page needs them, and the engine only in its worker. */

/**
 * @typedef {object} Settings
 * @property {"ngram" | "network" | "federated" | "personal"} source  counts alone; network alone; both mixed, where there
 *   are counts; the same and this device's words
 * @property {boolean} autocorrect  a separator may replace the typed word
 * @property {boolean} learn        finished words are counted
 * @property {boolean} incognito    nothing is learnt, and what was learnt is not suggested
 * @property {boolean} emoji        an emoji may take the right slot
 * @property {boolean} filter       offensive words are neither suggested nor corrected to
 * @property {boolean} fullstop     two blanks, the second one quick, make a full stop
 * @property {string} layout        a name in layouts.json
 * @property {"once"|"lock"|"off"} [shift]  what a person did with the shift key; not named: the text decides
 */

/** What holds where a caller names no setting. @type {Settings} */
export const SETTINGS = Object.freeze({
  source: "personal", autocorrect: true, learn: true, incognito: false, emoji: true, filter: true,
  fullstop: true, layout: "qwerty",
});
