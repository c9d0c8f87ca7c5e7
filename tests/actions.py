"""Small actions for the tests of the build engine. All have the same signature: (params, inputs, out)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mlcbuild import progress
from mlcbuild.canon import Json
from mlcbuild.errors import CheckpointError, InputError, Problem
from mlcbuild.store.links import link_or_copy

Params = Mapping[str, Json]
Inputs = Mapping[str, Path]


def text(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes params["text"] and the contents of all inputs to text.txt. It adds a line to a
    file for each of its runs, and sleeps or waits if params require it."""
    if "count" in params:
        with Path(str(params["count"])).open("a") as file:
            file.write(f"{params.get('text')}\n")
    time.sleep(int(str(params.get("sleep_ms", 0))) / 1000)
    while "gate" in params and not Path(str(params["gate"])).exists():
        time.sleep(0.02)
    parts = [str(params.get("text", ""))]
    for argument in sorted(inputs):
        parts += [path.read_text() for path in sorted(inputs[argument].rglob("*")) if path.is_file()]
    (out / "text.txt").write_text("\n".join(parts))


def stir(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes two files of 100 kB and more that depend on every byte of the inputs, a piece
    at a time."""
    from blake3 import blake3

    hasher = blake3(str(params["salt"]).encode())
    for argument in sorted(inputs):
        for path in sorted(inputs[argument].rglob("*")):
            if path.is_file():
                hasher.update(path.read_bytes())
    for number in range(2):
        with (out / f"{number}.bin").open("wb") as file:
            for piece in range(5 + 5 * number):
                file.write(hasher.digest(length=20_000, seek=20_000 * (20 * number + piece)))
                time.sleep(0.003)


def first_letter(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes only the first letter of its input, so that most changes of the input leave
    its result unchanged.
    """
    (out / "letter.txt").write_text((inputs["of"] / "text.txt").read_text()[:1])


def files(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes the files of params["files"], a mapping from name to text."""
    listed = params["files"]
    assert isinstance(listed, dict)
    for name, content in listed.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))


def names(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes the names of the files of its inputs to names.txt."""
    results = [f"{a}/{p.relative_to(d)}" for a, d in inputs.items() for p in d.rglob("*") if p.is_file()]
    (out / "names.txt").write_text("\n".join(sorted(results)))


def link(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: copies every file of every input to its output, as the action that assembles bundles
    does."""
    for directory in inputs.values():
        for path in directory.iterdir():
            link_or_copy(path, out / path.name)


def listing(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: copies all input files to its output, adds one, and lists all with digests, as the
    action that assembles bundles does."""
    from mlcbuild.bundles import assemble

    link(params, inputs, out)
    (out / "more.bin").write_bytes(b"more" * 1000)
    listed = {name: file.blake3 for name, file in assemble._files(out).items()}
    (out / "files.json").write_text(json.dumps(listed))


def random(params: Params, inputs: Inputs, out: Path) -> None:
    (out / "random.txt").write_text(os.urandom(16).hex())


def fail(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: fails in the way that params["how"] names, such as an exception or a signal."""
    how = params["how"]
    sys.stdout.write("a line before the end\n")
    sys.stdout.flush()
    if how == "own error":
        raise CheckpointError("model.safetensors: tensor a is missing")
    if how == "escapes":
        raise CheckpointError("\x1b[31mred")
    if how == "python escapes":
        raise ValueError("\x1b[31mred")
    if how == "input error":
        raise InputError([Problem("recipe.yaml", 3, 5, "wrong")])
    if how == "python error":
        raise KeyError("no such thing")
    if how == "exit":
        os._exit(7)
    if how == "sys.exit":
        sys.exit(2)
    os.kill(os.getpid(), int(str(how)))
    time.sleep(30)


def segfault(params: Params, inputs: Inputs, out: Path) -> None:
    ctypes.string_at(0)


def symlink(params: Params, inputs: Inputs, out: Path) -> None:
    (out / "link").symlink_to("elsewhere")


def outside_link(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: puts a hard link to a file of the user into its output."""
    (out / "linked").hardlink_to(str(params["path"]))


def spoil_input(params: Params, inputs: Inputs, out: Path) -> None:
    path = inputs["of"] / "text.txt"
    path.unlink()
    path.write_text("spoilt")


def spoil_source(params: Params, inputs: Inputs, out: Path) -> None:
    Path(str(params["path"])).write_text("changed while it was read")


def big(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes a file of params["bytes"] bytes."""
    (out / "big.bin").write_bytes(b"x" * int(str(params["bytes"])))


def noisy(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: prints from Python, from C, and from a child process."""
    sys.stdout.write("from python\n")
    ctypes.CDLL(None).puts(b"from native code")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    (out / "done").write_text("")


def environment(params: Params, inputs: Inputs, out: Path) -> None:
    names = ("MLCBUILD_CORES", "PYTHONHASHSEED")
    (out / "environment.txt").write_text(" ".join(os.environ.get(name, "-") for name in names))


def leave_rubbish(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: leaves a read-only directory with a file in the directory for temporary files."""
    import tempfile

    place = Path(tempfile.mkdtemp())
    (place / "rubbish").write_text("x")
    place.chmod(0o555)
    (out / "where.txt").write_text("x")
    Path(str(params["note"])).write_text(str(place))


def hold(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: starts a child process, writes both process ids to the file params["note"], then
    computes in Python for long."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note = Path(str(params["note"]))
    part = note.with_suffix(".part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.replace(note)
    end = time.monotonic() + 600
    while time.monotonic() < end:
        sum(range(1000))


def hold_once(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: writes the ids of this process and its parent to the file params["note"] and waits to
    be killed; when run again, it ends at once. With params["gate"], it waits only until that file exists."""
    note = Path(str(params["note"]))
    sys.stdout.write(f"attempt in {os.getpid()}\n")
    sys.stdout.flush()
    if not note.exists():
        part = note.with_suffix(".part")
        part.write_text(f"{os.getpid()} {os.getppid()}")
        part.replace(note)
        end = time.monotonic() + 60
        while time.monotonic() < end and not ("gate" in params and Path(str(params["gate"])).exists()):
            time.sleep(0.02)
    (out / "text.txt").write_text("held")


def slow_progress(params: Params, inputs: Inputs, out: Path) -> None:
    for count in range(4):
        progress.report(count, 3, "layers")
        time.sleep(0.25)
    (out / "done").write_text("")


def memory(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: allocates params["bytes"] bytes of memory."""
    held = bytearray(int(str(params["bytes"])))
    held[::4096] = b"x" * len(held[::4096])
    (out / "size.txt").write_text(str(len(held)))


def grow(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: leaks params["bytes"] bytes of memory, so that the worker process grows, and writes
    its process id.
    """
    _kept.append(b"x" * int(str(params["bytes"])))
    (out / "pid.txt").write_text(str(os.getpid()))


_kept: list[bytes] = []


def interval(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: appends the times of its start and its end to the file params["log"]."""
    started = time.monotonic()
    time.sleep(0.15)
    with Path(str(params["log"])).open("a") as file:
        file.write(f"{started} {time.monotonic()}\n")
    (out / "done").write_text(str(params.get("text")))


def send_signal(params: Params, inputs: Inputs, out: Path) -> None:
    """Action for tests: sends SIGTERM to its own process, which a run in this process must survive."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
