// Small helpers for building pages. Text always becomes text nodes: nothing a model writes is read as HTML.

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export const $ = (selector) => document.querySelector(selector);

// Browsers without a secure context have no clipboard: select the text instead.
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}

export function codeBlock(text, language = "") {
  const button = el("button", { class: "plain", type: "button" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return el(
    "div",
    { class: "code" },
    el("header", {}, el("span", {}, language || "text"), button),
    el("pre", { tabindex: "0" }, el("code", {}, text)),
  );
}

export function seconds(value) {
  if (value == null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

export function count(value) {
  return new Intl.NumberFormat("en", { notation: value >= 1e5 ? "compact" : "standard", maximumFractionDigits: 1 }).format(value);
}
