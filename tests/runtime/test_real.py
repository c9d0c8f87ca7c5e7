"""Tests of the compiled embedded model over HTTP: its answers alone and beside others, with both kinds of
tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from mlcbuild_format import bundle
from mlcbuild_runtime.engine.scheduler import SCORED
from mlcbuild_runtime.executor import executor, loading
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared
from .shared import Server

HELD_OUT = shared.ROOT / "recipes" / "models" / "tiny" / "heldout.jsonl"


def questions(count: int) -> list[tuple[str, str]]:
    """Returns up to `count` (prompt, right answer) of the questions that the small model in recipes/models
    was not trained on, spread over all kinds of tasks."""
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [(row["prompt"], row["answer"]) for row in chosen]


@pytest.fixture(scope="module")
def tiny_server(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, prompt: str, temperature: float = 0, seed: int | None = None) -> str:
    stream = client.chat.completions.create(
        model="tiny-q4f16_1",
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        seed=seed,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_it_answers_rightly(tiny_client: openai.OpenAI) -> None:
    results = [(ask(tiny_client, prompt), answer) for prompt, answer in questions(24)]
    assert sum(text == answer for text, answer in results) >= 18, results


def test_eight_clients_get_what_each_gets_alone(tiny_server: Server, tiny_client: openai.OpenAI) -> None:
    prompts = [prompt for prompt, _ in questions(16)]
    alone = [ask(tiny_client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(tiny_client, prompt), prompts)) == alone
    health = tiny_server.wait_idle()
    assert health["free_pages"] == health["pages"]


def test_seeds_hold_among_others(tiny_client: openai.OpenAI) -> None:
    prompts = [prompt for prompt, _ in questions(8)]
    alone = [ask(tiny_client, prompt, temperature=1, seed=3) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: ask(tiny_client, prompt, temperature=1, seed=3), prompts))
    assert together == alone


def scored(server: Server, prompt: object, **more: object) -> list[dict[str, Any]]:
    body = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 3,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 0,
    }
    body |= more
    document = httpx.post(f"{server.url}/v1/completions", json=body, timeout=shared.WAIT).json()
    return [dict(choice) for choice in document["choices"]]


def test_log_probabilities_of_a_prompt(tiny_server: Server, tiny_bundle: Path) -> None:
    """Checks the log-probabilities of a prompt's tokens over HTTP, as programs request them that score texts
    with a model."""
    text = "Copy this: é🙂 one two three. " * 7
    tokens = Tokenizer.load(tiny_bundle).encode(text)
    assert len(tokens) > 2 * SCORED, "several steps"
    logits = executor.score(loading.load(tiny_bundle), tokens).astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    (choice,) = scored(tiny_server, text)
    actual = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert actual["token_logprobs"][0] is actual["top_logprobs"][0] is None
    logprobs = [expected[i, token] for i, token in enumerate(tokens[1:])]
    assert actual["token_logprobs"][1:] == pytest.approx(logprobs, abs=1e-5)
    for top, value, row in zip(actual["top_logprobs"][1:], logprobs, expected[:-1], strict=True):
        listed = list(top.values())
        assert listed[:3] == pytest.approx(sorted(row, reverse=True)[:3], abs=1e-5)
        assert listed[3:] == ([] if value >= listed[2] - 1e-5 else [pytest.approx(value, abs=1e-5)])
    offsets = actual["text_offset"]
    assert offsets == sorted(offsets) and offsets[:2] == [0, 0]
    for name, place in zip(actual["tokens"][2:], offsets[2:], strict=True):
        assert name.startswith("<0x") or text.startswith(name, place)


def test_log_probabilities_of_prompts_among_others(tiny_server: Server, tiny_bundle: Path) -> None:
    tokenizer = Tokenizer.load(tiny_bundle)
    prompts = [tokenizer.encode(prompt * 4) for prompt, _ in questions(5)]
    alone = [scored(tiny_server, prompt, max_tokens=3)[0] for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(lambda: [scored(tiny_server, p, max_tokens=3)[0] for p in reversed(prompts)])
        together = scored(tiny_server, prompts, max_tokens=3)
        assert others.result()[::-1] == alone
    assert [{**choice, "index": 0} for choice in together] == alone
    for choice, prompt in zip(alone, prompts, strict=True):
        assert {len(listed) for listed in choice["logprobs"].values()} == {len(prompt) + 3}
    body: dict[str, Any] = {
        "extra_body": {"ignore_eos": True},
        "prompt": prompts[0],
        "echo": True,
        "logprobs": 3,
        "temperature": 0,
        "max_tokens": 3,
    }
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        stream = client.completions.create(model=tiny_server.name, stream=True, **body)
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == alone[0]["text"]
    for key, value in alone[0]["logprobs"].items():
        parts = [getattr(chunk.logprobs, key) for chunk in chunks if chunk.logprobs is not None]
        assert [item for part in parts for item in part] == value, key


def test_a_prompt_may_be_computed_only(tiny_server: Server) -> None:
    before = tiny_server.wait_idle()
    for body, text in (({"echo": True}, "a b"), ({}, "")):
        (choice,) = scored(tiny_server, "a b", **({"echo": False, "logprobs": None} | body))
        assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (text, "length", None)
    (full,) = scored(tiny_server, [5] * 256, logprobs=0)
    assert len(full["logprobs"]["tokens"]) == 256
    assert tiny_server.wait_idle()["answer_tokens"] == before["answer_tokens"]


def test_both_tokenizer_files_give_the_same(tiny_bundle: Path, tmp_path: Path) -> None:
    """Checks that the checkpoint's two tokenizer files, of SentencePiece and tokenizer.json, give the same
    tokens and prompts."""
    for path in tiny_bundle.iterdir():
        if path.name.startswith(("tokenizer", "chat", "special")) and path.name != "tokenizer.json":
            shutil.copy(path, tmp_path)
    serving = bundle.read(tiny_bundle).serving
    ours, other = Tokenizer.load(tiny_bundle, serving), Tokenizer.load(tmp_path, serving)
    assert (ours.bos, ours.eos) == (other.bos, other.eos)
    for prompt, answer in questions(60):
        messages = [{"role": "system", "content": "é"}, {"role": "user", "content": prompt}]
        assert ours.chat(messages) == other.chat(messages)
        assert ours.encode(answer) == other.encode(answer)
        assert other.decode(ours.encode(answer)) == answer == ours.decode(ours.encode(answer))
    assert ours.decode(range(512)) == other.decode(range(512))
