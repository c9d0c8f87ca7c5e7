"""Tests of the options of a server's command line, and what becomes of them."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
from mlcbuild_format.program import DEVICE_VARIABLE
from mlcbuild_runtime.engine.drafts import TOKENS
from mlcbuild_runtime.http import arguments
from mlcbuild_runtime.http.serve import ServerOptions


def parsed(*words: str) -> ServerOptions:
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.add(parser)
    return arguments.options(parser.parse_args(["bundle", *words]))


def test_without_options_a_server_has_the_defaults_of_its_dataclass() -> None:
    options, defaults = parsed(), ServerOptions()
    assert options.access.hosts == (), "a server on this machine answers to names of this machine only"
    for field in ("host", "port", "threads", "limits", "drain", "logs", "speculate", "max_waiting", "site"):
        assert getattr(options, field) == getattr(defaults, field), field


OPTIONS: list[tuple[str, str, Any]] = [
    ("--host 0.0.0.0", "host", "0.0.0.0"),
    ("--port 1", "port", 1),
    ("--threads 3", "threads", 3),
    ("--mode local", "limits.mode", "local"),
    ("--memory 50GiB", "limits.memory", 50 << 30),
    ("--max-batch 5", "limits.max_batch", 5),
    ("--max-pages 7", "limits.max_pages", 7),
    ("--prefill-chunk 9", "limits.prefill_chunk", 9),
    ("--max-waiting 0", "max_waiting", 0),
    ("--pooling mean", "pooling", "mean"),
    ("--api-key a --api-key b", "access.keys", ("a", "b")),
    ("--cors *", "access.origins", ("*",)),
    ("--allowed-host x", "access.hosts", ("x",)),
    ("--max-body 1kB", "access.max_body", 1000),
    ("--max-tokens 8", "access.max_tokens", 8),
    ("--lenient", "access.lenient", True),
    ("--timeout 0.5", "access.timeout", 0.5),
    ("--drain 0", "drain", 0.0),
    ("--access-log -", "logs.file", "-"),
    ("--log json", "logs.form", "json"),
    ("--trace t", "logs.trace", "t"),
    ("--browser --write d", "site", "d"),
]


@pytest.mark.parametrize(("words", "field", "value"), OPTIONS)
def test_each_option_has_its_field(words: str, field: str, value: Any) -> None:
    result: Any = parsed(*words.split())
    default: Any = parsed()
    for name in field.split("."):
        result, default = getattr(result, name), getattr(default, name)
    assert result == value != default


def test_drafts_are_looked_up_or_those_of_a_bundle() -> None:
    lookup, bundle = parsed("--speculate", "lookup").speculate, parsed("--speculate", "b").speculate
    assert lookup is not None and bundle is not None
    assert lookup.tokens == TOKENS and lookup.draft is None and str(bundle.draft) == "b"
    some = parsed("--speculate", "lookup", "--draft-tokens", "2").speculate
    assert some is not None and some.tokens == 2


def test_the_device_is_that_of_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "before")
    parsed()
    assert os.environ[DEVICE_VARIABLE] == "before"
    parsed("--device", "llvmpipe")
    assert os.environ[DEVICE_VARIABLE] == "llvmpipe"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--draft-tokens 2", "limits the drafts of --speculate, which is missing: add --speculate"),
        ("--write d", "the page of --browser, which is missing: add --browser"),
        ("--threads 0", "must be at least 1, found 0"),
        ("--threads x", "invalid positive value: 'x'"),
        ("--max-waiting -1", "must be at least 0, found -1"),
        ("--drain inf", "must be a number of seconds, found inf"),
        ("--timeout nan", "must be a number of seconds, found nan"),
        ("--memory 0GB", "must be at least 1 byte, found '0GB'"),
        ("--memory much", "much"),
    ],
)
def test_options_that_cannot_be(words: str, message: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, argparse.ArgumentError), match=message):
        parsed(*words.split())
