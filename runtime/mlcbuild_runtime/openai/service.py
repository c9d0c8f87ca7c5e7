"""Turns a checked request body into requests for the engine and a reply, for the HTTP server and the Python
API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe, is_integer

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Request, Sink, Ticket
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.openai import api, tools
from mlcbuild_runtime.openai.answer_syntax import answer_syntax
from mlcbuild_runtime.openai.body import Field, RequestBody, Table, boolean, text, wrong
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.chat_documents import Prompt, Reply
from mlcbuild_runtime.openai.foreign_fields import FORMATS
from mlcbuild_runtime.openai.messages import messages
from mlcbuild_runtime.openai.reasoning import template_variables
from mlcbuild_runtime.text import turns
from mlcbuild_runtime.text.tokenizer import check_length

MAX_SCORES = 1 << 19
"""Maximum number of log-probabilities of prompt tokens, for each token its own and those of `logprobs`
alternatives, counted over all prompts of one request and their `n` answers; a request for more is refused. So
many take about 50 MB of memory."""
MAX_DETOKENIZED = 1 << 16
"""Maximum number of tokens in a body of /detokenize, unless the context is longer."""
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions."""
TOKENIZE: Table = {
    "model": api.COMMON["model"],
    "prompt": text("A text, if there are no messages."),
    "messages": api.CHAT["messages"],
    "content": text(
        "The same as `prompt`, under llama.cpp's name: without BOS unless `add_special` is true."
    ),
    "add_special": boolean("Whether BOS is added to `content` (default: false)."),
    "parse_special": Field(
        {"enum": [True]}, "Whether special tokens in a text are recognized.", neutral=True
    ),
    "with_pieces": boolean(
        "Whether each token is an object with `id` and `piece`, which is a text or bytes."
    ),
    "add_special_tokens": boolean("Whether BOS is added, if the tokenizer adds one (default: true)."),
    "chat_template_kwargs": api.CHAT["chat_template_kwargs"],
}
DETOKENIZE: Table = {
    "model": api.COMMON["model"],
    "tokens": Field(
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        f"At most {MAX_DETOKENIZED}, or as many as the context has.",
    ),
}


@dataclass(frozen=True)
class CompletionJob:
    """A checked request for a chat or text completion: the requests for the engine, and the reply that their
    events fill."""

    requests: tuple[Request, ...]
    """The requests for the engine, one for each answer."""
    reply: Reply
    stream: bool
    include_usage: bool


def check_model(running: Engine, name: Json) -> None:
    """Raises RequestError (404) if `name` is not this model's name; null matches every model."""
    served_name = running.name
    if name is not None and name != served_name:
        raise RequestError(
            f"the model {describe(name)} is not here: this server has '{served_name}'",
            param="model",
            code="model_not_found",
            status=404,
        )


def serve_in_turn(address: str) -> None:
    """Records the address of the client for which this thread or task works: when several clients wait for
    constraints or chat templates, they are served in turn."""
    turns.client.set(address)


def constrained(body: Mapping[str, Json]) -> bool:
    """Returns True if the body of a chat or completion states a response format or tools, from which a
    constraint on the answer may have to be compiled."""
    return any(body.get(key) for key in ("response_format", "tools", *FORMATS))


def chat(running: Engine, body: Mapping[str, Json]) -> CompletionJob:
    """Returns the requests for the engine, and the reply that they fill, for a body of /v1/chat/completions.
    Raises RequestError for an invalid field, messages that the chat template refuses or for which it fails, a
    constraint that cannot be compiled, a prompt that is too long, or too many requests that wait for the
    template or for a constraint (503); SetupError if a child process for these two cannot be started."""
    call, tokenizer = api.chat_call(body, running.manifest.serving), running.tokenizer
    form, options = Form.of(tokenizer.template.source, tokenizer.vocabulary), call.options
    prompt = rendered(running, call, form)
    tokens = tokenizer.vocabulary.encode(prompt, special=False)
    syntax = answer_syntax(tokenizer, form, prompt)
    options = replace(options, constraint=syntax.constraint(call, tokenizer.vocabulary.leading_space))
    request = _request(running, options, tuple(tokens), message=True)
    if call.prediction:
        request = replace(request, prediction=_predicted(running, call.prediction))
    request = replace(request, shown=tuple((token, name) for name, token in syntax.shown(call).items()))
    prompts = [Prompt(0, len(tokens), reader=syntax.reader(call))]
    return _job(running, options, [request], prompts, chat=True)


def rendered(running: Engine, call: api.ChatCall, form: Form) -> str:
    """Returns the prompt of a chat as text: its messages and tools in the bundle's chat template. form:
    syntax of tool calls in the template. Raises RequestError if there is no template, if it refuses the
    messages or fails, if the prompt is too long, or if too many requests wait (503); SetupError if no child
    process can be started."""
    listed, box = call.messages, call.toolbox
    extra = {**template_variables(call.effort, call.enable_thinking), **call.template_options}
    if not form.native:
        return running.tokenizer.rendered(tools.in_words(listed, box, form), extra, running.longest_text)
    if box is not None:
        extra["tools"] = tools.documents(box)
    return running.tokenizer.rendered(tools.numbered(listed, form), extra, running.longest_text)


def completion(running: Engine, body: Mapping[str, Json]) -> CompletionJob:
    """Returns the requests for the engine, and the reply that they fill, for a body of /v1/completions.
    Raises RequestError for an invalid field, a constraint that cannot be compiled or for which too many
    requests wait (503), prompts that are too long, or too many log-probabilities; SetupError if the child
    process that tries constraints cannot be started."""
    call = api.completion_call(body, running.manifest.serving)
    requests, prompts, total = [], [], 0
    for number, prompt in enumerate(call.prompts):
        tokens = (
            tuple(running.tokenizer.encode(prompt, running.longest_text))
            if isinstance(prompt, str)
            else prompt
        )
        echo = prompt if isinstance(prompt, str) else running.tokenizer.decode(tokens) if call.echo else ""
        request = _request(running, call.options, tokens, message=False)
        if request.max_tokens is None:
            room = running.manifest.limits.context_window - len(tokens)
            request = replace(request, max_tokens=max(1, min(COMPLETION_TOKENS, room)))
        shown = Prompt(number, len(tokens), echo if call.echo else "")
        if call.echo and request.logprobs is not None:
            request = replace(request, prompt_logprobs=True)
            shown = replace(shown, tokens=tokens, offsets=running.tokenizer.offsets(tokens))
        requests.append(request)
        prompts.append(shown)
        total += len(tokens)
        if number:
            api.check_total("prompt", total, running.manifest.limits.context_window)
    scores = (
        sum(len(prompt.tokens) for prompt in prompts) * call.options.n * ((call.options.logprobs or 0) + 1)
    )
    if scores > MAX_SCORES:
        raise RequestError(
            f"logprobs with echo may return at most {MAX_SCORES} log-probabilities of prompts, found"
            f" {scores}: send fewer prompts, or a smaller logprobs or n",
            param="logprobs",
        )
    return _job(running, call.options, requests, prompts, chat=False)


def _predicted(running: Engine, text: str) -> tuple[int, ...]:
    """Returns the tokens of the answer that a client expects ("predicted outputs" in OpenAI's API), which are
    drafted for speculative decoding; at most as many as the model's context has. text: the expected
    answer."""
    tokens = running.tokenizer.vocabulary.encode(text[: running.longest_text], special=False)
    return tuple(tokens[: running.manifest.limits.context_window])


def submit(running: Engine, requests: Sequence[Request], sinks: Sequence[Sink], window: int) -> list[Ticket]:
    """Submits all of `requests` to the engine and returns their tickets. sinks: one function for each
    request, which receives its events; window: number of unread events at which a request pauses. Raises
    RequestError if the queue is full, a request does not fit the model or the engine is draining, EngineError
    if the engine is stopped; the requests that were submitted before are then cancelled."""
    tickets: list[Ticket] = []
    try:
        for request, sink in zip(requests, sinks, strict=True):
            tickets.append(running.submit(request, sink, window))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


def tokenize(running: Engine, body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the response to a request to /tokenize: {"tokens": tokens of the text in `prompt` or `content`,
    or of the chat in `messages`, "count": their number, "max_model_len": tokens of the context}. With
    `with_pieces` each token is {"id": its number, "piece": its text, or a list of bytes if they are only part
    of a character}. Raises RequestError for an invalid field, messages that the template refuses, or a text
    that is too long, SetupError if no child process can be started."""
    fields = RequestBody(body, TOKENIZE)
    special, tokenizer = fields.boolean("add_special_tokens", default=True), running.tokenizer
    prompt = fields.text("prompt")
    if prompt is None and (content := fields.text("content")) is not None:
        prompt, special = content, fields.boolean("add_special")
    if prompt is None and fields.get("messages") is not None:
        options = fields.object("chat_template_kwargs")
        tokens = tokenizer.chat(messages(fields), options, running.longest_text)
    elif prompt is not None:
        check_length(prompt, running.longest_text)
        tokens = tokenizer.encode(prompt) if special else tokenizer.vocabulary.encode(prompt, special=False)
    else:
        raise wrong("prompt", "a text, if there are no messages", prompt)
    context = running.manifest.limits.context_window
    shown: list[Json] = [*tokens]
    if fields.boolean("with_pieces"):
        shown = [{"id": token, "piece": _piece(running, token)} for token in tokens]
    return {"tokens": shown, "count": len(tokens), "max_model_len": context}


def _piece(running: Engine, token: int) -> Json:
    """Returns the text of a token, or its name if it is a special token; a list of its bytes if they are only
    part of a character."""
    data = running.tokenizer.vocabulary.token_bytes(token)
    try:
        return data.decode() or running.tokenizer.vocabulary.token_name(token)
    except UnicodeDecodeError:
        return list(data)


def detokenize(running: Engine, body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the response to a request to /detokenize, {"prompt": text, "content": the same text}: the text
    of the tokens in its field `tokens`, without special tokens. Raises RequestError for an invalid field."""
    fields = RequestBody(body, DETOKENIZE)
    value, size = fields.get("tokens"), running.manifest.vocab_size
    listed = value if isinstance(value, list) else [None]
    most = max(MAX_DETOKENIZED, running.manifest.limits.context_window)
    if len(listed) > most:
        raise wrong("tokens", f"a list of at most {most} tokens", f"{len(listed)} tokens")
    tokens = [token for token in listed if is_integer(token) and 0 <= token < size]
    if len(tokens) != len(listed):
        raise wrong("tokens", f"a list of tokens from 0 to {size - 1}", value)
    decoded = running.tokenizer.decode(tokens)
    return {"prompt": decoded, "content": decoded}


def _request(
    running: Engine, options: api.GenerationOptions, prompt: tuple[int, ...], message: bool
) -> Request:
    size = running.manifest.vocab_size
    for token, _ in options.sampling.bias:
        if token >= size:
            raise RequestError(
                f"logit_bias names token {token}, but the vocabulary has {size} tokens", param="logit_bias"
            )
    constraint = options.constraint
    return Request(
        prompt=prompt,
        max_tokens=options.max_tokens,
        sampling=_with_ends(running, options),
        stop=options.stop,
        stop_tokens=options.stop_tokens,
        message=message,
        logprobs=options.logprobs,
        constraint=None if constraint is None else running.grammars.compiled(constraint, message),
        ignore_eos=options.ignore_eos,
        speculate=options.speculate,
        priority=options.priority,
    )


def _with_ends(running: Engine, options: api.GenerationOptions) -> Sampling:
    """Returns the sampling parameters of a request. With `min_tokens` they include the tokens that must not
    be sampled before the answer has so many: the end-of-sequence tokens and the request's `stop_tokens`.
    Raises RequestError if `min_tokens` is combined with a constraint: a response format or tools."""
    if not options.sampling.min_tokens:
        return options.sampling
    if options.constraint is not None:
        raise RequestError(
            "min_tokens cannot be combined with a response format or tools, whose grammar may end the answer"
            " earlier: leave min_tokens out, or send no format and no tools (or tool_choice 'none')",
            param="min_tokens",
        )
    ends = {*running.tokenizer.eos, *options.stop_tokens}
    return replace(
        options.sampling, ends=tuple(sorted(end for end in ends if end < running.manifest.vocab_size))
    )


def _job(
    running: Engine,
    options: api.GenerationOptions,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    chat: bool,
) -> CompletionJob:
    """Returns the requests for the engine and the reply that they fill, with `options.n` answers to each
    prompt: first all answers to the first prompt. requests, prompts: for each prompt, the request of one
    answer, and the properties of the prompt that the reply needs; chat: True for chat completions, False for
    text completions."""
    each = [(request, choice) for request in requests for choice in range(options.n)]
    answers = tuple(
        replace(request, sampling=replace(request.sampling, choice=choice)) for request, choice in each
    )
    shown = [prompt for prompt in prompts for _ in range(options.n)]
    reply = Reply(chat, running.name, running.tokenizer.vocabulary, shown)
    return CompletionJob(answers, reply, options.stream, options.include_usage)
