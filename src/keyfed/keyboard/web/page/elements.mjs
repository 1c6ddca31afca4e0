/** Small makers of DOM elements; text only ever goes in as text. */

/** An element with properties and children: `make("p", {className: "note"}, "text", other)`. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A titled part of the panel. */
export function card(title, ...children) {
  return make("section", { className: "card", "aria-label": title }, make("h3", {}, title), ...children);
}

/** An on/off switch with an explanation. */
export function toggle(name, title, explanation, changed) {
  const input = make("input", { type: "checkbox", name, role: "switch" });
  input.addEventListener("change", () => changed(input.checked));
  const label = make("label", { className: "switch" }, make("span", {}, title), input, make("small", {}, explanation));
  return { label, input };
}

/** One choice of several, as a row of segments. `options`: [[value, label], …]. */
export function choice(name, title, options, changed) {
  const segments = make("div", { className: "segments" });
  const inputs = new Map();
  for (const [value, text] of options) {
    const input = make("input", { type: "radio", name, value });
    input.addEventListener("change", () => changed(value));
    inputs.set(value, input);
    segments.append(make("label", {}, input, text));
  }
  const group = make("fieldset", { className: "choice" }, make("legend", {}, title), segments);
  return { group, inputs };
}

export function button(text, clicked, className = "action") {
  const found = make("button", { type: "button", className }, text);
  found.addEventListener("click", clicked);
  return found;
}
