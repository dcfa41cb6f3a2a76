// The console: keys, what was done with them, and the last requests.

import { get, key, send } from "./api.js";
import { stackedBars } from "./chart.js";
import { $, copy, count, el, seconds } from "./dom.js";
import { askForKey, layout } from "./layout.js";

const REFRESH_MS = 5000;
const NO_KEYS = { local: "without key", owner: "--api_key" };
let names = {};

layout();

async function refresh() {
  try {
    const [keys, usage, recent, health] = await Promise.all([
      get("/console/keys"),
      get(`/console/usage?days=${$("#days").value}`),
      get("/console/requests"),
      fetch("/health").then((response) => response.json()),
    ]);
    names = { ...NO_KEYS, ...Object.fromEntries(keys.keys.map((item) => [item.id, item.name])) };
    $("#error").hidden = true;
    showParts(true);
    showFigures(usage.usage, recent.requests, health);
    showUsage(usage.usage);
    showKeys(keys.keys, usage.usage);
    showRecent(recent.requests);
  } catch (error) {
    $("#error").hidden = false;
    $("#error").textContent = error.message;
    if ([401, 403].includes(error.status)) showParts(false);
    if (error.status === 401 && !document.querySelector("dialog[open]")) askForKey();
  }
}

// Nobody is offered forms that their key may not use.
function showParts(isAllowed) {
  for (const part of document.querySelectorAll("main > section")) part.hidden = !isAllowed;
}

const day = (offset = 0) => new Date(Date.now() - offset * 86400e3).toISOString().slice(0, 10);
const sum = (rows, value) => rows.reduce((total, row) => total + value(row), 0);
const tokens = (row) => row.prompt_tokens + row.completion_tokens;

function showFigures(usage, recent, health) {
  const now = usage.filter((row) => row.day === day());
  const firsts = recent.map((item) => item.first_token_s).filter((value) => value != null).sort((a, b) => a - b);
  const speeds = recent.filter((item) => item.completion_tokens > 1 && item.first_token_s != null);
  const speed = speeds.length ? sum(speeds, (i) => i.completion_tokens - 1) / sum(speeds, (i) => i.total_s - i.first_token_s) : null;
  const figures = [
    ["Requests today", count(sum(now, (row) => row.requests))],
    ["Tokens today", count(sum(now, tokens))],
    ["Running / waiting", health.num_running === undefined ? health.status : `${health.num_running} / ${health.num_waiting}`],
    ["First token, median", seconds(firsts[Math.floor(firsts.length / 2)])],
    ["Tokens/s per request", speed ? speed.toFixed(1) : "–"],
  ];
  $("#figures").replaceChildren(...figures.map(([label, value]) => el("div", { class: "card figure" }, el("span", { class: "note" }, label), el("b", {}, value))));
}

function showUsage(usage) {
  const measure = $("#measure").value === "tokens" ? tokens : (row) => row.requests;
  const days = Array.from({ length: Number($("#days").value) }, (_, offset) => day(offset)).reverse();
  const totals = new Map();
  for (const row of usage) totals.set(row.key_id, (totals.get(row.key_id) ?? 0) + measure(row));
  // The four busiest keys have a colour of their own.
  const ranked = [...totals].sort((a, b) => b[1] - a[1]).map(([id]) => id);
  const series = ranked.slice(0, 4).map((id) => ({ name: names[id] ?? id, ids: [id] }));
  if (ranked.length > 4) series.push({ name: "others", ids: ranked.slice(4) });
  const values = series.map(({ ids }) =>
    days.map((date) => sum(usage.filter((row) => row.day === date && ids.includes(row.key_id)), measure)),
  );
  $("#chart").replaceChildren(stackedBars($("#chart").clientWidth, days, series.map((item) => item.name), values));
  $("#chart-legend").replaceChildren(...series.map((item, number) => el("span", {}, el("i", { class: `c${number + 1}` }), item.name)));
}

function row(...cells) {
  return el("tr", {}, cells.map((cell) => (Array.isArray(cell) ? el("td", { class: "num" }, cell[0]) : el("td", {}, cell))));
}

function head(...columns) {
  return el("thead", {}, el("tr", {}, columns.map((name) => (Array.isArray(name) ? el("th", { class: "num", scope: "col" }, name[0]) : el("th", { scope: "col" }, name)))));
}

const limit = (left, all) => (all ? `${count(Math.max(left, 0))} of ${count(all)} left` : "no limit");

function showKeys(keys, usage) {
  const rows = keys.map((item) => {
    const mine = usage.filter((entry) => entry.key_id === item.id);
    const revoke = el("button", { class: "plain danger", type: "button", onclick: () => revokeKey(item) }, "Revoke");
    const state = item.revoked ? el("span", { class: "no" }, "revoked") : el("span", { class: "ok" }, item.is_admin ? "admin" : "in force");
    return row(
      item.name,
      el("code", {}, `ow-${item.id}-…`),
      [limit(item.requests_left, item.requests_per_day)],
      [limit(item.tokens_left, item.tokens_per_minute)],
      [count(sum(mine, (entry) => entry.requests))],
      [count(sum(mine, tokens))],
      state,
      item.revoked ? "" : revoke,
    );
  });
  const empty = el("tr", {}, el("td", { colspan: "8", class: "note" }, "No keys yet: only this machine can use the server."));
  $("#keys").replaceChildren(
    head("Name", "Key", ["Requests/day"], ["Tokens/minute"], ["Requests"], ["Tokens"], "State", ""),
    el("tbody", {}, rows.length ? rows : empty),
  );
  // Whoever makes the first key must be able to come back.
  if (!keys.some((item) => !item.revoked)) $("#admin").checked = true;
}

async function revokeKey(item) {
  if (!confirm(`Revoke the key of ${item.name}? Its clients are refused from now on.`)) return;
  await send("DELETE", `/console/keys/${item.id}`).catch((error) => alert(error.message));
  refresh();
}

function showRecent(recent) {
  const rows = recent.slice(0, 50).map((item) =>
    row(
      new Date(item.at * 1000).toLocaleTimeString(),
      item.key_name,
      item.model,
      [count(item.prompt_tokens)],
      [count(item.completion_tokens)],
      [seconds(item.queue_s)],
      [seconds(item.first_token_s)],
      [seconds(item.total_s)],
      item.finish_reason,
    ),
  );
  const empty = el("tr", {}, el("td", { colspan: "9", class: "note" }, "Nothing yet."));
  $("#recent").replaceChildren(
    head("Time", "Key", "Model", ["Prompt"], ["Answer"], ["Queue"], ["First token"], ["Total"], "Ended"),
    el("tbody", {}, rows.length ? rows : empty),
  );
}

$("#create").addEventListener("submit", async (event) => {
  event.preventDefault();
  const number = (id) => ($(id).value ? Number($(id).value) : null);
  try {
    const made = await send("POST", "/console/keys", {
      name: $("#name").value,
      requests_per_day: number("#requests"),
      tokens_per_minute: number("#tokens"),
      is_admin: $("#admin").checked,
    });
    const button = el("button", { type: "button" }, "Copy");
    button.addEventListener("click", () => copy(made.secret, button));
    $("#secret").replaceChildren(
      el("div", { class: "secret", role: "status" }, el("code", { id: "new-secret" }, made.secret), button, el("span", { class: "note" }, "Shown this once.")),
    );
    // The first key closes the server: without it these pages would lock themselves out.
    if (!key.get() && made.is_admin) key.set(made.secret);
    event.target.reset();
    refresh();
  } catch (error) {
    $("#error").hidden = false;
    $("#error").textContent = error.message;
  }
});
for (const id of ["#measure", "#days"]) $(id).addEventListener("change", refresh);

refresh();
addEventListener("resize", refresh);
setInterval(() => document.hidden || refresh(), REFRESH_MS);
