"""Tests of the compiler's child process: the files that it leaves for its parent."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from mlcbuild import progress
from mlcbuild.canon import Json
from mlcbuild.compiler import child
from mlcbuild.errors import CompileError

Mark = Callable[[str], None]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory with a small request.json. sys.argv names it, as if this process were the compiler
    process that is started with it."""
    monkeypatch.setattr(sys, "argv", ["child", str(tmp_path)])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    (tmp_path / "request.json").write_text('{"a": [1]}')
    return tmp_path


def run(build: Callable[[Mapping[str, Json], Path, Mark], Sequence[Path]]) -> None:
    try:
        child.main(lambda: build)
    finally:
        progress.listen(None)


def test_a_request_is_compiled_and_the_objects_are_listed(directory: Path) -> None:
    def build(request: Mapping[str, Json], out: Path, mark: Mark) -> list[Path]:
        assert (request, out) == ({"a": [1]}, directory)
        assert (out / child.PHASE).read_text() == "start the compiler" and gc.isenabled()
        mark("choose kernels")
        progress.report(3, 3, "functions")
        return [out / "lib" / "a.o", out / "b.o"]

    run(build)
    assert json.loads((directory / child.OBJECTS).read_text()) == ["lib/a.o", "b.o"]
    assert (directory / child.PHASE).read_text() == "choose kernels"
    assert (directory / child.PROGRESS).read_text() == "3 3 functions"
    assert not (directory / child.ERROR).exists()


def test_an_error_that_a_user_can_fix_is_written_with_its_kind(directory: Path) -> None:
    def build(request: Mapping[str, Json], out: Path, mark: Mark) -> list[Path]:
        raise CompileError("compile.max_batch must be at least 1")

    with pytest.raises(SystemExit) as caught:
        run(build)
    assert caught.value.code == 1
    document = json.loads((directory / child.ERROR).read_text())
    assert document == ["CompileError", "compile.max_batch must be at least 1"]
    assert not (directory / child.OBJECTS).exists()


def test_a_defect_is_left_to_the_parent(directory: Path) -> None:
    def build(request: Mapping[str, Json], out: Path, mark: Mark) -> list[Path]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(build)
    assert not (directory / child.ERROR).exists() and gc.isenabled()
