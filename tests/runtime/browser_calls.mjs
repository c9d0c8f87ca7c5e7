// Calls functions of the browser's engine for tests in Python: reads lines, each of which is a list of
// [name, argument], and writes a line with a list of {"value"} or {"error"} for each.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const root = new URL("../../runtime/mlcbuild_runtime/browser/", import.meta.url);
const { blake3, Blake3 } = await import(new URL("blake3.js", root));
const { FEATURES, check, parse } = await import(new URL("program.js", root));
const { RandomNumbers, adjust, draw, drawFromTop, logprobs, samplingParams } = await import(new URL("sampling.js", root));
const { Tokenizer, tokenizerFiles } = await import(new URL("tokenizer.js", root));
const { WeightsReader, Bundle } = await import(new URL("bundle.js", root));
const { checkLimits } = await import(new URL("engine.js", root));
const { loadEngineInWorker } = await import(new URL("client.js", root));
const { Chat } = await import(new URL("openai.js", root));
const { angles } = await import(new URL("device.js", root));
const { formatGrammar } = await import(new URL("json_schema.js", root));
const { SortedTokens, TokenMatcher } = await import(new URL("token_masks.js", root));
const { translated } = await import(new URL("regex.js", root));

const bytes = (size) => Uint8Array.from({ length: size }, (_, index) => index % 251);

function tokenizer({ files, bos = null, eos = [] }) {
  const content = Object.entries(files).map(([name, path]) => {
    const data = readFileSync(path);
    return [name, name.endsWith(".json") ? JSON.parse(data) : name.endsWith(".model") ? new Uint8Array(data) : data.toString()];
  });
  return Tokenizer.load(new Map(content), { bos, eos });
}

const CALLS = {
  digest: ({ size, step }) => {
    const data = bytes(size), hasher = new Blake3();
    for (let at = 0; at < size; at += step) hasher.update(data.subarray(at, at + step));
    return [hasher.hex(), blake3(data)];
  },
  limits: ({ sizes, decodeRows, ropes, limits }) => {
    const program = {
      sizes: new Map(Object.entries(sizes)),
      functions: new Map([["decode", [{ sizes: new Map([["n", decodeRows]]) }]]]),
      ropes: new Map(ropes.map((rows) => [`rope.${rows}`, { rows }])),
    };
    checkLimits("program.json", program, limits);
    return true;
  },
  random: ({ seed, count }) => {
    const numbers = new RandomNumbers(BigInt(seed));
    return Array.from({ length: count }, () => numbers.next());
  },
  draws: ({ logits, bits, params, randoms }) => {
    const own = samplingParams(params);
    const row = bits ? new Float32Array(Int32Array.from(bits).buffer) : Float32Array.from(logits);
    return randoms.map((random) => draw(row, own, random));
  },
  top: ({ words, params, randoms }) => {
    const own = samplingParams(params);
    return randoms.map((random) => drawFromTop(Int32Array.from(words), own, random));
  },
  adjust: ({ logits, options, prompt, counts }) => {
    const row = Float32Array.from(logits);
    adjust(row, options, prompt, new Map(counts));
    return [...row];
  },
  logprobs: ({ logits, token, count }) => logprobs(Float32Array.from(logits), token, count),
  encode: async ({ texts, ...files }) => {
    const own = await tokenizer(files);
    return texts.map((text) => [own.encode(text), own.vocabulary.encode(text, false)]);
  },
  decode: async ({ lists, stop, ...files }) => {
    const own = await tokenizer(files);
    return lists.map((tokens) => {
      const stream = own.stream(stop, true);
      return [...tokens.map((token) => stream.push(token)), stream.finish()];
    });
  },
  prompt: async ({ messages, options, ...files }) => (await tokenizer(files)).prompt(messages, options),
  split: ({ pattern, texts }) => texts.map((text) => Array.from(text.matchAll(translated(pattern)), (match) => match[0])),
  ends: async (files) => {
    const { eos, bos } = await tokenizer(files);
    return [[...eos], bos];
  },
  // Begins an answer, whose tokens are not computed.
  begin: async ({ messages, vocab, context, ...files }) => {
    const engine = {
      vocab, context, model: "test", bundle: { manifest: { defaults: {} } }, tokenizer: await tokenizer(files),
      matcher: async () => null, exclusively: async function* () {},
    };
    await new Chat(engine).completions.create({ messages, stream: true });
    return true;
  },
  // Returns what calls of an engine in a worker end with, before and after it is unloaded.
  unloaded: async () => {
    globalThis.Worker = class extends EventTarget {
      postMessage({ id, call }) {
        if (this.isEnded || call === "abort") return;
        const event = Object.assign(new Event("message"), { data: { id, result: { model: call } } });
        setTimeout(() => this.dispatchEvent(event));
      }

      terminate() {
        this.isEnded = true;
      }
    };
    const engine = await loadEngineInWorker("http://localhost/bundle");
    const late = new Promise((resume) => setTimeout(resume, 2000, "no answer"));
    const ending = (promise) => Promise.race([promise.then((own) => own?.model ?? "ended", (error) => `${error.code}: ${error.message}`), late]);
    const create = () => ending(engine.chat.completions.create({ messages: [] }));
    return [await create(), ...(await Promise.all([ending(engine.unload()), ending(engine.unload()), create(), ending(engine.forget())])), await create()];
  },
  // Clicks on buttons of the page while its model is loading; returns what the page says after each.
  clicks: async ({ buttons }) => {
    const elements = new Map();
    globalThis.document = {
      querySelector: () => ({ content: "bundle/" }),
      getElementById: (id) => elements.get(id) ?? elements.set(id, new EventTarget()).get(id),
    };
    globalThis.location = { href: "http://localhost/" };
    globalThis.Worker = class extends EventTarget {
      postMessage() {}
    };
    await import(new URL("page.js", root));
    const texts = [];
    for (const id of buttons) {
      elements.get(id).dispatchEvent(new Event("click"));
      await new Promise((resume) => setTimeout(resume));
      texts.push(elements.get("status")?.textContent ?? null);
    }
    return texts;
  },
  files: ({ names }) => tokenizerFiles((name) => names.includes(name)),
  programs: ({ documents, pages }) => documents.map((text) => {
    try {
      const program = parse(JSON.parse(text));
      check(program, pages);
      const files = (features) => [...program.forDevice(new Set(features)).kernels.values()].map((kernel) => kernel.file);
      return { files: [files(FEATURES), files(["subgroups"]), files([])], signature: program.paramSignature(), bytes: Object.fromEntries(program.bytes(pages)) };
    } catch (error) {
      if (error.name !== "EngineError" && !(error instanceof SyntaxError)) throw error;
      return { error: error.message };
    }
  }),
  nested: ({ depth }) => {
    let schema = {};
    for (let level = 0; level < depth; level++) schema = { items: schema };
    return formatGrammar({ type: "json_schema", json_schema: { schema } }, false).start.accepts;
  },
  // Returns the tokens of answers that are drawn at random from those that are allowed.
  answers: async ({ formats, vocab, ends, limit, ...files }) => {
    const { vocabulary } = await tokenizer(files), sorted = new SortedTokens(vocabulary, vocab, ends);
    const numbers = new RandomNumbers(1);
    return formats.map((format) => {
      const matcher = new TokenMatcher(formatGrammar(format, false), sorted, vocabulary), tokens = [];
      while (!matcher.isFinished && tokens.length < limit) {
        const mask = matcher.mask(), allowed = Array.from(mask.keys()).filter((token) => mask[token]);
        tokens.push(allowed[Math.floor(numbers.next() * allowed.length)]);
        if (ends.includes(tokens.at(-1))) return tokens.slice(0, -1);
        matcher.take(tokens.at(-1));
      }
      return tokens;
    });
  },
  // Returns for each format its error, or for each walk the tokens that are allowed at each place.
  masks: async ({ formats, vocab, ends, space, ...files }) => {
    const { vocabulary } = await tokenizer(files), sorted = new SortedTokens(vocabulary, vocab, ends);
    return formats.map(([format, walks]) => {
      try {
        return walks.map((tokens) => {
          const matcher = new TokenMatcher(formatGrammar(format, space), sorted, vocabulary);
          const allowed = () => Array.from(matcher.mask().keys()).filter((token) => matcher.mask()[token]);
          const places = [allowed()];
          for (const token of tokens) {
            if (!matcher.mask()[token]) break;
            matcher.take(token);
            places.push(matcher.isFinished ? [] : allowed());
          }
          return places;
        });
      } catch (error) {
        if (error.name !== "EngineError") throw error;
        return error.message;
      }
    });
  },
  angles: (rope) => [...angles(rope)],
  weights: async ({ path, params, signature, part }) => {
    const data = readFileSync(path), tensors = {};
    const write = (name, offset, own) => {
      if (offset % 4 || own.length % 4) throw new Error("not whole words");
      const buffer = (tensors[name] ??= []);
      own.forEach((byte, index) => { buffer[offset + index] = byte; });
    };
    const reader = new WeightsReader("weights", new Map(params.map((own) => [own.name, own])), signature, write);
    for (let at = 0; at < data.length; at += part) await reader.push(at, new Uint8Array(data.subarray(at, at + part)));
    return tensors;
  },
  open: async ({ url }) => {
    const bundle = await Bundle.open(url);
    return Object.fromEntries(await Promise.all([...bundle.manifest.files.keys()].map(async (path) => [path, blake3(await bundle.bytes(path))])));
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const results = [];
  for (const [name, argument] of JSON.parse(line)) {
    try {
      results.push({ value: await CALLS[name](argument) });
    } catch (error) {
      results.push({ error: error.name === "EngineError" ? error.message : `${error.stack}` });
    }
  }
  process.stdout.write(`${JSON.stringify(results)}\n`);
}
