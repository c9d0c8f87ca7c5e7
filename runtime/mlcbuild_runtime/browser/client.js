/** An engine that computes in a worker, with the interface of the one in engine.js. */
import { EngineError } from "./errors.js";

const UNLOADED = "the model was unloaded: load it again";
let policy = null;

/** Returns a new worker, also on pages that require trusted types. */
function startWorker() {
  try {
    return new Worker(new URL("./worker.js", import.meta.url), { type: "module" }); // bundlers look for this form
  } catch (error) {
    if (!globalThis.trustedTypes) throw error;
    policy ??= trustedTypes.createPolicy("mlcbuild", { createScriptURL: (own) => own });
    return new Worker(policy.createScriptURL(new URL("./worker.js", import.meta.url).href), { type: "module" });
  }
}

/** Loads the bundle at a URL in a new worker; the options are those of `loadEngine`. Throws EngineError. */
export async function loadEngineInWorker(url, { onProgress, signal, ...options } = {}) {
  const worker = startWorker();
  const engine = new WorkerEngine(worker);
  try {
    const absolute = new URL(url, globalThis.location?.href).href;
    return Object.assign(engine, await engine.call({ call: "load", url: absolute, options }, { onProgress, signal }));
  } catch (error) {
    worker.terminate();
    throw error;
  }
}

function errorOf({ name, message, code }) {
  return name === "AbortError" ? new DOMException(message, name) : new EngineError(message, code);
}

class WorkerEngine {
  #worker;
  #calls = new Map();
  #next = 0;
  #unloading = null;

  constructor(worker) {
    this.#worker = worker;
    worker.addEventListener("message", ({ data: { id, ...message } }) => this.#calls.get(id)?.(message));
    const fail = (event) => {
      event.preventDefault?.();
      this.#end(`the worker ended: ${event.message || "it could not be started"}`);
    };
    worker.addEventListener("error", fail);
    worker.addEventListener("messageerror", fail);
    this.chat = { completions: { create: (request) => this.#create(request) } };
  }

  #end(message) {
    for (const receive of this.#calls.values()) receive({ error: { message, code: "worker_ended" } });
  }

  /** Sends a call; returns its result. */
  call(message, { onProgress, onChunk, signal } = {}) {
    signal?.throwIfAborted();
    if (this.#unloading) return Promise.reject(new EngineError(UNLOADED, "unloaded")); // the worker answers no more
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      const abort = () => this.#worker.postMessage({ id, call: "abort" });
      const settle = (how, value) => {
        this.#calls.delete(id);
        signal?.removeEventListener("abort", abort);
        how(value);
      };
      this.#calls.set(id, ({ progress, chunk, error, result }) => {
        if (progress) onProgress?.(progress);
        else if (chunk) onChunk(chunk);
        else if (error) settle(reject, errorOf(error));
        else settle(resolve, result);
      });
      signal?.addEventListener("abort", abort);
      this.#worker.postMessage({ id, ...message });
    });
  }

  async #create({ signal, ...request }) {
    const own = new AbortController(), abort = () => own.abort(signal.reason);
    signal?.throwIfAborted();
    signal?.addEventListener("abort", abort);
    const chunks = [];
    let wake = () => {};
    const onChunk = (chunk) => { chunks.push(chunk); wake(); };
    const result = this.call({ call: "create", request }, { onChunk, signal: own.signal });
    if (!request.stream) return result.finally(() => signal?.removeEventListener("abort", abort));
    let state = null;
    result.then(() => { state = { isDone: true }; wake(); }, (error) => { state = { error }; wake(); });
    const stream = async function* () {
      try {
        for (;;) {
          while (chunks.length) yield chunks.shift();
          if (state?.error) throw state.error;
          if (state) return;
          await new Promise((resume) => { wake = resume; });
        }
      } finally {
        signal?.removeEventListener("abort", abort);
        own.abort(); // a reader that stops early ends the answer
      }
    };
    // Faults of the request are thrown here, as by the engine itself: the first chunk or the error comes first.
    while (!chunks.length && !state) await new Promise((resume) => { wake = resume; });
    if (state?.error && !chunks.length) throw state.error;
    return stream();
  }

  /** Deletes the bundle's files from the browser's storage. */
  forget() {
    return this.call({ call: "forget" });
  }

  /** Frees the memory of the GPU, and ends the worker. */
  unload() {
    return (this.#unloading ??= this.call({ call: "unload" }).finally(() => {
      this.#end(UNLOADED);
      this.#worker.terminate();
    }));
  }
}
