"""Tests of the Python API, which offers the interface of OpenAI's client for an engine in the same
process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlcbuild_runtime
import pytest
from mlcbuild_format.errors import BundleError, EngineError, RequestError, StoppingError
from mlcbuild_runtime.openai import streams

from . import shared
from .test_engine import held
from .test_server import HI, text_of


@pytest.fixture(scope="module")
def engine(toy_bundle: Path) -> Iterator[mlcbuild_runtime.Engine]:
    with mlcbuild_runtime.Engine(toy_bundle) as running:
        yield running


def wait_idle(engine: Any) -> None:
    end = time.monotonic() + shared.WAIT
    while engine.state().running or engine.state().waiting:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert engine.state().free_pages == engine.state().pages


def test_a_chat(engine: Any, toy_bundle: Path) -> None:
    reply = engine.chat.completions.create(model=engine.model, messages=HI, max_tokens=9)
    tokens = engine.tokenize(messages=HI)
    assert engine.tokenize(messages=HI, with_pieces=True) == tokens
    assert reply.choices[0].message.content == text_of(toy_bundle, tokens, 9)
    assert reply.choices[0].message.tool_calls is None
    assert reply.usage.completion_tokens == reply["usage"]["completion_tokens"] == 9
    assert json.loads(json.dumps(reply)) == reply
    with pytest.raises(AttributeError, match="there is no 'choice' here, only id, object"):
        _ = reply.choice
    again = engine.chat.completions.create(messages=(*HI, reply.choices[0].message), max_tokens=1)
    assert again.usage.prompt_tokens > len(tokens) + 8


def test_streams(engine: Any) -> None:
    whole = engine.completions.create(prompt="once", max_tokens=30, n=2, seed=1, temperature=1.0)
    texts = ["", ""]
    for chunk in engine.completions.create(
        prompt="once", max_tokens=30, n=2, seed=1, temperature=1.0, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_stream_that_is_left_ends_its_answer(engine: Any) -> None:
    stream = engine.completions.create(prompt=[1], max_tokens=250, stream=True)
    next(stream)
    stream.close()
    wait_idle(engine)


def test_streams_that_nobody_reads_end(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW", 4)
    for create in (
        partial(engine.completions.create, prompt="once", max_tokens=30, ignore_eos=True, stream=True),
        partial(engine.responses.create, input="once", max_output_tokens=30, stream=True),
    ):
        for _ in range(3):
            create()
        wait_idle(engine)


def test_errors(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown field 'temprature'"):
        engine.completions.create(prompt="x", temprature=1)
    with pytest.raises(RequestError, match="prompt must be"):
        engine.completions.create()
    with pytest.raises(RequestError, match="the prompt has 300 tokens"):
        engine.completions.create(prompt=[1] * 300, stream=True)
    with pytest.raises(BundleError, match=r"there is no bundle\.json"):
        mlcbuild_runtime.Engine(tmp_path)
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = mlcbuild_runtime.Motor


def test_constraints_and_tools(engine: Any) -> None:
    form = {"type": "regex", "regex": "[0-9]{4}"}
    reply = engine.chat.completions.create(messages=HI, response_format=form)
    assert reply.choices[0].message.content.isdecimal()
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "now", "parameters": empty}}]
    reply = engine.chat.completions.create(messages=HI, tools=tools, tool_choice="required")
    assert reply.choices[0].message.tool_calls[0].function.name == "now"


def test_responses(engine: Any) -> None:
    first = engine.responses.create(input="hi", max_output_tokens=9)
    said = engine.chat.completions.create(messages=HI, max_tokens=9).choices[0].message.content
    assert (first.output_text, first.status) == (said, "incomplete")
    assert engine.responses.retrieve(first.id) == first
    more = engine.responses.create(
        input="more", previous_response_id=first.id, max_output_tokens=3, store=False
    )
    assert more.usage.input_tokens > first.usage.input_tokens + 9
    events = list(engine.responses.create(input="hi", max_output_tokens=9, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == said
    assert engine.responses.retrieve(events[-1].response["id"]).output_text == said
    engine.responses.delete(first.id)
    for name in (first.id, more.id):
        with pytest.raises(RequestError, match="there is no response"):
            engine.responses.retrieve(name)
    with pytest.raises(RequestError, match="input must be"):
        engine.responses.create()
    stream = engine.responses.create(input="hi", stream=True)
    next(stream)
    stream.close()
    wait_idle(engine)


def test_many_threads(engine: Any, toy_bundle: Path) -> None:
    def ask(i: int) -> str:
        return str(engine.completions.create(prompt=[i, i], max_tokens=20).choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [text_of(toy_bundle, [i, i], 20) for i in range(16)]


def test_an_event_loop(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> None:
        async with mlcbuild_runtime.AsyncEngine(toy_bundle) as engine:
            running: Any = engine
            jobs = [running.completions.create(prompt=[i], max_tokens=20) for i in range(8)]
            texts = [reply.choices[0].text for reply in await asyncio.gather(*jobs)]
            assert texts == [text_of(toy_bundle, [i], 20) for i in range(8)]
            streamed = ""
            async for chunk in await running.completions.create(prompt=[3], max_tokens=20, stream=True):
                streamed += chunk.choices[0].text
            assert streamed == texts[3]
            stream = await running.chat.completions.create(messages=HI, max_tokens=200, stream=True)
            await anext(stream)
            await stream.aclose()
            while engine.state().running:
                await asyncio.sleep(0.002)
            first = await running.responses.create(input="hi", max_output_tokens=9)
            answered = await running.responses.create(input="hi", max_output_tokens=9, stream=True)
            events = [event async for event in answered]
            assert events[-1].response["output"][0]["content"] == first.output[0]["content"]
            assert running.responses.retrieve(first.id).output_text == first.output_text
            with pytest.raises(RequestError, match="unknown field"):
                await running.completions.create(prompt="x", nothing=1)
            monkeypatch.setattr(streams, "WINDOW", 4)
            await running.completions.create(prompt="x", max_tokens=30, ignore_eos=True, stream=True)
            while engine.state().running or engine.state().waiting:
                await asyncio.sleep(0.002)
        with pytest.raises(EngineError, match="stopped"):
            await running.completions.create(prompt="x")

    asyncio.run(talk())


def test_an_engine_that_ends_fails_its_answers(toy_bundle: Path) -> None:
    engine: Any = mlcbuild_runtime.Engine(toy_bundle)
    with held(engine._running):
        stream = engine.completions.create(prompt=[1], max_tokens=250, stream=True)
        engine.close()
    with pytest.raises(StoppingError):
        list(stream)


def test_the_package_loads_nothing_until_it_is_asked() -> None:
    code = "import sys, mlcbuild_runtime; print([m for m in ('numpy', 'tvm_ffi') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=shared.environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
