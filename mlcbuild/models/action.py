"""The step `config/<model>`: a checkpoint's config.json becomes ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlcbuild.canon import Json, canonical
from mlcbuild.errors import CheckpointError
from mlcbuild.models.families import parse
from mlcbuild.models.serial import to_json

LARGEST = 4 << 20
"""Bytes. A real config.json has a few thousand; label tables can make it longer."""


def normalise(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Reads `config.json` in inputs["checkpoint"], writes `config.json` (canonical bytes of `to_json`).

    Raises CheckpointError. Takes no params.
    """
    source = inputs["checkpoint"] / "config.json"
    config = parse(read_json(source), str(source))
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_bytes(canonical(to_json(config)))


def read_json(path: Path) -> object:
    """A JSON file of a checkpoint: no duplicate keys, no NaN. Raises CheckpointError."""
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path}: larger than {LARGEST} bytes; this is not a model's config.json")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}. A checkpoint needs a config.json") from None
    try:
        found: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice}' is there twice")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
