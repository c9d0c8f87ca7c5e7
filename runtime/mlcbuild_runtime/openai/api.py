"""Reads OpenAI's request bodies: the fields that are honoured, ignored or refused. See runtime/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, is_integer

from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.openai import response_format
from mlcbuild_runtime.openai.body import (
    MAX_INTEGER,
    Field,
    RequestBody,
    Table,
    boolean,
    checked_text,
    choice,
    ignored,
    integer,
    neutral,
    number,
    structure,
    text,
    wrong,
)
from mlcbuild_runtime.openai.foreign_fields import checked, translated
from mlcbuild_runtime.openai.messages import CONTENT, MESSAGES, content_text, messages
from mlcbuild_runtime.openai.reasoning import EFFORTS
from mlcbuild_runtime.openai.tools import TOOL_CHOICE, TOOLS, Toolbox, toolbox
from mlcbuild_runtime.text.chat_template import Message

MAX_STOPS, MAX_STOP = 16, 4096
"""Maximum number of stop texts, and maximum characters of each."""
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Maximum answers to one request: its prompts times `n`."""
MAX_BIASES = 1024
MAX_PROMPT_TOKENS = 1 << 18
"""Maximum tokens of all prompts of a request together, unless the context is longer; as Python integers they
take 10 MB of memory."""

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP}
_STOPS: Json = {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}
_TOKEN: Json = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
TOKENS: Json = {"type": "array", "minItems": 1, "items": _TOKEN}

SAMPLING: Table = {
    "temperature": number(
        0, 2, "Temperature; 0 always takes the most likely token (default: the bundle's, else 1)."
    ),
    "top_p": number(
        0, 1, "Nucleus sampling: the probability mass that is kept (default: the bundle's, else 1)."
    ),
    "top_k": integer(
        0,
        about="An extension: the number of most likely tokens that are kept; 0 keeps all "
        "(default: the bundle's, else 0).",
    ),
    "min_p": number(
        0, 1, "An extension: the least probability of a kept token, as a fraction of the largest one."
    ),
    "seed": integer(-(1 << 63), (1 << 63) - 1, "The same seed, prompt and settings give the same text."),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 100, "An extension."),
    "logit_bias": Field(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "Token -> number that is added to its logit.",
    ),
}
COMMON: Table = {
    "model": text("The name of a model of /v1/models; may be left out."),
    "max_tokens": integer(1),
    **SAMPLING,
    "n": integer(1, MAX_CHOICES, "Number of answers to each prompt."),
    "min_tokens": integer(0, about="An extension: minimum number of tokens before an end token."),
    "stop_token_ids": Field(
        {"type": "array", "maxItems": MAX_STOPS, "items": _TOKEN},
        "An extension: more tokens that end the answer.",
    ),
    "ignore_eos": boolean("An extension: continue after end tokens."),
    "speculate": boolean("An extension: use speculative decoding if the server has it (default: true)."),
    "priority": integer(
        -1000, 1000, "An extension: priority; requests with a lower number are served first."
    ),
    "stop": Field({"anyOf": [_STOP, _STOPS]}, "Texts that end the answer."),
    "stream": boolean("Server-sent events."),
    "stream_options": Field(
        {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}, "Only with `stream`."
    ),
    "response_format": Field(response_format.SCHEMA, "The format that the answer must have."),
    **ignored("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    **ignored("service_tier", "store", "user"),
    **neutral(
        audio=(), best_of=(1,), function_call=("none", "auto"), functions=([],), modalities=(["text"],)
    ),
    **neutral(reasoning_effort=(), suffix=("",), verbosity=(), web_search_options=()),
}
_PREDICTION: dict[str, Json] = {
    "type": "object",
    "required": ["type", "content"],
    "properties": {"type": {"const": "content"}, "content": CONTENT},
}
CHAT: Table = {
    "messages": Field(MESSAGES, "The chat so far."),
    **COMMON,
    "prediction": Field(
        _PREDICTION, "The expected answer, from which tokens are drafted; the answer itself does not change."
    ),
    "max_completion_tokens": integer(1, about="The newer name of max_tokens."),
    "logprobs": boolean(),
    "top_logprobs": integer(0, MAX_LOGPROBS, "Only with `logprobs`."),
    "chat_template_kwargs": structure("An extension: more variables for the chat template."),
    "reasoning_effort": choice(
        *EFFORTS, about='A variable of the chat template; "none" means the same as enable_thinking false.'
    ),
    "enable_thinking": boolean(
        "An extension: whether the model reasons first, if its chat template has that choice."
    ),
    "reasoning_format": choice(
        "none",
        "auto",
        "deepseek",
        about='An extension: "none" leaves reasoning in the content (default: auto).',
    ),
    "tools": Field(TOOLS, "Functions that the answer may call."),
    "tool_choice": Field(TOOL_CHOICE, "Only with `tools`."),
    "parallel_tool_calls": boolean("Whether an answer may contain several calls (default: true)."),
}
COMPLETION: Table = {
    "prompt": Field(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                TOKENS,
                {"type": "array", "minItems": 1, "items": TOKENS},
            ]
        },
        "A text, a list of tokens, or a list of these.",
    ),
    **COMMON,
    "max_tokens": integer(0, about="0: only the prompt is computed."),
    "echo": boolean("The prompt before each answer; with `logprobs`, its tokens', too."),
    "logprobs": integer(0, MAX_LOGPROBS, "Number of alternatives to report for each token."),
}


@dataclass(frozen=True)
class GenerationOptions:
    """The checked settings of a request that chat and text completions have in common: sampling parameters,
    ends of the answer, constraint, number of answers, streaming."""

    sampling: Sampling
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    max_tokens: int | None
    logprobs: int | None
    """Number of most likely tokens at each position whose log-probabilities are reported besides that of the
    answer's token, which may be among them; 0: only that one; None: none at all."""
    constraint: Constraint | None
    n: int
    ignore_eos: bool
    speculate: bool
    priority: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatCall:
    messages: tuple[Message, ...]
    toolbox: Toolbox | None
    template_options: Mapping[str, Json]
    effort: str | None
    enable_thinking: bool | None
    splits_reasoning: bool
    """True if the reasoning is returned in a separate field of the answer's message, False if it is part of
    the message's content."""
    prediction: str
    """Text that the client expects as the answer, from which tokens are drafted; "" if it expects none."""
    options: GenerationOptions


@dataclass(frozen=True)
class CompletionCall:
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    options: GenerationOptions


def chat_call(body: Mapping[str, Json], serving: Serving) -> ChatCall:
    """Returns the checked fields of a body of /v1/chat/completions. serving: the bundle's default sampling
    parameters. Raises RequestError, naming the field, for an invalid one, or fields that do not fit together.
    """
    fields = checked(translated(body), CHAT)
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}: send one of them",
            param="max_completion_tokens",
        )
    alternatives = fields.integer("top_logprobs")
    has_logprobs = fields.boolean("logprobs")
    if alternatives is not None and not has_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    options = _options(fields, serving, new or old, (alternatives or 0) if has_logprobs else None)
    box = toolbox(fields)
    return ChatCall(
        messages(fields),
        box,
        fields.object("chat_template_kwargs"),
        fields.text("reasoning_effort"),
        fields.boolean("enable_thinking") if fields.get("enable_thinking") is not None else None,
        fields.get("reasoning_format") != "none",
        _prediction(fields.get("prediction")),
        options,
    )


def _prediction(prediction: Json) -> str:
    match prediction:
        case None:
            return ""
        case {"type": "content", "content": str() | list() as content}:
            return content_text("prediction.content", content)
    raise wrong("prediction", 'an object such as {"type": "content", "content": "..."}', prediction)


def completion_call(body: Mapping[str, Json], serving: Serving) -> CompletionCall:
    """Returns the checked fields of a body of /v1/completions. serving: the bundle's default sampling
    parameters. Raises RequestError, naming the field, for an invalid one, fields that do not fit together, or
    more than 128 answers (prompts times `n`)."""
    fields = checked(translated(body), COMPLETION)
    options = _options(fields, serving, fields.integer("max_tokens"), fields.integer("logprobs"))
    listed = prompts("prompt", fields.get("prompt"))
    if len(listed) * options.n > MAX_CHOICES:
        raise RequestError(
            f"{len(listed)} prompts with n = {options.n} are more than {MAX_CHOICES} answers", param="prompt"
        )
    return CompletionCall(listed, fields.boolean("echo"), options)


def _options(
    body: RequestBody, serving: Serving, max_tokens: int | None, logprobs: int | None
) -> GenerationOptions:
    stream, stream_options = body.boolean("stream"), body.get("stream_options")
    if stream_options is not None and not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return GenerationOptions(
        sampling=_sampling(body, serving),
        stop=_stop(body.get("stop")),
        stop_tokens=_stop_tokens(body.get("stop_token_ids")),
        max_tokens=max_tokens,
        logprobs=logprobs,
        constraint=response_format.response_format(body.get("response_format")),
        n=body.integer("n") or 1,
        ignore_eos=body.boolean("ignore_eos"),
        speculate=body.boolean("speculate", default=True),
        priority=body.integer("priority") or 0,
        stream=stream,
        include_usage=_include_usage(stream_options),
    )


def _sampling(body: RequestBody, serving: Serving) -> Sampling:
    temperature, top_p = body.number("temperature"), body.number("top_p")
    top_k = body.integer("top_k")
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
        min_p=body.number("min_p") or 0.0,
        seed=body.integer("seed"),
        frequency_penalty=body.number("frequency_penalty") or 0.0,
        presence_penalty=body.number("presence_penalty") or 0.0,
        repetition_penalty=body.number("repetition_penalty") or 1.0,
        bias=_bias(body.object("logit_bias")),
        min_tokens=body.integer("min_tokens") or 0,
    )


def _bias(biases_by_token: Mapping[str, Json]) -> tuple[tuple[int, float], ...]:
    rule = f"an object of at most {MAX_BIASES} tokens, each with a number from -100 to 100"
    if len(biases_by_token) > MAX_BIASES:
        raise wrong("logit_bias", rule, f"{len(biases_by_token)} tokens")
    biases = []
    for token, bias in biases_by_token.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not number or not token.isascii() or not token.isdecimal() or len(token) > 9:
            raise wrong("logit_bias", rule, {token: bias})
        assert isinstance(bias, int | float)
        biases.append((int(token), float(bias)))
    return tuple(biases)


def _stop(value: Json) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise wrong("stop", f"a string or a list of at most {MAX_STOPS} strings", value)
    texts = []
    for item in listed:
        if not isinstance(item, str) or not item:
            raise wrong("stop", "made of non-empty strings", value)
        if len(item) > MAX_STOP:
            raise wrong(
                "stop", f"made of strings of at most {MAX_STOP} characters", f"{len(item)} characters"
            )
        texts.append(checked_text("stop", item))
    return tuple(texts)


def _stop_tokens(value: Json) -> tuple[int, ...]:
    listed = [] if value is None else value if isinstance(value, list) else [None]
    tokens = tuple(token for token in listed if is_integer(token) and 0 <= token <= MAX_INTEGER)
    if len(tokens) != len(listed) or len(tokens) > MAX_STOPS:
        raise wrong("stop_token_ids", f"a list of at most {MAX_STOPS} tokens", value)
    return tokens


def prompts(key: str, value: Json) -> tuple[str | tuple[int, ...], ...]:
    """Returns the prompts in `value`, the field `key` of a request: a text, a list of token numbers, or a
    list of these. Each prompt is a text, which may be empty, or a tuple of token numbers. Raises
    RequestError, naming `key`, for anything else, such as an empty list."""
    listed = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    return tuple(_prompt(key, item, value) for item in listed)


def check_total(key: str, total: int, context: int) -> None:
    """Raises RequestError (status 413) if the prompts of one request have too many tokens together: more than
    262,144 and more than `context`. key: the request's field with the prompts; total: number of their tokens;
    context: number of tokens of the model's context."""
    most = max(MAX_PROMPT_TOKENS, context)
    if total > most:
        raise RequestError(
            f"{key} has more than {most} tokens in all: send fewer texts at a time", param=key, status=413
        )


def _prompt(key: str, item: Json, value: Json) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return checked_text(key, item)
    if isinstance(item, list) and item:
        tokens = tuple(token for token in item if is_integer(token) and 0 <= token <= MAX_INTEGER)
        if len(tokens) == len(item):
            return tokens
    raise wrong(key, "a text, a list of tokens, or a list of these", value)


def _include_usage(value: Json) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not isinstance(value.get("include_usage", False), bool):
        raise wrong("stream_options", 'an object such as {"include_usage": true}', value)
    return value.get("include_usage") is True
