// The chat page: one conversation, answers as they are written, speed as it is.

import { ApiError, stream } from "./api.js";
import { $, copy, el, seconds } from "./dom.js";
import { askForKey, layout } from "./layout.js";
import { markdown } from "./markdown.js";

const STORE = "openwafer.conversation";
const TEMPERATURE = 0.7; // as in `openwafer chat`: at the API's 1 small models ramble on to the end of their context
const IDEAS = ["Explain weight streaming in two sentences.", "Write a haiku about silicon.", "What is 17 × 23, step by step?"];

const picker = layout({ withModel: true });
const turns = $("#turns");
const prompt = $("#prompt");
const messages = restored();
let running = null; // AbortController of the answer under way

function restored() {
  try {
    const saved = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
    return Array.isArray(saved) ? saved : [];
  } catch {
    return [];
  }
}

function save() {
  sessionStorage.setItem(STORE, JSON.stringify(messages));
}

function show() {
  if (!messages.length) {
    const ideas = IDEAS.map((idea) => el("button", { type: "button", onclick: () => ask(idea) }, idea));
    turns.replaceChildren(
      el("div", { class: "welcome" }, el("h1", {}, "What is on your mind?"), el("p", {}, "Everything stays on this server."), el("div", { class: "ideas" }, ideas)),
    );
    return;
  }
  turns.replaceChildren(...messages.map((message, index) => turn(message, index)));
}

function turn(message, index) {
  if (message.role === "user") return el("article", { class: "turn user" }, el("div", { class: "said" }, message.content));
  const said = el("div", { class: "said" });
  said.append(markdown(message.content));
  const copyButton = el("button", { class: "plain", type: "button" }, "Copy");
  copyButton.addEventListener("click", () => copy(message.content, copyButton));
  const again =
    index === messages.length - 1
      ? el("button", { class: "plain", type: "button", id: "regenerate", onclick: regenerate }, "Regenerate")
      : null;
  const speed = el("span", { class: "speed" }, message.stats ?? "");
  const trouble = message.error ? el("div", { class: "error", role: "alert" }, message.error) : null;
  return el("article", { class: "turn assistant" }, said, trouble, el("footer", {}, speed, copyButton, again));
}

async function ask(text) {
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  save();
  prompt.value = "";
  fit();
  await answer();
}

async function regenerate() {
  if (running) return;
  messages.pop();
  await answer();
}

// Streams one answer into a new turn.
async function answer() {
  const message = { role: "assistant", content: "", stats: "" };
  const history = messages.filter((m) => m.content).map(({ role, content }) => ({ role, content }));
  messages.push(message);
  show();
  stay(true);
  const node = turns.lastElementChild;
  node.classList.add("writing");
  const meter = new Meter(node);
  running = new AbortController();
  busy(true);
  try {
    const request = { model: picker.value, messages: history, temperature: TEMPERATURE };
    for await (const chunk of stream("/v1/chat/completions", request, running.signal)) {
      const delta = chunk.choices[0]?.delta?.content;
      if (delta) {
        message.content += delta;
        meter.token();
        paint(node, message);
      }
      if (chunk.time_info) message.stats = meter.final(chunk);
      if (chunk.choices[0]?.finish_reason === "length") message.stats += " · cut off at the longest length";
    }
  } catch (error) {
    if (error.name === "AbortError") message.stats = meter.stopped();
    else message.error = error.message;
    if (error instanceof ApiError && error.status === 401) askForKey();
  } finally {
    running = null;
    busy(false);
    save();
    show();
    stay(true);
    prompt.focus();
  }
}

// At most once per frame, however fast tokens come.
let painted = 0;
function paint(node, message) {
  if (painted) return;
  painted = requestAnimationFrame(() => {
    painted = 0;
    if (!running) return;
    const follow = isAtEnd();
    node.querySelector(".said").replaceChildren(markdown(message.content));
    stay(follow);
  });
}

function isAtEnd() {
  const root = document.scrollingElement;
  return root.scrollHeight - root.scrollTop - root.clientHeight < 80;
}

function stay(follow) {
  if (follow) document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

// Tokens per second while they come, and the server's own count at the end.
class Meter {
  constructor(node) {
    this.label = node.querySelector(".speed");
    this.began = performance.now();
    this.first = null;
    this.tokens = 0;
  }

  token() {
    this.tokens += 1;
    this.first ??= performance.now();
    const elapsed = (performance.now() - this.first) / 1000;
    if (elapsed > 0.1) this.label.textContent = `${this.tokens} tokens · ${((this.tokens - 1) / elapsed).toFixed(1)} tokens/s`;
  }

  final({ usage, time_info: times }) {
    const speed = usage.completion_tokens / Math.max(times.completion_time, 1e-9);
    const first = this.first === null ? "" : ` · first after ${seconds((this.first - this.began) / 1000)}`;
    return `${usage.completion_tokens} tokens · ${speed.toFixed(1)} tokens/s${first}`;
  }

  stopped() {
    return `${this.tokens} tokens · stopped`;
  }
}

function busy(isBusy) {
  const button = $("#send");
  button.textContent = isBusy ? "Stop" : "Send";
  button.classList.toggle("main", !isBusy);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask(prompt.value);
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) ask(prompt.value);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("#new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  save();
  show();
  prompt.focus();
});

show();
prompt.focus();
