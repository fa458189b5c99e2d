// Requests to the server. Every page has its own session, which sees only its own uploads.

let session = sessionStorage.getItem("session");

/** Starts or resumes the session; returns what the page needs to draw its controls. */
export async function start() {
  const about = await json(await send("api/session", {}));
  session = about.session;
  sessionStorage.setItem("session", session);
  return about;
}

/** Posts an object and returns the response. */
export async function ask(path, body, signal) {
  return json(await post(path, body, signal));
}

/** Posts an object and returns the file in the response: its name and content. */
export async function file(path, body) {
  const response = await post(path, body);
  if (!response.ok) throw await problem(response);
  const name = /filename\*=utf-8''(.+)$/.exec(response.headers.get("Content-Disposition"))[1];
  return { name: decodeURIComponent(name), content: await response.blob() };
}

/** Uploads a photo; returns its id. */
export async function upload(photo, limit) {
  if (photo.size > limit) throw new Error(`${photo.name} is larger than the limit of ${limit / 2 ** 20} MB.`);
  const path = `api/upload?name=${encodeURIComponent(photo.name)}`;
  return (await json(await withSession(() => send(path, { body: photo })))).photo;
}

/** Posts an object and yields the messages of the response as they arrive: {…, data: Int16Array}. */
export async function* stream(path, body, signal) {
  const response = await post(path, body, signal);
  if (!response.ok) throw await problem(response);
  const reader = response.body.getReader();
  let bytes = new Uint8Array(0);
  for (;;) {
    while (bytes.length >= 8) {
      const [text, data] = new Uint32Array(bytes.slice(0, 8).buffer);
      if (bytes.length < 8 + text + data) break;
      const message = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + text)));
      message.data = new Int16Array(bytes.slice(8 + text, 8 + text + data).buffer);
      bytes = bytes.slice(8 + text + data);
      yield message;
    }
    const { done, value } = await reader.read();
    if (done) return;
    const joined = new Uint8Array(bytes.length + value.length);
    joined.set(bytes);
    joined.set(value, bytes.length);
    bytes = joined;
  }
}

addEventListener("pagehide", () => navigator.sendBeacon("api/pause", session));

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return withSession(() => send(path, { body: JSON.stringify(body), headers, signal }));
}

/** Sends a request; if the session has expired, retries with a new one. */
async function withSession(request) {
  const response = await request();
  if (response.status !== 401) return response;
  await start();
  return request();
}

function send(path, { body, headers = {}, signal }) {
  return fetch(path, { method: "POST", body, signal, headers: session ? { ...headers, session } : headers });
}

async function json(response) {
  if (!response.ok) throw await problem(response);
  return response.json();
}

async function problem(response) {
  const { error } = await response.json().catch(() => ({}));
  return new Error(error || `The server responded with status ${response.status}.`);
}
