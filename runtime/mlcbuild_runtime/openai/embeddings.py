"""Serves the endpoint /v1/embeddings, which converts texts to vectors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.pooling import Floats, unit
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import Field, RequestBody, Table, choice, ignored, integer

MAX_INPUTS = 2048
"""Maximum number of texts in one request for embeddings."""
AT_A_TIME = 64
"""Number of texts that are submitted to the engine together; a large request must not fill the queue for
others."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

TABLE: Table = {
    "input": Field(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"type": "string"}},
                api.TOKENS,
                {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": api.TOKENS},
            ]
        },
        "A text, a list of tokens, or a list of these.",
    ),
    "model": api.COMMON["model"],
    "dimensions": integer(1, about="Number of values of each vector to return; the others are cut off."),
    "encoding_format": choice(
        "float", "base64", about='"base64" encodes little-endian float32 values (default: float).'
    ),
    **ignored("user"),
}


@dataclass(frozen=True)
class EmbeddingsJob:
    """A checked request to /v1/embeddings: the requests for the engine, one for each text, and the form of
    the result."""

    requests: tuple[Request, ...]
    model: str
    dimensions: int | None
    base64: bool

    def waves(self) -> Iterable[tuple[Request, ...]]:
        """Yields the engine's requests that belong to this HTTP request, one for each text to embed, in
        tuples of at most 64. The caller submits one tuple after the other; the engine accepts all after the
        first even while it is stopping."""
        for start in range(0, len(self.requests), AT_A_TIME):
            wave = self.requests[start : start + AT_A_TIME]
            yield tuple(replace(request, continues=start > 0) for request in wave)

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all texts of the request together."""
        return sum(len(request.prompt) for request in self.requests)

    def vectors(self, events: Sequence[Event]) -> list[Json]:
        """Returns the embedding of each text in the form that the request states: a list of numbers, or
        base64 of little-endian float32 values; if the request states a number of dimensions, it is cut to
        them and scaled to the length 1. events: the engine's only event for each text, which holds its
        embedding."""
        shown = []
        for event in events:
            assert event.vector is not None
            shown.append(self._shown(event.vector))
        return shown

    def document(self, events: Sequence[Event]) -> dict[str, Json]:
        """Returns OpenAI's document with the embeddings of all texts. events: the engine's only event for
        each text, which holds its embedding."""
        vectors = enumerate(self.vectors(events))
        data: list[Json] = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in vectors
        ]
        usage: dict[str, Json] = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def content(self, events: Sequence[Event]) -> bytes:
        """Returns the document with the embeddings of all texts as JSON text in UTF-8. The method is best
        called in a thread of its own. events: the engine's only event for each text, which holds its
        embedding."""
        return json_text(self.document(events), "data")

    def _shown(self, vector: Floats) -> Json:
        if self.dimensions is not None:
            vector = unit(vector[: self.dimensions])
        if self.base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(value) for value in vector]


def json_text(document: Mapping[str, Json], key: str) -> bytes:
    """Returns a JSON object, which must have other keys besides `key`, as JSON text in UTF-8. The items of
    its list `document[key]`, which comes first, are encoded one by one, since the encoder blocks all other
    threads: 2048 vectors of 1024 numbers at once would block them for more than a second."""
    items = document[key]
    assert isinstance(items, list)
    others = _encode({name: value for name, value in document.items() if name != key})
    return f"{{{_encode(key)}:[{','.join(map(_encode, items))}],{others[1:]}".encode()


def job(running: Engine, body: Mapping[str, Json], truncate: bool = False) -> EmbeddingsJob:
    """Returns the checked body of a request to /v1/embeddings, as requests for the engine. Raises
    RequestError for an invalid field, naming it, and for texts that are empty, too long, or too many, alone
    or by all their tokens (413). A text with more tokens than the context is refused only when its request is
    submitted.

    truncate: True if texts longer than the model's context are cut instead of refused."""
    fields = RequestBody(body, TABLE)
    manifest = running.manifest
    prompts = api.prompts("input", fields.get("input"))
    if len(prompts) > MAX_INPUTS:
        raise RequestError(
            f"input has {len(prompts)} texts; at most {MAX_INPUTS} are accepted at a time", param="input"
        )
    dimensions = fields.integer("dimensions")
    if dimensions is not None and "hidden_size" not in manifest.model.config:
        message = "this bundle does not say how many values its vectors have: leave dimensions out"
        raise RequestError(message, param="dimensions", code="unsupported_field")
    if dimensions is not None and dimensions > (size := manifest.hidden_size):
        raise RequestError(
            f"dimensions is {dimensions}, but this model's vectors have {size}", param="dimensions"
        )
    requests, total = [], 0
    for prompt in prompts:
        tokens = _tokens(running, prompt, truncate) if isinstance(prompt, str) else prompt
        if not tokens or prompt == "":
            raise RequestError("input has an empty text, which has no embedding", param="input")
        requests.append(Request(tokens, pooling=running.pooling))
        total += len(tokens)
        api.check_total("input", total, running.manifest.limits.context_window)
    is_base64 = fields.get("encoding_format") == "base64"
    return EmbeddingsJob(tuple(requests), running.name, dimensions, is_base64)


def _tokens(running: Engine, text: str, truncate: bool) -> tuple[int, ...]:
    """Returns the tokens of a text. truncate: True if they are cut to as many as fit the model's context.
    Otherwise raises RequestError for a text with more bytes than can fit; the engine refuses a text with too
    many tokens."""
    longest = running.longest_text
    if not truncate:
        return tuple(running.tokenizer.encode(text, longest))
    return tuple(running.tokenizer.encode(text[:longest])[: running.manifest.limits.context_window])
