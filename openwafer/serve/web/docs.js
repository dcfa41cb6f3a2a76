// The OpenAPI document as a page.

import { get } from "./api.js";
import { $, codeBlock, el } from "./dom.js";
import { layout } from "./layout.js";

layout();

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.map(kind).join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  return schema.type ?? "anything";
}

function limits(schema) {
  const inner = [schema, ...(schema.anyOf ?? [])];
  const found = (name) => inner.map((part) => part[name]).find((value) => value !== undefined);
  const [low, high] = [found("minimum"), found("maximum")];
  return low === undefined && high === undefined ? "" : `${low ?? "…"} to ${high ?? "…"}`;
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, value]) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, name), schema.required?.includes(name) ? el("span", { class: "chip" }, "needed") : null),
      el("td", {}, kind(value).replace(" | null", "")),
      el("td", { class: "note" }, [limits(value), value.description].filter(Boolean).join("; ")),
    ),
  );
  return el("div", { class: "scroll" }, el("table", { class: "data" }, el("tbody", {}, rows)));
}

function operation(path, method, description, schemas) {
  const reference = description.requestBody?.content["application/json"].schema.$ref;
  const children = [el("summary", {}, el("span", { class: "verb" }, method.toUpperCase()), el("code", {}, path), ` ${description.description ?? ""}`)];
  if (reference) children.push(fields(schemas[reference.split("/").pop()]));
  return el("details", {}, children);
}

const document_ = await get("/openapi.json");
const schemas = document_.components.schemas;
const groups = new Map();
for (const [path, methods] of Object.entries(document_.paths)) {
  for (const [method, description] of Object.entries(methods)) {
    const group = description.tags?.[0] ?? "other";
    groups.set(group, [...(groups.get(group) ?? []), operation(path, method, description, schemas)]);
  }
}
for (const [name, operations] of groups) $("#operations").append(el("h2", {}, name), ...operations);
$("#operations").append(
  el("h2", {}, "Parts of bodies"),
  ...Object.entries(schemas).map(([name, schema]) => el("details", {}, el("summary", {}, el("code", {}, name)), schema.properties ? fields(schema) : codeBlock(JSON.stringify(schema, null, 2), "json"))),
);
