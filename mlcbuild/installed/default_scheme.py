"""Chooses the quantization scheme of a checkpoint that is built without one: by its size and this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mlcbuild import machine
from mlcbuild.errors import MlcbuildError
from mlcbuild.models.action import read_json
from mlcbuild.models.config import ModelConfig, parameters
from mlcbuild.models.parsing import parse

SMALL = 1_000_000_000
"""Number of parameters below which a model gets 8 bits per weight. In 4 bits the loss of SmolLM2-135M rises
by 0.14 nats, far beyond 3 percent of perplexity; in 8 bits by 0.001 (`ci/bench/accuracy`).
"""
_PART_OF_MEMORY = 0.5
"""Maximum part of the memory for steps that weights may take; the rest is for the cache and for other
programs.
"""
_BYTES = {8: 1.07, 4: 0.57}
"""Bits of a weight -> bytes of storage, scales included."""


@dataclass(frozen=True)
class SchemeChoice:
    """A quantization scheme and why it was chosen."""

    scheme: str
    reason: str
    """Reason that follows "with SCHEME" in a message. It names the alternative if there was one."""


def choose_scheme(words: str, count: int | None = None, memory: int | None = None) -> SchemeChoice:
    """Returns the default scheme for a model on a machine.

    words: the machine as `machine_words` describes it. count: number of the model's parameters; None if it is
    unknown. memory: bytes for weights and everything else; None: this machine's. int8 products need
    instructions that sum bytes: AVX2 and later, or Arm's dot product. Other processors multiply floats about
    as fast.
    """
    _, cpu, *features = words.split()
    sums_bytes = cpu in ("x86-64-v3", "x86-64-v4", "apple-m1") or "+dotprod" in features
    four, eight = ("q4a8_1", "q8a8_1") if sums_bytes else ("q4f16_1", "q8f16_1")
    if count is None:
        return SchemeChoice(four, f"which fits this CPU; {eight} loses less of a small model")
    room = (machine.memory() if memory is None else memory) * _PART_OF_MEMORY
    if count < SMALL and count * _BYTES[8] <= room:
        return SchemeChoice(eight, f"since a model this small loses much in 4 bits; {four} is smaller")
    if count * _BYTES[4] > room:
        return SchemeChoice(four, "the smallest; it may be too large for this machine's memory")
    return SchemeChoice(four, f"which fits this CPU; {eight} loses less")


def parameter_count(source: str) -> int | None:
    """Returns the number of parameters of a checkpoint; None if it cannot be determined.

    source: the path of a directory or a GGUF file, or an hf:// address, for which the hub's list of weights
    files is read and two bytes per parameter are assumed.
    """
    try:
        if source.startswith("hf://"):
            return _hub_count(source)
        return sum(math.prod(param.shape) for param in parameters(_config(Path(source))))
    except MlcbuildError:
        return None


def _config(path: Path) -> ModelConfig:
    if path.suffix == ".gguf":
        from mlcbuild.checkpoints.gguf_config import read_config  # loads NumPy

        return read_config(path)
    return parse(read_json(path / "config.json"), str(path / "config.json"))


def _hub_count(source: str) -> int | None:
    from mlcbuild.checkpoints import hub
    from mlcbuild.checkpoints.fetch import needed_files

    repository = hub.parse_source(source)
    if repository is None:
        return None
    _, files = hub.list_files(repository)
    if "config.json" not in files:
        return None
    names = {name for name in files if name.endswith(".safetensors")}
    weights = [name for name in needed_files(files, names) if name.endswith(".safetensors")]
    return sum(files[name].size for name in weights) // 2
