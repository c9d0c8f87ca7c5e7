"""Tokenizer files are loaded in a process of their own first, once for each content.

The libraries that read them are written for files of friends: a damaged one can make them panic, abort the
process, or ask for more memory than there is. A small file in the user's cache directory says which contents
have passed, so that the first start with a tokenizer costs a process (60 ms, and once more the time to load
it), and later ones a look at a file name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from blake3 import blake3
from mlcbuild_format.errors import BundleError, SetupError

SECONDS = 120.0
"""For loading a tokenizer. The largest known ones take two."""
MEMORY = 4 << 30
"""Bytes of address space, where the system keeps to it. The largest known tokenizers take less than one."""
_START = "from mlcbuild_runtime.text.tokenizer import try_out; try_out()"


def check(path: Path, digests: Mapping[str, str]) -> None:
    """Raises BundleError for files of a tokenizer in directory `path` that cannot be loaded.

    `digests`: name -> BLAKE3 of each of the files.
    """
    note = _note(digests)
    if note is not None and note.exists():
        return
    reason = _fault(path, list(digests))
    if reason:
        raise BundleError(reason)
    if note is not None:
        with suppress(OSError):  # without a note the next start tries again
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


def _note(digests: Mapping[str, str]) -> Path | None:
    """The file that says that the tokenizer has passed; None where the account has no place for it."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if sys.platform == "darwin":
            base = Path("~/Library/Caches").expanduser()
        else:
            base = chosen if chosen.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # no home directory
        return None
    # This process needs the library in a moment; its metadata would be slower to find.
    reader = import_module("tokenizers" if "tokenizer.json" in digests else "sentencepiece")
    key = json.dumps([reader.__name__, reader.__version__, dict(digests)], sort_keys=True)
    return base / "mlcbuild" / "tokenizers" / blake3(key.encode()).hexdigest()


def _fault(path: Path, names: list[str]) -> str:
    """What is wrong with a tokenizer, as one sentence; empty: nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START, str(path), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic writes there what it then raises
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{path}: its tokenizer takes more than {SECONDS:g} s to load; build the bundle again"
    except OSError as error:
        raise SetupError(f"{path}: its tokenizer cannot be tried in a process: {error.strerror}") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    how = "fails"
    if done.returncode < 0:
        with suppress(ValueError):
            how = f"is ended by {signal.Signals(-done.returncode).name}"
    return (
        f"{path}: its tokenizer is not usable: the process that loads it {how}, or needs more than"
        f" {MEMORY >> 30} GiB; build the bundle again from a whole checkpoint"
    )


def limit() -> None:
    """Binds this process, which is a child of `check`, to MEMORY, and makes it end without a core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
