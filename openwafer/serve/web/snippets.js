// A request as code that can be pasted and run.

export function asCurl(origin, body) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${origin}/v1/chat/completions \\`,
    '  -H "Authorization: Bearer $OPENWAFER_API_KEY" \\',
    '  -H "Content-Type: application/json" \\',
    `  -d '${text}'`,
  ].join("\n");
}

export function asPython(origin, body) {
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=os.environ.get("OPENWAFER_API_KEY", "none"))`,
    "answer = client.chat.completions.create(",
    ...fields,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

// JSON with Python's names for true, false and null.
function literal(value, indent) {
  const pad = " ".repeat(indent + 4);
  const end = " ".repeat(indent);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((item) => pad + literal(item, indent + 4)).join(",\n")},\n${end}]` : "[]";
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(([key, item]) => `${pad}${JSON.stringify(key)}: ${literal(item, indent + 4)}`);
    return items.length ? `{\n${items.join(",\n")},\n${end}}` : "{}";
  }
  return JSON.stringify(value);
}
