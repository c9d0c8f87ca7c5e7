/** Loads a bundle onto a GPU of this browser and computes tokens, one request after the other. */
import { Bundle, WeightsReader } from "./bundle.js";
import { DeviceProgram, cachePages, featuresOf, findAdapter, limitsOf } from "./device.js";
import { EngineError } from "./errors.js";
import { Chat } from "./openai.js";
import { evaluate, parse } from "./program.js";
import { RandomNumbers, adjust, draw, drawFromTop, filters, logprobs } from "./sampling.js";
import { Tokenizer, tokenizerFiles } from "./tokenizer.js";

/** Decode steps in one submit; an abort is noticed between submits. */
const SUBMIT = 4;
/** Tokens of a page of the KV cache in the compiler's kernels. */
const PAGE = 16;
/** Rows of a tile of a prompt's attention: `QUERIES` of the compiler's kernels. */
const TILE = 32;
const ONE_ROW = new Map([["q", 1]]);
const HEAD = ["head", ONE_ROW], GREEDY = ["greedy", ONE_ROW], TOP = ["top", ONE_ROW];
const ADVANCE = ["advance", new Map([["n", 1]])];
const DECODE = [["decode", new Map([["n", 1], ["f", 0]])], HEAD];
/** Calls of one sequence beside those of its prompt, which may have any size. */
const CALLS = [...DECODE, GREEDY, TOP, ADVANCE];
const TOP_WORDS = 2 + 2 * 64;
/** Up to so many tokens the whole row is read. */
const SMALL_VOCABULARY = 256;

/**
 * Loads the bundle at a URL. Throws EngineError in one sentence.
 * @param {string} url directory of bundle.json
 * @param {{onProgress?: Function, signal?: AbortSignal, powerPreference?: string, contextWindow?: number,
 * features?: string[]}} options contextWindow: tokens of KV cache, at most and by default the bundle's context;
 * features: optional features of the GPU that may be used, by default all
 */
export async function loadEngine(url, options = {}) {
  const bundle = await Bundle.open(url, options), { manifest } = bundle;
  const adapter = await findAdapter(options);
  const texts = tokenizerFiles((path) => bundle.has(path));
  bundle.plan([manifest.library, ...texts, ...manifest.weights]);
  const program = await readProgram(bundle, featuresOf(adapter, options.features));
  // Kernels for the rows of several sequences, two thirds of all text, are neither downloaded nor compiled.
  const variants = [...program.functions.get("prefill"), ...CALLS.map(([name, sizes]) => program.variant(name, sizes))];
  const kernels = program.kernelsOf(variants), files = new Set([...kernels.values()].map((kernel) => kernel.file));
  bundle.plan(files);
  const tokenizer = await readTokenizer(bundle, texts);
  const sources = new Map();
  await Promise.all([...files].map(async (path) => sources.set(path, await bundle.text(path))));
  const wanted = Math.ceil(Math.min(manifest.context, options.contextWindow ?? manifest.context) / manifest.pageSize);
  const pages = cachePages(program, Math.min(wanted, program.sizes.get("pages")), limitsOf(adapter));
  if (pages < 1) throw new EngineError("the GPU has no room for a page of KV cache: build with fewer layers or heads", "out_of_memory");
  const device = await DeviceProgram.create(adapter, program, pages);
  try {
    const compiled = device.compile(kernels, sources, (done, count) => bundle.reportCompiled(done, count));
    await Promise.all([compiled, readWeights(bundle, program, device)]);
    return new Engine(bundle, program, tokenizer, device);
  } catch (error) {
    device.close();
    throw error;
  }
}

async function readProgram(bundle, features) {
  const { library, signature } = bundle.manifest;
  let program;
  try {
    program = parse(await bundle.json(library)).forDevice(features);
  } catch (error) {
    throw new EngineError(`${library}: not a usable GPU program: ${error.message}; build the bundle again`, error.code);
  }
  if (program.signature !== signature || program.paramSignature() !== signature)
    throw new EngineError(`${library} was built for other weights than those of this bundle: build the bundle again`, "bad_bundle");
  const lacks = [
    ...["prefill", "decode", "head", "greedy", "advance", "top"].filter((name) => !program.functions.has(name)),
    ...["count", "tokens", "positions", "slots", "first_page", "rows", "tiles", "page_table"].filter((name) => !program.inputs.has(name)),
    ...["sampled", "history", "top", "logits"].filter((name) => !program.buffers.has(name)),
  ];
  if (lacks.length || !program.sizes.get("m") || !program.functions.get("prefill").at(-1).sizes.get("n"))
    throw new EngineError(`${library} lacks ${lacks.join(", ") || "sizes"}, so it computes no text: build the bundle again`, "bad_bundle");
  checkLimits(library, program, bundle.manifest);
  const missing = [...program.kernels.values()].find((kernel) => !bundle.has(kernel.file));
  if (missing) throw new EngineError(`bundle.json does not list ${missing.file}, which ${library} needs: build the bundle again`, "bad_bundle");
  return program;
}

/**
 * Throws EngineError where a program was compiled for other limits than those in bundle.json, as the Python runtime
 * refuses it.
 */
export function checkLimits(library, program, { context, pageSize, maxBatch, prefillChunk }) {
  const decodeRows = program.functions.get("decode").at(-1).sizes.get("n");
  const figures = [
    ["tokens in a page of the KV cache", PAGE, pageSize],
    ["pages of KV cache", program.sizes.get("pages"), Math.ceil(context / pageSize) * maxBatch],
    ["rows in a call", program.sizes.get("n"), Math.max(prefillChunk, maxBatch, decodeRows)],
    ["rows in a decoding step", decodeRows, Math.max(maxBatch, decodeRows)],
    ...[...program.ropes.values()].map((rope) => ["positions in a table", rope.rows, context]),
  ];
  const wrong = figures.find(([, compiled, stated]) => compiled !== stated);
  if (wrong)
    throw new EngineError(`${library} has ${wrong[1]} ${wrong[0]}, and the limits in bundle.json are for ${wrong[2]}:`
      + " build the bundle again", "bad_bundle");
}

async function readTokenizer(bundle, paths) {
  const files = new Map();
  for (const path of paths) {
    const read = path.endsWith(".json") ? "json" : path.endsWith(".model") ? "bytes" : "text";
    files.set(path, await bundle[read](path));
  }
  return Tokenizer.load(files, bundle.manifest);
}

async function readWeights(bundle, program, device) {
  const params = new Map(program.params.map((own) => [own.name, own])), written = new Set();
  for (const path of bundle.manifest.weights) {
    const reader = new WeightsReader(path, params, program.signature, (name, offset, bytes) => device.upload(name, offset, bytes));
    await bundle.stream(path, (offset, bytes) => reader.push(offset, bytes));
    for (const name of reader.names) written.add(name);
  }
  const missing = program.params.find((own) => !written.has(own.name));
  if (missing) throw new EngineError(`the weights lack '${missing.name}': build the bundle again`, "bad_weights");
}

/** The int32 inputs of a call for one sequence, whose page i is page i of the cache. */
class InputBlock {
  constructor(program, pages) {
    const [, own] = [...program.buffers].find(([, buffer]) => buffer.kind === "inputs");
    this.words = new Int32Array(evaluate(own.size, program.sizes) / 4);
    this.sections = program.inputs;
    this.sizes = program.sizes;
    this.set("page_table", Array.from({ length: pages }, (_, page) => page));
    this.end = program.inputs.get("page_table").start + pages;
  }

  set(name, values) {
    const { start, size } = this.sections.get(name);
    if (values.length > evaluate(size, this.sizes)) throw new EngineError(`the program's input '${name}' is too small`, "bad_program");
    this.words.set(values, start);
  }

  /** Returns the words to upload for tokens from `position` on, of which the last one's logits are computed. */
  fill(tokens, position) {
    const places = tokens.map((_, index) => position + index);
    this.set("count", [0]);
    this.set("tokens", tokens);
    this.set("positions", places);
    this.set("slots", places);
    this.set("first_page", tokens.map(() => 0));
    this.set("rows", [tokens.length - 1]);
    return this.words.subarray(0, this.end);
  }
}

/** Returns whether tokens are drawn from the logits as they are, and nothing but the token is needed. */
const isPlain = (sampling) => !sampling.adjusts && sampling.logprobs === null && !sampling.matcher;

export class Engine {
  /** Use `loadEngine`. */
  constructor(bundle, program, tokenizer, device) {
    Object.assign(this, { bundle, program, tokenizer, device });
    this.context = Math.min(bundle.manifest.context, device.pages * bundle.manifest.pageSize);
    this.inputs = new InputBlock(program, device.pages);
    [this.inputBuffer] = [...program.buffers].find(([, own]) => own.kind === "inputs");
    this.chunk = program.functions.get("prefill").at(-1).sizes.get("n");
    this.stride = program.sizes.get("m");
    this.vocab = bundle.manifest.vocab;
    this.cached = []; // tokens whose keys and values are in the cache
    this.uploaded = []; // tokens whose keys and values the next run computes
    this.reused = 0; // tokens of the latest prompt that were in the cache
    this.turn = Promise.resolve();
    this.chat = new Chat(this);
  }

  get model() {
    return this.bundle.manifest.name;
  }

  /** Name of the GPU, for people. */
  get deviceName() {
    return this.device.name;
  }

  /** Runs an async generator after all earlier ones have ended. */
  async *exclusively(generate) {
    let leave;
    const before = this.turn;
    this.turn = new Promise((resolve) => { leave = resolve; });
    try {
      await before;
      yield* generate();
    } finally {
      leave();
    }
  }

  /**
   * Yields the sampled tokens that follow a prompt, {token, score?}, until the caller ends it or the context is
   * full. score: [token, log-probability] of the token and of the most likely ones, where `logprobs` is a number.
   */
  async *tokens(prompt, sampling, signal) {
    const random = new RandomNumbers(sampling.seed ?? crypto.getRandomValues(new BigUint64Array(1))[0]);
    const counts = new Map();
    let calls = await this.#prefill(prompt, signal);
    for (;;) {
      let drawn;
      if (isPlain(sampling) && sampling.params.scale === 0) drawn = await this.#greedy(calls);
      else drawn = [await this.#sample(calls, sampling, random.next(), prompt, counts)];
      for (const own of drawn) {
        counts.set(own.token, (counts.get(own.token) ?? 0) + 1);
        yield own;
      }
      signal?.throwIfAborted();
      if (this.cached.length >= this.context) return;
      this.#upload([drawn.at(-1).token]);
      calls = DECODE;
    }
  }

  /** Returns a matcher for an answer of the form that `response_format` states; null for plain text. */
  async matcher(format) {
    if (format == null || format.type === "text") return null;
    const { vocabulary, eos } = this.tokenizer, ends = [...eos].filter((token) => token < this.vocab);
    if (!ends.length) throw new EngineError("the model has no end token, so that a constrained answer could not end", "bad_request");
    // Only few pages need these modules.
    const [{ formatGrammar }, { SortedTokens, TokenMatcher }] = await Promise.all([import("./json_schema.js"), import("./token_masks.js")]);
    const grammar = formatGrammar(format, vocabulary.leadingSpace);
    this.sorted ??= new SortedTokens(vocabulary, this.vocab, ends);
    return new TokenMatcher(grammar, this.sorted, vocabulary);
  }

  /** Uploads the inputs of tokens behind those in the cache. */
  #upload(tokens) {
    this.device.write(this.inputBuffer, this.inputs.fill(tokens, this.cached.length));
    this.uploaded = tokens;
  }

  /** Executes calls, and notes that the keys and values of their tokens are in the cache. */
  async #run(calls, read) {
    const [words] = await this.device.run(calls, [read]);
    this.cached.push(...this.uploaded);
    this.uploaded = [];
    return words;
  }

  /** Computes a prompt but for its last part; returns the calls that compute this and its last logits. */
  async #prefill(prompt, signal) {
    let start = 0;
    while (start < prompt.length - 1 && this.cached[start] === prompt[start]) start += 1;
    this.cached.length = this.reused = start;
    for (; ; start += this.chunk) {
      const tokens = prompt.slice(start, start + this.chunk), tiles = [];
      for (let first = 0; first < tokens.length; first += TILE) tiles.push(first, Math.min(TILE, tokens.length - first));
      this.inputs.set("tiles", tiles);
      this.#upload(tokens);
      const call = ["prefill", new Map([["n", tokens.length], ["t", tiles.length / 2]])];
      if (start + this.chunk >= prompt.length) return [call, HEAD];
      await this.#run([call], [this.inputBuffer, 0, 1]);
      signal?.throwIfAborted();
    }
  }

  /** Takes greedy steps in one submit, where the GPU passes each token to the next step. */
  async #greedy(calls) {
    const isPrompt = calls !== DECODE, count = isPrompt ? 1 : Math.min(SUBMIT, this.context - this.cached.length);
    const all = Array.from({ length: count }, () => [...calls, GREEDY, ADVANCE]).flat();
    const words = await this.#run(isPrompt ? [...calls, GREEDY] : all, isPrompt ? ["sampled", 0, 1] : ["history", 0, (count - 1) * this.stride + 1]);
    const drawn = Array.from({ length: count }, (_, step) => this.#checked(words[step * this.stride]));
    this.cached.push(...drawn.slice(0, -1));
    return drawn.map((token) => ({ token }));
  }

  async #sample(calls, sampling, random, prompt, counts) {
    const { params, matcher } = sampling;
    if (isPlain(sampling) && filters(params) && this.vocab > SMALL_VOCABULARY) {
      const token = drawFromTop(await this.#run([...calls, TOP], ["top", 0, TOP_WORDS]), params, random);
      if (token !== null) return { token: this.#checked(token) };
      calls = [];
    }
    const words = await this.#run(calls, ["logits", 0, this.vocab]);
    const logits = new Float32Array(words.buffer, words.byteOffset, words.length);
    if (sampling.adjusts) adjust(logits, sampling, prompt, counts);
    matcher?.apply(logits);
    const token = this.#checked(draw(logits, params, random));
    matcher?.take(token);
    return sampling.logprobs === null ? { token } : { token, score: logprobs(logits, token, sampling.logprobs) };
  }

  #checked(token) {
    if (token < 0 || token >= this.vocab) throw new EngineError("the model's logits are not numbers", "bad_logits");
    return token;
  }

  /** Frees the memory of the GPU; requests after it are refused. */
  unload() {
    this.cached = [];
    this.device.close();
  }

  /** Deletes the bundle's files from the browser's storage. */
  async forget() {
    await this.bundle.forget();
  }
}
