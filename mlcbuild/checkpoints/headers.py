"""Reads the headers of a checkpoint's safetensors files, and finds incomplete files without parsing their
headers."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from textwrap import shorten

from mlcbuild_format import regular, safetensors
from mlcbuild_format.safetensors import MAX_HEADER, Header, HeaderError

from mlcbuild.errors import CheckpointError

_POINTER = b"version "
"""The first bytes of a Git LFS pointer, which a checkout without LFS has in place of a weights file."""
_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,18}\s*,\s*(\d{1,18})\s*\]')
"""Matches the offsets of a tensor's bytes in the JSON header of a safetensors file; group 1 is the end,
relative to the end of the header.
"""


def read_header(path: Path) -> Header:
    """Reads and returns the header of a safetensors file: the dtype, shape and position (bytes from the
    beginning of the file) of each tensor. Raises CheckpointError for a damaged or unreadable file."""
    try:
        try:
            return safetensors.read_header(path)
        except HeaderError as error:
            raise _damaged(path, str(error)) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def check_complete(path: Path) -> None:
    """Raises CheckpointError if a safetensors file is shorter than its header says, or cannot be read. Other
    damage is not detected.

    The header is searched and not parsed: a plan may look at thousands of files, and parsing takes 20 times
    as long. The result is cached for as long as the file's size and mtime stay the same.
    """
    try:
        stat = path.stat()
        problem = _shortfall(path, stat.st_size, stat.st_mtime_ns)
        if problem is not None:
            raise _damaged(path, problem)
    except OSError as error:
        raise _unreadable(path, error) from None


@lru_cache(maxsize=1 << 14)
def _shortfall(path: Path, size: int, _mtime_ns: int) -> str | None:
    """Returns the reason why a safetensors file of `size` bytes is incomplete, as part of a sentence; None
    if it is complete. Raises OSError if it cannot be read.
    """
    with regular.open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{size} bytes do not hold the header"
        text = file.read(min(length, MAX_HEADER))
    expected = 8 + length + max(map(int, _END.findall(text)), default=0)
    return f"its header describes {expected} bytes" if expected > size else None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions")


def _damaged(path: Path, reason: str) -> CheckpointError:
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        return CheckpointError(
            f"{path}: is a Git LFS pointer, not the weights; run 'git lfs pull' in the checkpoint"
        )
    return CheckpointError(
        f"{path}: is truncated, damaged or not a safetensors file ({path.stat().st_size} bytes; "
        f"{shorten(reason, 200, placeholder=' ...')}); fetch the file again"
    )
