"""Tests of the endpoints of Ollama's API, without a server process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.http import event_stream, handling
from mlcbuild_runtime.http.body_reader import BodyReader
from mlcbuild_runtime.http.ollama_endpoints import VERSION, OllamaEndpoints
from mlcbuild_runtime.openai import embeddings
from mlcbuild_runtime.openai.embeddings import AT_A_TIME

from . import in_process, toy
from .parrot import say

LONG = "more than sixteen tokens, since each letter is one"
HI = [{"role": "user", "content": say(LONG)}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with in_process.running(tmp_path_factory.mktemp("ollama") / "toy") as engine:
        yield engine


def call(engine: Engine, path: str, **body: Any) -> httpx.Response:
    """Returns the server's response to /api/`path` of Ollama's API: to a POST request whose JSON body has the
    fields `body`, or to a GET request if there are none."""
    request = ("POST" if body else "GET", f"/api/{path}", body or None)
    return in_process.send(OllamaEndpoints, engine, request)[0]


def test_models_are_listed(engine: Engine) -> None:
    assert call(engine, "version").json() == {"version": VERSION}
    (listed,) = call(engine, "tags").json()["models"]
    (loaded,) = call(engine, "ps").json()["models"]
    assert listed["name"] == engine.name and listed.items() < loaded.items()
    in_a_month = datetime.now(UTC) + timedelta(days=30)
    assert datetime.fromisoformat(loaded["expires_at"]) > in_a_month, "it stays loaded"
    assert loaded["size_vram"] == 0


def test_a_model_is_shown(engine: Engine) -> None:
    for body in ({"model": f"{engine.name}:latest"}, {"name": engine.name}):
        shown = call(engine, "show", **body).json()
        assert (shown["template"], shown["details"]["format"]) == (toy.TEMPLATE, "mlcbuild")
    with pytest.raises(RequestError, match="'other' is not here"):
        call(engine, "show", model="other")
    with pytest.raises(RequestError, match="unknown field 'colour'"):
        call(engine, "show", model=engine.name, colour="red")


def test_a_chat_is_lines_of_json_by_default(engine: Engine) -> None:
    response = call(engine, "chat", messages=HI)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    documents: list[Any] = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(document["message"]["content"] for document in documents) == LONG
    assert [document["done"] for document in documents] == [False] * len(LONG) + [True]
    whole = call(engine, "chat", messages=HI, stream=False).json()
    assert (whole["message"], whole["done_reason"]) == ({"role": "assistant", "content": LONG}, "stop")


def test_a_prompt_is_a_chat_or_with_raw_a_text(engine: Engine) -> None:
    body: dict[str, Any] = {"prompt": say(LONG), "stream": False}
    chat = call(engine, "generate", **body).json()
    text = call(
        engine, "generate", **{**body, "prompt": f"{body['prompt']}<|assistant|>", "raw": True}
    ).json()
    assert chat["response"] == text["response"] == LONG, "without OpenAI's short default of tokens"
    # The template adds <|user|>, a line break and <|assistant|>; of these the raw prompt has one.
    assert chat["prompt_eval_count"] == text["prompt_eval_count"] + 2
    cut = call(engine, "generate", **body, options={"num_predict": 4}).json()
    assert (cut["response"], cut["done_reason"], cut["eval_count"]) == (LONG[:4], "length", 4)


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [("5m", "load"), (-1, "load"), (False, "load"), (0, "unload"), ("0", "unload"), ("0s", "unload")],
)
def test_a_request_without_a_prompt_loads_or_unloads(engine: Engine, keep_alive: Any, reason: str) -> None:
    chat = call(engine, "chat", messages=[], keep_alive=keep_alive).json()
    assert chat["message"] == {"role": "assistant", "content": ""}
    text = call(engine, "generate", keep_alive=keep_alive).json()
    assert text["response"] == ""
    for document in (chat, text):
        assert (document["model"], document["done"], document["done_reason"]) == (engine.name, True, reason)


def vector(text: str) -> list[float]:
    """Returns the embedding of a text by the simulated model, scaled to length 1. The model's last hidden
    state is (s, s mod 7, 1), where s is the sum of all tokens, each times (its position mod 7) + 1."""
    tokens = [toy.BOS, *(byte - ord("!") for byte in text.encode())]  # "!" is the first visible letter.
    total = sum(token * (i % 7 + 1) for i, token in enumerate(tokens))
    state = [total, total % 7, 1]
    return [value / math.hypot(*state) for value in state]


def test_texts_have_embeddings(engine: Engine) -> None:
    document = call(engine, "embed", input=["a", "bc"]).json()
    assert document["embeddings"] == [pytest.approx(vector("a")), pytest.approx(vector("bc"))]
    assert (document["model"], document["prompt_eval_count"]) == (engine.name, 5)
    assert document["total_duration"] > 0
    assert call(engine, "embed", input="a").json()["embeddings"] == document["embeddings"][:1]
    assert call(engine, "embed", input=[]).json()["embeddings"] == []
    assert call(engine, "embeddings", prompt="bc").json() == {"embedding": document["embeddings"][1]}


def test_large_bodies_are_released_before_embeddings_are_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that other large bodies need not wait while the texts of one are embedded, which may take
    minutes."""
    readers, states = list[BodyReader](), list[tuple[int, int]]()

    class Watched(BodyReader):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            readers.append(self)

    async def watched(*arguments: Any) -> Any:
        states.append((readers[-1]._kept, readers[-1]._processing.borrowed_tokens))
        return await event_stream.unless_gone(*arguments)

    monkeypatch.setattr(handling, "BodyReader", Watched)
    monkeypatch.setattr(handling, "unless_gone", watched)
    text = "," * 60  # Many commas count as many values.
    assert len(call(engine, "embed", input=[text] * 600).json()["embeddings"]) == 600
    assert call(engine, "embeddings", prompt="," * 40_000).json()["embedding"]
    assert set(states) == {(0, 0)}


def test_vectors_are_encoded_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that no call of the JSON encoder is long, because it blocks all other threads, and with them the
    answers to other clients."""
    sizes, encode = list[int](), embeddings._encode

    def watched(value: Any) -> str:
        sizes.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr(embeddings, "_encode", watched)
    response = call(engine, "embed", input=["a"] * 300)
    assert (
        len(response.json()["embeddings"]) == 300 and response.headers["content-type"] == "application/json"
    )
    assert len(sizes) == 302 and max(sizes) < 300
    assert json.loads(embeddings.json_text({"data": [], "a": 1}, "data")) == {"data": [], "a": 1}


def test_all_texts_of_a_request_are_embedded_while_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process.running(tmp_path / "toy") as stopping:

        async def drained(*arguments: Any) -> Any:
            events = await event_stream.unless_gone(*arguments)
            stopping.drain()
            return events

        monkeypatch.setattr(handling, "unless_gone", drained)
        count = 2 * AT_A_TIME + 1
        assert len(call(stopping, "embed", input=["a"] * count).json()["embeddings"]) == count
        with pytest.raises(RequestError, match="the server is stopping"):
            call(stopping, "embed", input="a")


def test_long_texts_are_cut_or_refused(engine: Engine) -> None:
    size = engine.manifest.limits.context_window
    long = "x" * (size + 9)
    assert call(engine, "embed", input=long).json()["prompt_eval_count"] == size
    with pytest.raises(RequestError, match="the context"):
        call(engine, "embed", input=long, truncate=False)


def test_refused_requests_return_their_reference_to_the_model(engine: Engine) -> None:
    for path, body, message in (
        ("chat", {"messages": HI, "template": "x"}, "unknown field 'template'"),
        ("generate", {"prompt": "a", "think": "much"}, "think must be"),
        ("embed", {"input": [1]}, "input must be a text or a list of texts"),
        ("embed", {"input": "a", "dimensions": 2}, "does not say how many values"),
    ):
        with pytest.raises(RequestError, match=message):
            call(engine, path, **body)
