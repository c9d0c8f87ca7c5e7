"""Tests of receipts: a run without work ends early by its receipt, and prints exactly what an ordinary run
would print."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlcbuild.cli import main
from mlcbuild.reports import runlog
from mlcbuild.store import receipt, stamp
from mlcbuild.store.staging import remove
from mlcbuild.store.store import Store, default_root
from tests import product
from tests.conftest import ROOT, copy_source

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there are no receipts on macOS")
TARGETS = ("x86-64-v2", "aarch64-linux")
WORDS = ["run", "recipe.yaml", "--store", "store"]
Build = Callable[[], str]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Build:
    """Returns a function that runs a recipe twice in this process and returns what the second run prints. The
    steps' real actions are replaced by ones that write a few bytes. Every file counts as old enough for a
    receipt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "mlcbuild").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(stamp, "RACY_NS", 0)
    product.replace_work(monkeypatch.setattr)
    product.make(tmp_path, 1, ("q0f32",), TARGETS)

    def run() -> str:
        assert main([*WORDS, "--executor", "inline"]) == 0
        capsys.readouterr()
        assert main(WORDS) == 0
        return capsys.readouterr().out

    return run


def seconds_apart(text: str) -> str:
    return re.sub(r"in \d+\.\d+ s", "in N s", text)


def test_a_receipt_says_what_a_run_says(build: Build) -> None:
    ordinary = build()
    said = receipt.check(WORDS)
    assert said is not None
    assert seconds_apart(said + "\n") == seconds_apart(ordinary)
    assert "0 built, " in said
    assert receipt.check([*WORDS, "--keep-going"]) is None, "another command line"


def test_it_is_the_program_that_looks_for_receipts(build: Build) -> None:
    build()
    time.sleep(2.1)  # from here on, all that a process reads is old enough
    command = [sys.executable, "-X", "importtime", "-m", "mlcbuild", *WORDS]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    first, second = (
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert seconds_apart(first.stdout) == seconds_apart(second.stdout) == seconds_apart(build())
    assert "mlcbuild.cli" in first.stderr
    assert "mlcbuild.cli" not in second.stderr, "the command line was not even imported"
    assert not {"argparse", "json", "dataclasses"} & set(re.findall(r"\w+$", second.stderr, re.MULTILINE))


def blob(name: str, root: Path) -> Path:
    """Returns the path in the store `root`/store of the blob to which the file `name` of a built bundle is
    hard-linked. Raises StopIteration if there is none."""
    inode = next((root / "dist").rglob(name)).stat().st_ino
    return next(path for path in (root / "store" / "cas").rglob("*") if path.stat().st_ino == inode)


def first(root: Path, name: str = "bundle.json") -> Path:
    return next(iter(sorted((root / "dist").rglob(name))))


def append(path: Path, text: str = "x") -> None:
    path.chmod(0o644)
    with path.open("a") as file:
        file.write(text)


def same_size(path: Path) -> None:
    """Writes other bytes of the same size to a file and restores its times."""
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def program(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('#!/bin/sh\nexec /usr/bin/ld "$@"\n')
    path.chmod(0o755)


def move_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def swap(path: Path) -> None:
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").replace(path)


def promise(root: Path) -> None:
    (root / "store" / "unsent").mkdir()
    (root / "store" / "unsent" / ("0" * 64)).touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "a record is gone": lambda root: next((root / "store/ac").rglob("?" * 64)).unlink(),
    "all records are gone": lambda root: shutil.rmtree(root / "store/ac"),
    "a blob is gone": lambda root: blob("model.so", root).unlink(),
    "a blob was written to through a bundle": lambda root: append(first(root, "model.so")),
    "a blob has another time": lambda root: os.utime(blob("model.so", root)),
    "a file that only a bundle has was written to": lambda root: append(first(root, "provenance.json")),
    "a file of a bundle is gone": lambda root: first(root).unlink(),
    "a file was put into a bundle": lambda root: first(root).with_name("mine").touch(),
    "a file of a bundle was replaced": lambda root: swap(first(root)),
    "a bundle is gone": lambda root: shutil.rmtree(first(root).parent),
    "a bundle is a link": lambda root: move_link(first(root).parent),
    "all bundles are gone": lambda root: shutil.rmtree(root / "dist"),
    "the list of a bundle's files is gone": lambda root: next((root / "dist").glob(".*.json")).unlink(),
    "a result is promised to a remote": promise,
    "the recipe": lambda root: append(root / "recipe.yaml"),
    "a comment of the same size": lambda root: same_size(root / "recipe.yaml"),
    "a source": lambda root: append(root / "models/m000/model.safetensors"),
    "a source, with size and time as before": lambda root: same_size(root / "models/m000/model.safetensors"),
    "a new file of a model": lambda root: (root / "models/m000/tokenizer_config.json").write_text("{}"),
    "a model is gone": lambda root: shutil.rmtree(root / "models/m000"),
    "a lock file": lambda root: (root / "recipe.lock").touch(),
    "a key to sign with": lambda root: (root / "config" / "mlcbuild" / "key.pem").touch(),
    "a linker that comes first": lambda root: program(root / "bin/ld"),
    "the store's format": lambda root: (root / "store/store.json").write_text("{}"),
    "the logs of runs are gone": lambda root: shutil.rmtree(root / "store/runs"),
    "the receipt is torn": lambda root: os.truncate(receipt.place(str(root / "store"), WORDS), 1000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_leads_to_an_ordinary_run(build: Build, tmp_path: Path, change: str) -> None:
    build()
    assert receipt.check(WORDS) is not None
    CHANGES[change](tmp_path)
    assert receipt.check(WORDS) is None


@pytest.mark.parametrize("change", [name for name in CHANGES if "bundle" in name or "record" in name])
def test_young_directories_are_listed(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    build()
    monkeypatch.setattr("mlcbuild.cli.receipts.time.time_ns", lambda: 0)
    build()
    assert receipt.check(WORDS) is not None
    CHANGES[change](tmp_path)
    assert receipt.check(WORDS) is None


def test_other_records_do_no_harm(build: Build, tmp_path: Path) -> None:
    build()
    shelves = list((tmp_path / "store" / "ac").iterdir())
    record = next(shelves[-1].iterdir())
    for shelf in shelves:
        (shelf / (shelf.name + "0" * 62)).touch()
    assert receipt.check(WORDS) is not None
    record.unlink()
    assert receipt.check(WORDS) is None


def test_no_damage_to_a_receipt_is_more_than_an_ordinary_run(build: Build, tmp_path: Path) -> None:
    build()
    path = Path(receipt.place(str(tmp_path / "store"), WORDS))
    data = path.read_bytes()
    line, rest = data.split(b"\n", 1)
    form, *lengths = line.split()
    for words in (
        [form, *lengths[:-1]],
        [form, *lengths, b"0"],
        [form, *lengths[1:], lengths[0]],
        [form, b"-1", *lengths[1:]],
        [form, *[b"x"] * len(lengths)],
        [form.replace(b"3", b"2"), *lengths],
        [form],
        [],
    ):
        path.write_bytes(b" ".join(words) + b"\n" + rest)
        assert receipt.check(WORDS) is None, words
    for end in range(0, len(data), 97):
        path.write_bytes(data[:end])
        assert receipt.check(WORDS) is None, end
        path.write_bytes(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])
        assert receipt.check(WORDS) is None, f"a flipped bit at {end}"
    path.unlink()
    for replace in (Path.mkdir, os.mkfifo, lambda place: place.symlink_to("kept")):
        path.with_name("kept").write_bytes(data)
        replace(path)
        assert receipt.check(WORDS) is None
        remove(path)
    path.write_bytes(data)
    path.chmod(0o664)
    assert receipt.check(WORDS) is None, "others may have written it"
    path.chmod(0o644)
    assert receipt.check(WORDS) is not None


@pytest.mark.parametrize(
    "change", ["a record is gone", "a blob was written to through a bundle", "a bundle is gone", "a source"]
)
def test_what_was_lost_is_made_again(build: Build, tmp_path: Path, change: str) -> None:
    build()
    CHANGES[change](tmp_path)
    if change == "a blob was written to through a bundle":
        shutil.rmtree(first(tmp_path, "model.so").parent)  # changed files in a bundle are the user's
    build()
    assert receipt.check(WORDS) is not None
    assert len(list((tmp_path / "dist").rglob("model.so"))) == 2


def test_surroundings_are_part_of_it(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    with monkeypatch.context() as other:
        other.setenv("MLCBUILD_KEY", str(tmp_path / "other.pem"))
        assert receipt.check(WORDS) is None
    with monkeypatch.context() as other:
        other.setattr(sys, "path", [*sys.path, str(tmp_path)])
        assert receipt.check(WORDS) is None
    assert receipt.check(WORDS) is not None
    monkeypatch.chdir(tmp_path / "models")
    assert receipt.check(["run", "../recipe.yaml", "--store", "../store"]) is None


def test_everything_that_decides_is_watched(build: Build, tmp_path: Path) -> None:
    build()
    text = os.fsdecode(Path(receipt.place(str(tmp_path / "store"), WORDS)).read_bytes())
    package = Path(receipt.__file__).parent.parent
    for path in (
        "checkpoints/conversion.py",
        "compiler/program/decoder.py",
        "schema/recipe.schema.json",
    ):
        assert f"{package / path}\0" in text
    assert "/mlcbuild_format/bundle.py\0" in text and "/mlcbuild_format/cpus.json\0" in text
    assert "/x86-64-v3.yaml\0" in text
    assert "-packages\0" in text, "where versions of installed packages show"
    assert "libtvm_runtime." in text


RUN = """
import sys
from mlcbuild.cli import main
from mlcbuild.store import stamp
stamp.RACY_NS = 0
sys.exit(main(sys.argv[1:]))
"""
"""A program that executes the command line without looking for a receipt. Every file counts as old enough."""
CHECK = """
import sys
from mlcbuild.store import receipt
sys.exit(receipt.check(sys.argv[1:]) is None)
"""
"""A program that fails if no receipt shows that the command line has nothing to do."""


def move_into_package(module: Path) -> None:
    """Creates a package that Python imports in place of a module, with the same code."""
    module.with_suffix("").mkdir()
    shutil.copy(module, module.with_suffix("") / "__init__.py")


CODE_CHANGES: Mapping[str, Callable[[Path], object]] = {
    "a module that runs import": lambda root: append(root / "mlcbuild/session.py", "# edited\n"),
    "a new module": lambda root: (root / "mlcbuild/reports/added.py").touch(),
    "a package in place of a module": lambda root: move_into_package(root / "mlcbuild/durations.py"),
    "a file of this package": lambda root: append(root / "mlcbuild/durations/__init__.py", "#"),
    "an import": lambda root: append(root / "mlcbuild/session.py", "import mlcbuild.reports.added\n"),
    "a module that was not imported before": lambda root: append(root / "mlcbuild/reports/added.py", "#"),
    "a new preset": lambda root: shutil.copy(root / "targets/x86-64-v3.yaml", root / "targets/mine.yaml"),
    "a module that is only in keys": lambda root: append(root / "mlcbuild/compiler/program/decoder.py", "#"),
}
"""Change of the program's source files -> function that makes it in a copy of the source. A change may build
on those before it. After the last one, a run has to build a library."""


def test_a_change_of_the_program_leads_to_an_ordinary_run(tmp_path: Path) -> None:
    """Checks that no receipt survives a change of the source files that a run imports or that cache keys
    hold, and that changes of other files do no harm."""
    source, work = tmp_path / "source", tmp_path / "work"
    copy_source(source)
    product.make(work, 1, ("q0f32",), ("aarch64-linux",))
    paths = [str(path) for path in (source, source / "runtime", ROOT)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CONFIG_HOME": "/no-config"}

    def python(*arguments: str) -> int:
        return subprocess.run([sys.executable, *arguments], cwd=work, env=variables, check=False).returncode

    assert python("-m", "tests.product", "fill", *WORDS[1:]) == 0
    for change, make in CODE_CHANGES.items():
        assert python("-c", RUN, *WORDS) == 0
        append(source / "mlcbuild/doctor.py", "#")
        append(source / "runtime/mlcbuild_runtime/http/server.py", "#")
        assert python("-c", CHECK, *WORDS) == 0, f"before {change}"
        make(source)
        assert python("-c", CHECK, *WORDS) == 1, change


def test_a_file_that_was_just_written_is_not_trusted(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    same_size(tmp_path / "models/m000/tokenizer.json")
    product.replace_work(monkeypatch.setattr)
    assert main([*WORDS, "--executor", "inline"]) == 0
    assert main(WORDS) == 0
    assert receipt.check(WORDS) is None


def test_gc_at_work_is_left_alone(build: Build, tmp_path: Path) -> None:
    build()
    with (tmp_path / "store" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert receipt.check(WORDS) is None
    assert receipt.check(WORDS) is not None


def test_the_use_of_records_is_noted(build: Build, tmp_path: Path) -> None:
    build()
    record = next((tmp_path / "store" / "ac").rglob("?" * 64))
    os.utime(record, (1e9, 1e9))
    assert receipt.check(WORDS) is not None
    assert record.stat().st_mtime == 1e9, "it was noted a moment ago"
    os.utime(receipt.place(str(tmp_path / "store"), WORDS), (1e9, 1e9))
    assert receipt.check(WORDS) is not None
    assert record.stat().st_mtime > 1.7e9


def test_runs_by_receipt_have_logs(build: Build, tmp_path: Path) -> None:
    build()
    (before, *_) = runlog.latest(Store(tmp_path / "store"), tmp_path / "recipe.yaml")
    for _ in range(runlog.KEPT + 2):
        assert receipt.check(WORDS) is not None
    logs = runlog.latest(Store(tmp_path / "store"), tmp_path / "recipe.yaml")
    assert len(logs) == runlog.KEPT
    assert logs[0].time > before.time
    assert (logs[0].steps, logs[0].variants) == (before.steps, before.variants)
    assert {step.status for step in logs[0].steps} == {"reused"}


def test_only_as_many_receipts_stay(build: Build, tmp_path: Path) -> None:
    build()
    kept = Path(receipt.place(str(tmp_path / "store"), WORDS))
    texts = ("said", "watched", "absent", "records", "shelves", "blobs", "copies", "listed", "log")
    numbers = ("stats", "shelf_stats", "blob_sizes", "copy_sizes")
    for number in range(receipt.KEPT + 3):
        place = str(kept.with_name(str(number)))
        receipt.write(place, {name: ["x"] for name in texts}, {name: [1] for name in numbers})
    assert len(list(kept.parent.iterdir())) == receipt.KEPT


def test_the_store_is_found_as_the_command_line_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, {"MLCBUILD_STORE": "~/here"}, {"XDG_CACHE_HOME": "/x"}, {"XDG_CACHE_HOME": "x"}):
        with monkeypatch.context() as other:
            for name in ("MLCBUILD_STORE", "XDG_CACHE_HOME"):
                other.delenv(name, raising=False)
            for name, value in variables.items():
                other.setenv(name, value)
            assert receipt.store(["run", "r.yaml"]) == str(default_root())
    assert receipt.store(["run", "--store", "/a"]) == receipt.store(["run", "--store=/a"]) == "/a"
