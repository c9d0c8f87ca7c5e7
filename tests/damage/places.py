"""Helpers for tests of damage: a recipe of two variants with its store, and functions that damage files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mlcbuild import cli
from mlcbuild.store import receipt
from tests import product
from tests.conftest import ROOT
from tests.forkserver import COMMANDS

PATIENCE = 100
"""Maximum seconds for a separate process; one that takes longer is considered to hang. A command that hangs
in the test's process ends with the test, by pytest's timeout."""


@dataclass(frozen=True)
class Place:
    """A directory with a recipe of two variants, the store that they were built with, and their bundles."""

    root: Path
    separate: bool = False
    """True if each command is a process of its own. Otherwise, commands run in the test's process, which
    takes a third of the time; they read the same receipts, and print the same."""

    @property
    def apart(self) -> Place:
        """The same directory, with commands that are processes of their own."""
        return replace(self, separate=True)

    @property
    def store(self) -> Path:
        return self.root / "store"

    def command(
        self, module: str, *words: str | Path, before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        variables = {"MLCBUILD_STORE": str(self.store), "PYTHONPATH": str(ROOT), "HOME": str(self.root)}
        variables["XDG_CONFIG_HOME"] = str(self.root / "no-config")
        arguments = [str(word) for word in words]
        if self.separate or before:
            environment = {**os.environ, **variables}
            result = COMMANDS.run(module, arguments, self.root, environment, PATIENCE, before)
        else:
            result = self._call(module, arguments, variables)
        assert "Traceback" not in result.stderr and "a defect of" not in result.stderr, result.stderr
        return result

    def _call(
        self, module: str, words: list[str], variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in this process, as `command` does in another one."""
        with (
            pytest.MonkeyPatch.context() as patch,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(self.root)
            with redirect_stdout(out), redirect_stderr(err):
                if module == "tests.product":
                    product.replace_work(patch.setattr)
                    code = cli.main(["run", *words[1:], "--executor", "inline"])
                elif words[0] == "run" and (text := receipt.check(words)) is not None:
                    sys.stdout.write(f"{text}\n")
                    code = 0
                else:
                    code = cli.main(words)
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *texts)

    def mlcbuild(self, *words: str | Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return self.command("mlcbuild", *words, before=before)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `mlcbuild run` with actions that write a few bytes, and returns the ended process."""
        return self.command("tests.product", "fill", "recipe.yaml", *words)

    def records(self, step: str) -> list[Path]:
        results = []
        for path in sorted(self.store.glob("ac/*/*")):
            if json.loads(path.read_bytes().splitlines()[1])["step"].startswith(step):
                results.append(path)
        return results

    def blob(self, step: str) -> Path:
        """Returns the path, in the store, of the first file of a step's result."""
        head = json.loads(self.records(step)[0].read_bytes().splitlines()[0])
        digest = str(head["files"][0][1])
        return self.store / "cas" / digest[:2] / digest

    def bundles(self) -> dict[str, bytes]:
        """Returns path -> content of every file of every bundle, without the provenance file beside them,
        which contains the time of the build."""
        dist = self.root / "dist"
        return {
            path.relative_to(dist).as_posix(): path.read_bytes()
            for path in dist.rglob("*")
            if path.is_file() and path.parent != dist
        }


def write(path: Path, data: bytes) -> None:
    """Overwrites a file in place, even if its mode forbids that, to damage it."""
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)


def healed(place: Place, sound: Place) -> None:
    """Asserts that the damage is repaired: all bundles have their original contents, and the store is
    sound."""
    actual, expected = place.bundles(), sound.bundles()
    wrong = [name for name in {**actual, **expected} if actual.get(name) != expected.get(name)]
    assert not wrong, wrong
    settled(place)


def settled(place: Place) -> None:
    """Asserts that the store is sound and complete, and that another run builds nothing and prints no
    warning."""
    result = place.mlcbuild("cache", "verify")
    assert result.returncode == 0, result.stdout
    again = place.mlcbuild("run", "recipe.yaml")
    right = again.returncode == 0 and "0 built, 11 reused" in again.stdout and "warning" not in again.stdout
    assert right, again.stdout + again.stderr


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")


def brackets(path: Path) -> None:
    write(path, b"[" * 100_000 + b"\n" + b"[" * 100_000 + b"}\n")


def other_kind(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as created:
        created.bind(f"/tmp/{os.getpid()}.socket")  # names of sockets are short
    shutil.move(f"/tmp/{os.getpid()}.socket", path)


def full_directory(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_text("x")


def field(line: int, name: str, value: object) -> Callable[[Path], None]:
    """Returns a function that damages the record file whose path it receives: it replaces the field `name` by
    `value` in the JSON object of the first (0) or second (1) line."""

    def change(path: Path) -> None:
        parts = [json.loads(text) for text in lines(path)[:2]]
        parts[line][name] = value
        write(path, b"".join(json.dumps(part).encode() + b"\n" for part in parts))

    return change


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        write(path, data.replace(old, new, 1))

    return change


def enlarge(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 1 << 40)


RECORDS: dict[str, Callable[[Path], object]] = {
    "a flipped bit in a name": replaced(b"weights-0", b"veights-0"),
    "empty": lambda path: write(path, b""),
    "cut in the first line": lambda path: write(path, path.read_bytes()[:40]),
    "cut in the second line": lambda path: write(path, path.read_bytes()[:-5]),
    "one line": lambda path: write(path, lines(path)[0] + b"\n"),
    "a third line": lambda path: write(path, path.read_bytes() + b'{"x":1}\n'),
    "text behind it": lambda path: write(path, path.read_bytes() + b"x"),
    "a duplicate key": replaced(b'{"action"', b'{"action":"x:y","action"'),
    "a flipped bit in what no key covers": replaced(b'"shared":true', b'"sharee":true'),
    "a cost of 1e999": replaced(b'"measured":[', b'"measured":[1e999,'),
    "zeros": lambda path: write(path, bytes(path.stat().st_size)),
    "not UTF-8": replaced(b'"step":"', b'"step":"\xff'),
    "brackets": brackets,
    "a size of 1e999": replaced(b'","', b'",1e999,"'),
    "a huge number": replaced(b'"measured":[', b'"measured":[' + b"9" * 5000),
    "measured of another shape": field(1, "measured", ["x", {}, []]),
    "measured is true": field(1, "measured", [True, 1, 2]),
    "measured is negative": field(1, "measured", [-1, 1, 2]),
    "a step that is an object": field(1, "step", {"a": [1]}),
    "a step with a line break": field(1, "step", "weights/\x1b[31m\n"),
    "a lone surrogate": field(1, "step", "\ud800"),
    "shared is a word": field(1, "shared", "yes"),
    "inputs are a list": field(1, "inputs", [1]),
    "deep params": field(1, "params", json.loads('{"a":' * 300 + "1" + "}" * 300)),
    "one field more": field(1, "more", 1),
    "files out of the tree": field(0, "files", [["../x", "00" * 32, 1]]),
    "files twice": field(0, "files", [["x", "00" * 32, 1]] * 2),
    "a name of 300 letters": field(0, "files", [["x" * 300, "00" * 32, 1]]),
    "a file below a file": field(0, "files", [["x", "00" * 32, 1], ["x/y", "00" * 32, 1]]),
    "a negative size": field(0, "files", [["x", "00" * 32, -1]]),
    "a tree that is a list": field(0, "tree", [1]),
    "another format": field(0, "format", "record/9"),
    "a directory": other_kind(Path.mkdir),
    "a full directory": other_kind(full_directory),
    "a pipe": other_kind(os.mkfifo),
    "a socket": other_kind(bound),
    "a link to itself": other_kind(lambda path: path.symlink_to(path)),
    "a link to a device": other_kind(lambda path: path.symlink_to("/dev/zero")),
    "larger than any record": enlarge,
}
