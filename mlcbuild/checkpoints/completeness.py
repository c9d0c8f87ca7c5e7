"""Detects incomplete weights files of a checkpoint before any step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mlcbuild.checkpoints.headers import check_complete
from mlcbuild.checkpoints.torch_files import read_file
from mlcbuild.errors import CheckpointError

_CHECKS: Mapping[str, Callable[[Path], object]] = {".safetensors": check_complete, ".bin": read_file}
"""Suffix of a weights file -> function that raises CheckpointError for an incomplete or unreadable one."""


def weights_faults(root: Path, files: Iterable[str]) -> list[str]:
    """Returns an error message for each safetensors file that is shorter than its header says or cannot be
    read, and for each PyTorch file that is incomplete, damaged or missing; [] if there is none. Files with
    other suffixes than .safetensors and .bin are skipped. root: the checkpoint's directory; files: names in
    it.
    """
    faults = []
    for name in files:
        check = _CHECKS.get(Path(name).suffix)
        if check is not None:
            try:
                check(root / name)
            except CheckpointError as error:
                faults.append(str(error))
    return faults
