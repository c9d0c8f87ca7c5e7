/** OpenAI's chat completions over an Engine: checks requests, and writes chunks and completions. */
import { EngineError, shown } from "./errors.js";
import { samplingParams } from "./sampling.js";

const MAX_STOPS = 16;

const refuse = (field, rule, value) => {
  throw new EngineError(`${field} must be ${rule}, found ${shown(value)}`, "bad_request");
};

function number(request, field, minimum, maximum, fallback, whole = false) {
  const value = request[field] ?? fallback;
  if (value === fallback) return value;
  const isRight = typeof value === "number" && value >= minimum && value <= maximum && (!whole || Number.isSafeInteger(value));
  return isRight ? value : refuse(field, `${whole ? "a whole number" : "a number"} from ${minimum} to ${maximum}`, value);
}

function flag(request, field) {
  const value = request[field] ?? false;
  return typeof value === "boolean" ? value : refuse(field, "true or false", value);
}

const FIELDS = [
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens",
  "max_completion_tokens", "stop", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty",
  "repetition_penalty", "logit_bias", "chat_template_kwargs", "n", "signal", "user",
  "response_format",
];

function messagesOf(value) {
  if (!Array.isArray(value) || !value.length) refuse("messages", "a list with at least one message", value);
  return value.map((message, index) => {
    if (typeof message?.role !== "string") refuse(`messages[${index}].role`, "a text", message?.role);
    let { content } = message;
    if (Array.isArray(content)) {
      const other = content.find((part) => part?.type !== "text" || typeof part.text !== "string");
      if (other) refuse(`messages[${index}].content`, "text, since this model reads nothing else", other);
      content = content.map((part) => part.text).join("");
    }
    if (typeof content !== "string") refuse(`messages[${index}].content`, "a text", content);
    return { ...message, content };
  });
}

/** Returns a request with its defaults, checked. @param {object} defaults sampling defaults of the bundle */
function checked(request, defaults, vocab) {
  const unknown = Object.keys(request).find((field) => !FIELDS.includes(field));
  if (unknown) throw new EngineError(`unknown field '${unknown}': this engine knows ${FIELDS.join(", ")}`, "bad_request");
  if ((request.n ?? 1) !== 1) refuse("n", "1", request.n);
  const stop = [request.stop ?? []].flat();
  if (stop.length > MAX_STOPS || stop.some((text) => typeof text !== "string" || !text))
    refuse("stop", `at most ${MAX_STOPS} texts, none of them empty`, request.stop);
  const wantsLogprobs = flag(request, "logprobs"), top = number(request, "top_logprobs", 0, 20, 0, true);
  const bias = Object.entries(request.logit_bias ?? {}).map(([token, value]) => [Number(token), value]);
  for (const [token, value] of bias)
    if (!Number.isInteger(token) || token < 0 || token >= vocab || typeof value !== "number" || Math.abs(value) > 100)
      refuse("logit_bias", `an object of tokens below ${vocab} with numbers from -100 to 100`, request.logit_bias);
  const penalties = {
    repetition: number(request, "repetition_penalty", 0.01, 100, 1),
    frequency: number(request, "frequency_penalty", -2, 2, 0),
    presence: number(request, "presence_penalty", -2, 2, 0),
    bias,
  };
  return {
    messages: messagesOf(request.messages),
    stream: flag(request, "stream"),
    includeUsage: flag(request.stream_options ?? {}, "include_usage"),
    limit: number(request, request.max_completion_tokens == null ? "max_tokens" : "max_completion_tokens", 1, 2 ** 31 - 1, Infinity, true),
    stop,
    signal: request.signal,
    options: request.chat_template_kwargs ?? {},
    sampling: {
      params: samplingParams({
        temperature: number(request, "temperature", 0, 2, defaults.temperature ?? 1),
        topP: number(request, "top_p", 0, 1, defaults.top_p ?? 1),
        topK: number(request, "top_k", 0, 2 ** 31 - 1, defaults.top_k ?? 0, true),
        minP: number(request, "min_p", 0, 1, 0),
      }),
      seed: number(request, "seed", -Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER, null, true),
      logprobs: wantsLogprobs ? top : null,
      ...penalties,
      adjusts: penalties.repetition !== 1 || penalties.frequency !== 0 || penalties.presence !== 0 || bias.length > 0,
    },
  };
}


/** engine.chat */
export class Chat {
  constructor(engine) {
    this.completions = { create: (request) => this.create(request, engine) };
  }

  /** Returns a completion, or with `stream` an async iterable of chunks. Throws EngineError. */
  async create(request, engine) {
    const own = checked(request, engine.bundle.manifest.defaults, engine.vocab);
    own.sampling.matcher = await engine.matcher(request.response_format);
    const prompt = engine.tokenizer.chat(own.messages, own.options);
    if (!prompt.length) throw new EngineError("the chat template wrote an empty prompt", "bad_request");
    const stray = prompt.find((token) => token >= engine.vocab);
    if (stray !== undefined)
      throw new EngineError(`the prompt does not fit the model: token ${stray} is outside the vocabulary of ${engine.vocab} tokens`, "bad_request");
    if (prompt.length >= engine.context)
      throw new EngineError(`the prompt has ${prompt.length} tokens, and the context has room for ${engine.context}: shorten it`, "context_length_exceeded");
    const about = { id: `chatcmpl-${crypto.randomUUID().replaceAll("-", "")}`, created: Math.floor(Date.now() / 1000), model: engine.model };
    const parts = engine.exclusively(() => answer(engine, prompt, own));
    return own.stream ? chunks(parts, about, own) : completion(parts, about);
  }
}

/** Yields {text, logprobs} and at last {finish, usage}. */
async function* answer(engine, prompt, own) {
  own.signal?.throwIfAborted();
  const stream = engine.tokenizer.stream(own.stop, true);
  let count = 0, finish = "length";
  const isFull = () => count >= own.limit || prompt.length + count >= engine.context;
  for await (const { token, score } of engine.tokens(prompt, own.sampling, own.signal)) {
    if (engine.tokenizer.eos.has(token)) {
      finish = "stop";
      break;
    }
    count += 1;
    const text = stream.push(token), logprobs = score && [entry(engine, score)];
    if (text || logprobs) yield { text, logprobs };
    if (stream.stopped || own.sampling.matcher?.isFinished) finish = "stop";
    if (finish === "stop" || isFull()) break;
  }
  const rest = stream.finish();
  if (rest) yield { text: rest };
  const usage = { prompt_tokens: prompt.length, completion_tokens: count, total_tokens: prompt.length + count };
  yield { finish, usage: { ...usage, prompt_tokens_details: { cached_tokens: engine.reused } } };
}

/** Returns a token's log-probability as OpenAI writes it. */
function entry(engine, [own, ...others]) {
  const form = ([token, logprob]) => {
    const bytes = engine.tokenizer.vocabulary.tokenBytes(token);
    return { token: new TextDecoder().decode(bytes), logprob, bytes: [...bytes] };
  };
  return { ...form(own), top_logprobs: others.map(form) };
}

async function completion(parts, about) {
  let content = "", end, logprobs = null;
  for await (const part of parts) {
    content += part.text ?? "";
    if (part.logprobs) logprobs = { content: [...(logprobs?.content ?? []), ...part.logprobs] };
    if (part.finish) end = part;
  }
  const choice = { index: 0, message: { role: "assistant", content }, logprobs, finish_reason: end.finish };
  return { ...about, object: "chat.completion", choices: [choice], usage: end.usage };
}

async function* chunks(parts, about, own) {
  const base = { ...about, object: "chat.completion.chunk" };
  const chunk = (delta, finish = null, logprobs = null) => ({ ...base, choices: [{ index: 0, delta, logprobs, finish_reason: finish }] });
  yield chunk({ role: "assistant", content: "" });
  for await (const { text, logprobs, finish, usage } of parts) {
    if (!finish) yield chunk({ content: text }, null, logprobs ? { content: logprobs } : null);
    else {
      yield chunk({}, finish);
      if (own.includeUsage) yield { ...base, choices: [], usage };
    }
  }
}

