/**
 * A bundle at a URL: reads its files with progress, checks their digests, resumes broken downloads, and keeps
 * them in the browser's storage, in parts that are named by the digest of their file.
 */
import { Blake3 } from "./blake3.js";
import { EngineError, shown } from "./errors.js";

const FORMAT = "mlcbuild-bundle/1";
const PATH = /^(?!.*(^|\/)\.)[A-Za-z0-9_][A-Za-z0-9_.+-]*(\/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*$/;
const HEX = /^[0-9a-f]{64}$/;
const STORE = "mlcbuild-files";
const PART = 8 * 2 ** 20;
const SMALL = 65536; // bytes up to which two pages may download a file at the same time
const MAX_MANIFEST = 16 * 2 ** 20;
const RETRIES = 4;
const PAUSE = 500; // milliseconds before the first retry; doubled each time

/** A file whose digest is not the one in bundle.json. */
class DamagedError extends EngineError {}
/** A server that cannot be reached, or a connection that broke; reading is tried again. */
class ConnectionError extends EngineError {}

const broken = (url, { message }) =>
  new ConnectionError(`${url} cannot be read (${message}): check the address and the connection`, "no_connection");

/** The part of a manifest that this package reads. */
function manifestOf(document) {
  const wrong = (field, value) => {
    throw new EngineError(`bundle.json: '${field}' is ${shown(value)}: build the bundle again`, "bad_bundle");
  };
  const positive = (value, field) => (Number.isInteger(value) && value > 0 && value < 2 ** 31 ? value : wrong(field, value));
  if (document?.format !== FORMAT) wrong("format", document?.format);
  const files = new Map(Object.entries(document.files ?? wrong("files")));
  for (const [path, file] of files)
    if (!PATH.test(path) || !HEX.test(file?.blake3) || !Number.isSafeInteger(file.size) || file.size < 0) wrong(`files.${path}`, file);
  const { name, library, weights, signature, limits = {}, model = {}, serving = {}, target = {} } = document;
  if (typeof name !== "string") wrong("name", name);
  if (target.output !== "program")
    throw new EngineError(`this bundle is for the device '${target.device}': build it for the target webgpu`, "bad_bundle");
  if (!Array.isArray(weights) || !weights.length) wrong("weights", weights);
  for (const path of [library, ...weights]) if (!files.has(path)) wrong("files", path);
  if (!HEX.test(signature)) wrong("signature", signature);
  const vocab = positive(model.config?.vocab_size, "model.config.vocab_size");
  const token = (value) => (Number.isInteger(value) && value >= 0 && value < vocab ? value : wrong("serving", value));
  return {
    name, library, weights, signature, files, vocab,
    context: positive(limits.context_window, "limits.context_window"),
    pageSize: positive(limits.page_size, "limits.page_size"),
    maxBatch: positive(limits.max_batch, "limits.max_batch"),
    prefillChunk: positive(limits.prefill_chunk, "limits.prefill_chunk"),
    bos: serving.bos_token_id == null ? null : token(serving.bos_token_id),
    eos: (serving.eos_token_ids ?? []).map(token),
    defaults: { temperature: serving.temperature, top_p: serving.top_p, top_k: serving.top_k },
  };
}

export class Bundle {
  /** @param {URL} base @param {object} manifest @param {{onProgress?: Function, signal?: AbortSignal}} options */
  constructor(base, manifest, options) {
    Object.assign(this, { base, manifest, options, note: null, loaded: 0 });
    this.total = 0;
    this.compiled = null;
    this.file = null;
  }

  /** Reads bundle.json at a URL. Throws EngineError. */
  static async open(url, options = {}) {
    const base = new URL(url.endsWith("/") ? url : `${url}/`, globalThis.location?.href);
    const response = await request(new URL("bundle.json", base), { cache: "no-cache", signal: options.signal });
    const body = await response.arrayBuffer().catch((error) => {
      options.signal?.throwIfAborted();
      throw broken(response.url, error);
    });
    if (body.byteLength > MAX_MANIFEST) throw new EngineError("bundle.json is too large to be one", "bad_bundle");
    return new Bundle(base, manifestOf(parseJson(new Uint8Array(body), "bundle.json")), options);
  }

  /** Announces the files that will be read, so that progress has a total. @param {Iterable<string>} paths */
  plan(paths) {
    for (const path of paths) this.total += this.manifest.files.get(path).size;
  }

  has(path) {
    return this.manifest.files.has(path);
  }

  /** Returns the bytes of a file. */
  async bytes(path) {
    const data = new Uint8Array(this.manifest.files.get(path).size);
    await this.stream(path, (offset, part) => data.set(part, offset));
    return data;
  }

  async json(path) {
    return parseJson(await this.bytes(path), path);
  }

  async text(path) {
    return new TextDecoder().decode(await this.bytes(path));
  }

  /**
   * Passes a file's bytes in order to `consume(offset, bytes)`, and returns when all of them are as bundle.json
   * says. Where stored bytes are damaged, they are deleted and the file is passed again from its start.
   */
  async stream(path, consume) {
    const file = this.manifest.files.get(path), store = await openStore();
    const read = async () => {
      try {
        return await this.#read(path, file, store, consume);
      } catch (error) {
        if (!(error instanceof DamagedError) || !error.stored) throw error;
        this.loaded -= file.size;
        return this.#read(path, file, store, consume);
      }
    };
    // Of several pages that need one file, one downloads it, and the others then read it from the store.
    const locks = store && file.size > SMALL ? globalThis.navigator?.locks : null;
    if (!locks || (await isWhole(store, file))) return read();
    this.#report(`waiting for another page to download ${path}`);
    return locks.request(`mlcbuild:${file.blake3}`, { signal: this.options.signal }, read);
  }

  async #read(path, file, store, consume) {
    const hasher = new Blake3(), download = new Download(new URL(path, this.base), file.size, this.options.signal);
    let stored = false;
    try {
      for (let start = 0; start < file.size; start += PART) {
        const size = Math.min(PART, file.size - start);
        let part = await storedPart(store, file, start, size);
        stored ||= part !== null;
        if (!part) {
          part = await download.read(start, size, (count) => this.#report(path, this.loaded + count));
          if (store && !(await this.#keep(store, file, start, part))) store = null;
        }
        hasher.update(part);
        await consume(start, part);
        this.loaded += size;
        this.#report(path);
        this.options.signal?.throwIfAborted();
      }
    } finally {
      download.close();
    }
    if (hasher.hex() === file.blake3) return;
    await forget(store, file);
    throw Object.assign(new DamagedError(`${path} is not the file that bundle.json lists: it was changed or damaged after the`
      + " build, so copy the bundle to its server again", "damaged"), { stored });
  }

  /** Stores a part; returns false, with a note in the progress, where the browser has no room for it. */
  async #keep(store, file, start, part) {
    try {
      await store.put(partUrl(file, start), new Response(part, { headers: { "Content-Length": String(part.length) } }));
      return true;
    } catch (error) {
      this.note = `the browser has no room to keep the model (${error.name}), so it will be downloaded again next time`;
      return false;
    }
  }

  #report(file, loaded = this.loaded) {
    this.file = file;
    this.options.onProgress?.({ file, loaded, total: this.total, note: this.note, compiled: this.compiled });
  }

  /** Adds to the progress that `done` of `count` kernels are compiled. */
  reportCompiled(done, count) {
    this.compiled = { done, count };
    this.#report(this.file);
  }

  /** Deletes this bundle's files from the browser's storage. */
  async forget() {
    const store = await openStore();
    for (const file of this.manifest.files.values()) await forget(store, file);
  }
}

/** One file on a server, read in order; a broken connection is continued where it broke. */
class Download {
  constructor(url, size, signal) {
    Object.assign(this, { url, size, signal, reader: null, at: -1, rest: null });
  }

  /** Returns `count` bytes from `start` on. @param {(count: number) => void} onBytes bytes so far */
  async read(start, count, onBytes) {
    const part = new Uint8Array(count);
    for (let done = 0, failures = 0; done < count; ) {
      try {
        const piece = await this.#piece(start + done);
        const used = piece.subarray(0, count - done);
        part.set(used, done);
        this.rest = piece.subarray(used.length);
        this.at = start + (done += used.length);
        failures = 0;
        onBytes(done);
      } catch (error) {
        this.close();
        this.signal?.throwIfAborted();
        if (!(error instanceof ConnectionError) || ++failures > RETRIES) throw error;
        await new Promise((resume) => setTimeout(resume, PAUSE * 2 ** (failures - 1)));
      }
    }
    return part;
  }

  async #piece(start) {
    if (this.at !== start) await this.#open(start);
    if (this.rest?.length) return this.rest;
    const { done, value } = await this.#next();
    if (done) throw broken(this.url, new Error("the connection ended early"));
    return value;
  }

  #next() {
    return this.reader.read().catch((error) => { throw broken(this.url, error); });
  }

  async #open(start) {
    this.close();
    const headers = start ? { Range: `bytes=${start}-` } : {};
    // The parts are kept by this package, so the browser's HTTP cache need not keep them a second time.
    const response = await request(this.url, { headers, cache: "no-store", signal: this.signal });
    this.reader = response.body.getReader();
    this.at = response.status === 206 ? start : 0;
    if (response.status === 206 && !response.headers.get("Content-Range")?.startsWith(`bytes ${start}-`))
      throw new EngineError(`${this.url}: the server sent another part of the file than was requested`, "bad_server");
    while (this.at < start) {
      // The server ignores ranges: skip what is here already.
      const { done, value } = await this.#next();
      if (done) throw new EngineError(`${this.url} is shorter than bundle.json says: copy the bundle again`, "damaged");
      this.rest = value.subarray(Math.min(value.length, start - this.at));
      this.at += value.length - this.rest.length;
    }
  }

  close() {
    this.reader?.cancel().catch(() => {});
    this.reader = this.rest = null;
    this.at = -1;
  }
}

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    options.signal?.throwIfAborted();
    throw broken(url, error);
  }
  if (!response.ok) throw new EngineError(`${url} cannot be read: the server answered ${response.status}`, "not_there");
  return response;
}

function parseJson(bytes, path) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    throw new EngineError(`${path} is not valid JSON (${error.message}): build the bundle again`, "bad_bundle");
  }
}

/** Returns the store, or null where the browser has none, as in some private windows. */
async function openStore() {
  try {
    return (await globalThis.caches?.open(STORE)) ?? null;
  } catch {
    return null;
  }
}

// The address is a name only: nothing is ever requested from it.
const partUrl = (file, start) => `https://storage.invalid/${file.blake3}/${start}`;

const starts = (file) => Array.from({ length: Math.ceil(file.size / PART) }, (_, index) => index * PART);

async function storedPart(store, file, start, size) {
  const response = await store?.match(partUrl(file, start)).catch(() => null);
  const part = response ? new Uint8Array(await response.arrayBuffer()) : null;
  return part?.length === size ? part : null;
}

async function isWhole(store, file) {
  for (const start of starts(file)) if (!(await store.match(partUrl(file, start)))) return false;
  return true;
}

async function forget(store, file) {
  for (const start of store ? starts(file) : []) await store.delete(partUrl(file, start));
}

const ITEM = new Map([["F32", ["float32", 4]], ["F16", ["float16", 2]], ["U32", ["uint32", 4]], ["U8", ["uint8", 1]]]);
const MAX_HEADER = 32 * 2 ** 20;

/** Reads a safetensors file as its bytes arrive, and passes each tensor's bytes to `write(name, offset, bytes)`. */
export class WeightsReader {
  /** @param {Map<string, object>} params the parameters that the program takes, by name */
  constructor(path, params, signature, write) {
    Object.assign(this, { path, params, signature, write, header: new Uint8Array(0), tensors: null, names: new Set() });
  }

  #refuse(reason) {
    throw new EngineError(`${this.path}: ${reason}: build the bundle again`, "bad_weights");
  }

  /** Takes the file's bytes in order; an offset of 0 begins anew. */
  async push(offset, bytes) {
    if (offset === 0) {
      this.header = new Uint8Array(0);
      this.tensors = null;
      this.names.clear();
    }
    if (!this.tensors) {
      const joined = new Uint8Array(this.header.length + bytes.length);
      joined.set(this.header);
      joined.set(bytes, this.header.length);
      this.header = joined;
      const length = joined.length < 8 ? MAX_HEADER : Number(new DataView(joined.buffer).getBigUint64(0, true));
      if (length > MAX_HEADER) this.#refuse(`its header has ${length} bytes`);
      if (joined.length < 8 + length) return;
      this.#parse(joined.subarray(8, 8 + length), 8 + length);
      [bytes, offset, this.header] = [joined.subarray(8 + length), 8 + length, new Uint8Array(0)];
    }
    await this.#pass(offset, bytes);
  }

  #parse(text, data) {
    const { __metadata__: metadata, ...entries } = parseJson(text, this.path);
    if (metadata?.signature !== this.signature)
      this.#refuse(`its weights have signature ${shown(metadata?.signature)}, but the bundle is for ${this.signature.slice(0, 12)}`);
    this.tensors = Object.entries(entries).map(([name, { dtype, shape, data_offsets: offsets }]) => {
      const param = this.params.get(name), [own, item] = ITEM.get(dtype) ?? [];
      if (!param || own !== param.dtype || String(shape) !== String(param.shape)) this.#refuse(`'${name}' is no parameter of the program`);
      const size = shape.reduce((product, each) => product * each, item);
      if (!Array.isArray(offsets) || offsets[1] - offsets[0] !== size) this.#refuse(`'${name}' has the wrong size`);
      this.names.add(name);
      return { name, start: data + offsets[0], end: data + offsets[1] };
    });
    this.tensors.sort((left, right) => left.start - right.start);
    let end = data;
    for (const tensor of this.tensors) {
      if (tensor.start !== end) this.#refuse(`there is a gap or an overlap in front of '${tensor.name}'`);
      end = tensor.end;
    }
    this.next = 0;
    this.carry = new Uint8Array(0);
  }

  async #pass(offset, bytes) {
    while (bytes.length && this.next < this.tensors.length) {
      const { name, start, end } = this.tensors[this.next];
      const count = Math.min(bytes.length, end - offset);
      // GPUs take whole words: up to 3 bytes wait for the next part, and the last word is filled with zeros.
      let piece = bytes.subarray(0, count);
      const begin = offset - start - this.carry.length, isLast = offset + count === end;
      const whole = this.carry.length + count, words = isLast ? Math.ceil(whole / 4) * 4 : whole - (whole % 4);
      if (this.carry.length || words !== count) {
        const padded = new Uint8Array(Math.max(words, whole));
        padded.set(this.carry);
        padded.set(piece, this.carry.length);
        this.carry = isLast ? new Uint8Array(0) : padded.slice(words, whole);
        piece = padded.subarray(0, words);
      }
      if (piece.length) await this.write(name, begin, piece);
      bytes = bytes.subarray(count);
      offset += count;
      if (isLast) this.next += 1;
    }
  }
}
