/**
 * Which keys the on-screen keyboard shows, as plain values: rows of `{id, label, units, …}`. Letters come from
 * layouts.json; the rows around them and the two pages of symbols are here.
 *
 * A phone centres its rows while layouts.json staggers them like a physical keyboard, so that a point on the screen
 * and a point of the decoder differ by a horizontal shift per row (`Plan.shifts`).
 */

/** Characters offered when a key is held. */
export const VARIANTS = {
  a: "àáâäæãåā", c: "çćč", d: "ð", e: "éèêëēę", g: "ğ", i: "îïíìīı", l: "ł", n: "ñń", o: "ôöòóœøõō", r: "ř",
  s: "ßśš", t: "þť", u: "ûüùúū", y: "ÿý", z: "žźż",
  ".": "'!?…;:-", ",": ";:!?\"'", "-": "–—_", "'": "’‘`", "\"": "“”„«»", "?": "¿", "!": "¡", "€": "$£¥¢",
};

const DIGITS = "1234567890";
const SYMBOLS = [
  ["1234567890", "@#€_&-+()/", "*\"':;!?"],
  ["~`|•√π÷×§¶", "£¥$¢^°={}\\", "%©®™[]<>"],
];

/**
 * @typedef {object} Key
 * @property {string} id     the character, or the name of what the key does
 * @property {"char"|"letter"|"digit"|"shift"|"backspace"|"enter"|"space"|"page"} kind
 * @property {string} label  what stands on it
 * @property {string} name   what a screen reader says
 * @property {number} units  width in letter keys
 * @property {string} hint   the first held character, shown small
 * @property {string} variants
 * @property {[number, number] | null} centre  in the decoder's units; null: no letter key
 */

const key = (id, kind, units = 1, more = {}) =>
  ({ id, kind, label: id, name: id, units, hint: "", variants: VARIANTS[id] ?? "", centre: null, ...more });

const shift = (units) => key("shift", "shift", units, { label: "", name: "Shift" });
const backspace = (units) => key("backspace", "backspace", units, { label: "", name: "Backspace" });
const page = (to, label, name, units) => key(`page-${to}`, "page", units, { label, name, to });
const gap = (units) => key("gap", "gap", units, { label: "" });
const emoji = page("emoji", "☺", "Emoji", 1);
const bottom = (turn, columns, other = emoji) => [
  turn, other, key(",", "char"), key(" ", "space", columns - 6, { label: "space", name: "Space" }), key(".", "char", 1, { hint: "'" }),
  key("\n", "enter", 1.5, { label: "", name: "New line" }),
];

function letter(char, row, column, offset, numbers) {
  const hint = row === 0 && column < DIGITS.length && !numbers ? DIGITS[column] : "";
  const variants = hint + (VARIANTS[char] ?? "");
  return key(char, "letter", 1, { hint, variants, centre: [offset + column + 0.5, row + 0.5] });
}

/**
 * The letters page of a layout: {rows, columns, above, shifts}; `shifts[r]` = decoder x − screen x on letter row r, which
 * is row `above` + r of the page.
 */
function letters({ rows, offsets }, numbers) {
  const columns = Math.max(...rows.map((row) => [...row].length));
  const keys = rows.map((row, r) => [...row].map((char, c) => letter(char, r, c, offsets[r], numbers)));
  const last = keys.length - 1;
  const side = (columns - keys[last].length) / 2;
  // A short last row (AZERTY has six letters there) gives its room to an apostrophe.
  const wide = side > 1.5 && keys[last].length < 7;
  if (wide) keys[last].push(key("'", "char"));
  const margin = (columns - keys[last].length) / 2;
  const starts = keys.map((row, r) => (r === last ? margin : (columns - row.length) / 2));
  const framed = keys.map((row, r) => {
    if (r === last) return [shift(margin), ...row, backspace(margin)];
    return starts[r] > 0 ? [gap(starts[r]), ...row, gap(starts[r])] : row;
  });
  return {
    columns,
    above: numbers ? 1 : 0,
    rows: [...(numbers ? [[...DIGITS].map((digit) => key(digit, "digit", columns / DIGITS.length))] : []), ...framed,
      bottom(page("symbols", "?123", "Digits and symbols", 1.5), columns)],
    shifts: offsets.map((offset, r) => offset - starts[r]),
  };
}

function symbols(which, columns) {
  const rows = SYMBOLS[which].map((row) => [...row].map((char) => key(char, "char", columns / 10)));
  const other = which === 0 ? page("more", "=\\<", "More symbols", 1.5) : page("symbols", "?123", "Digits and symbols", 1.5);
  const middle = rows[2].map((k) => ({ ...k, units: (columns - 3) / rows[2].length }));
  return {
    columns,
    rows: [rows[0], rows[1], [other, ...middle, backspace(1.5)], bottom(page("letters", "abc", "Letters", 1.5), columns)],
    shifts: [],
  };
}

/** The row below the emoji. */
function pictures(columns) {
  const [turn, back] = [page("letters", "abc", "Letters", 1.5), backspace(1.5)];
  return { columns, rows: [[turn, key(" ", "space", columns - 4.5, { label: "space", name: "Space" }), back,
    key("\n", "enter", 1.5, { label: "", name: "New line" })]], shifts: [] };
}

/** All pages of a layout: {letters, symbols, more, emoji}; `numbers`: with a row of digits above the letters. */
export function plan(layout, numbers = false) {
  const first = letters(layout, numbers);
  const { columns } = first;
  return { letters: first, symbols: symbols(0, columns), more: symbols(1, columns), emoji: pictures(columns) };
}

/** Decoder x minus screen x at height y (both in key units): straight between the middles of the letter rows. */
export function shiftAt(shifts, y) {
  const last = shifts.length - 1;
  const at = Math.min(Math.max(y - 0.5, 0), last);
  const row = Math.min(Math.floor(at), Math.max(last - 1, 0));
  const next = Math.min(row + 1, last);
  return shifts[row] + (shifts[next] - shifts[row]) * (at - row);
}
