"""Tests of the command-line options of the terminal chat, and of returning freed memory to the operating
system, which both chat and server do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from mlcbuild_runtime.chat import chat_options
from mlcbuild_runtime.chat.chat_options import KEY_VARIABLE, ChatOptions
from mlcbuild_runtime.text import freed_memory

from . import shared


def parsed(*words: str) -> tuple[str, ChatOptions]:
    parser = argparse.ArgumentParser("mlcbuild-chat")
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--temperature", "9"), "--temperature: must be from 0 to 2, found 9"),
        (("--temperature", "nan"), "--temperature: must be from 0 to 2, found nan"),
        (("--max-tokens", "0"), "--max-tokens: must be at least 1, found 0"),
        (("--max-tokens", "x"), "--max-tokens: invalid positive value: 'x'"),
    ],
)
@pytest.mark.parametrize("program", [("mlcbuild", "chat"), ("mlcbuild_runtime.chat",)])
def test_a_value_out_of_range_is_bad_usage(
    program: tuple[str, ...], words: tuple[str, ...], sentence: str
) -> None:
    result = shared.run("-m", *program, "nowhere", *words)
    assert result.returncode == 2 and result.stderr.rstrip().endswith(sentence)


def test_threads_are_at_least_one() -> None:
    result = shared.run("-m", "mlcbuild_runtime.chat", "nowhere", "--threads", "0")
    assert result.returncode == 2 and result.stderr.endswith("--threads: must be at least 1, found 0\n")


@pytest.mark.parametrize(
    ("module", "program"), [("mlcbuild", "mlcbuild chat"), ("mlcbuild_runtime.chat", "mlcbuild-chat")]
)
def test_errors_name_the_program_that_was_started(toy_bundle: Path, module: str, program: str) -> None:
    verb = ["chat"] if module == "mlcbuild" else []
    result = shared.run("-m", module, *verb, "http://127.0.0.1:1", "hi")
    assert result.returncode == 3 and result.stderr.startswith(f"{program}: http://127.0.0.1:1")
    empty = shared.run("-m", module, *verb, str(toy_bundle), "-", stdin=" ")
    assert empty.returncode == 2 and empty.stderr.startswith(f"{program}: '-': standard input is empty")


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
