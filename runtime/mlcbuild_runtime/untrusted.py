"""Loads the library and the tokenizer of a bundle; contents that are new to this machine are loaded in a
child process first.

The system's loader, TVM and the tokenizer libraries expect valid files: a damaged one can make them panic,
abort, fault, or allocate more memory than there is. So this process loads only what a child process has
loaded before. An empty file in the user's cache directory records each content that has passed: the first
start with a bundle costs one child process (0.3 s, most of it for importing NumPy and TVM's Python package),
and later starts check two file names.

This protects against damage, not against malice: a library is machine code, and may do anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from blake3 import blake3
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError, RequestError, SetupError
from mlcbuild_format.manifest import Manifest

from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import FILES, Tokenizer

SECONDS = 120.0
"""Maximum seconds for loading a bundle without its weights; one that takes longer is refused as damaged. The
largest known tokenizers take two."""
MEMORY = 4 << 30
"""Maximum bytes of address space of the child process that tries a bundle, on systems with such a limit. The
largest known tokenizers use less than 1 GiB."""
SAMPLES = ("Once upon a time, 1 + 1 = 2.\n", "Zwölf Boxkämpfer, 日本語 🙂\t\0", "<s> a  b</s>")
"""Texts that every tokenizer must be able to encode."""
EVERY_LETTER = "".join(map(chr, range(0x20, 0x3000)))
"""A text with every character from the space (U+0020) up to U+2FFF, before the first Chinese characters, to
try a tokenizer with."""
TOKENS_PER_BYTE, MORE_TOKENS = 16, 1000
"""TOKENS_PER_BYTE is the maximum number of tokens for each byte of a sample text, MORE_TOKENS the number that
it may have in addition. A bundle whose tokenizer makes more is refused: it could use up all memory for a
prompt of allowed length."""
_START = "from mlcbuild_runtime.untrusted import work; work()"
_FEW_THREADS = {"TVM_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment variables of the child process that tries a bundle, name -> value. They limit each thread pool
to one thread: each thread takes address space, and there may be hundreds of cores."""


def load(
    path: Path | str, threads: int | None = None, pages: int | None = None
) -> tuple[Executor, Tokenizer]:
    """Loads the bundle in directory `path`, and returns its executor and its tokenizer, ready for an engine.
    threads: number of computing threads on a CPU, None for as many as compute fastest, at most one per
    physical core; pages: number of pages of the KV cache, None for enough for a full batch. Raises
    BundleError for a damaged bundle or one for another device or processor, SetupError if the machine lacks
    something else that loading needs."""
    executor = loading.load(path, threads, pages, check)
    return executor, Tokenizer.of(executor.path, executor.manifest)


def check(path: Path, manifest: Manifest) -> None:
    """Loads, in a child process, those parts of a bundle (library, tokenizer) that no child process has
    loaded successfully before, and records in the user's cache directory the parts that could be loaded.
    Raises BundleError if one cannot, SetupError if this machine cannot run the bundle or start a process."""
    notes = {part: _note(part, manifest) for part in _parts(manifest)}
    # Path.exists raises PermissionError below a directory that another account owns; os.path.exists does not.
    new = [part for part, note in notes.items() if note is None or not os.path.exists(note)]  # noqa: PTH110
    if not new:
        return
    passed, fault = _try(path, new)
    for part in passed:
        note = notes[part]
        with suppress(OSError):  # Without a note, the next start tries again.
            if note is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
    if fault:
        raise BundleError(fault)


def _parts(manifest: Manifest) -> dict[str, list[str]]:
    """Returns part ("library", "tokenizer") -> the names of the bundle's files that belong to it."""
    names = sorted(manifest.files)
    parts = {"tokenizer": [name for name in names if name in FILES]}
    if manifest.machine.device in loading.CODE:
        code = [name for name in names if name == manifest.library or name.startswith("lib/")]
        parts = {"library": code, **parts}
    return parts


def _note(part: str, manifest: Manifest) -> Path | None:
    """Returns the path of the file that exists once a child process has loaded a part of a bundle: "library",
    the compiled code, or "tokenizer". The path depends on the content of the part's files and on the version
    of the package that loads them. None if there is no cache directory, because the account has no home
    directory."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if sys.platform == "darwin":
            base = Path("~/Library/Caches").expanduser()
        else:
            base = chosen if chosen.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # The account has no home directory.
        return None
    files = {name: manifest.files[name].blake3 for name in _parts(manifest)[part]}
    key = json.dumps([part, _version(part, manifest), files], sort_keys=True)
    return base / "mlcbuild" / "loaded" / blake3(key.encode()).hexdigest()


def _version(part: str, manifest: Manifest) -> list[str]:
    """Returns [name, version] of the Python package that loads a part of a bundle, so that the part is tested
    again with another version. part: "tokenizer", loaded by tokenizers or sentencepiece, or "library", the
    compiled code, whose package has the name "code" here."""
    if part == "library":
        return ["code", loading.code_version(manifest)]
    # The module's attribute, because this process imports it soon anyway; reading metadata is slower.
    reader = import_module("tokenizers" if "tokenizer.json" in manifest.files else "sentencepiece")
    return [reader.__name__, reader.__version__]


def _try(path: Path, parts: Sequence[str]) -> tuple[list[str], str]:
    """Loads parts of a bundle ("library", "tokenizer") in a child process, in order, up to the first one that
    cannot be loaded. Returns (parts that were loaded, error message for that first one, or "" if all were
    loaded). Raises SetupError if no process can be started, or this machine cannot run the bundle."""
    how, code = f"takes more than {SECONDS:g} s", None
    try:
        process = _run_child(path, parts)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    except OSError as error:
        raise SetupError(f"{path}: it cannot be tried in a process: {error.strerror}") from None
    else:
        output, code = process.stdout, process.returncode
        how = f"fails, or needs more than {MEMORY >> 30} GiB"
        if process.returncode < 0:
            with suppress(ValueError):
                how = f"is ended by {signal.Signals(-process.returncode).name}"
    lines = output.decode(errors="replace").splitlines()
    passed = [part for part, line in zip(parts, lines, strict=False) if part == line]
    if len(passed) == len(parts):
        return passed, ""
    if len(lines) > len(passed):
        if code == SetupError.exit_code:
            raise SetupError(lines[-1])
        return passed, lines[-1]
    remedy = "; build the bundle again from a whole checkpoint"
    return passed, f"{path}: its {parts[len(passed)]} is not usable: the process that loads it {how}{remedy}"


def _run_child(path: Path, parts: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs `work` for parts of a bundle in a child process, and returns the ended process and its standard
    output. Raises subprocess.TimeoutExpired after SECONDS, OSError if no process can be started."""
    return subprocess.run(
        [sys.executable, "-c", _START, str(path), *parts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # A panic prints the message that it then raises.
        env={**os.environ, **_FEW_THREADS, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=SECONDS,
        check=False,
    )


def work() -> None:
    """Runs inside the child process that tries a bundle. Its command-line arguments are the bundle's
    directory and the parts to load: "library", "tokenizer".

    Writes to standard output a line with the name of each part that could be loaded. At the first one that
    cannot, it writes the error message and exits with the error's exit code.
    """
    limit()
    path, parts = Path(sys.argv[1]), sys.argv[2:]
    try:
        manifest = bundle.manifest(path)
        for part in parts:
            if part == "library":
                loading.try_out(path, manifest)
            else:
                _use(path, Tokenizer.of(path, manifest))
            sys.stdout.write(f"{part}\n")
            sys.stdout.flush()
    except (BundleError, SetupError) as error:
        sys.stdout.write(str(error))
        sys.exit(error.exit_code)


def _use(path: Path, tokenizer: Tokenizer) -> None:
    """Encodes and decodes sample texts, to see whether a tokenizer works. Raises BundleError if it cannot
    encode one, or makes far too many tokens of it; the decoded text is not compared."""
    try:
        for sample in (*SAMPLES, EVERY_LETTER):
            tokens, size = tokenizer.encode(sample), len(sample.encode())
            if len(tokens) > MORE_TOKENS + TOKENS_PER_BYTE * size:
                raise BundleError(
                    f"{path}: its tokenizer makes {len(tokens)} tokens of a text of {size} bytes; build the"
                    " bundle again"
                )
            tokenizer.decode(tokens)
    except RequestError as error:
        raise BundleError(
            f"{path}: its tokenizer cannot read plain text: {error}; build the bundle again"
        ) from None


def limit() -> None:
    """Limits the address space of this process to 4 GiB, where the system has such a limit, and disables core
    dumps."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
