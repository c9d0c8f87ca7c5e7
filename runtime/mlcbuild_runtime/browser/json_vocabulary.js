/** The vocabulary in a tokenizer.json: what the library `tokenizers` of Hugging Face reads. */
import { EngineError, shown } from "./errors.js";
import { CharMap, Prefixes, bestPath, mergePairs, pieceBytes } from "./merging.js";
import { literal, translated } from "./regex.js";

const SPACE = "▁";
const DECODERS = ["ByteLevel", "ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"];
const BYTE_LEVEL = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
/** What \w matches in Rust's regular expressions. */
const RUST_WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d";
const MAX_CACHED = 20_000;
const UNKNOWN_PENALTY = 10;

const refuse = (what) => {
  throw new EngineError(`tokenizer.json: ${what} is not of a kind that this package knows`, "bad_tokenizer");
};

/** The letters that GPT-2 uses for bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on. */
const LETTERS = (() => {
  const isPrintable = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  let next = 0x100;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
})();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
const encoder = new TextEncoder();

/** Returns the steps of a normalizer, pre-tokenizer or decoder, which may be a sequence of such. */
function steps(own, key) {
  if (!own) return [];
  return own.type === "Sequence" ? own[key].flatMap((each) => steps(each, key)) : [own];
}

const patternOf = (pattern) => (pattern.String === undefined ? translated(pattern.Regex) : literal(pattern.String));

const NORMALIZERS = {
  NFC: () => (text) => text.normalize("NFC"),
  NFD: () => (text) => text.normalize("NFD"),
  NFKC: () => (text) => text.normalize("NFKC"),
  NFKD: () => (text) => text.normalize("NFKD"),
  Lowercase: () => (text) => Array.from(text, (letter) => letter.toLowerCase()).join(""),
  StripAccents: () => (text) => text.replace(/\p{Mn}/gu, ""),
  Prepend: ({ prepend }) => (text) => text && prepend + text,
  Replace: ({ pattern, content }) => {
    const expression = patternOf(pattern);
    return (text) => text.replace(expression, () => content);
  },
  Strip: ({ strip_left: left, strip_right: right }) => (text) => {
    const start = left ? text.trimStart() : text;
    return right ? start.trimEnd() : start;
  },
  ByteLevel: () => byteLetters,
  Precompiled: ({ precompiled_charsmap: map }) => {
    if (!map) return (text) => text;
    const table = new CharMap(Uint8Array.from(atob(map), (letter) => letter.charCodeAt(0)));
    const graphemes = new Intl.Segmenter("en");
    const replaced = (text) => table.matches(encoder.encode(text), 0)[0]?.[1];
    const each = (text) => (encoder.encode(text).length < 6 ? replaced(text) : undefined) ?? Array.from(text, (letter) => replaced(letter) ?? letter).join("");
    return (text) => Array.from(graphemes.segment(text), ({ segment }) => each(segment)).join("");
  },
};

const byteLetters = (text) => Array.from(encoder.encode(text), (byte) => LETTERS[byte]).join("");

/** Returns the parts of a text that an expression cuts, each with whether the expression matches it. */
function cut(text, expression) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(expression)) {
    if (!match[0]) continue;
    if (match.index > end) parts.push([text.slice(end, match.index), false]);
    parts.push([match[0], true]);
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push([text.slice(end), false]);
  return parts;
}

/** Splits a text at matches, which are treated as `behavior` says. */
function split(text, expression, behavior, invert = false) {
  const parts = cut(text, expression).map(([part, matches]) => [part, matches !== invert]);
  const joined = [];
  let previous = null;
  for (const [index, [part, isMatch]] of parts.entries()) {
    if (behavior === "Removed") {
      if (!isMatch) joined.push(part);
    } else if (behavior === "MergedWithPrevious" && isMatch && previous === false) joined[joined.length - 1] += part;
    else if (behavior === "MergedWithNext" && !isMatch && previous === true) joined[joined.length - 1] += part;
    else if (behavior === "Contiguous" && index && isMatch === previous) joined[joined.length - 1] += part;
    else if (["Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"].includes(behavior)) joined.push(part);
    else refuse(`the behavior ${shown(behavior)}`);
    previous = isMatch;
  }
  return joined;
}

/** Each returns a function from [text, whether it is the text's start] to its parts. */
const PRE_TOKENIZERS = {
  ByteLevel: ({ add_prefix_space: prefix, use_regex: cuts = true }) => {
    const expression = translated(BYTE_LEVEL);
    return (text) => {
      const whole = prefix && !text.startsWith(" ") ? ` ${text}` : text;
      return (cuts ? split(whole, expression, "Isolated") : [whole]).map(byteLetters);
    };
  },
  Split: ({ pattern, behavior, invert }) => {
    const expression = patternOf(pattern);
    return (text) => split(text, expression, behavior, invert);
  },
  Metaspace: ({ replacement = SPACE, prepend_scheme: scheme, add_prefix_space: prefix, split: cuts = true }) => {
    const when = scheme ?? (prefix === false ? "never" : "always"), expression = literal(replacement);
    return (text, isStart) => {
      const spaced = text.replaceAll(" ", replacement);
      const prepends = when === "always" || (when === "first" && isStart);
      const whole = prepends && !spaced.startsWith(replacement) ? replacement + spaced : spaced;
      return cuts ? split(whole, expression, "MergedWithNext") : [whole];
    };
  },
  Digits: ({ individual_digits: alone }) => (text) => split(text, /\p{N}/gu, alone ? "Isolated" : "Contiguous"),
  Punctuation: ({ behavior = "Isolated" }) => (text) => split(text, /[!-/:-@[-`{-~]|\p{P}/gu, behavior),
  Whitespace: () => (text) => split(text, translated(`[${RUST_WORD}]+|[^${RUST_WORD}\\s]+`), "Removed", true),
  WhitespaceSplit: () => (text) => split(text, translated("\\s"), "Removed"),
};

function built(table, own, what) {
  const build = Object.hasOwn(table, own.type) ? table[own.type] : refuse(`${what} ${shown(own.type)}`);
  return build(own);
}

const MODELS = {
  BPE(model) {
    // A call takes at most about 120,000 arguments, and real vocabularies have more tokens.
    const vocab = new Map(Object.entries(model.vocab)), size = [...vocab.values()].reduce((most, id) => Math.max(most, id + 1), 0);
    // `dropout` is for training.
    if (model.continuing_subword_prefix || model.end_of_word_suffix) refuse("the BPE model with a prefix or suffix");
    const merges = new Map(model.merges.map((own, rank) => {
      const [left, right] = typeof own === "string" ? own.split(" ") : own;
      return [vocab.get(left) * size + vocab.get(right), { rank, merged: vocab.get(left + right) }];
    }));
    const pair = (left, right) => merges.get(left * size + right) ?? null;
    const unknown = model.unk_token == null ? null : vocab.get(model.unk_token);
    return { vocab, encode: cached((word) => {
      if (model.ignore_merges && vocab.has(word)) return [vocab.get(word)];
      const symbols = [];
      let isUnknown = false;
      for (const letter of word) {
        const own = vocab.has(letter) ? [vocab.get(letter)] : model.byte_fallback ? byteTokens(letter, vocab) : null;
        if (own) symbols.push(...own);
        else if (unknown !== null && !(isUnknown && model.fuse_unk)) symbols.push(unknown);
        isUnknown = !own;
      }
      return mergePairs(symbols, pair);
    }) };
  },
  Unigram(model) {
    const scores = model.vocab.map(([, score]) => score), unknown = scores.reduce((least, score) => Math.min(least, score), Infinity) - UNKNOWN_PENALTY;
    const vocab = new Map(model.vocab.map(([piece], id) => [piece, id]));
    const pieces = new Prefixes(model.vocab.map(([piece], id) => [piece, { id, score: scores[id] }]));
    return { vocab, encode: (word) => {
      const parts = [];
      for (const [start, end, id] of bestPath(word, pieces, unknown, (score) => score)) {
        const isUnknown = id === null || id === model.unk_id;
        if (isUnknown && parts.at(-1)?.isUnknown) parts.at(-1).text += word.slice(start, end);
        else parts.push({ text: word.slice(start, end), id, isUnknown });
      }
      return parts.flatMap(({ text }) => {
        if (vocab.has(text)) return [vocab.get(text)];
        return (model.byte_fallback && byteTokens(text, vocab)) || [model.unk_id ?? refuse("a vocabulary without an unknown token")];
      });
    } };
  },
};

/** Returns the tokens <0x00> to <0xFF> of a text's bytes, or null if one is missing. */
function byteTokens(text, vocab) {
  const tokens = Array.from(encoder.encode(text), (byte) => vocab.get(byteName(byte)));
  return tokens.includes(undefined) ? null : tokens;
}

const byteName = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;

/** Returns a function with a memory of recent results. */
function cached(compute) {
  const memory = new Map();
  return (text) => {
    if (!memory.has(text)) {
      if (memory.size >= MAX_CACHED) memory.clear();
      memory.set(text, compute(text));
    }
    return memory.get(text);
  };
}

/** Cuts texts at added tokens, the leftmost and longest first. */
class AddedTokens {
  constructor(entries) {
    this.byText = new Map(entries.map((own) => [own.content, own]));
    const texts = [...this.byText.keys()].filter(Boolean).sort((left, right) => right.length - left.length);
    this.expression = texts.length ? new RegExp(texts.map((text) => literal(text).source).join("|"), "gu") : null;
  }

  /** Yields [text, start, null] and [text, start, id]. */
  *cut(text) {
    let end = 0;
    for (const match of this.expression ? text.matchAll(this.expression) : []) {
      const own = this.byText.get(match[0]);
      let start = match.index, stop = start + match[0].length;
      if (own.single_word && (/[\p{L}\p{M}\p{N}_]$/u.test(text.slice(0, start)) || /^[\p{L}\p{M}\p{N}_]/u.test(text.slice(stop)))) continue;
      if (own.lstrip) start = Math.max(end, text.slice(0, start).trimEnd().length);
      if (own.rstrip) stop = text.length - text.slice(stop).trimStart().length;
      if (start > end) yield [text.slice(end, start), end, null];
      yield [text.slice(start, stop), start, own.id];
      end = stop;
    }
    if (end < text.length) yield [text.slice(end), end, null];
  }
}

export class JsonVocabulary {
  /** @param {object} document the content of tokenizer.json. Throws EngineError for kinds that are not known. */
  constructor(document) {
    const { model = {}, added_tokens: added = [], normalizer, pre_tokenizer: pre, post_processor: post, decoder } = document;
    this.normalizers = steps(normalizer, "normalizers").map((own) => built(NORMALIZERS, own, "the normalizer"));
    this.preTokenizers = steps(pre, "pretokenizers").map((own) => built(PRE_TOKENIZERS, own, "the pre-tokenizer"));
    // Older files name no type of their model.
    const kind = model.type ?? (model.merges ? "BPE" : Array.isArray(model.vocab) ? "Unigram" : undefined);
    this.model = built(MODELS, { ...model, type: kind }, "the model");
    this.added = new Map(added.map((own) => [own.id, own]));
    this.rawTokens = new AddedTokens(added.filter((own) => !own.normalized));
    this.normalizedTokens = new AddedTokens(added.filter((own) => own.normalized).map((own) => ({ ...own, content: this.#normalize(own.content) })));
    this.names = new Map([...this.model.vocab].map(([name, id]) => [id, name]));
    for (const own of added) this.names.set(own.id, own.content);
    this.ids = new Map([...this.model.vocab, ...added.map((own) => [own.content, own.id])]);
    this.template = steps(post, "processors").find((own) => own.type === "TemplateProcessing") ?? null;
    const unknown = steps(post, "processors").find((own) => !["TemplateProcessing", "ByteLevel"].includes(own.type));
    if (unknown) refuse(`the post-processor ${shown(unknown.type)}`);
    const kinds = steps(decoder, "decoders").map((own) => own.type);
    if (!kinds.length || kinds.some((own) => !DECODERS.includes(own))) refuse(`the decoder ${shown(kinds)}`);
    this.isByteLevel = kinds.includes("ByteLevel");
    this.hasFallback = kinds.includes("ByteFallback");
    this.leadingSpace = kinds.includes("Strip") || kinds.includes("Metaspace");
  }

  #normalize(text) {
    return this.normalizers.reduce((whole, normalize) => normalize(whole), text);
  }

  /** Returns the tokens of a text. @param {boolean} special whether BOS and the like are added */
  encode(text, special) {
    const tokens = [];
    for (const [part, start, id] of this.rawTokens.cut(text)) {
      if (id !== null) tokens.push(id);
      else
        for (const [normal, at, own] of this.normalizedTokens.cut(this.#normalize(part))) {
          if (own !== null) tokens.push(own);
          else for (const word of this.#words(normal, start + at === 0)) for (const token of this.model.encode(word)) tokens.push(token);
        }
    }
    if (!special || !this.template) return tokens;
    return this.template.single.flatMap((own) => {
      if (own.Sequence) return tokens;
      return this.template.special_tokens[own.SpecialToken.id].ids;
    });
  }

  #words(text, isStart) {
    let words = [[text, isStart]];
    for (const cutWords of this.preTokenizers)
      words = words.flatMap(([word, first]) => cutWords(word, first).filter(Boolean).map((part, index) => [part, first && index === 0]));
    return words.map(([word]) => word);
  }

  /** Returns the UTF-8 bytes of a token, which may be a part of a character; none for special tokens. */
  tokenBytes(token) {
    const added = this.added.get(token);
    if (added?.special) return new Uint8Array(0);
    if (added && this.isByteLevel) return encoder.encode(added.content);
    const piece = this.names.get(token) ?? "";
    if (this.isByteLevel) {
      const bytes = Array.from(piece, (letter) => BYTES.get(letter));
      return bytes.includes(undefined) ? encoder.encode(piece) : Uint8Array.from(bytes);
    }
    return pieceBytes(piece, this.hasFallback);
  }

  tokenId(name) {
    return this.ids.get(name) ?? null;
  }
}
