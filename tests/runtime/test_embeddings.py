"""Tests of /v1/embeddings with a real model, compared with the builder's float64 reference."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime import AsyncEngine, Engine
from mlcbuild_runtime.engine.pooling import unit
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray

from . import shared
from .shared import Server
from .test_server import post

PATH = "/v1/embeddings"
TEXTS = ["What is 12 + 30?", "sort 70 8 31", "once upon a time " * 12]
"""Texts to embed; the last one is longer than a chunk of a prompt."""


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def states(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[NDArray[np.float64]]:
    """Returns the hidden states of each text's tokens, float64 [n, hidden], computed by the builder's
    reference with the bundle's weights."""
    tokenizer = Tokenizer.load(tiny_bundle)
    out = tmp_path_factory.mktemp("states") / "states.npy"
    script = Path(__file__).with_name("states.py")
    listed = [",".join(map(str, tokenizer.encode(text))) for text in TEXTS]
    path = {"PYTHONPATH": f"{shared.ROOT}{os.pathsep}{shared.ROOT / 'runtime'}"}
    command = [sys.executable, str(script), str(tiny_bundle), str(out), *listed]
    subprocess.run(command, check=True, env=shared.environment(path))
    ends = np.cumsum([len(text.split(",")) for text in listed])
    return np.split(np.load(out), ends[:-1])


def vectors(document: Any) -> NDArray[np.float64]:
    assert [entry["index"] for entry in document["data"]] == list(range(len(document["data"])))
    return np.array([entry["embedding"] for entry in document["data"]])


def ask(server: Server, **body: Any) -> Any:
    response = post(server, PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


def pooled(states: list[NDArray[np.float64]], kind: str) -> NDArray[np.float64]:
    rows = [hidden[-1] if kind == "last" else hidden.mean(axis=0) for hidden in states]
    return np.array([row / np.linalg.norm(row) for row in rows])


def test_the_last_token_speaks_for_a_text(real: Server, states: list[NDArray[np.float64]]) -> None:
    actual = ask(real, input=TEXTS)
    assert actual["model"] == real.name
    assert actual["usage"]["prompt_tokens"] == actual["usage"]["total_tokens"] == sum(map(len, states))
    assert np.abs(vectors(actual) - pooled(states, "last")).max() < 2e-3
    assert np.allclose(np.linalg.norm(vectors(actual), axis=1), 1)
    # The prefix cache and the other sequences of a step change the rounding only.
    assert np.abs(vectors(ask(real, input=TEXTS[2])) - vectors(actual)[2:]).max() < 1e-4


def test_the_mean_of_all_tokens(tiny_bundle: Path, states: list[NDArray[np.float64]]) -> None:
    with shared.serving(tiny_bundle, "--pooling", "mean") as server:
        first, again = vectors(ask(server, input=TEXTS)), vectors(ask(server, input=TEXTS))
    assert np.abs(first - pooled(states, "mean")).max() < 2e-3
    assert np.abs(first - pooled(states, "last")).max() > 0.05
    assert np.abs(first - again).max() < 1e-4


def test_the_official_client(real: Server, tiny_bundle: Path) -> None:
    tokens = Tokenizer.load(tiny_bundle).encode(TEXTS[0])
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        by_text = client.embeddings.create(model=real.name, input=TEXTS[0])
        by_tokens = client.embeddings.create(model=real.name, input=[tokens, tokens])
        plain = client.embeddings.create(model=real.name, input=tokens, encoding_format="float")
        short = client.embeddings.create(model=real.name, input=TEXTS[0], dimensions=16)
    vector = by_text.data[0].embedding
    assert np.allclose(by_tokens.data[1].embedding, vector, atol=1e-4)
    assert np.allclose(plain.data[0].embedding, vector, atol=1e-4)
    assert np.allclose(short.data[0].embedding, unit(np.array(vector[:16])), atol=1e-4)
    assert by_tokens.usage.prompt_tokens == 2 * len(tokens)


def test_base64_is_little_endian_float32(real: Server) -> None:
    actual = ask(real, input="a b", encoding_format="base64")["data"][0]["embedding"]
    plain = ask(real, input="a b")["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(actual), "<f4"), plain, atol=1e-6)


def test_more_texts_than_places(tiny_bundle: Path) -> None:
    with shared.serving(tiny_bundle, "--max-batch", "2", "--max-waiting", "70") as server:
        texts = [f"number {i}" for i in range(150)]
        actual = vectors(ask(server, input=texts))
        assert len(actual) == 150
        assert np.abs(actual[[149]] - vectors(ask(server, input=texts[149]))).max() < 1e-4
        assert server.wait_idle()["running"] == 0


def test_in_this_process(tiny_bundle: Path, real: Server) -> None:
    expected = ask(real, input=TEXTS[:2])

    async def later() -> Any:
        async with AsyncEngine(tiny_bundle, threads=1) as engine:
            return await engine.embeddings.create(input=TEXTS[:2])

    with Engine(tiny_bundle, threads=1) as engine:
        actual = engine.embeddings.create(input=TEXTS[:2])
        answer = engine.completions.create(prompt=TEXTS[0], max_tokens=4)
    assert np.abs(vectors(actual) - vectors(expected)).max() < 1e-4
    assert answer["usage"]
    assert np.abs(vectors(asyncio.run(later())) - vectors(expected)).max() < 1e-4


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "a text, a list of tokens, or a list of these; it is missing"),
        ({"input": []}, "input", "a text, a list of tokens"),
        ({"input": ""}, "input", "an empty text"),
        ({"input": ["a", ""]}, "input", "an empty text"),
        ({"input": ["a", 1]}, "input", "a text, a list of tokens"),
        ({"input": [-1]}, "input", "a text, a list of tokens"),
        ({"input": [1 << 30]}, "prompt", "outside the vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2049 texts; at most 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "an integer from 1"),
        ({"input": "a", "dimensions": 1 << 20}, "dimensions", "this model's vectors have"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", '"float" or "base64"'),
        ({"input": "a", "model": "other"}, "model", "is not here"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
        ({"input": "a " * 300}, None, "but the context has 256: shorten it"),
    ],
)
def test_errors(real: Server, body: dict[str, Any], param: str | None, message: str) -> None:
    response = post(real, PATH, body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def test_a_text_may_fill_the_context(real: Server) -> None:
    assert ask(real, input=[5] * 256)["usage"]["prompt_tokens"] == 256
    response = post(real, PATH, {"input": [5] * 257})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_library_without_hidden_states(server: Server) -> None:
    """Checks the error for a library without the function for hidden states, such as older builders made."""
    response = post(server, PATH, {"input": "hello"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_embeddings"


def test_a_pooling_that_does_not_exist(toy_copy: Path) -> None:
    text = (toy_copy / "bundle.json").read_text().replace('"serving": {', '"serving": {"pooling": "max",')
    (toy_copy / "bundle.json").write_text(text)
    with pytest.raises(BundleError, match=r"'serving\.pooling' must be one of last, mean, found 'max'"):
        Engine(toy_copy)
