/** Decides which tokens may come next in an answer that follows a grammar over bytes. */
import { EngineError } from "./errors.js";

/** Masks that are kept for an answer: most tokens of a text follow one of a few states. */
const MAX_MASKS = 32;

/** The tokens of a vocabulary in the order of their bytes. */
export class SortedTokens {
  /** @param {number[]} ends end-of-sequence tokens; they and special tokens are no text */
  constructor(vocabulary, count, ends) {
    Object.assign(this, { count, ends });
    const entries = [];
    for (let token = 0; token < count; token++) {
      const text = ends.includes(token) ? "" : String.fromCharCode(...vocabulary.tokenBytes(token));
      if (text && text !== "\xff") entries.push([text, token]);
    }
    entries.sort(([left], [right]) => (left < right ? -1 : left > right ? 1 : 0));
    this.texts = entries.map(([text]) => text);
    this.tokens = entries.map(([, token]) => token);
    this.common = this.texts.map((text, index) => commonLength(text, this.texts[index - 1] ?? ""));
  }
}

function commonLength(left, right) {
  let length = 0;
  while (length < left.length && length < right.length && left[length] === right[length]) length += 1;
  return length;
}

/** The progress of one answer through its grammar. */
export class TokenMatcher {
  #masks = new Map();

  constructor(grammar, sorted, vocabulary) {
    Object.assign(this, { grammar, sorted, vocabulary, state: grammar.start });
  }

  /** Returns 1 for each token that may come next, else 0; end-of-sequence tokens where the text is complete. */
  mask() {
    let mask = this.#masks.get(this.state);
    if (!mask) {
      if (this.#masks.size >= MAX_MASKS) this.#masks.clear();
      this.#masks.set(this.state, (mask = this.#computed()));
    }
    return mask;
  }

  #computed() {
    const { grammar, sorted } = this, { texts, common } = sorted, mask = new Uint8Array(sorted.count);
    const path = [this.state]; // states behind the bytes of the latest text, as far as they are allowed
    let isEmpty = !this.state.accepts;
    if (!isEmpty) for (const token of sorted.ends) mask[token] = 1;
    for (let index = 0; index < texts.length; index++) {
      if (common[index] >= path.length) continue; // the bytes that it shares with that text are not allowed
      const text = texts[index];
      path.length = common[index] + 1;
      for (let at = common[index]; at < text.length; at++) {
        const next = grammar.step(path[at], text.charCodeAt(at));
        if (!next) break;
        path.push(next);
      }
      if (path.length <= text.length) continue;
      mask[sorted.tokens[index]] = 1;
      isEmpty = false;
    }
    if (isEmpty) throw new EngineError("response_format cannot be followed: the model has no token for what must come next", "invalid_constraint");
    return mask;
  }

  /** Sets the logits of tokens that may not come next to -Infinity. */
  apply(logits) {
    const mask = this.mask();
    for (let token = 0; token < logits.length; token++) if (!mask[token]) logits[token] = -Infinity;
  }

  /** Appends a token that the mask allows. */
  take(token) {
    if (this.sorted.ends.includes(token)) return;
    for (const byte of this.vocabulary.tokenBytes(token)) this.state = this.grammar.step(this.state, byte);
  }

  /** True if only an end-of-sequence token may follow. */
  get isFinished() {
    return this.state.accepts && !this.state.moves.length;
  }
}
