"""Translates a checkpoint's config.json into a ModelConfig and the names of its tensors, in the build step
`config/<model>`."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path

from mlcbuild_format import regular, strict_json

from mlcbuild.canon import Json, canonical
from mlcbuild.errors import CheckpointError
from mlcbuild.models.config import ModelConfig
from mlcbuild.models.known import QUANTIZATION
from mlcbuild.models.parsing import parse, tensor_names
from mlcbuild.models.serial import to_json
from mlcbuild.models.tensor_names import TensorNames

TENSOR_NAMES = "tensors.json"
STORAGE = "quantization.json"
"""Name of the file that holds, as JSON, the part of config.json that describes how weights are stored (such
as quantization_config). The file is absent for unquantized weights."""
LARGEST = 4 << 20
"""Maximum size of a config.json in bytes. A usual one has a few thousand; tables of labels can make it
longer.
"""


def normalise(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action: translates the config.json of a checkpoint into a ModelConfig and the names of its tensors.

    Reads `config.json` in inputs["checkpoint"] and writes three JSON files to `out`: `config.json` (the
    ModelConfig), `tensors.json` (the names), and `quantization.json` (the quantization_config) if the weights
    are quantized. params is not read. Raises CheckpointError for a missing or invalid config.json, or an
    unsupported architecture.
    """
    source = inputs["checkpoint"] / "config.json"
    values = read_json(source)
    write_config(parse(values, str(source)), out)
    stored = quantization(values)
    if stored is not None:
        (out / STORAGE).write_text(json.dumps(stored, sort_keys=True))


def quantization(values: object) -> object:
    """Returns the value of the field of a config.json that describes how weights are stored: the first in the
    order quantization_config, compression_config, quantization that is there and not null or, if there is
    none, that of its text_config; None for unquantized weights. values: the decoded JSON document."""
    if not isinstance(values, Mapping):
        return None
    stored = [values[name] for name in QUANTIZATION if values.get(name) is not None]
    return stored[0] if stored else quantization(values.get("text_config"))


def write_config(config: ModelConfig, out: Path, names: TensorNames | None = None) -> None:
    """Writes config.json and tensors.json of a model to the directory `out`, which is created if it is
    missing; older files are overwritten. names: parameter -> the checkpoint's tensors that hold it; None: the
    names that the model's family defines."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_bytes(canonical(to_json(config)))
    (out / TENSOR_NAMES).write_bytes(canonical((names or tensor_names(config)).to_json()))


def read_json(path: Path) -> object:
    """Reads a JSON file of a checkpoint and returns the decoded document. Raises CheckpointError for a file
    that is missing or unreadable, larger than 4 MiB, not UTF-8, malformed or nested too deeply, or has
    duplicate keys, NaN or Infinity."""
    try:
        text = regular.read(path, LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointError(
                f"{path}: larger than {LARGEST} bytes; this is not a model's config.json"
            ) from None
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}. A checkpoint needs a config.json") from None
    try:
        document: object = _decode(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    return document


_decode = strict_json.decoder()
