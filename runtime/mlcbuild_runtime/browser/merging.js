/** The two algorithms of subword tokenizers: merging of pairs (BPE) and the most likely path (unigram). */

/** A binary heap whose smallest item, by `before`, is popped first. */
class Heap {
  constructor(before) {
    this.before = before;
    this.items = [];
  }

  push(item) {
    const { items, before } = this;
    let at = items.push(item) - 1;
    for (let up; at && before(item, items[(up = (at - 1) >> 1)]); at = up) items[at] = items[up];
    items[at] = item;
  }

  pop() {
    const { items, before } = this, top = items[0], item = items.pop();
    if (!items.length) return top;
    let at = 0;
    for (let down; (down = 2 * at + 1) < items.length; at = down) {
      if (down + 1 < items.length && before(items[down + 1], items[down])) down += 1;
      if (!before(items[down], item)) break;
      items[at] = items[down];
    }
    items[at] = item;
    return top;
  }
}

/**
 * Merges neighbours until no pair can be merged, the best pair first and of equal ones the leftmost.
 * @template T @param {T[]} symbols @param {(left: T, right: T) => {rank: number, merged: T} | null} pair rank:
 * smaller is better @param {(one: T, other: T) => boolean} same @returns {T[]}
 */
export function mergePairs(symbols, pair, same = (one, other) => one === other) {
  const count = symbols.length, values = symbols.slice();
  const previous = values.map((_, index) => index - 1), next = values.map((_, index) => (index + 1 < count ? index + 1 : -1));
  const isAlive = values.map(() => true);
  const heap = new Heap((one, other) => one.rank < other.rank || (one.rank === other.rank && one.left < other.left));
  const offer = (left, right) => {
    const own = left >= 0 && right >= 0 ? pair(values[left], values[right]) : null;
    if (own) heap.push({ ...own, left, right });
  };
  for (let index = 0; index + 1 < count; index++) offer(index, index + 1);
  while (heap.items.length) {
    const { left, right, merged } = heap.pop();
    if (!isAlive[left] || !isAlive[right] || next[left] !== right) continue;
    const now = pair(values[left], values[right]);
    if (!now || !same(now.merged, merged)) continue;
    values[left] = merged;
    isAlive[right] = false;
    next[left] = next[right];
    if (next[right] >= 0) previous[next[right]] = left;
    offer(previous[left], left);
    offer(left, next[left]);
  }
  return values.filter((_, index) => isAlive[index]);
}

/** Texts that are looked up by prefix: which of them a text has at a place, shortest first. */
export class Prefixes {
  /** @param {Iterable<[string, any]>} entries text -> value */
  constructor(entries) {
    this.values = new Map(entries);
    this.beginnings = new Set();
    for (const text of this.values.keys())
      for (let end = 1; end < text.length; end++) this.beginnings.add(text.slice(0, end));
  }

  /** Yields [end, value] for each text that stands at `start`. */
  *at(text, start) {
    for (let end = start + 1; end <= text.length; end++) {
      const part = text.slice(start, end), value = this.values.get(part);
      if (value !== undefined) yield [end, value];
      if (!this.beginnings.has(part)) return;
    }
  }
}

/**
 * Returns the most likely segmentation of a text as [start, end, id]; id is null for an unknown character.
 * @param {Prefixes} pieces text -> {id, score(bytes)} @param {number} unknown score of an unknown character
 * @param {(value: number) => number} rounded rounds sums of scores, as Math.fround
 */
export function bestPath(text, pieces, unknown, rounded) {
  const best = new Array(text.length + 1);
  best[0] = { score: 0, from: -1, id: null };
  for (let start = 0; start < text.length; ) {
    const size = text.codePointAt(start) > 0xffff ? 2 : 1, before = best[start].score;
    let hasSingle = false;
    const offer = (end, id, score) => {
      if (!best[end] || score > best[end].score) best[end] = { score: rounded(score), from: start, id };
    };
    for (const [end, { id, score }] of pieces.at(text, start)) {
      if (end - start < size) continue;
      offer(end, id, (typeof score === "number" ? score : score(text.slice(start, end))) + before);
      hasSingle ||= end - start === size;
    }
    if (!hasSingle) offer(start + size, null, unknown + before);
    start += size;
  }
  const path = [];
  for (let end = text.length; end > 0; end = best[end].from) path.push([best[end].from, end, best[end].id]);
  return path.reverse();
}

/** A normalization table of SentencePiece: UTF-8 prefixes in a double-array trie, and what stands for them. */
export class CharMap {
  /** @param {Uint8Array} blob bytes of the trie as uint32, the trie, then texts that end with a zero byte */
  constructor(blob) {
    const view = new DataView(blob.buffer, blob.byteOffset, blob.byteLength), size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size >> 2 }, (_, index) => view.getUint32(4 + 4 * index, true));
    this.texts = blob.subarray(4 + size);
  }

  /** Returns [bytes, replacement] of each prefix of UTF-8 bytes from `start` on, the shortest first. */
  matches(bytes, start) {
    const offset = (unit) => (unit >>> 10) << ((unit & 512) >>> 6), matches = [];
    let place = offset(this.units[0]);
    for (let at = start; at < bytes.length; at++) {
      place ^= bytes[at];
      const unit = this.units[place] ?? 0;
      if (((unit & 0x800000ff) >>> 0) !== bytes[at]) break;
      place ^= offset(unit);
      if ((unit >>> 8) & 1) matches.push([at + 1 - start, this.#text((this.units[place] ?? 0) & 0x7fffffff)]);
    }
    return matches;
  }

  #text(start) {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.texts.subarray(start, this.texts.indexOf(0, start)));
  }
}

/** Returns the bytes of a piece of SentencePiece. @param {boolean} fallback whether <0x00> stands for a byte */
export function pieceBytes(piece, fallback) {
  const byte = fallback && /^<0x([0-9A-F]{2})>$/.exec(piece);
  return byte ? Uint8Array.of(parseInt(byte[1], 16)) : new TextEncoder().encode(piece.replaceAll("▁", " "));
}
