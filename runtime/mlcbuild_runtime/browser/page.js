/** The chat page: loads the bundle beside it into this browser, and chats with it. */
import { loadEngineInWorker } from "./index.js";

const $ = (id) => document.getElementById(id);
const BUNDLE = document.querySelector("meta[name=mlcbuild-bundle]").content;
let engine = null, history = [], control = null;

function show(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  $("log").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function status(text) {
  $("status").textContent = text;
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/** Says what has come and what is ready; weights are read while kernels are compiled. */
function progressText({ file, loaded, total, compiled }) {
  const bytes = `${file}: ${megabytes(loaded)} of ${megabytes(total)}`;
  if (!compiled || compiled.done === compiled.count) return bytes;
  const kernels = `${compiled.done} of ${compiled.count} kernels are compiled`;
  return loaded < total ? `${bytes}; ${kernels}` : kernels;
}

async function load() {
  $("progress").hidden = false;
  try {
    let note = null;
    engine = await loadEngineInWorker(BUNDLE, {
      onProgress(progress) {
        $("progress").value = progress.total ? progress.loaded / progress.total : 0;
        note = progress.note;
        status(note ?? progressText(progress));
      },
    });
    $("name").textContent = document.title = engine.model;
    $("send").disabled = false;
    status(note ?? `${engine.model} runs on ${engine.deviceName}: nothing that you write leaves this browser.`);
  } catch (error) {
    show("error", error.message);
    status("");
  } finally {
    $("progress").hidden = true;
  }
}

function request() {
  const own = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "max_tokens", "seed"]) if ($(name).value !== "") own[name] = Number($(name).value);
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return { ...own, messages: [...system, ...history], signal: control.signal };
}

async function answer() {
  const start = performance.now(), box = show("assistant", ""), own = history;
  let first = 0, text = "", usage = null;
  control = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    for await (const chunk of await engine.chat.completions.create(request())) {
      usage = chunk.usage ?? usage;
      text += chunk.choices[0]?.delta.content ?? "";
      if (text && !first) first = performance.now();
      box.textContent = text;
      box.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    control = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    if (text) own.push({ role: "assistant", content: text });
    else {
      own.pop();
      box.remove();
    }
    if (usage && first) {
      const seconds = (performance.now() - first) / 1000, count = usage.completion_tokens;
      const rate = count > 1 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
      status(`${usage.prompt_tokens} + ${count} tokens, the first after ${((first - start) / 1000).toFixed(2)} s${rate}`);
    }
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || control || !engine) return;
  $("input").value = "";
  history.push({ role: "user", content: text });
  show("user", text);
  answer();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => control?.abort());
$("reset").addEventListener("click", () => {
  control?.abort();
  history = [];
  $("log").textContent = "";
});
/** Says what to do where no model is loaded; returns whether one is. */
function isLoaded() {
  if (!engine) status("No model is loaded: wait until it is, or reload the page.");
  return engine !== null;
}

$("unload").addEventListener("click", async () => {
  if (!isLoaded()) return;
  control?.abort();
  await engine.unload();
  engine = null;
  $("send").disabled = true;
  status("The memory of the GPU is free. Reload the page to chat again.");
});
$("forget").addEventListener("click", async () => {
  if (!isLoaded()) return;
  await engine.forget();
  status("The stored model is deleted. The next visit downloads it again.");
});
load();
