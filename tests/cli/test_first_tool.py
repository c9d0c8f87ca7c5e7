"""Tests a first attempt with tools as a new user makes it: the embedded model, built as in the quick start,
and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import QUICKSTART, ROOT
from tests.runtime import shared


@pytest.fixture(scope="module")
def client(tiny_bundles: Path) -> Iterator[openai.OpenAI]:
    with (
        shared.serving(tiny_bundles / "dist" / "tiny-q4a8_1-host") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_embedded_model_has_room_for_a_tool(client: openai.OpenAI, choice: Any) -> None:
    """Checks that the context window which the quick start's recipe sets is long enough for a tool call of
    the embedded model."""
    limits = "compile: {context_window: 512,"
    assert limits in (ROOT / "recipes" / "quickstart.yaml").read_text() and limits in QUICKSTART
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    add: Any = {"name": "add", "description": "Adds two numbers", "parameters": schema}
    answer = client.chat.completions.create(
        model="tiny-q4a8_1-host",
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        tools=[{"type": "function", "function": add}],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
    )
    (actual,) = answer.choices
    if choice == "auto":
        assert (actual.finish_reason, actual.message.content) == ("stop", "42")
    else:
        assert actual.finish_reason == "tool_calls"
        (call,) = actual.message.tool_calls or []
        assert call.type == "function" and set(json.loads(call.function.arguments)) == {"a", "b"}
    assert answer.usage is not None and answer.usage.prompt_tokens < 300
