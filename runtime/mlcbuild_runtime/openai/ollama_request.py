"""Checks the request bodies of Ollama's /api, and converts those of chats and completions, with messages,
options and formats, to bodies of OpenAI's API."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime.openai import api, tools
from mlcbuild_runtime.openai.body import (
    Field,
    RequestBody,
    Table,
    boolean,
    ignored,
    integer,
    neutral,
    number,
    structure,
    text,
    wrong,
)

_MESSAGE: Json = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null"]},
        "thinking": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object", "required": ["function"]}},
        "tool_name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
_EFFORTS = ("low", "medium", "high")
_THINK: dict[str, Json] = {"anyOf": [{"type": "boolean"}, {"enum": [*_EFFORTS]}]}
_FORMAT: dict[str, Json] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}
MODEL: Table = {"model": text("The name of a model of /api/tags, with or without ':latest'.")}
_COMMON: Table = {
    **MODEL,
    "stream": boolean(
        "Whether each piece of the answer is sent as a line of JSON when it is ready (default: true)."
    ),
    "format": Field(_FORMAT, "json, or a JSON schema."),
    "options": structure("Sampling parameters; num_ctx is accepted up to the model's context."),
    "think": Field(_THINK, "Whether the model reasons first, or how much."),
    **ignored("keep_alive", "logprobs", "top_logprobs"),
}
CHAT: Table = {
    **_COMMON,
    "messages": Field(
        {"type": "array", "items": _MESSAGE}, "The chat so far; without messages the model is only loaded."
    ),
    "tools": Field(tools.TOOLS, "Functions that the answer may call."),
}
GENERATE: Table = {
    **_COMMON,
    "prompt": text("The message of a user; without one the model is only loaded."),
    "system": text("A system message."),
    "raw": boolean("True if the prompt is a text to continue, without the chat template."),
    **neutral(context=([],), images=([],), suffix=("",), template=("",)),
}
EMBED: Table = {
    **MODEL,
    "input": Field({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "Texts."),
    "truncate": boolean("Cut texts that are too long (default: true), instead of refusing them."),
    "dimensions": integer(1, about="Number of values of each vector to return."),
    **ignored("keep_alive", "options"),
}
EMBEDDING: Table = {**MODEL, "prompt": text("A text."), **ignored("keep_alive", "options")}
SHOW: Table = {**MODEL, "name": text("As model."), **ignored("verbose", "system", "template", "options")}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "stop")
OPTIONS: Table = {
    **{name: api.COMMON[name] for name in _SAME},
    "temperature": number(0, 2),
    "top_k": integer(-1),
    "seed": integer(-(1 << 63), (1 << 63) - 1),
    "num_predict": integer(-2),
    "num_ctx": integer(0),
    "repeat_penalty": api.SAMPLING["repetition_penalty"],
    **ignored("f16_kv", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_keep", "num_thread", "numa"),
    **ignored("penalize_newline", "repeat_last_n", "use_mlock", "use_mmap", "vocab_only", "logits_all"),
    **ignored("mirostat_eta", "mirostat_tau"),
    **neutral(mirostat=(0,), tfs_z=(1,), typical_p=(1,)),
}
"""Name of a field in `options` of Ollama's API -> the field's type, bounds and description."""


def model_name(body: Mapping[str, Json]) -> Json:
    """Returns the name of the model in a body of Ollama's API (`model`, or else `name`), without the tag
    ":latest"; None if both are absent or empty, which stands for the first model. Raises RequestError if the
    name is not a text."""
    for field in ("model", "name"):
        name = body.get(field)
        if name is not None and not isinstance(name, str):
            raise wrong(field, "a text", name)
        if name:
            return name.removesuffix(":latest")
    return None


def chat_body(body: Mapping[str, Json], context: int) -> dict[str, Json]:
    """Returns the body of a chat completion that means the same as a body of Ollama's /api/chat. Raises
    RequestError for an invalid field, naming it.

    context: number of tokens of the model's context, which `num_ctx` must not exceed.
    """
    fields = RequestBody(body, CHAT)
    listed = fields.get("messages")
    if not isinstance(listed, list):
        raise wrong("messages", "a list of messages", listed)
    calls = _OpenCalls()
    messages: list[Json] = [_message(f"messages[{i}]", message, calls) for i, message in enumerate(listed)]
    return {**_common(fields, context), "messages": messages, "tools": fields.get("tools"), **_think(fields)}


def generate_body(body: Mapping[str, Json], context: int, has_template: bool) -> dict[str, Json]:
    """Returns the request body that means the same as a body of Ollama's /api/generate. It is a text
    completion if `raw` is true or the model has no chat template, and its prompt then begins with the
    `system` text, if any, on lines of its own; else it is a chat completion, with a system message. Raises
    RequestError for an invalid field, naming it.

    context: number of tokens of the model's context, which `num_ctx` must not exceed. has_template: True if
    the model has a chat template."""
    fields = RequestBody(body, GENERATE)
    prompt, system = fields.text("prompt") or "", fields.text("system")
    common = _common(fields, context)
    if fields.boolean("raw") or not has_template:
        return {**common, "prompt": prompt if not system else f"{system}\n{prompt}"}
    messages: list[Json] = [] if not system else [{"role": "system", "content": system}]
    return {**common, "messages": [*messages, {"role": "user", "content": prompt}], **_think(fields)}


def _common(fields: RequestBody, context: int) -> dict[str, Json]:
    """Returns the fields that requests to Ollama's /api/chat and /api/generate have in common (`stream`,
    `options`, `format`), converted to OpenAI's. context: number of tokens of the model's context, which
    `num_ctx` must not exceed. Raises RequestError for an invalid field."""
    common: dict[str, Json] = {"stream": fields.boolean("stream", default=True)}
    options = RequestBody(_named(fields.object("options")), OPTIONS)
    window = options.integer("num_ctx")
    if window is not None and window > context:
        raise RequestError(
            f"options.num_ctx is {window}, and the model was built for {context} tokens: leave it out, or"
            " build a bundle with a larger compile.context_window",
            param="options.num_ctx",
        )
    for name in _SAME:
        if options.get(name) is not None:
            common[name] = options.get(name)
    if options.integer("top_k") == -1:
        common["top_k"] = 0
    if (penalty := options.get("repeat_penalty")) is not None:
        common["repetition_penalty"] = penalty
    if (count := options.integer("num_predict")) is not None and count > 0:
        common["max_tokens"] = count
    match fields.get("format"):
        case None | "":
            pass
        case "json":
            common["response_format"] = {"type": "json_object"}
        case dict() as schema:
            common["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case other:
            raise wrong("format", '"json" or a JSON schema', other)
    return common


def _named(options: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a copy of the object `options` of a request to Ollama's API, whose values are not checked here.
    Raises RequestError for an option that this server does not have, naming it as options.NAME."""
    for name in options:
        if name not in OPTIONS:
            raise RequestError(
                f"options.{name[:60]} is unknown: this server has {', '.join(sorted(OPTIONS))}",
                param=f"options.{name[:60]}",
                code="unknown_field",
            )
    return dict(options)


def _think(fields: RequestBody) -> dict[str, Json]:
    match fields.get("think"):
        case None:
            return {}
        case bool() as enabled:
            return {"enable_thinking": enabled}
        case str() as effort if effort in _EFFORTS:
            return {"reasoning_effort": effort}
        case other:
            raise wrong("think", f"true, false or one of {', '.join(_EFFORTS)}", other)


class _OpenCalls:
    """The tool calls of a chat that have no result yet. The time of each method does not depend on the number
    of calls: one body may hold a hundred thousand calls and results."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        """Id of a tool call that has no result yet -> name of the called function, in the order of the calls.
        """
        self._ids: defaultdict[str, deque[str]] = defaultdict(deque)
        """Name of a function -> ids of its tool calls in their order; those that `_names` lacks have a result
        already."""
        self._count = 0
        """Number of tool calls that were added to the conversation, including those with a result."""

    def add(self, name: str, id: str | None) -> str:
        """Adds a call of the function `name` to the tool calls of a chat that have no result yet. Returns its
        id: `id`, or a new one for None or "", nine digits: Mistral's chat templates refuse others."""
        id = id or f"{self._count:09d}"
        self._count += 1
        self._names[id] = name
        self._ids[name].append(id)
        return id

    def take(self, id: str) -> str | None:
        """Removes the tool call with this id from the chat's calls without a result, and returns the id; None
        if there is no such call."""
        return None if self._names.pop(id, None) is None else id

    def take_name(self, name: str) -> str | None:
        """Removes the first call of the function `name` from the chat's tool calls without a result, and
        returns the call's id; None if there is no such call."""
        ids = self._ids.get(name, ())
        while ids:
            if (id := self.take(ids.popleft())) is not None:
                return id
        return None

    def take_first(self) -> str | None:
        """Removes the first one of the chat's tool calls without a result, and returns its id; None if there
        is none."""
        return self._names.popitem(last=False)[0] if self._names else None


def _message(where: str, message: Json, calls: _OpenCalls) -> Json:
    """Returns a message of an Ollama chat as an OpenAI chat message. calls: the tool calls that have no
    result yet; those of this message are added to it, and if the message is the result of a call, that call
    is removed. where: the message's place in the request, for errors. Raises RequestError for an invalid
    message."""
    fields = message if isinstance(message, dict) else {}
    role = fields.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise wrong(where, "an object with a role (system, user, assistant, tool) and content", message)
    if fields.get("images"):
        raise RequestError(
            f"{where}.images: this model reads text only: leave them out",
            param=f"{where}.images",
            code="unsupported_field",
        )
    converted: dict[str, Json] = {"role": role, "content": fields.get("content") or ""}
    if role == "tool":
        converted["tool_call_id"] = _answered(fields, calls)
    elif role == "assistant":
        converted["reasoning_content"] = fields.get("thinking")
        listed = fields.get("tool_calls") or []
        if not isinstance(listed, list):
            raise wrong(f"{where}.tool_calls", "a list of calls", listed)
        if listed:
            converted["tool_calls"] = [
                _call(f"{where}.tool_calls[{i}]", call, calls) for i, call in enumerate(listed)
            ]
    return converted


def _call(where: str, call: Json, calls: _OpenCalls) -> Json:
    match call:
        case {"function": {"name": str(name), "arguments": dict() as arguments}}:
            stated = call.get("id") if isinstance(call, dict) else None
            id = calls.add(name, stated if isinstance(stated, str) else None)
            function: Json = {"name": name, "arguments": json.dumps(arguments)}
            return {"id": id, "type": "function", "function": function}
    raise wrong(where, 'a call such as {"function": {"name": ..., "arguments": {}}}', call)


def _answered(fields: Mapping[str, Json], calls: _OpenCalls) -> Json:
    """Returns the id of the tool call to which a tool's message is the result: the call with the id or the
    tool name that the message states or, if it states neither, the first call without a result. If there is
    no such call, returns the stated id, or else the stated name in its place, or else "". calls: the chat's
    calls without a result, from which the call is removed; fields: the message. Raises RequestError for an id
    or a name that is no text."""
    for key, take in (
        ("tool_call_id", calls.take),
        ("tool_name", calls.take_name),
        ("name", calls.take_name),
    ):
        if (value := fields.get(key)) is not None:
            if not isinstance(value, str):
                raise wrong(key, "a text", describe(value))
            return take(value) or value
    return calls.take_first() or ""


class EmbeddingInput(NamedTuple):
    """The fields of a request for embeddings to Ollama's API: the texts, and how they are converted."""

    texts: list[Json]
    truncate: bool
    """True if texts longer than the context are cut instead of refused."""
    dimensions: int | None
    """Number of values of each embedding; None: all."""


def embed_input(body: Mapping[str, Json]) -> EmbeddingInput:
    """Returns the texts in a body of Ollama's /api/embed, with its `truncate` (True by default) and its
    `dimensions`. Raises RequestError for a wrong or unknown field, and for an empty text."""
    fields = RequestBody(body, EMBED)
    truncate, dimensions = fields.boolean("truncate", default=True), fields.integer("dimensions")
    value = fields.get("input")
    texts: list[Json] = value if isinstance(value, list) else [value]
    for item in texts:
        if not isinstance(item, str):
            raise wrong("input", "a text or a list of texts", item)
        if not item:
            raise _empty("input")
    return EmbeddingInput(texts, truncate, dimensions)


def embedding_input(body: Mapping[str, Json]) -> EmbeddingInput:
    """Returns the single text in a body of Ollama's /api/embeddings, which is cut if it is too long and gets
    all dimensions. Raises RequestError for a wrong or unknown field, and for an absent or empty text."""
    prompt = RequestBody(body, EMBEDDING).text("prompt")
    if prompt is None:
        raise wrong("prompt", "a text", None)
    if not prompt:
        raise _empty("prompt")
    return EmbeddingInput([prompt], True, None)


def _empty(field: str) -> RequestError:
    return RequestError(f"{field} has an empty text, which has no embedding", param=field)
