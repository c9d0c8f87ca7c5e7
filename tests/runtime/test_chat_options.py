"""Tests of the command-line options of the terminal chat, and of returning freed memory to the operating
system, which both chat and server do."""

from __future__ import annotations

import argparse

import pytest
from mlcbuild_runtime.chat import chat_options
from mlcbuild_runtime.chat.chat_options import KEY_VARIABLE, ChatOptions
from mlcbuild_runtime.text import freed_memory


def parsed(*words: str) -> tuple[str, ChatOptions]:
    parser = argparse.ArgumentParser()
    chat_options.add(parser, "a bundle")
    arguments = parser.parse_args(words)
    return arguments.bundle, chat_options.options(arguments)


def test_each_option_has_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert parsed("b") == ("b", ChatOptions())
    words = [
        "b",
        "hello",
        "--system",
        "s",
        "--temperature",
        "0",
        "--max-tokens",
        "3",
        "--api-key",
        "k",
        "--model",
        "m",
        "--plain",
    ]
    assert parsed(*words) == ("b", ChatOptions("hello", "s", 0.0, 3, "k", "m", True))


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert parsed("b")[1].api_key == "secret" and parsed("b", "--api-key", "k")[1].api_key == "k"


def test_freed_memory_is_returned_where_the_allocator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(freed_memory, "_TRIM", calls.append)
    freed_memory.give_back()
    assert calls == [0]
    monkeypatch.setattr(freed_memory, "_TRIM", None)
    freed_memory.give_back()
