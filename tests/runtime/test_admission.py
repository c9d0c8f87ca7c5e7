"""Tests of the check whether a request fits a model: the maximum length of an answer, and the size of the
longest text that can be a prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.engine.admission import answer_limit, longest_text
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer

from .wrapped import Wrapped


@pytest.fixture(scope="module")
def executor(light_toy_bundle: Path) -> Executor:
    return loading.load(light_toy_bundle, pages=4)


class Mute(Wrapped):
    capabilities = frozenset({"generate"})


@pytest.mark.parametrize(("max_tokens", "limit"), [(None, 61), (7, 7), (61, 61), (0, 0)])
def test_the_answer_has_the_rest_of_the_context(
    executor: Executor, max_tokens: int | None, limit: int
) -> None:
    """Checks how many tokens an answer may have if the memory for the KV cache, four pages of 16 tokens, is
    smaller than the model's context."""
    assert answer_limit(Request((1, 2, 3), max_tokens), executor) == limit


def test_a_prompt_that_fills_the_context_needs_no_answer(executor: Executor) -> None:
    full = Request((1,) * 64, 0)
    assert answer_limit(full, executor) == 0
    assert answer_limit(replace(full, max_tokens=None, pooling="mean"), executor) == 0
    with pytest.raises(RequestError, match="has 64 tokens, but the context has 64, answer included"):
        answer_limit(replace(full, max_tokens=None), executor)


def test_embeddings_need_hidden_states(executor: Executor) -> None:
    silent = cast(Executor, Mute(executor))
    with pytest.raises(RequestError, match="no hidden states") as caught:
        answer_limit(Request((1,), pooling="last"), silent)
    assert caught.value.code == "no_embeddings"


def test_a_longer_text_cannot_fit(executor: Executor, light_toy_bundle: Path) -> None:
    tokenizer = Tokenizer.load(light_toy_bundle, executor.manifest.serving)
    assert longest_text(executor.manifest, tokenizer) == len("<|assistant|>") * 256
