/** The engine in a worker of its own, so that a page stays responsive; client.js is its other side. */
import { loadEngine } from "./engine.js";

let engine = null;
const running = new Map(); // number of a request -> its AbortController

const failure = ({ name, message, code }) => ({ name, message, code });

async function load(id, { url, options }) {
  engine?.unload();
  engine = null;
  const onProgress = (progress) => postMessage({ id, progress });
  engine = await loadEngine(url, { ...options, onProgress, signal: running.get(id).signal });
  return { model: engine.model, deviceName: engine.deviceName, context: engine.context };
}

async function create(id, { request }) {
  if (!engine) throw new Error("no model is loaded");
  const { signal } = running.get(id), answer = await engine.chat.completions.create({ ...request, signal });
  if (!request.stream) return answer;
  for await (const chunk of answer) postMessage({ id, chunk });
  return null;
}

const CALLS = {
  load,
  create,
  async unload() {
    engine?.unload();
    engine = null;
  },
  async forget() {
    await engine?.forget();
  },
};

addEventListener("message", async ({ data: { id, call, ...fields } }) => {
  if (call === "abort") {
    running.get(id)?.abort();
    return;
  }
  running.set(id, new AbortController());
  try {
    postMessage({ id, result: await CALLS[call](id, fields) });
  } catch (error) {
    postMessage({ id, error: failure(error) });
  } finally {
    running.delete(id);
  }
});
