"""OpenAI's request bodies, checked: what this server honours, ignores and refuses. See runtime/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlcbuild_runtime.body import Body, checked_text, wrong
from mlcbuild_runtime.bundle import Serving
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, is_integer
from mlcbuild_runtime.formats import response_format
from mlcbuild_runtime.grammar import Constraint
from mlcbuild_runtime.messages import messages
from mlcbuild_runtime.sampling import Sampling
from mlcbuild_runtime.template import Message
from mlcbuild_runtime.tools import Toolbox, toolbox

COMMON: tuple[str, ...] = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n")
COMMON += ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos")
COMMON += ("stop", "stream", "stream_options", "logprobs", "priority", "response_format")
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
CHAT += ("tools", "tool_choice", "parallel_tool_calls")
COMPLETION = (*COMMON, "prompt", "echo")

IGNORED: tuple[str, ...] = ("metadata", "prompt_cache_key", "prompt_cache_retention")
IGNORED += ("safety_identifier", "service_tier", "store", "user")
"""Fields of OpenAI's that do not change the text."""

NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields whose meaning this server cannot honour, with the values that ask for nothing."""

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Answers to one request: prompts times `n`."""
MAX_BIASES = 1024


@dataclass(frozen=True)
class Options:
    """What both endpoints have in common."""

    sampling: Sampling
    stop: tuple[str, ...]
    max_tokens: int | None
    logprobs: int | None
    """Alternatives to report for each token; None: no log-probabilities."""
    constraint: Constraint | None
    n: int
    ignore_eos: bool
    priority: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatCall:
    messages: tuple[Message, ...]
    toolbox: Toolbox | None
    template_options: Mapping[str, Json]
    options: Options


@dataclass(frozen=True)
class CompletionCall:
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    options: Options


def chat_call(body: Mapping[str, Json], serving: Serving) -> ChatCall:
    """A body of /v1/chat/completions. Raises RequestError, naming the field."""
    fields = Body(body, (*CHAT, *IGNORED), NEUTRAL)
    old, new = fields.integer("max_tokens", 1), fields.integer("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}: send one of them",
            param="max_completion_tokens",
        )
    alternatives = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = fields.boolean("logprobs")
    if alternatives is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    options = _options(fields, serving, new or old, (alternatives or 0) if wanted else None)
    box = toolbox(fields)
    if box is not None and options.constraint is not None:
        raise RequestError("tools and response_format are two constraints: send one", param="response_format")
    return ChatCall(messages(fields), box, fields.object("chat_template_kwargs"), options)


def completion_call(body: Mapping[str, Json], serving: Serving) -> CompletionCall:
    """A body of /v1/completions. Raises RequestError, naming the field."""
    fields = Body(body, (*COMPLETION, *IGNORED), NEUTRAL)
    logprobs, echo = fields.integer("logprobs", 0, MAX_LOGPROBS), fields.boolean("echo")
    if echo and logprobs is not None:
        raise RequestError("echo has no logprobs of the prompt: leave one of them out", param="echo")
    options = _options(fields, serving, fields.integer("max_tokens", 1), logprobs)
    prompts = _prompts(fields.get("prompt"))
    if len(prompts) * options.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {options.n} are more than {MAX_CHOICES} answers", param="prompt"
        )
    return CompletionCall(prompts, echo, options)


def _options(body: Body, serving: Serving, max_tokens: int | None, logprobs: int | None) -> Options:
    stream, stream_options = body.boolean("stream"), body.get("stream_options")
    if stream_options is not None and not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return Options(
        sampling=_sampling(body, serving),
        stop=_stop(body.get("stop")),
        max_tokens=max_tokens,
        logprobs=logprobs,
        constraint=response_format(body.get("response_format")),
        n=body.integer("n", 1, MAX_CHOICES) or 1,
        ignore_eos=body.boolean("ignore_eos"),
        priority=body.integer("priority", -1000, 1000) or 0,
        stream=stream,
        include_usage=_include_usage(stream_options),
    )


def _sampling(body: Body, serving: Serving) -> Sampling:
    temperature, top_p = body.number("temperature", 0, 2), body.number("top_p", 0, 1)
    top_k = body.integer("top_k", 0)
    if temperature is None:
        temperature = 1.0 if serving.temperature is None else serving.temperature
    if top_p is None:
        top_p = 1.0 if serving.top_p is None else serving.top_p
    if top_k is None:
        top_k = serving.top_k or 0
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=body.number("min_p", 0, 1) or 0.0,
        seed=body.integer("seed", -(1 << 63), (1 << 63) - 1),
        frequency_penalty=body.number("frequency_penalty", -2, 2) or 0.0,
        presence_penalty=body.number("presence_penalty", -2, 2) or 0.0,
        repetition_penalty=body.number("repetition_penalty", 0.01, 100) or 1.0,
        bias=_bias(body.object("logit_bias")),
    )


def _bias(found: Mapping[str, Json]) -> tuple[tuple[int, float], ...]:
    wanted = f"an object of at most {MAX_BIASES} tokens, each with a number from -100 to 100"
    if len(found) > MAX_BIASES:
        raise wrong("logit_bias", wanted, f"{len(found)} tokens")
    biases = []
    for token, bias in found.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not number or not token.isascii() or not token.isdecimal() or len(token) > 9:
            raise wrong("logit_bias", wanted, {token: bias})
        assert isinstance(bias, int | float)
        biases.append((int(token), float(bias)))
    return tuple(biases)


def _stop(found: Json) -> tuple[str, ...]:
    if found is None:
        return ()
    listed = [found] if isinstance(found, str) else found
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise wrong("stop", f"a string or a list of at most {MAX_STOPS} strings", found)
    texts = []
    for item in listed:
        if not isinstance(item, str) or not item:
            raise wrong("stop", "made of non-empty strings", found)
        texts.append(checked_text("stop", item))
    return tuple(texts)


def _prompts(found: Json) -> tuple[str | tuple[int, ...], ...]:
    listed = found if isinstance(found, list) and found and isinstance(found[0], str | list) else [found]
    return tuple(_prompt(item, found) for item in listed)


def _prompt(item: Json, found: Json) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return checked_text("prompt", item)
    if isinstance(item, list):
        tokens = tuple(token for token in item if is_integer(token) and 0 <= token < 1 << 31)
        if len(tokens) == len(item):
            return tokens
    raise wrong("prompt", "a text, a list of tokens, or a list of these", found)


def _include_usage(value: Json) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not isinstance(value.get("include_usage", False), bool):
        raise wrong("stream_options", 'an object such as {"include_usage": true}', value)
    return value.get("include_usage") is True
