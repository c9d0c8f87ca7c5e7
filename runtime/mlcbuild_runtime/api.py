"""OpenAI's request bodies, checked: what this server honours, ignores and refuses. See runtime/README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from mlcbuild_runtime.bundle import Serving
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, describe, is_integer
from mlcbuild_runtime.sampling import Sampling
from mlcbuild_runtime.template import Message

COMMON: tuple[str, ...] = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
COMMON += ("stop", "stream", "stream_options", "logprobs")
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
COMPLETION = (*COMMON, "prompt")

IGNORED: tuple[str, ...] = ("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention")
IGNORED += ("safety_identifier", "service_tier", "store", "user")
"""Fields of OpenAI's that do not change the text."""

NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields whose meaning this server cannot honour, with the values that ask for nothing."""

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 16
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Options:
    """What both endpoints have in common."""

    sampling: Sampling
    stop: tuple[str, ...]
    max_tokens: int | None
    logprobs: int | None
    """Alternatives to report for each token; None: no log-probabilities."""
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatCall:
    messages: tuple[Message, ...]
    template_options: Mapping[str, Json]
    options: Options


@dataclass(frozen=True)
class CompletionCall:
    prompt: str | tuple[int, ...]
    options: Options


def parse_body(data: bytes) -> dict[str, Json]:
    """The JSON object of a request. Raises RequestError; NaN and Infinity are not JSON."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, found {describe(body)}")
    return body


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def chat_call(body: Mapping[str, Json], serving: Serving) -> ChatCall:
    """A body of /v1/chat/completions. Raises RequestError, naming the field."""
    fields = _Body(body, CHAT)
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
    options = fields.options(serving, new or old, (alternatives or 0) if wanted else None)
    return ChatCall(fields.messages(), fields.template_options(), options)


def completion_call(body: Mapping[str, Json], serving: Serving) -> CompletionCall:
    """A body of /v1/completions. Raises RequestError, naming the field."""
    fields = _Body(body, COMPLETION)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    return CompletionCall(fields.prompt(), fields.options(serving, fields.integer("max_tokens", 1), logprobs))


class _Body:
    """Typed access to a body. null means absent. Every accessor raises RequestError, naming the field."""

    def __init__(self, body: Mapping[str, Json], known: tuple[str, ...]) -> None:
        self._values = {key: value for key, value in body.items() if value is not None}
        for key, value in self._values.items():
            if key in NEUTRAL:
                _check_neutral(key, value)
            elif key not in known and key not in IGNORED:
                close = get_close_matches(key, known, n=1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise RequestError(f"unknown field '{key}'{hint}", param=key, code="unknown_field")

    def options(self, serving: Serving, max_tokens: int | None, logprobs: int | None) -> Options:
        stream_options = self._values.get("stream_options")
        stream = self.boolean("stream")
        if stream_options is not None and not stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return Options(
            sampling=self._sampling(serving),
            stop=self._stop(),
            max_tokens=max_tokens,
            logprobs=logprobs,
            stream=stream,
            include_usage=_include_usage(stream_options),
        )

    def _sampling(self, serving: Serving) -> Sampling:
        temperature, top_p = self._number("temperature", 0, 2), self._number("top_p", 0, 1)
        top_k, min_p = self.integer("top_k", 0), self._number("min_p", 0, 1)
        if temperature is None:
            temperature = 1.0 if serving.temperature is None else serving.temperature
        if top_p is None:
            top_p = 1.0 if serving.top_p is None else serving.top_p
        if top_k is None:
            top_k = serving.top_k or 0
        seed = self.integer("seed", -(1 << 63), (1 << 63) - 1)
        return Sampling(temperature, top_p, top_k, min_p or 0.0, seed)

    def _stop(self) -> tuple[str, ...]:
        found = self._values.get("stop", [])
        listed = [found] if isinstance(found, str) else found
        if not isinstance(listed, list) or len(listed) > MAX_STOPS:
            raise _wrong("stop", f"a string or a list of at most {MAX_STOPS} strings", found)
        texts = []
        for item in listed:
            if not isinstance(item, str) or not item:
                raise _wrong("stop", "made of non-empty strings", found)
            texts.append(_text("stop", item))
        return tuple(texts)

    def prompt(self) -> str | tuple[int, ...]:
        found = self._values.get("prompt")
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
            found = found[0]
        if isinstance(found, str):
            return _text("prompt", found)
        if isinstance(found, list):
            tokens = tuple(item for item in found if is_integer(item) and 0 <= item < 1 << 31)
            if len(tokens) == len(found):
                return tokens
        raise _wrong("prompt", "one text or one list of tokens", found)

    def messages(self) -> tuple[Message, ...]:
        found = self._values.get("messages")
        if not isinstance(found, list) or not found:
            raise _wrong("messages", "a list of at least one message", found)
        return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(found))

    def template_options(self) -> dict[str, Json]:
        found = self._values.get("chat_template_kwargs", {})
        if not isinstance(found, dict):
            raise _wrong("chat_template_kwargs", "an object", found)
        return found

    def integer(self, key: str, low: int, high: int = (1 << 31) - 1) -> int | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise _wrong(key, f"an integer from {low} to {high}", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value

    def _number(self, key: str, low: float, high: float) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _wrong(key, f"a number from {low:g} to {high:g}", value)
        return float(value)


def _check_neutral(key: str, value: Json) -> None:
    allowed = NEUTRAL[key]
    if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        return
    other = f" or send {' or '.join(json.dumps(item) for item in allowed)}" if allowed else ""
    raise RequestError(
        f"{key} is {describe(value)}, which this server cannot honour: leave it out{other}",
        param=key,
        code="unsupported_field",
    )


def _include_usage(value: Json) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not isinstance(value.get("include_usage", False), bool):
        raise _wrong("stream_options", 'an object such as {"include_usage": true}', value)
    return value.get("include_usage") is True


def _message(where: str, message: Json) -> Message:
    """Role and content of one message; parts of text are joined."""
    if not isinstance(message, dict):
        raise _wrong(where, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for key, value in message.items():
        if key not in ("role", "content", "name", "refusal", "annotations") and value not in (None, []):
            raise RequestError(
                f"{where}.{key} is {describe(value)}, which this server cannot honour: leave it out",
                param=f"{where}.{key}",
                code="unsupported_field",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", "a text or a list of parts", content)
    # `developer` is OpenAI's newer name of `system`, which templates do not know.
    name = "system" if role == "developer" else str(role)
    return {"role": name, "content": _text(f"{where}.content", content)}


def _part(where: str, part: Json) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _wrong(where, 'a part such as {"type": "text", "text": "..."}: this model reads text only', part)


def _text(where: str, text: str) -> str:
    r"""Refuses halves of surrogate pairs: JSON can write them ("\ud800"), UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds half of a surrogate pair at character {error.start}, which is no text",
            param=where,
        ) from None
    return text


def _wrong(key: str, wanted: str, found: Json) -> RequestError:
    what = "it is missing" if found is None else f"found {describe(found)}"
    return RequestError(f"{key} must be {wanted}; {what}", param=key)
