/**
 * program.json: reads a GPU program and checks it, as mlcbuild_format/program.py and program_json.py do.
 *
 * A program is written by a stranger. Every operation of an expression is monotone in every size, and buffers
 * are allocated for the largest sizes, so a check at the largest sizes holds for all calls.
 */
import { blake3 } from "./blake3.js";
import { EngineError, shown } from "./errors.js";

export const FORMAT = "mlcbuild-program/2";
const ITEM_BYTES = new Map([["float32", 4], ["float16", 2], ["uint32", 4], ["uint8", 1]]);
/** Optional features for which a kernel may have another text. */
export const FEATURES = ["packed_4x8_integer_dot_product", "shader-f16", "subgroups"];
const KINDS = ["workspace", "cache", "inputs", "rope"];
const OPERATIONS = new Map([
  ["add", (left, right) => left + right],
  ["mul", (left, right) => left * right],
  ["div", (left, right) => Math.ceil(left / right)],
  ["min", Math.min],
  ["max", Math.max],
]);
const MAX_INT32 = 2 ** 31 - 1, MAX_BYTES = 2 ** 42, MAX_DEPTH = 6, MAX_LAUNCHES = 200_000, MAX_TABLE = 65536, MAX_SHARED = 2 ** 20;
/** Uniforms of a launch besides the grid: a record of 256 bytes has 64 words. */
const MAX_UNIFORMS = 63;
const NAME = /^[A-Za-z_][A-Za-z0-9_.:-]{0,199}$/;
const FILE = /^kernels\/[A-Za-z0-9_]{1,100}\.[a-z]{1,8}$/;
const ENTRY = /^[A-Za-z_][A-Za-z0-9_]{0,199}$/;

/** The limits that WebGPU guarantees; `limitsOf` returns those of an adapter. */
export const GUARANTEED = {
  storageBuffers: 8, bindingBytes: 128 * 2 ** 20, bufferBytes: 256 * 2 ** 20,
  threads: 256, sharedBytes: 16384, workgroups: 65535, alignment: 256,
};

const refuse = (message) => { throw new EngineError(message, "bad_program"); };

function object(value, where, keys) {
  if (value === null || typeof value !== "object" || Array.isArray(value))
    refuse(`${where} must be an object, found ${shown(value)}`);
  if (keys) {
    const unknown = Object.keys(value).find((key) => !keys.includes(key));
    if (unknown !== undefined) refuse(`unknown field '${where}.${unknown}'`);
  }
  return value;
}

function integer(value, where, minimum, maximum) {
  if (!Number.isInteger(value) || value < minimum || value > maximum)
    refuse(`'${where}' must be an integer from ${minimum} to ${maximum}, found ${shown(value)}`);
  return value;
}

function text(value, where, pattern) {
  if (typeof value !== "string" || !pattern.test(value)) refuse(`'${where}' is ${shown(value)}, which is no valid name`);
  return value;
}

function list(value, where) {
  if (!Array.isArray(value)) refuse(`'${where}' must be a list, found ${shown(value)}`);
  return value;
}

/** Returns name -> read(entry) as a Map, so that names such as "constructor" mean nothing. */
function named(value, where, read) {
  const entries = Object.entries(object(value, `'${where}'`));
  return new Map(entries.map(([name, entry]) => [text(name, where, NAME), read(entry, `${where}.${name}`)]));
}

function expression(value, allowed, where, depth = 0) {
  if (Number.isInteger(value) && value >= 0 && value <= MAX_BYTES) return value;
  if (typeof value === "string" && allowed.has(value)) return value;
  if (depth < MAX_DEPTH && Array.isArray(value) && value.length === 3 && OPERATIONS.has(value[0])) {
    const [name, left, right] = value;
    if (name === "div" && !(Number.isInteger(right) && right > 0))
      refuse(`'${where}' divides by ${shown(right)}, not by a whole number above 0`);
    return [name, expression(left, allowed, where, depth + 1), expression(right, allowed, where, depth + 1)];
  }
  return refuse(`'${where}' has ${shown(value)} where an expression must stand`);
}

/** Returns the value of an expression over sizes, a Map. Refuses values that a number does not hold exactly. */
export function evaluate(own, sizes) {
  if (typeof own === "number") return own;
  if (typeof own === "string") return sizes.get(own) ?? refuse(`a call has no size '${own}'`);
  const value = OPERATIONS.get(own[0])(evaluate(own[1], sizes), evaluate(own[2], sizes));
  return value <= Number.MAX_SAFE_INTEGER ? value : refuse(`an expression has the value ${value}, which is too large`);
}

const SHADER = ["file", "entry", "threads", "shared_bytes", "bindings", "scalars", "uniforms", "grid", "alternatives"];

function alternative(value, where) {
  object(value, `'${where}'`, ["features", "file", "shared_bytes"]);
  const features = list(value.features, `${where}.features`), unknown = features.find((name) => !FEATURES.includes(name));
  if (unknown !== undefined || !features.length)
    refuse(`'${where}' needs a feature of ${FEATURES.join(", ")}, found ${features.length ? shown(unknown) : "none"}`);
  const sharedBytes = integer(value.shared_bytes, `${where}.shared_bytes`, 0, MAX_SHARED);
  return { features, file: text(value.file, `${where}.file`, FILE), sharedBytes };
}

function shader(value, where) {
  object(value, `'${where}'`, SHADER);
  const scalars = list(value.scalars, `${where}.scalars`).map((name) => text(name, where, NAME));
  const allowed = new Set(scalars);
  const grid = list(value.grid, `${where}.grid`);
  if (grid.length !== 2) refuse(`'${where}' has a grid of ${grid.length} dimensions, not 2`);
  const bindings = list(value.bindings, `${where}.bindings`).map((entry) => {
    object(entry, `'${where}.bindings'`, ["name", "written", "size"]);
    if (typeof entry.written !== "boolean") refuse(`'${where}': 'written' must be true or false, found ${shown(entry.written)}`);
    return { name: text(entry.name, where, NAME), written: entry.written, size: expression(entry.size, allowed, where) };
  });
  for (const names of [scalars, bindings.map((binding) => binding.name)])
    if (new Set(names).size !== names.length) refuse(`'${where}' has two scalars or two bindings of one name`);
  return {
    file: text(value.file, `${where}.file`, FILE),
    entry: text(value.entry, `${where}.entry`, ENTRY),
    threads: integer(value.threads, `${where}.threads`, 1, 1024),
    sharedBytes: integer(value.shared_bytes, `${where}.shared_bytes`, 0, MAX_SHARED),
    bindings,
    scalars,
    uniforms: integer(value.uniforms, `${where}.uniforms`, 0, Math.min(scalars.length, MAX_UNIFORMS)),
    grid: grid.map((extent) => expression(extent, allowed, where)),
    alternatives: list(value.alternatives, `${where}.alternatives`).map((own) => alternative(own, `${where}.alternatives`)),
  };
}

function param(row) {
  if (Array.isArray(row) && row.length === 4) {
    const [name, shape, dtype, layout] = row;
    const fits = Array.isArray(shape) && shape.length <= 4
      && shape.every((size) => Number.isInteger(size) && size > 0 && size <= MAX_INT32)
      && shape.reduce((product, size) => product * size, 1) <= MAX_BYTES;
    if (fits && NAME.test(name) && ITEM_BYTES.has(dtype) && typeof layout === "string") {
      const bytes = shape.reduce((product, size) => product * size, 1) * ITEM_BYTES.get(dtype);
      return { name, shape, dtype, layout, bytes };
    }
  }
  return refuse(`'params' holds ${shown(row)}, not [name, shape, dtype, layout]`);
}

function rope(value, where) {
  object(value, `'${where}'`, ["rows", "inv_freq", "factor"]);
  const numbers = list(value.inv_freq, `${where}.inv_freq`);
  const right = [...numbers, value.factor].every((own) => typeof own === "number" && own >= 0 && own <= 1e9);
  if (!right || !numbers.length || numbers.length > MAX_TABLE)
    refuse(`'${where}' must have numbers from 0 to 1e9 as 'inv_freq' and 'factor'`);
  return { rows: integer(value.rows, `${where}.rows`, 1, 2 ** 24), invFreq: numbers, factor: value.factor };
}

function sizesOf(value, where) {
  return named(value, where, (size, place) => integer(size, place, 0, MAX_INT32));
}

function launch(entry, allowed, where) {
  if (!Array.isArray(entry) || entry.length !== 3 || typeof entry[0] !== "string" || !Array.isArray(entry[1]) || !Array.isArray(entry[2]))
    refuse(`'${where}' holds ${shown(entry)}, not [kernel, buffers, scalars]`);
  const uses = entry[1].map((use) => {
    if (typeof use === "string") return { name: use, offset: 0 };
    if (Array.isArray(use) && use.length === 2 && typeof use[0] === "string")
      return { name: use[0], offset: integer(use[1], where, 0, MAX_BYTES) };
    return refuse(`'${where}' binds ${shown(use)}, not a name or [name, offset]`);
  });
  return { kernel: entry[0], uses, scalars: entry[2].map((scalar) => expression(scalar, allowed, where)) };
}

function variants(value, where, sizes) {
  if (!list(value, where).length) refuse(`'${where}' must have at least one variant`);
  return value.map((entry) => {
    object(entry, `'${where}'`, ["sizes", "launches"]);
    const own = sizesOf(entry.sizes, where);
    for (const [size, largest] of own)
      if (largest > (sizes.get(size) ?? 0)) refuse(`'${where}': size '${size}' may be ${largest}, more than the program has`);
    const allowed = new Set([...own.keys(), "pages"]);
    return { sizes: own, launches: list(entry.launches, where).map((each) => launch(each, allowed, where)) };
  });
}

/** A program that `parse` has read. Sizes are Maps of name -> value. */
export class Program {
  constructor(fields) {
    Object.assign(this, fields);
  }

  /** Returns the first variant of a function for a call of these sizes. @param {Map<string, number>} sizes */
  variant(name, sizes) {
    const fits = (own) => [...own.sizes].every(([size, largest]) => (sizes.get(size) ?? 0) <= largest);
    return this.functions.get(name)?.find(fits) ?? refuse(`the program has no variant of '${name}' for this call`);
  }

  /** Returns name -> kernel of the kernels that variants of functions launch. */
  kernelsOf(variants) {
    const names = new Set(variants.flatMap((variant) => variant.launches.map((launch) => launch.kernel)));
    return new Map([...this.kernels].filter(([name]) => names.has(name)));
  }

  /** Returns the program in which each kernel is the best one for a device with these features, a Set of names. */
  forDevice(features) {
    const best = (own) => own.alternatives.find((other) => other.features.every((name) => features.has(name)));
    const kernels = [...this.kernels].map(([name, own]) => [name, { ...own, ...best(own), alternatives: [] }]);
    return new Program({ ...this, kernels: new Map(kernels) });
  }

  /** Returns name -> bytes of every buffer and parameter, with a cache of so many pages. */
  bytes(pages) {
    const sizes = new Map([...this.sizes, ["pages", pages]]);
    const rounded = (size) => Math.max(4, Math.ceil(size / 4) * 4);
    return new Map([
      ...this.params.map((own) => [own.name, rounded(own.bytes)]),
      ...[...this.buffers].map(([name, own]) => [name, rounded(evaluate(own.size, sizes))]),
    ]);
  }

  /** Returns the digest of the parameters, which the weights and the manifest carry, too. */
  paramSignature() {
    const rows = this.params.map((own) => [own.name, own.shape, own.dtype, own.layout]);
    return blake3(new TextEncoder().encode(`signature/1\0${JSON.stringify(rows)}`));
  }
}

/** Returns the Program that a JSON document describes. Throws EngineError, in one sentence. */
export function parse(document) {
  if (document?.format !== FORMAT) refuse(`'format' must be '${FORMAT}', found ${shown(document?.format)}`);
  const top = object(document, "the document", [
    "format", "signature", "params", "sizes", "kernels", "buffers", "inputs", "ropes", "functions",
  ]);
  const sizes = sizesOf(top.sizes, "sizes");
  const program = new Program({
    signature: text(top.signature, "signature", /^[0-9a-f]{64}$/),
    params: list(top.params, "params").map(param),
    sizes,
    kernels: named(top.kernels, "kernels", shader),
    buffers: named(top.buffers, "buffers", (value, where) => {
      object(value, `'${where}'`, ["kind", "size"]);
      if (!KINDS.includes(value.kind)) refuse(`'${where}' is of kind ${shown(value.kind)}, not ${KINDS.join(", ")}`);
      return { kind: value.kind, size: expression(value.size, sizes, where) };
    }),
    inputs: named(top.inputs, "inputs", (value, where) => {
      object(value, `'${where}'`, ["start", "size"]);
      return { start: integer(value.start, where, 0, MAX_INT32), size: expression(value.size, sizes, where) };
    }),
    ropes: named(top.ropes, "ropes", rope),
    functions: named(top.functions, "functions", (value, where) => variants(value, where, sizes)),
  });
  crossCheck(program);
  return program;
}

function crossCheck(program) {
  const params = new Set(program.params.map((own) => own.name));
  if (params.size !== program.params.length || [...program.buffers.keys()].some((name) => params.has(name)))
    refuse("'params' and 'buffers' have two entries of one name");
  if (!program.sizes.has("pages")) refuse("'sizes.pages' is missing");
  const ofKind = (kind) => [...program.buffers].filter(([, own]) => own.kind === kind).map(([name]) => name);
  const ropes = ofKind("rope"), inputs = ofKind("inputs");
  if (inputs.length !== 1 || ropes.length !== program.ropes.size || ropes.some((name) => !program.ropes.has(name)))
    refuse("'buffers' must have one entry of kind inputs, and one of kind rope for each of 'ropes'");
  const bytesOf = (name) => evaluate(program.buffers.get(name).size, program.sizes);
  for (const [name, own] of program.ropes) {
    const size = own.rows * 2 * own.invFreq.length * 4;
    if (bytesOf(name) !== size) refuse(`'buffers.${name}' must have ${size} bytes`);
  }
  for (const [name, section] of program.inputs) {
    const end = (section.start + evaluate(section.size, program.sizes)) * 4;
    if (end > bytesOf(inputs[0])) refuse(`'inputs.${name}' ends at byte ${end}, beyond the buffer '${inputs[0]}'`);
  }
  const launches = [...program.functions.values()].flat().flatMap((variant) => variant.launches);
  if (launches.length > MAX_LAUNCHES) refuse(`'functions' have more than ${MAX_LAUNCHES} launches`);
  for (const own of launches) {
    const kernel = program.kernels.get(own.kernel);
    if (!kernel) refuse(`a launch names the kernel ${shown(own.kernel)}, which 'kernels' lacks`);
    if (own.uses.length !== kernel.bindings.length || own.scalars.length !== kernel.scalars.length)
      refuse(`a launch of '${own.kernel}' has ${own.uses.length} buffers and ${own.scalars.length} scalars, and the kernel`
        + ` ${kernel.bindings.length} and ${kernel.scalars.length}`);
    const stray = own.uses.find((use) => !params.has(use.name) && !program.buffers.has(use.name));
    if (stray) refuse(`a launch binds ${shown(stray.name)}, which is no buffer and no parameter`);
  }
}

/** Returns the scalars of a launch in a call of these sizes, as a Map in the kernel's order. */
export function scalarValues(kernel, own, sizes) {
  return new Map(kernel.scalars.map((name, index) => [name, evaluate(own.scalars[index], sizes)]));
}

/** Throws EngineError unless every launch keeps within its buffers and the device's limits. */
export function check(program, pages, device = GUARANTEED) {
  const present = program.bytes(pages);
  for (const [name, size] of present)
    if (size > device.bufferBytes) refuse(`'${name}' takes ${size} bytes, and a buffer of the device ${device.bufferBytes}`);
  for (const [name, kernel] of program.kernels) {
    const needs = [
      ["threads", kernel.threads, device.threads],
      ["bytes of shared memory", Math.max(kernel.sharedBytes, ...kernel.alternatives.map((own) => own.sharedBytes)), device.sharedBytes],
      ["storage buffers", kernel.bindings.length, device.storageBuffers],
    ];
    for (const [what, needed, limit] of needs)
      if (needed > limit) refuse(`'kernels.${name}' needs ${needed} ${what}, and the device has ${limit}`);
  }
  const constant = new Set([...program.params.map((own) => own.name), ...program.ropes.keys()]);
  for (const list of program.functions.values())
    for (const variant of list) {
      const sizes = new Map([...program.sizes, ...variant.sizes, ["pages", pages]]);
      for (const own of variant.launches) checkLaunch(program.kernels.get(own.kernel), own, sizes, present, device, constant);
    }
}

function checkLaunch(kernel, own, sizes, present, device, constant) {
  const scalars = scalarValues(kernel, own, sizes);
  const where = `kernel '${own.kernel}'`;
  if (Math.max(0, ...scalars.values()) > MAX_INT32) refuse(`a scalar of ${where} exceeds ${MAX_INT32}`);
  for (const extent of kernel.grid) {
    const count = evaluate(extent, scalars);
    if (count > device.workgroups) refuse(`${where} needs ${count} workgroups in one dimension, and the device has ${device.workgroups}`);
  }
  kernel.bindings.forEach((binding, index) => {
    const use = own.uses[index], size = evaluate(binding.size, scalars);
    if (use.offset % device.alignment) refuse(`'${use.name}' is bound at byte ${use.offset}, no multiple of ${device.alignment}`);
    if (use.offset + size > present.get(use.name))
      refuse(`${where} accesses ${size} bytes of '${use.name}' from byte ${use.offset} on, which has ${present.get(use.name)}`);
    if (size > device.bindingBytes)
      refuse(`${where} accesses ${size} bytes of '${use.name}' at once, and the device allows ${device.bindingBytes}`);
    if (!binding.written) return;
    // WebGPU binds no buffer for reading and writing in one launch, not even at ranges that are apart.
    if (own.uses.filter((other) => other.name === use.name).length > 1) refuse(`${where} writes '${use.name}', which is bound to it twice`);
    if (constant.has(use.name)) refuse(`${where} writes '${use.name}', which is constant`);
  });
}
