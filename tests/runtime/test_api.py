"""Tests that any request body gives either a checked call or a RequestError, and no other exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import parse_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BUSY = settings(suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis settings for slow tests: other tests may use this machine's processors at the same time."""
NAMES = st.sampled_from(sorted({*api.CHAT, *api.COMPLETION, "odd"}))
HI: Json = [{"role": "user", "content": "hi"}]


@BUSY
@given(body=st.dictionaries(NAMES, JSON, max_size=4))
def test_any_chat_body(body: dict[str, Json]) -> None:
    try:
        call = api.chat_call({"messages": HI, **body}, Serving())
    except RequestError as error:
        assert (error.status, "\n" in str(error)) == (400, False)
    else:
        assert call.messages
        assert 0 <= call.options.sampling.temperature <= 2


@BUSY
@given(body=st.dictionaries(NAMES, JSON, max_size=4))
def test_any_completion_body(body: dict[str, Json]) -> None:
    try:
        call = api.completion_call({"prompt": "x", **body}, Serving())
    except RequestError as error:
        assert error.status == 400
    else:
        assert all(isinstance(prompt, str | tuple) for prompt in call.prompts)


@BUSY
@given(data=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(data: bytes) -> None:
    try:
        assert isinstance(parse_body(data), dict)
    except RequestError as error:
        assert str(error).startswith("the body ")


def test_defaults_and_their_order() -> None:
    serving = Serving(temperature=0.6, top_p=0.95, top_k=20)
    sampling = api.chat_call({"messages": HI}, serving).options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.95, 20, 0)
    sampling = api.chat_call({"messages": HI, "temperature": 0, "top_k": 0}, serving).options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.95, 0)
    sampling = api.chat_call({"messages": HI}, Serving()).options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1, 1, 0, None)


def test_messages_become_plain() -> None:
    parts: Json = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body: dict[str, Json] = {
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": [1]},
        ],
        "stop": "x",
    }
    call = api.chat_call(body, Serving())
    assert call.messages == ({"role": "system", "content": "ab"}, {"role": "assistant", "content": "c"})
    assert call.options.stop == ("x",)


@pytest.mark.parametrize("key", sorted(key for key, field in api.CHAT.items() if field.neutral))
def test_fields_that_cannot_be_honoured(key: str) -> None:
    allowed = api.CHAT[key].schema["enum"]
    assert isinstance(allowed, list)
    for value in allowed:
        api.chat_call({"messages": HI, key: value}, Serving())
    with pytest.raises(RequestError, match="which this server does not support: leave it out") as caught:
        api.chat_call({"messages": HI, key: {"some": "thing"}}, Serving())
    assert (caught.value.param, caught.value.code) == (key, "unsupported_field")
