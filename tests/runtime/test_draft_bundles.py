"""Tests of draft tokens from a second bundle, and of those that clients predict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime import local
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.executor.executor import StepOutput

from tests.runtime.draft_engines import TEXT, start

from . import shared
from .shared import Server
from .test_engine import GREEDY, ask, drain


@pytest.fixture(scope="module")
def plain(toy_bundle: Path) -> Iterator[Engine]:
    engine = start(toy_bundle, None)
    yield engine
    assert engine.close()


class Broken(CpuExecutor):
    def step(self, *_: Any) -> StepOutput:
        raise RuntimeError("no")


def test_a_draft_bundle_that_fails_is_left_out(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(tiny_bundle, None, speculate=Speculate(tiny_bundle))
    drafter: Any = engine._runner.speculation._drafter
    drafter._executor.__class__ = Broken
    try:
        assert drain(ask(engine, Request((1, 40, 41), 20, GREEDY)))[-1].finish == "length"
        assert "the draft bundle has failed and is not used any more" in caplog.text
    finally:
        engine.close()


def test_draft_bundles_that_do_not_fit(toy_bundle: Path, tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match="cannot draft for tiny-q4f16_1: it was compiled with prefill"):
        start(tiny_bundle, None, speculate=Speculate(toy_bundle))
    with pytest.raises(BundleError, match=r"cannot draft for toy-q0f32-host: token 0 is .* there and"):
        start(toy_bundle, None, speculate=Speculate(tiny_bundle))
    with pytest.raises(BundleError, match=r"bundle\.json"):
        start(toy_bundle, None, speculate=Speculate(toy_bundle / "missing"))


def test_a_server_with_drafts(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--speculate", "lookup", "--draft-tokens", "3") as server:

        def ask(**more: Any) -> Any:
            body = {"prompt": "abc" * 9, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
            return httpx.post(
                f"{server.url}/v1/completions", json=body, timeout=shared.WAIT, verify=shared.PLAIN
            ).json()

        again = {"prompt": "abcabc" * 8, "response_format": {"type": "regex", "regex": "([abc]{3})*"}}
        first, off = ask(**again), ask(**again, speculate=False)
        assert first["choices"][0]["text"] == off["choices"][0]["text"]
        details = first["usage"]["completion_tokens_details"]
        assert off["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        }
        text = httpx.get(f"{server.url}/metrics").text
        accepted = float(text.split("\nmlcbuild_draft_tokens_accepted_total{")[1].split()[1])
        drafted = float(text.split("\nmlcbuild_draft_tokens_total{")[1].split()[1])
        assert drafted >= accepted >= details["accepted_prediction_tokens"]


def test_a_prediction_over_http(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True}

    def ask(**more: Any) -> Any:
        url = f"{server.url}/v1/chat/completions"
        return httpx.post(
            url, content=json.dumps({**body, **more}), timeout=shared.WAIT, verify=shared.PLAIN
        ).json()

    plain = ask()
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text}]):
        actual = ask(prediction={"type": "content", "content": content})
        assert actual["choices"] == plain["choices"]
    assert (
        ask(prediction={"type": "content", "content": "wrong from the start"})["choices"] == plain["choices"]
    )
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    for wrong, words in (
        ({"type": "guess"}, "prediction must be an object such as"),
        ({"type": "content", "content": 1}, "prediction must be an object such as"),
        ({"type": "content", "content": [{"type": "image"}]}, r"prediction.content\[0\] must be a part"),
        ({"type": "content", "content": "\ud800"}, "prediction.content holds half of a surrogate pair"),
    ):
        refused = ask(prediction=wrong)["error"]
        assert re.search(words, refused["message"]), refused


def test_a_server_whose_draft_bundle_does_not_fit(toy_bundle: Path, tiny_bundle: Path) -> None:
    command = ("-m", "mlcbuild_runtime", str(toy_bundle), "--port", "0")
    done = shared.run(*command, "--speculate", str(tiny_bundle))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot draft for toy-q0f32-host" in done.stderr


def test_the_python_api_drafts(tiny_bundle: Path) -> None:
    with local.Engine(tiny_bundle, speculate="lookup") as engine:
        reply = engine.completions.create(prompt=TEXT, max_tokens=40, temperature=0, ignore_eos=True)
        assert engine.state().drafted_tokens > 0
    with local.Engine(tiny_bundle) as engine:
        plain = engine.completions.create(prompt=TEXT, max_tokens=40, temperature=0, ignore_eos=True)
    assert reply.choices == plain.choices
