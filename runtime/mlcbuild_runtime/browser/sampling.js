/**
 * Draws tokens from logits in float64, from a whole row or from its 64 largest logits, and the random numbers
 * of a seed: the same as those of the Python runtime, so that a seed gives the same answer there.
 */

/** Relative error of a sum of float32 exponentials, generously. */
const MARGIN = 1e-4;
const MAX_INVERSE_TEMPERATURE = 1e30;

/** Returns the columns of abi.SamplingParams for an OpenAI request, without the random number. */
export function samplingParams({ temperature, topP, topK, minP }) {
  if (temperature === 0 || topK === 1 || topP === 0) return { scale: 0, drop: -Infinity, topP: 1, topK: 0 };
  const scale = Math.min(Math.max(1 / temperature, 1 / MAX_INVERSE_TEMPERATURE), MAX_INVERSE_TEMPERATURE);
  return { scale, drop: minP ? Math.log(minP) / scale : -Infinity, topP, topK };
}

/** Returns whether top_k, min_p or top_p excludes tokens. */
export const filters = (params) => params.drop > -Infinity || params.topP < 1 || params.topK > 0;

/** Returns the index of the largest logit, the first of several; -1 if a logit is NaN or the largest is infinite. */
export function argmax(logits) {
  let best = 0;
  for (let index = 0; index < logits.length; index++) {
    if (Number.isNaN(logits[index])) return -1;
    if (logits[index] > logits[best]) best = index;
  }
  return Number.isFinite(logits[best]) ? best : -1;
}

/** Returns the token that is drawn from a row of logits, or -1 for logits that are not numbers. */
export function draw(logits, params, random) {
  const best = argmax(logits);
  if (best < 0 || params.scale === 0) return best;
  return pick(Float64Array.from(logits, (logit) => logit - logits[best]), params, random, null);
}

/** Returns an index into logits minus the largest one. total: of all weights, where some are left out. */
function pick(below, params, random, total) {
  let bound = params.drop;
  if (params.topK > 0 && params.topK < below.length) bound = Math.max(bound, largest(below, params.topK));
  const weights = below.map((value) => (value >= bound ? Math.exp(value * params.scale) : 0));
  if (params.topP < 1) {
    const sorted = weights.slice().sort().reverse();
    const whole = total ?? sorted.reduce((sum, weight) => sum + weight, 0);
    let sum = 0, last = 0;
    for (; last < sorted.length - 1; last++) if ((sum += sorted[last]) >= params.topP * whole) break;
    const least = sorted[last];
    for (let index = 0; index < weights.length; index++) if (weights[index] < least) weights[index] = 0;
  }
  const goal = random * weights.reduce((sum, weight) => sum + weight, 0);
  let sum = 0;
  for (let index = 0; index < weights.length; index++) if ((sum += weights[index]) > goal) return index;
  return weights.length - 1;
}

/** Returns the value at a place in descending order. @param {Float64Array} values @param {number} place from 1 */
const largest = (values, place) => values.slice().sort()[values.length - place];

/**
 * Returns the token that `draw` returns for the whole row, or null if that takes the whole row.
 * @param {Int32Array} words bits of the largest logit and of the sum of exp(logit - largest), then of the 64
 * largest logits the bits and the token
 */
export function drawFromTop(words, params, random) {
  const floats = new Float32Array(words.buffer, words.byteOffset, words.length);
  const [most, total] = floats;
  // A NaN may have the smallest key of the kernel, but the sum is NaN then.
  if (!Number.isFinite(most) || !Number.isFinite(total)) return -1;
  const pairs = [];
  for (let index = 2; index < words.length; index += 2) pairs.push([words[index + 1], floats[index] - most]);
  pairs.sort((left, right) => left[0] - right[0]);
  const below = Float64Array.from(pairs, ([, value]) => value), count = below.length;
  const lowest = below.reduce((least, value) => Math.min(least, value), 0);
  const closed = lowest < params.drop || (params.topK > 0 && params.topK < count && largest(below, params.topK) > lowest);
  if (closed) return pairs[pick(below, params, random, null)][0];
  // With another filter, top_p refers to a sum over tokens that are not all known here.
  if (params.topP >= 1 || params.scale !== 1 || params.drop > -Infinity || params.topK > 0) return null;
  let sum = 0;
  for (const weight of below.map(Math.exp).sort().reverse()) {
    sum += weight;
    if (Math.abs(sum - params.topP * total) <= MARGIN * total) return null;
  }
  if (sum - Math.exp(lowest) < params.topP * total) return null;
  return pairs[pick(below, params, random, total)][0];
}

/** Changes logits by penalties and biases, as `adjusted` of the Python runtime does, in float32. */
export function adjust(logits, { repetition, frequency, presence, bias }, prompt, counts) {
  if (repetition !== 1)
    for (const token of new Set([...prompt, ...counts.keys()])) {
      const penalty = Math.fround(repetition);
      logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
    }
  if (frequency || presence)
    for (const [token, count] of counts)
      logits[token] -= Math.fround(Math.fround(Math.fround(frequency) * count) + Math.fround(presence));
  for (const [token, added] of bias) logits[token] += Math.fround(added);
}

/** Returns the log-probability of a token and those of the `count` most likely tokens, [token, logprob]. */
export function logprobs(logits, token, count) {
  const most = logits.reduce((best, logit) => Math.max(best, logit), -Infinity);
  const whole = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
  const order = count ? Array.from(logits.keys()).sort((left, right) => logits[right] - logits[left] || left - right) : [];
  return [token, ...order.slice(0, count)].map((own) => [own, logits[own] - whole]);
}

const M128 = (1n << 128n) - 1n, M64 = (1n << 64n) - 1n;

/** Returns four words of entropy as NumPy's SeedSequence mixes them (O'Neill's seed_seq_fe128). */
function seedWords(seed) {
  const entropy = [];
  for (let rest = seed; rest > 0n || !entropy.length; rest >>= 32n) entropy.push(Number(rest & 0xffffffffn));
  let constant = 0x43b0d7e5;
  const hash = (value) => {
    value = Math.imul((value ^ constant) >>> 0, (constant = Math.imul(constant, 0x931e8875)));
    return (value ^ (value >>> 16)) >>> 0;
  };
  const mix = (left, right) => {
    const value = (Math.imul(left, 0xca01f9dd) - Math.imul(right, 0x4973f715)) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: 4 }, (_, index) => hash(entropy[index] ?? 0));
  for (let from = 0; from < 4; from++)
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  let state = 0x8b51f9dd;
  const words = Array.from({ length: 8 }, (_, index) => {
    let value = pool[index % 4] ^ state;
    state = Math.imul(state, 0x58f38ded);
    value = Math.imul(value, state);
    return BigInt((value ^ (value >>> 16)) >>> 0);
  });
  return [0, 2, 4, 6].map((index) => words[index] | (words[index + 1] << 32n));
}

/** The random numbers in [0, 1) of a seed: PCG64 (O'Neill, 2014) as numpy.random.default_rng(seed) draws them. */
export class RandomNumbers {
  /** @param {number | bigint} seed a whole number, of which 64 bits count */
  constructor(seed) {
    const [a, b, c, d] = seedWords(BigInt(seed) & M64);
    this.increment = (((c << 64n) | d) << 1n | 1n) & M128;
    this.state = 0n;
    this.#step();
    this.state = (this.state + ((a << 64n) | b)) & M128;
    this.#step();
  }

  #step() {
    this.state = (this.state * 0x2360ed051fc65da44385df649fccf645n + this.increment) & M128;
  }

  /** Returns the next number. */
  next() {
    this.#step();
    const word = ((this.state >> 64n) ^ this.state) & M64, turn = this.state >> 122n;
    const rotated = ((word >> turn) | (word << (64n - turn))) & M64;
    return Number(rotated >> 11n) / 9007199254740992;
  }
}
