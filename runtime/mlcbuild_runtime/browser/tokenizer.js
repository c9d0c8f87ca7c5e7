/** Converts prompts to tokens, and the tokens of answers to text as they arrive. */
import { EngineError } from "./errors.js";
import { Template } from "./vendor/jinja.js";

const FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"];

/** Returns the files of a bundle from which its tokenizer is read. @param {(path: string) => boolean} has */
export function tokenizerFiles(has) {
  return FILES.filter((path) => has(path) && !(path === "tokenizer.model" && has("tokenizer.json")));
}

/** Returns name (bos_token, ...) -> its text. */
function specialTokens(config) {
  const texts = Object.entries(config).map(([name, value]) => [name, value?.content ?? value]);
  return new Map(texts.filter(([name, text]) => name.endsWith("_token") && typeof text === "string"));
}

function templateOf(files, config) {
  let template = files.get("chat_template.jinja");
  if (template !== undefined) return template;
  template = config.chat_template ?? (files.get("chat_template.json") ?? {}).chat_template;
  if (Array.isArray(template)) template = template.filter((own) => own?.name === "default").at(-1)?.template;
  return typeof template === "string" ? template : null;
}

export class Tokenizer {
  /**
   * Reads a tokenizer, and loads the module for its kind of vocabulary.
   * @param {Map<string, any>} files name -> content: objects for JSON, bytes for tokenizer.model, else text
   * @param {{bos: number | null, eos: number[]}} tokens special tokens that the manifest names
   * @returns {Promise<Tokenizer>}
   */
  static async load(files, tokens) {
    const config = files.get("tokenizer_config.json") ?? {};
    const special = specialTokens({ ...(files.get("special_tokens_map.json") ?? {}), ...config });
    let vocabulary;
    if (files.has("tokenizer.json")) {
      const { JsonVocabulary } = await import("./json_vocabulary.js");
      vocabulary = new JsonVocabulary(files.get("tokenizer.json"));
    } else if (files.has("tokenizer.model")) {
      const { PieceVocabulary } = await import("./piece_vocabulary.js");
      vocabulary = new PieceVocabulary(files.get("tokenizer.model"), config, special);
    } else throw new EngineError("the bundle has neither tokenizer.json nor tokenizer.model", "bad_tokenizer");
    return new Tokenizer(vocabulary, special, templateOf(files, config), tokens);
  }

  constructor(vocabulary, special, template, { bos, eos }) {
    Object.assign(this, { vocabulary, special, template });
    const tokenId = (name) => this.vocabulary.tokenId(this.special.get(name) ?? "");
    this.eos = new Set([...eos, tokenId("eos_token")].filter((token) => token !== null));
    this.bos = bos ?? tokenId("bos_token");
  }

  /** Returns the tokens of a prompt, with BOS where the tokenizer adds one; it is not doubled. */
  encode(text) {
    const tokens = this.vocabulary.encode(text, true);
    return this.bos !== null && tokens[0] === this.bos && tokens[1] === this.bos ? tokens.slice(1) : tokens;
  }

  /** Returns the prompt for an answer to messages, as text. @param {object} options variables for the template */
  prompt(messages, options = {}) {
    if (this.template === null) throw new EngineError("this model has no chat template, so it cannot chat", "no_chat_template");
    const variables = { tools: null, documents: null, ...Object.fromEntries(this.special), ...options, messages, add_generation_prompt: true };
    try {
      this.compiled ??= new Template(this.template);
      return this.compiled.render(variables);
    } catch (error) {
      const reason = String(error?.message ?? error).split(/\s+/).join(" ").slice(0, 300);
      throw new EngineError(`the model's chat template refuses these messages: ${reason}`, "template_failed");
    }
  }

  /** Returns the tokens of the prompt for an answer to messages; the template writes all special tokens. */
  chat(messages, options) {
    return this.vocabulary.encode(this.prompt(messages, options), false);
  }

  /** Returns a converter from tokens to text. @param {boolean} message whether they are a whole message */
  stream(stop = [], message = false) {
    return new TextStream(this.vocabulary, stop, message && this.vocabulary.leadingSpace);
  }

  decode(tokens) {
    const stream = this.stream([], true);
    return tokens.map((token) => stream.push(token)).join("") + stream.finish();
  }
}

/** Converts tokens to text piece by piece; never splits a character or emits a part of a stop string. */
export class TextStream {
  constructor(vocabulary, stop, strip) {
    Object.assign(this, { vocabulary, stop, strip, held: "", stopped: false });
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  /** Adds a token; returns the text that is certain now. */
  push(token) {
    return this.#take(this.decoder.decode(this.vocabulary.tokenBytes(token), { stream: true }));
  }

  /** Returns the remaining text when no more tokens come. */
  finish() {
    let text = this.#take(this.decoder.decode());
    if (!this.stopped) [text, this.held] = [text + this.held, ""];
    return text;
  }

  #take(piece) {
    if (this.stopped || !piece) return "";
    if (this.strip) {
      this.strip = false;
      if (piece.startsWith(" ")) piece = piece.slice(1);
    }
    if (!this.stop.length) return piece;
    const text = this.held + piece;
    // The stop string that is complete first counts, however the tokens split the text.
    const ends = this.stop.map((stop) => [text.indexOf(stop), stop.length]).filter(([place]) => place >= 0);
    if (ends.length) {
      ends.sort(([one, size], [other, otherSize]) => one + size - other - otherSize || one - other);
      this.stopped = true;
      this.held = "";
      return text.slice(0, ends[0][0]);
    }
    const keep = Math.max(...this.stop.map((stop) => overlap(text, stop)));
    this.held = text.slice(text.length - keep);
    return text.slice(0, text.length - keep);
  }
}

/** Returns the length of the longest proper prefix of `stop` with which `text` ends. */
function overlap(text, stop) {
  for (let length = Math.min(stop.length - 1, text.length); length > 0; length--) if (text.endsWith(stop.slice(0, length))) return length;
  return 0;
}
