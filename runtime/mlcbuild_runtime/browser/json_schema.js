/** Translates JSON schemas into grammars over bytes; texts have the form that the Python runtime allows. */
import { ByteGrammar, alt, bytes, endless, optional, reference, repeat, seq } from "./byte_grammar.js";
import { EngineError, shown } from "./errors.js";

const MAX_SOURCE = 2 ** 18;
const FIELD = "response_format";
const NOTES = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions"];
const RULES = {
  object: ["properties", "required", "additionalProperties"],
  array: ["items", "minItems", "maxItems"],
  string: ["minLength", "maxLength"],
};
const KEYWORDS = ["type", ...Object.values(RULES).flat()];
const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];

const refuse = (path, what) => {
  throw new EngineError(`${path}: ${what}`, "invalid_constraint");
};

/** One space, or a line break with indentation: models that may write any white space write it for ever. */
const SPACE = alt(seq(), " ", seq("\n", repeat(bytes(" \t"), 0, 40)));
const COMMA = seq(SPACE, ",", SPACE);
const DIGIT = bytes([[0x30, 0x39]]), DIGITS = seq(DIGIT, repeat(DIGIT));
const INTEGER = seq(optional(bytes("-")), alt("0", seq(bytes([[0x31, 0x39]]), repeat(DIGIT))));
const NUMBER = seq(INTEGER, optional(seq(".", DIGITS)), optional(seq(bytes("eE"), optional(bytes("+-")), DIGITS)));

/** Place within a character -> [first byte, last byte, next place], for UTF-8 without what JSON escapes. */
const UTF8 = {
  start: [
    [0x20, 0x21, "end"], [0x23, 0x5b, "end"], [0x5d, 0x7e, "end"], [0xc2, 0xdf, "one"], [0xe0, 0xe0, "e0"], [0xe1, 0xec, "two"],
    [0xed, 0xed, "ed"], [0xee, 0xef, "two"], [0xf0, 0xf0, "f0"], [0xf1, 0xf3, "three"], [0xf4, 0xf4, "f4"],
  ],
  one: [[0x80, 0xbf, "end"]],
  two: [[0x80, 0xbf, "one"]],
  three: [[0x80, 0xbf, "two"]],
  e0: [[0xa0, 0xbf, "one"]],
  ed: [[0x80, 0x9f, "one"]],
  f0: [[0x90, 0xbf, "two"]],
  f4: [[0x80, 0x8f, "two"]],
};
/** Returns a node for the bytes of a character from a place on. */
const character = (place) => (place === "end" ? seq() : alt(...UTF8[place].map(([low, high, next]) => seq(bytes([[low, high]]), character(next)))));
const HEX = bytes("0123456789abcdefABCDEF");
const ESCAPE = seq("\\", alt(bytes('"\\bfnrt'), seq("u00", alt(seq(bytes("01"), HEX), seq("7", bytes("fF"))))));
const LETTERS = repeat(alt(character("start"), ESCAPE));

/** Returns a node for a key, behind its quote, that is none of some names. */
function otherKey(names, path) {
  const root = new Map();
  for (const name of names) {
    if (JSON.stringify(name) !== `"${name}"` || name.includes("\x7f"))
      refuse(path, `the name ${shown(name)} needs escapes, so no other properties can be allowed beside it: set additionalProperties to false`);
    let node = root;
    for (const byte of new TextEncoder().encode(name)) node.set(byte, (node = node.get(byte) ?? new Map()));
    node.isName = true;
  }
  return keyFrom(root, "start");
}

function keyFrom(names, place) {
  const choices = [];
  for (const [low, high, next] of UTF8[place]) {
    const free = [];
    for (let byte = low; byte <= high; byte++) {
      const more = names.get(byte);
      if (more) choices.push(seq(bytes([[byte, byte]]), keyFrom(more, next === "end" ? "start" : next)));
      else free.push([byte, byte]);
    }
    choices.push(seq(bytes(free), character(next), LETTERS, '"'));
  }
  if (place !== "start") return alt(...choices);
  return alt(...choices, seq(ESCAPE, LETTERS, '"'), ...(names.isName ? [] : ['"']));
}

const objectOf = (members) => seq("{", SPACE, ...members.flatMap((own, index) => (index ? [COMMA, own] : [own])), members.length ? SPACE : seq(), "}");
const member = (key, value) => seq(key, SPACE, ":", SPACE, value);

/** Returns a node for one JSON value, with white space where other values have it. */
function literal(value) {
  if (Array.isArray(value)) return seq("[", SPACE, ...value.flatMap((own, index) => (index ? [COMMA, literal(own)] : [literal(own)])), value.length ? SPACE : seq(), "]");
  if (value && typeof value === "object") return objectOf(Object.entries(value).map(([key, own]) => member(seq(JSON.stringify(key)), literal(own))));
  const parts = JSON.stringify(value).replaceAll("\x7f", "\\u007f").match(/\\u00[017][a-f]|\\?[^]/gu);
  return seq(...parts.flatMap((part) => (part.length > 2 ? [part.slice(0, -1), bytes(part.at(-1) + part.at(-1).toUpperCase())] : [part])));
}

const typesOf = (value) => {
  if (value === null) return ["null"];
  if (typeof value === "number") return Number.isInteger(value) ? ["integer", "number"] : ["number"];
  return [Array.isArray(value) ? "array" : typeof value];
};

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

class Translation {
  constructor(root, path) {
    Object.assign(this, { root, path, references: new Map() });
    this.any = reference();
    this.any.target = alt(...TYPES.map((type) => this[type]({}, path)));
  }

  /** Returns a node for the values that a schema accepts. @param {string} path where it is, for errors */
  value(schema, path) {
    if (schema === true) return this.any;
    if (!isObject(schema)) refuse(path, `a schema must be an object or true here, found ${shown(schema)}`);
    const keys = Object.keys(schema).filter((key) => !NOTES.includes(key));
    const kind = ["$ref", "anyOf", "const", "enum"].find((key) => keys.includes(key));
    const isConstant = kind === "const" || kind === "enum";
    const taken = kind ? [kind, ...(isConstant ? ["type"] : [])] : KEYWORDS;
    const other = keys.find((key) => !taken.includes(key));
    if (other) refuse(path, `'${other}'${kind ? ` beside '${kind}'` : ""} is not supported in browsers: leave it out, or send the request to a server`);
    const types = this.#types(schema.type ?? TYPES, path);
    if (kind === "$ref") return this.#reference(schema.$ref, path);
    if (kind === "anyOf") return alt(...this.#list(schema.anyOf, `${path}.anyOf`).map((own, index) => this.value(own, `${path}.anyOf[${index}]`)));
    if (isConstant) {
      const values = kind === "const" ? [schema.const] : this.#list(schema.enum, `${path}.enum`);
      const right = values.filter((own) => typesOf(own).some((type) => types.includes(type)));
      return right.length ? alt(...right.map(literal)) : refuse(path, `no value of '${kind}' has the type ${shown(schema.type)}`);
    }
    return types.length === TYPES.length && !keys.length ? this.any : alt(...types.map((type) => this[type](schema, path)));
  }

  #types(own, path) {
    const types = [own].flat(), wrong = types.find((type) => !TYPES.includes(type));
    if (wrong !== undefined || !types.length) refuse(`${path}.type`, `must be ${TYPES.join(", ")} or a list of these, found ${shown(own)}`);
    return types;
  }

  #list(own, path) {
    return Array.isArray(own) && own.length ? own : refuse(path, `must be a list that is not empty, found ${shown(own)}`);
  }

  #reference(pointer, path) {
    if (typeof pointer !== "string" || !/^#(\/|$)/.test(pointer)) refuse(`${path}.$ref`, `must begin with '#/', found ${shown(pointer)}`);
    let own = this.references.get(pointer);
    if (own) return own;
    this.references.set(pointer, (own = reference()));
    let target = this.root;
    for (const part of pointer.split("/").slice(1)) {
      const key = decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~");
      if (target === null || typeof target !== "object" || !Object.hasOwn(target, key)) refuse(`${path}.$ref`, `${shown(pointer)} leads to nothing`);
      target = target[key];
    }
    own.target = this.value(target, `${this.path}${pointer.slice(1).replaceAll("/", ".")}`);
    return own;
  }

  /** Returns two limits as numbers. */
  #limits(schema, least, most, path) {
    const [min, max] = [schema[least] ?? 0, schema[most] ?? Infinity];
    for (const [key, value] of [[least, min], [most, max]])
      if (value !== Infinity && (!Number.isSafeInteger(value) || value < 0)) refuse(`${path}.${key}`, `must be a whole number from 0, found ${shown(value)}`);
    return min <= max ? [min, max] : refuse(path, `'${least}' is ${min} and '${most}' is ${max}, so no value fits`);
  }

  object(schema, path) {
    const { properties = {}, required = [] } = schema, names = isObject(properties) ? Object.keys(properties) : [];
    if (!isObject(properties)) refuse(`${path}.properties`, `must be an object of schemas, found ${shown(properties)}`);
    if (!Array.isArray(required)) refuse(`${path}.required`, `must be a list of names, found ${shown(required)}`);
    const absent = required.find((name) => !names.includes(name));
    if (absent !== undefined) refuse(`${path}.required`, `${shown(absent)} is not in 'properties': add it there`);
    // Without the keyword, a model would continue with keys of its own: the Python runtime closes objects as well.
    const more = schema.additionalProperties ?? schema.properties === undefined, end = seq(SPACE, "}");
    let first = end, after = end; // what may follow where no member was written, and behind a member
    if (more !== false) {
      const own = member(seq('"', otherKey(names, path)), this.value(more, `${path}.additionalProperties`));
      after = seq(repeat(seq(COMMA, own)), end);
      first = alt(end, seq(SPACE, own, after));
    }
    for (const name of names.reverse()) {
      const own = member(seq(JSON.stringify(name)), this.value(properties[name], `${path}.properties.${name}`));
      const [begin, next] = [seq(SPACE, own, after), seq(COMMA, own, after)];
      [first, after] = required.includes(name) ? [begin, next] : [alt(begin, first), alt(next, after)];
    }
    return seq("{", first);
  }

  array(schema, path) {
    const [min, max] = this.#limits(schema, "minItems", "maxItems", path);
    const item = this.value(schema.items ?? true, `${path}.items`), empty = seq(SPACE, "]");
    if (max === 0) return seq("[", empty);
    const filled = seq(SPACE, item, repeat(seq(COMMA, item), Math.max(min - 1, 0), max - 1), empty);
    return seq("[", min ? filled : alt(empty, filled));
  }

  string(schema, path) {
    return seq('"', repeat(LETTERS.own, ...this.#limits(schema, "minLength", "maxLength", path)), '"');
  }

  number = () => NUMBER;
  integer = () => INTEGER;
  boolean = () => alt("true", "false");
  null = () => seq("null");
}

/** Returns the schema that `response_format` states, and its place. Throws EngineError for other values. */
function schemaOf(format) {
  if (format?.type === "json_schema" && (isObject(format.json_schema?.schema) || typeof format.json_schema?.schema === "boolean"))
    return [format.json_schema.schema, `${FIELD}.json_schema.schema`];
  if (format?.type === "json_object") return [{ type: "object" }, FIELD];
  return refuse(FIELD, `must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}, found ${shown(format)}`);
}

/**
 * Returns the grammar of the field `response_format` of another type than text. Throws EngineError for what is
 * not supported. @param {boolean} space whether the text may begin with a space
 */
export function formatGrammar(format, space) {
  const [schema, path] = schemaOf(format);
  try {
    if (JSON.stringify(schema).length > MAX_SOURCE) refuse(path, `it has more than ${MAX_SOURCE} characters: simplify it`);
    const translation = new Translation(schema, path), node = translation.value(schema, path), root = reference(node);
    if (endless([...translation.references.values(), translation.any, root]).length) refuse(path, "a '$ref' leads to nothing but itself, so no text fits");
    return new ByteGrammar(space ? seq(optional(seq(" ")), node) : node);
  } catch (error) {
    if (error instanceof RangeError || error instanceof URIError) refuse(path, `it is nested too deeply or not well formed (${error.message}): simplify it`);
    throw error;
  }
}
