"""The embedded model, compiled: its answers over HTTP, alone and together, with both kinds of tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from mlcbuild_runtime import bundle
from mlcbuild_runtime.text import Tokenizer

from . import shared
from .shared import Server

HELD_OUT = shared.ROOT / "recipes" / "models" / "tiny" / "heldout.jsonl"


def questions(count: int) -> list[tuple[str, str]]:
    """Prompts with their right answers, spread over the kinds of task."""
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [(row["prompt"], row["answer"]) for row in chosen]


@pytest.fixture(scope="module")
def tiny_server(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


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
    found = [(ask(tiny_client, prompt), answer) for prompt, answer in questions(24)]
    assert sum(text == answer for text, answer in found) >= 18, found


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


def test_both_tokenizer_files_give_the_same(tiny_bundle: Path, tmp_path: Path) -> None:
    """The checkpoint carries its SentencePiece model and the same as tokenizer.json."""
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
