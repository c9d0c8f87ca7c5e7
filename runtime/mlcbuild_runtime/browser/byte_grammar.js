/**
 * Grammars over bytes. A state is a set of stacks of what a text still needs, so grammars may be recursive and
 * ambiguous; states and their edges are built while texts are read.
 */

/** States that a grammar keeps; they are built anew when there are more. */
const MAX_STATES = 8192;

/** Returns a node for one byte out of some. @param {string | [number, number][]} own letters, or ranges */
export function bytes(own) {
  const has = new Uint8Array(256);
  if (typeof own === "string") for (const letter of own) has[letter.charCodeAt(0)] = 1;
  else for (const [low, high] of own) has.fill(1, low, high + 1);
  return { kind: "bytes", has };
}

/** Returns a node for parts one after the other; a text stands for its UTF-8 bytes. */
export const seq = (...parts) => ({ kind: "seq", parts: parts.flatMap((part) => (typeof part === "string" ? textBytes(part) : [part])) });

/** Returns a node for one of several. */
export const alt = (...choices) => ({ kind: "alt", choices: choices.map((own) => (typeof own === "string" ? seq(own) : own)) });

export const optional = (own) => alt(seq(), own);

/** Returns a node for `min` to `max` repetitions of a node that is never empty. */
export const repeat = (own, min = 0, max = Infinity) => ({ kind: "repeat", own, min, max, less: null });

/** Returns a node that stands for another one, which may be set later as its `target`. */
export const reference = (target = null) => ({ kind: "reference", target });

const textBytes = (text) => Array.from(new TextEncoder().encode(text), (byte) => bytes([[byte, byte]]));

/** Returns a repetition after one turn. */
function turned(node) {
  if (node.min === 0 && node.max === Infinity) return node;
  return (node.less ??= repeat(node.own, Math.max(node.min - 1, 0), node.max - 1));
}

/** Returns whether texts fit a node, if those fit that `known` says so of. @param {Map<object, boolean>} known */
function canEnd(node, known) {
  if (known.has(node)) return known.get(node);
  known.set(node, false); // a node that needs itself
  const fits = (own) => canEnd(own, known);
  const result = {
    bytes: () => node.has.includes(1),
    seq: () => node.parts.every(fits),
    alt: () => node.choices.some(fits),
    repeat: () => node.min === 0 || fits(node.own),
    reference: () => false,
  }[node.kind]();
  known.set(node, result);
  return result;
}

/** Returns the references that no finite text fits. */
export function endless(references) {
  const ends = new Set();
  for (let before = -1; before < ends.size; ) {
    before = ends.size;
    const known = new Map(Array.from(ends, (own) => [own, true]));
    for (const own of references) if (canEnd(own.target, known)) ends.add(own);
  }
  return references.filter((own) => !ends.has(own));
}

export class ByteGrammar {
  #states = new Map();
  #count = 0;

  constructor(node) {
    this.end = { id: 0, above: new Map() };
    this.start = this.#state([this.#push(node, this.end)]);
  }

  /** Returns the stack with a node on top of `next`; equal stacks are one object. */
  #push(node, next) {
    let stack = next.above.get(node);
    if (!stack) next.above.set(node, (stack = { id: ++this.#count, node, next, above: new Map() }));
    return stack;
  }

  #state(stacks) {
    const key = stacks.map((own) => own.id).sort((left, right) => left - right).join();
    let state = this.#states.get(key);
    if (!state) {
      if (this.#states.size >= MAX_STATES) this.#states.clear();
      state = { ...this.#expanded(stacks), edges: new Array(256) };
      this.#states.set(key, state);
    }
    return state;
  }

  /** Returns {moves, accepts}: [next bytes, stack behind them], and whether the text may end. */
  #expanded(stacks) {
    const seen = new Set(), left = [...stacks], moves = [];
    while (left.length) {
      const stack = left.pop(), { node, next } = stack;
      if (seen.has(stack)) continue;
      seen.add(stack);
      if (stack === this.end) continue;
      if (node.kind === "bytes") moves.push([node.has, next]);
      else if (node.kind === "seq") left.push(node.parts.reduceRight((rest, part) => this.#push(part, rest), next));
      else if (node.kind === "alt") for (const own of node.choices) left.push(this.#push(own, next));
      else if (node.kind === "reference") left.push(this.#push(node.target, next));
      else {
        if (node.min === 0) left.push(next);
        if (node.max > 0) left.push(this.#push(node.own, this.#push(turned(node), next)));
      }
    }
    return { moves, accepts: seen.has(this.end) };
  }

  /** Returns the state behind a byte, or null if the byte is not allowed. */
  step(state, byte) {
    let next = state.edges[byte];
    if (next === undefined) {
      const stacks = new Set(state.moves.filter(([has]) => has[byte]).map(([, stack]) => stack));
      next = state.edges[byte] = stacks.size ? this.#state([...stacks]) : null;
    }
    return next;
  }
}
