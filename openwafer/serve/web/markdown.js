// Markdown to DOM nodes: headings, lists, quotes, tables, code, emphasis and links. No HTML passes through.

import { codeBlock, el } from "./dom.js";

const BLOCK = /^(#{1,6})\s+(.*)$|^\s*(```+|~~~+)\s*([\w+#.-]*).*$|^\s*(?:[-*_]\s*){3,}$|^\s*>\s?|^(\s*)(?:[-*+]|\d{1,9}[.)])\s+/;

export function markdown(text) {
  const out = document.createDocumentFragment();
  out.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
  return out;
}

function blocks(lines) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*).*$/);
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (!line.trim()) at += 1;
    else if (fence) at = code(lines, at, fence, out);
    else if (heading) {
      out.push(el(`h${Math.min(heading[1].length + 1, 4)}`, {}, inline(heading[2].replace(/\s+#+\s*$/, ""))));
      at += 1;
    } else if (/^\s*(?:[-*_]\s*){3,}$/.test(line)) {
      out.push(el("hr"));
      at += 1;
    } else if (/^\s*>/.test(line)) at = quote(lines, at, out);
    else if (/^(\s*)(?:[-*+]|\d{1,9}[.)])\s+/.test(line)) at = list(lines, at, out);
    else if (line.includes("|") && /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "")) at = table(lines, at, out);
    else at = paragraph(lines, at, out);
  }
  return out;
}

function code(lines, at, fence, out) {
  const body = [];
  at += 1;
  while (at < lines.length && !lines[at].trim().startsWith(fence[1])) body.push(lines[at++]);
  out.push(codeBlock(body.join("\n"), fence[2]));
  return at + 1;
}

function quote(lines, at, out) {
  const body = [];
  while (at < lines.length && /^\s*>/.test(lines[at])) body.push(lines[at++].replace(/^\s*>\s?/, ""));
  out.push(el("blockquote", {}, ...blocks(body)));
  return at;
}

function list(lines, at, out) {
  const first = lines[at].match(/^(\s*)([-*+]|\d{1,9}[.)])\s+/);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  while (at < lines.length) {
    const mark = lines[at].match(/^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/);
    if (mark && mark[1].length <= indent + 1 && /\d/.test(mark[2]) === ordered) items.push([mark[3]]);
    else if (!lines[at].trim() || /^\s{2,}/.test(lines[at]) || (mark && mark[1].length > indent + 1)) {
      if (!lines[at].trim() && !/^\s{2,}\S|^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[at + 1] ?? "")) break;
      items.at(-1).push(lines[at].slice(Math.min(indent + 2, lines[at].search(/\S|$/))));
    } else break;
    at += 1;
  }
  const start = ordered ? parseInt(first[2], 10) : null;
  out.push(el(ordered ? "ol" : "ul", { start: start > 1 ? start : null }, items.map((item) => el("li", {}, tight(item)))));
  return at;
}

// A list item of one paragraph needs no paragraph around it.
function tight(lines) {
  const children = blocks(lines);
  if (children[0]?.tagName === "P") children.splice(0, 1, ...children[0].childNodes);
  return children;
}

function table(lines, at, out) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = el("tr", {}, cells(lines[at]).map((cell) => el("th", {}, cell)));
  const rows = [];
  at += 2;
  while (at < lines.length && lines[at].includes("|")) rows.push(el("tr", {}, cells(lines[at++]).map((cell) => el("td", {}, cell))));
  out.push(el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
  return at;
}

function paragraph(lines, at, out) {
  const body = [lines[at++]];
  while (at < lines.length && lines[at].trim() && !BLOCK.test(lines[at])) body.push(lines[at++]);
  out.push(el("p", {}, inline(body.join("\n"))));
  return at;
}

const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|__(?=\S)([^]*?\S)__|\*(?=\S)([^*]*?\S)\*|(?<![\w_])_(?=\S)([^_]*?\S)_(?![\w_])|~~(?=\S)([^]*?\S)~~|\[([^\]\n]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>)\]]+)|\\([\\`*_{}[\]()#+.!|>~-])/;

function inline(text) {
  const out = [];
  while (text) {
    const found = text.match(INLINE);
    if (!found) {
      out.push(...withBreaks(text));
      break;
    }
    out.push(...withBreaks(text.slice(0, found.index)));
    out.push(piece(found));
    text = text.slice(found.index + found[0].length);
  }
  return out;
}

function piece([whole, ticks, code, bold, bold2, italic, italic2, struck, label, target, url, escaped]) {
  if (ticks) return el("code", {}, code.trim() || code);
  if (bold ?? bold2) return el("strong", {}, inline(bold ?? bold2));
  if (italic ?? italic2) return el("em", {}, inline(italic ?? italic2));
  if (struck) return el("s", {}, inline(struck));
  if (label) return /^(https?:|mailto:)/i.test(target) ? link(target, inline(label)) : document.createTextNode(whole);
  if (url) return link(url, [url]);
  return document.createTextNode(escaped);
}

function link(target, children) {
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, children);
}

function withBreaks(text) {
  return text.split(/ {2,}\n/).flatMap((part, number) => (number ? [el("br"), part] : [part])).filter((part) => part !== "");
}
