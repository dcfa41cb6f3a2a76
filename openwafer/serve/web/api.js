// Talks to the server this page came from.

const KEY = "openwafer.key";

export const key = {
  get: () => localStorage.getItem(KEY) ?? "",
  set: (value) => (value ? localStorage.setItem(KEY, value) : localStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code;
  }
}

function headers(more = {}) {
  return key.get() ? { authorization: `Bearer ${key.get()}`, ...more } : more;
}

async function checked(response) {
  if (response.ok) return response;
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not our error: a proxy in between.
  }
  throw new ApiError(response.status, error);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function send(method, path, body, signal) {
  const options = { method, headers: headers({ "content-type": "application/json" }), signal };
  if (body !== undefined) options.body = JSON.stringify(body);
  return (await checked(await fetch(path, options))).json();
}

// Chunks of a streamed completion, one by one. An error inside the stream is thrown.
export async function* stream(path, body, signal) {
  const options = { method: "POST", headers: headers({ "content-type": "application/json" }), signal };
  options.body = JSON.stringify({ ...body, stream: true });
  const response = await checked(await fetch(path, options));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was lost before the answer was whole");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ApiError(chunk.status_code, chunk.error);
      yield chunk;
    }
  }
}

export async function models() {
  return (await get("/v1/models")).data.map((model) => model.id);
}
