// The playground: every setting of one request, its answer, and where its time went.

import { ApiError, send, stream } from "./api.js";
import { $, codeBlock, el, seconds } from "./dom.js";
import { askForKey, layout } from "./layout.js";
import { markdown } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";

const picker = layout({ withModel: true });
const lines = $("#lines");
let running = null;
let answered = "";

function addLine(role, content = "") {
  const options = ["system", "user", "assistant"].map((name) => el("option", { selected: name === role }, name));
  const text = el("textarea", { "aria-label": "Message", rows: "2" });
  text.value = content;
  const line = el(
    "div",
    { class: "line" },
    el("select", { "aria-label": "Role" }, options),
    text,
    el("button", { class: "plain", type: "button", "aria-label": "Remove message", onclick: () => line.remove() }, "✕"),
  );
  lines.append(line);
  return text;
}

function messages() {
  return [...lines.children]
    .map((line) => ({ role: line.querySelector("select").value, content: line.querySelector("textarea").value }))
    .filter((message) => message.content || message.role === "user");
}

function json(selector, what) {
  try {
    return JSON.parse($(selector).value);
  } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

// The body that the form describes; a setting left empty is not sent.
function body() {
  const request = { model: picker.value, messages: messages() };
  for (const name of ["temperature", "top_p", "max_completion_tokens", "seed"]) {
    const value = $(`#${name}`).value;
    if (value !== "") request[name] = Number(value);
  }
  const stops = $("#stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) request.stop = stops;
  const format = $("#format").value;
  if (format === "json_object") request.response_format = { type: "json_object" };
  if (format === "json_schema") {
    request.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: json("#schema", "The schema") } };
  }
  if ($("#tools").value.trim()) {
    request.tools = json("#tools", "The tools");
    if ($("#tool_choice").value) request.tool_choice = $("#tool_choice").value;
  }
  return request;
}

async function run() {
  if (running) {
    running.abort();
    return;
  }
  for (const id of ["#answer", "#error", "#timings", "#calls"]) $(id).replaceChildren();
  $("#keep").hidden = true;
  running = new AbortController();
  $("#run").textContent = "Stop";
  answered = "";
  try {
    const request = body();
    if ($("#stream").checked) await streamed(request);
    else whole(await send("POST", "/v1/chat/completions", request, running.signal));
  } catch (error) {
    if (error.name !== "AbortError") $("#error").textContent = error.message;
    if (error instanceof ApiError && error.status === 401) askForKey();
  } finally {
    running = null;
    $("#run").textContent = "Run";
    $("#keep").hidden = !answered;
  }
}

async function streamed(request) {
  const calls = [];
  for await (const chunk of stream("/v1/chat/completions", request, running.signal)) {
    const choice = chunk.choices[0];
    if (choice?.delta?.content) {
      answered += choice.delta.content;
      showText(request);
    }
    for (const delta of choice?.delta?.tool_calls ?? []) {
      calls[delta.index] ??= { name: "", arguments: "" };
      calls[delta.index].name += delta.function.name ?? "";
      calls[delta.index].arguments += delta.function.arguments ?? "";
      showCalls(calls);
    }
    if (chunk.time_info) showTimings(chunk, choice?.finish_reason);
  }
}

function whole(response) {
  const { message, finish_reason: reason } = response.choices[0];
  answered = message.content ?? "";
  showText(body());
  showCalls((message.tool_calls ?? []).map((call) => call.function));
  showTimings(response, reason);
}

function showText(request) {
  const isJson = request.response_format && request.response_format.type !== "text";
  $("#answer").replaceChildren(isJson ? codeBlock(answered, "json") : markdown(answered));
}

function showCalls(calls) {
  $("#calls").replaceChildren(...calls.map((call) => codeBlock(call.arguments, `calls ${call.name}`)));
}

// A bar of the three phases, and the numbers.
function showTimings({ usage, time_info: times }, reason) {
  const phases = [["Queue", times.queue_time, 2], ["Prompt", times.prompt_time, 3], ["Completion", times.completion_time, 1]];
  const total = phases.reduce((sum, [, value]) => sum + value, 0) || 1;
  const bar = el("div", { class: "phases", "aria-hidden": "true" }, phases.map(([, value, colour]) => {
    const part = el("span", { class: `c${colour}` });
    part.style.width = `${(100 * value) / total}%`;
    return part;
  }));
  const legend = phases.map(([name, value, colour]) => el("span", {}, el("i", { class: `c${colour}` }), `${name} ${seconds(value)}`));
  const speed = usage.completion_tokens / Math.max(times.completion_time, 1e-9);
  legend.push(el("span", {}, `${usage.prompt_tokens} prompt (${usage.prompt_tokens_details.cached_tokens} cached) + ${usage.completion_tokens} tokens`));
  legend.push(el("span", {}, `${speed.toFixed(1)} tokens/s`), el("span", {}, `ended: ${reason}`));
  $("#timings").replaceChildren(bar, el("div", { class: "legend" }, legend));
}

function showCode(kind) {
  for (const tab of document.querySelectorAll("#code-dialog [role=tab]")) tab.setAttribute("aria-selected", tab.dataset.tab === kind);
  try {
    const text = kind === "curl" ? asCurl(location.origin, body()) : asPython(location.origin, body());
    $("#code-body").replaceChildren(codeBlock(text, kind === "curl" ? "bash" : "python"));
  } catch (error) {
    $("#code-body").replaceChildren(el("p", { class: "error" }, error.message));
  }
}

for (const slider of document.querySelectorAll("[data-with]")) {
  const field = $(`#${slider.dataset.with}`);
  slider.addEventListener("input", () => (field.value = slider.value));
  field.addEventListener("input", () => (slider.value = field.value));
}
$("#format").addEventListener("change", () => ($("#schema-label").hidden = $("#format").value !== "json_schema"));
$("#add").addEventListener("click", () => {
  const last = lines.lastElementChild?.querySelector("select").value;
  addLine(last === "user" ? "assistant" : "user").focus();
});
$("#run").addEventListener("click", run);
$("#keep").addEventListener("click", () => {
  addLine("assistant", answered);
  addLine("user").focus();
  $("#keep").hidden = true;
});
$("#code").addEventListener("click", () => {
  showCode("curl");
  $("#code-dialog").showModal();
});
$("#close-code").addEventListener("click", () => $("#code-dialog").close());
for (const tab of document.querySelectorAll("#code-dialog [role=tab]")) tab.addEventListener("click", () => showCode(tab.dataset.tab));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  if (event.key === "Escape" && running) running.abort();
});
$("#settings").addEventListener("submit", (event) => event.preventDefault());

addLine("system", "You are a helpful assistant.");
addLine("user").focus();
