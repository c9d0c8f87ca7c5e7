/**
 * The vocabulary in a tokenizer.model: what the library SentencePiece of Google reads, with the tokens that
 * tokenizer_config.json adds. Scores are float32, as in that library, so that equal paths end equally.
 */
import { EngineError } from "./errors.js";
import { CharMap, Prefixes, bestPath, mergePairs, pieceBytes } from "./merging.js";
import { literal } from "./regex.js";

const NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6;
const UNIGRAM = 1, BPE = 2;
const SPACE = "▁";
const UNKNOWN_PENALTY = 10;
const encoder = new TextEncoder(), decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Yields [field number, value] of a Protocol Buffers message: bytes, whole numbers, or float32. */
function* fields(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = view.getUint8(at++);
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, value);
    }
  };
  while (at < bytes.length) {
    const tag = Number(varint()), kind = tag & 7;
    if (kind === 0) yield [tag >> 3, Number(varint())];
    else if (kind === 2) {
      const size = Number(varint());
      if (size < 0 || at + size > bytes.length) throw new RangeError("a field is longer than the file");
      yield [tag >> 3, bytes.subarray(at, (at += size))];
    } else if (kind === 5) yield [tag >> 3, view.getFloat32((at += 4) - 4, true)];
    else if (kind === 1) at += 8;
    else throw new RangeError(`a field is of kind ${kind}`);
  }
}

/** Returns the pieces and settings of a ModelProto, with the defaults of sentencepiece_model.proto. */
function parsed(data) {
  const model = {
    pieces: [], kind: UNIGRAM, fallback: false, suffix: false, map: null,
    prefix: true, collapse: true, escape: true, unk: 0, bos: 1, eos: 2,
  };
  const trainer = { 3: "kind", 24: "suffix", 35: "fallback", 40: "unk", 41: "bos", 42: "eos" };
  const normalizer = { 3: "prefix", 4: "collapse", 5: "escape" };
  for (const [field, value] of fields(data)) {
    if (field === 1) {
      const piece = { text: "", score: 0, type: NORMAL };
      for (const [part, own] of fields(value)) {
        if (part === 1) piece.text = decoder.decode(own);
        else if (part === 2) piece.score = own;
        else if (part === 3) piece.type = own;
      }
      model.pieces.push(piece);
    } else if (field === 2) {
      for (const [part, own] of fields(value))
        if (trainer[part]) model[trainer[part]] = typeof model[trainer[part]] === "boolean" ? Boolean(own) : own;
    } else if (field === 3)
      for (const [part, own] of fields(value)) {
        if (part === 2 && own.length) model.map = new CharMap(own);
        else if (normalizer[part]) model[normalizer[part]] = Boolean(own);
      }
  }
  if (!model.pieces.length) throw new RangeError("it has no pieces");
  if (model.kind !== UNIGRAM && model.kind !== BPE) throw new RangeError(`its algorithm ${model.kind} is neither unigram nor BPE`);
  return model;
}

/** The model of a tokenizer.model, without added tokens. */
class PieceModel {
  constructor(model) {
    Object.assign(this, model);
    const { pieces } = this, isOwn = ({ type }) => [NORMAL, USER_DEFINED, UNUSED].includes(type);
    const scores = pieces.filter(({ type }) => type === NORMAL).map(({ score }) => score);
    const best = scores.reduce((one, other) => Math.max(one, other), -Infinity);
    this.unknownScore = Math.fround(scores.reduce((one, other) => Math.min(one, other), Infinity) - UNKNOWN_PENALTY);
    this.own = new Map(pieces.flatMap((piece, id) => (isOwn(piece) ? [[piece.text, id]] : [])));
    this.ids = new Map(pieces.map(({ text }, id) => [text, id]));
    this.unknown = pieces.findIndex(({ type }) => type === UNKNOWN);
    this.userDefined = new Prefixes(pieces.flatMap(({ text, type }) => (type === USER_DEFINED ? [[text, text]] : [])));
    if (this.kind === UNIGRAM)
      this.paths = new Prefixes(pieces.flatMap(({ text, score, type }, id) => {
        if (type === USER_DEFINED) return [[text, { id, score: (part) => encoder.encode(part).length * best - 0.1 }]];
        return type === NORMAL ? [[text, { id, score }]] : [];
      }));
  }

  /** Returns a text in the form of pieces: SentencePiece's normalizer. @param {boolean} prefix add_dummy_prefix */
  normalized(text, prefix) {
    const bytes = this.map ? encoder.encode(text) : null, space = this.escape ? SPACE : " ";
    let at = 0, byte = 0, out = "", isSpace = this.collapse, isBegun = false;
    while (at < text.length) {
      let part = [...this.userDefined.at(text, at)].at(-1)?.[1], replaced = part;
      if (part === undefined) {
        const match = bytes && this.map.matches(bytes, byte).at(-1);
        part = match ? decoder.decode(bytes.subarray(byte, byte + match[0])) : String.fromCodePoint(text.codePointAt(at));
        replaced = match ? match[1] : part;
      }
      at += part.length;
      if (bytes) byte += encoder.encode(part).length;
      if (this.collapse && !isBegun && replaced === " ") continue;
      if (!isBegun && prefix && !this.suffix) out += space;
      isBegun = true;
      if (isSpace) replaced = replaced.replace(/^ +/, "");
      if (replaced) {
        out += replaced.replaceAll(" ", space);
        isSpace = replaced.endsWith(" ");
      }
      if (!this.collapse) isSpace = false;
    }
    if (this.collapse) while (out.endsWith(space)) out = out.slice(0, -space.length);
    return isBegun && prefix && this.suffix ? out + space : out;
  }

  encode(text, prefix = this.prefix) {
    const normal = this.normalized(text, prefix), tokens = [];
    let wasUnknown = false;
    for (const [part, id] of this.kind === BPE ? this.#merged(normal) : this.#path(normal)) {
      const isUnknown = id === this.unknown;
      if (isUnknown && this.fallback) {
        for (const byte of encoder.encode(part)) tokens.push(this.ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`) ?? id);
      } else if (!isUnknown || !wasUnknown) tokens.push(id);
      wasUnknown = isUnknown;
    }
    return tokens;
  }

  #path(text) {
    const path = text ? bestPath(text, this.paths, this.unknownScore, Math.fround) : [];
    return path.map(([start, end, id]) => [text.slice(start, end), id ?? this.unknown]);
  }

  #merged(text) {
    const symbols = [], halves = new Map();
    for (let at = 0; at < text.length; ) {
      const own = [...this.userDefined.at(text, at)].at(-1)?.[1];
      const part = own ?? String.fromCodePoint(text.codePointAt(at));
      symbols.push({ text: part, isFrozen: own !== undefined });
      at += part.length;
    }
    const pair = (left, right) => {
      const whole = left.text + right.text, id = left.isFrozen || right.isFrozen ? undefined : this.own.get(whole);
      if (id === undefined) return null;
      if (this.pieces[id].type === UNUSED) halves.set(whole, [left.text, right.text]);
      return { rank: -this.pieces[id].score, merged: { text: whole, isFrozen: false } };
    };
    const parts = mergePairs(symbols, pair, (one, other) => one.text === other.text).map((symbol) => symbol.text);
    // Pieces that are not in use are taken apart again, as they were merged.
    const whole = (part) => {
      const id = this.ids.get(part) ?? this.unknown, pieces = halves.get(part);
      return this.pieces[id]?.type === UNUSED && pieces ? pieces.flatMap(whole) : [[part, id]];
    };
    return parts.flatMap(whole);
  }
}

export class PieceVocabulary {
  /**
   * @param {Uint8Array} data tokenizer.model @param {object} config tokenizer_config.json
   * @param {Map<string, string>} special name such as bos_token -> its text
   */
  constructor(data, config, special) {
    try {
      this.model = new PieceModel(parsed(data));
    } catch (error) {
      throw new EngineError(`tokenizer.model cannot be read: ${error.message}`, "bad_tokenizer");
    }
    this.config = config;
    const { pieces } = this.model;
    this.added = new Map(Object.entries(config.added_tokens_decoder ?? {}).map(([id, own]) => [Number(id), own]));
    const listed = config.additional_special_tokens ?? [];
    const names = [...special.values(), ...(Array.isArray(listed) ? listed.map((own) => own?.content ?? own) : [])];
    this.special = new Set([
      ...pieces.flatMap(({ type }, id) => (type === CONTROL ? [id] : [])),
      ...[...this.added].flatMap(([id, own]) => (own.special ? [id] : [])),
      ...names.map((name) => this.tokenId(name)).filter((id) => id !== null),
    ]);
    this.names = new Map([
      ...[...this.special].map((id) => [this.#name(id), id]),
      ...[...this.added].map(([id, own]) => [own.content, id]),
    ]);
    const texts = [...this.names.keys()].filter(Boolean).sort((left, right) => right.length - left.length);
    this.cuts = texts.length ? new RegExp(`(${texts.map((text) => literal(text).source).join("|")})`, "u") : null;
    this.isLegacy = config.legacy !== false;
    this.leadingSpace = String(this.model.encode("a")) !== String(this.model.encode("a", false));
  }

  #name(token) {
    return this.added.get(token)?.content ?? this.model.pieces[token]?.text ?? "";
  }

  encode(text, special) {
    const { config, model } = this, tokens = [];
    if (special && (config.add_bos_token ?? true) && model.bos >= 0) tokens.push(model.bos);
    (this.cuts ? text.split(this.cuts) : [text]).forEach((whole, index, parts) => {
      const strips = this.added.get(this.names.get(parts[index - 1]))?.rstrip;
      const part = strips ? whole.replace(/^\p{White_Space}+/u, "") : whole;
      if (index % 2) tokens.push(this.names.get(part));
      // Newer tokenizers put no space before text that follows a special token.
      else if (part) for (const token of model.encode(part, this.isLegacy || index === 0 ? undefined : false)) tokens.push(token);
    });
    if (special && (config.add_eos_token ?? false) && model.eos >= 0) tokens.push(model.eos);
    return tokens;
  }

  tokenBytes(token) {
    if (this.special.has(token)) return new Uint8Array(0);
    if (this.added.has(token)) return pieceBytes(this.added.get(token).content, false);
    const piece = this.model.pieces[token];
    if (!piece) return new Uint8Array(0);
    if (piece.type === UNKNOWN) return encoder.encode(" \u2047 ");
    return pieceBytes(piece.text, piece.type === BYTE);
  }

  tokenId(name) {
    for (const [id, own] of this.added) if (own.content === name) return id;
    return this.model.ids.get(name) ?? null;
  }
}
