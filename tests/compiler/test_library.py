"""Tests of what surrounds the compiler when a library is built: the memory that the library states, its
metadata, and the phases of the compilation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format import versions as format_versions
from mlcbuild_format.limits import Limits
from tvm import IRModule

from mlcbuild.compiler import library, phases, versions
from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.targets import presets
from tests.compiler.toy_backend import CONFIG
from tests.schemes import SCHEMES

LIMITS = Limits(context_window=40, prefill_chunk=16, max_batch=3)
TENSORS = [
    SimpleNamespace(name="a", shape=(4, 2), dtype="float32", layout="plain"),
    SimpleNamespace(name="b", shape=(3, 5), dtype="float16", layout="x16"),
]


class SomeOps:
    """A stand-in for the kernels and compiler passes of a device, in tests of how a library is compiled
    around them. Its passes are names only, and its workspace is 7 bytes."""

    cache = SimpleNamespace(page_bytes=100)
    plan, lower, kernels, target = "plan", "lower", "kernels", "target"

    def workspace(self, limits: Limits, mod: object) -> int:
        assert limits == LIMITS
        return 7

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        return {"attention": "rows"}, {}


def decoder_of(ops: object, limits: Limits) -> Decoder:
    return cast(Decoder, SimpleNamespace(ops=ops, limits=limits, tensors=TENSORS))


def test_memory_is_counted_in_bytes() -> None:
    memory = library.estimate(decoder_of(SomeOps(), LIMITS), IRModule())
    # 40 tokens need three pages of 16, for each of three sequences.
    assert (memory.weights, memory.kv_page, memory.kv_cache) == (4 * 2 * 4 + 3 * 5 * 2, 100, 9 * 100)
    assert memory.workspace == 7


def test_a_library_is_compiled_in_phases_and_holds_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = CompileRequest(
        CONFIG, SCHEMES["q0f32"], replace(presets.resolve("x86-64-v3"), name=""), LIMITS, "int8"
    )
    marks: list[str] = []
    ran: list[tuple[Any, Any]] = []

    def make_ops(*arguments: object) -> Any:
        assert arguments == (request.config, request.scheme, request.target, "int8")
        return SomeOps()

    def run(mod: IRModule, passes: Any, target: Any, mark: Callable[[str], None]) -> IRModule:
        ran.append((passes, target))
        mark(passes)
        return mod

    def objects(mod: IRModule, target: Any, directory: Path, mark: object, kernels: Any) -> list[Path]:
        assert (target, directory, kernels) == ("target", tmp_path, "kernels")
        written = (tmp_path / "library.json").read_text()
        body = mod["_metadata"].body
        assert str(body.blocks[0].bindings[0].value.value) + "\n" == written
        return [tmp_path / "a.o"]

    monkeypatch.setattr(library, "Decoder", decoder_of)
    monkeypatch.setattr(versions, "check", lambda: marks.append("check"))
    monkeypatch.setattr(functions, "build", lambda decoder: IRModule())
    monkeypatch.setattr(phases, "run", run)
    monkeypatch.setattr(phases, "objects", objects)
    assert library.build(request.to_json(), tmp_path, marks.append, make_ops) == [tmp_path / "a.o"]
    assert marks == ["check", "choose kernels", "plan", "lower"]
    assert ran == [("plan", "target"), ("lower", "target")]
    document = json.loads((tmp_path / "library.json").read_text())
    assert document["format"] == format_versions.LIBRARY and document["tools"] == versions.compiler()
    assert document["params"][1] == ["b", [3, 5], "float16", "x16"]
    assert (document["kernels"], document["memory"]["kv_cache"]) == ({"attention": "rows"}, 900)
