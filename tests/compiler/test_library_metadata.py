"""Tests of the text of library.json: what it states, and that it depends on its contents only."""

from __future__ import annotations

import json
from dataclasses import replace

from mlcbuild_format.limits import Limits
from mlcbuild_format.signature import signature

from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.compiler.library_metadata import LibraryCode, LibraryMemory, describe
from mlcbuild.targets import presets
from tests.compiler.toy_backend import CONFIG
from tests.schemes import SCHEMES

PARAMS = [("table", (4, 2), "float32", "plain"), ("é", (2,), "float16", "plain")]
REQUEST = CompileRequest(CONFIG, SCHEMES["q4f16_1"], presets.presets()["x86-64-v3"], Limits(64, 16, 2))
CODE = LibraryCode(
    "mlcbuild-library/9",
    PARAMS,
    {"b": "2", "a": "1"},
    LibraryMemory(weights=1, kv_page=2, kv_cache=3, workspace=4),
    {"attention": "rows"},
    {"embed": "it is odd"},
)


def test_it_states_the_request_and_the_code() -> None:
    document = json.loads(describe(REQUEST, CODE))
    assert {*document} == {
        *("config", "fallbacks", "format", "kernels", "limits", "memory"),
        *("params", "scheme", "signature", "target", "tools"),
    }
    assert document["format"] == "mlcbuild-library/9"
    assert document["params"] == [["table", [4, 2], "float32", "plain"], ["é", [2], "float16", "plain"]]
    assert document["signature"] == signature(PARAMS)
    limits = {"context_window": 64, "prefill_chunk": 16, "max_batch": 2, "page_size": 16}
    assert document["limits"] == limits
    assert document["memory"] == {"weights": 1, "kv_page": 2, "kv_cache": 3, "workspace": 4}
    assert (document["tools"], document["kernels"]) == ({"a": "1", "b": "2"}, {"attention": "rows"})
    assert document["fallbacks"] == {"embed": "it is odd"}
    assert (document["scheme"]["name"], document["target"]["cpu"]) == ("q4f16_1", "x86-64-v3")
    assert document["config"]["vocab_size"] == CONFIG.vocab_size


def test_it_is_one_line_of_ascii_with_sorted_keys() -> None:
    text = describe(REQUEST, CODE)
    assert text.isascii() and "\n" not in text and '", "' not in text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert describe(REQUEST, replace(CODE, tools={"a": "1", "b": "2"})) == text
    assert describe(REQUEST, replace(CODE, params=PARAMS[::-1])) != text, "the order of arguments counts"
