// The bar on top: where we are, which model, light or dark, which key.

import { key, models } from "./api.js";
import { $, el, svg } from "./dom.js";

const PAGES = { "/": "Chat", "/playground": "Playground", "/console": "Console", "/docs": "API" };

function applyTheme(theme) {
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

applyTheme(localStorage.getItem("openwafer.theme"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  applyTheme(localStorage.getItem("openwafer.theme")),
);

function themeButton() {
  const button = el("button", { class: "plain", type: "button", "aria-label": "Light or dark" }, "◐");
  button.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("openwafer.theme", next);
    applyTheme(next);
  });
  return button;
}

function keyDialog() {
  const input = el("input", { type: "password", autocomplete: "off", placeholder: "ow-…", "aria-label": "API key" });
  const problem = el("p", { class: "error", role: "alert" });
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", {}, "API key"),
    problem,
    el("p", { class: "note" }, "Sent with every request of these pages, and kept in this browser only."),
    el("div", { class: "form" }, input, el("button", { class: "main" }, "Use"), el("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel")),
  );
  const dialog = el("dialog", { id: "key-dialog" }, form);
  form.addEventListener("submit", () => {
    key.set(input.value.trim());
    location.reload();
  });
  const open = (text = "") => {
    input.value = key.get();
    problem.textContent = text;
    problem.hidden = !text;
    if (!dialog.open) dialog.showModal();
  };
  return { dialog, open };
}

let keys = null;

// After a 401.
export function askForKey() {
  keys.open(key.get() ? "This key is not valid here, or it was revoked." : "");
}

// Fills the header; gives the model picker, or null on pages without one.
export function layout({ withModel = false } = {}) {
  keys = keyDialog();
  const links = Object.entries(PAGES).map(([path, name]) =>
    el("a", { href: path, "aria-current": path === location.pathname ? "page" : null }, name),
  );
  const logo = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", {
    d: "M12 1a11 11 0 1 0 0 22 11 11 0 0 0 0-22Zm-1 3.1V8H7.2a9 9 0 0 1 3.8-3.9ZM5.3 10H11v4H5.3a9 9 0 0 1 0-4ZM11 16v3.9A9 9 0 0 1 7.2 16H11Zm2 3.9V16h3.8a9 9 0 0 1-3.8 3.9Zm5.7-5.9H13v-4h5.7a9 9 0 0 1 0 4ZM13 8V4.1A9 9 0 0 1 16.8 8H13Z",
  }));
  const picker = withModel ? el("select", { id: "model", "aria-label": "Model" }) : null;
  const keyButton = el("button", { class: "plain", type: "button", id: "key-button", onclick: () => keys.open() }, "Key");
  $("header.bar").append(
    el("a", { class: "brand", href: "/" }, logo, "openwafer"),
    el("nav", { "aria-label": "Pages" }, links),
    el("div", { class: "tools" }, picker, keyButton, themeButton()),
  );
  document.body.append(keys.dialog);
  if (picker) fillModels(picker);
  return picker;
}

async function fillModels(picker) {
  try {
    picker.replaceChildren(...(await models()).map((name) => el("option", {}, name)));
    const last = localStorage.getItem("openwafer.model");
    if ([...picker.options].some((option) => option.value === last)) picker.value = last;
    picker.dispatchEvent(new Event("change"));
    picker.addEventListener("change", () => localStorage.setItem("openwafer.model", picker.value));
  } catch (error) {
    if (error.status === 401) askForKey();
  }
}
