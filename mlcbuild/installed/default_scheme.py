"""Chooses the quantization scheme of a checkpoint for which the user named none: by its number of parameters,
and by the processor and memory of this machine."""

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
"""Number of parameters below which a model gets more than 4 bits per weight: of 8, 6 and 5 (only 8 without
int8 products), the most with which its weights fit into half of the memory that build steps may use, or else
4. The perplexity of SmolLM2-135M, 19.52 in float32, is 19.46 in q8a8_1, 19.86 in q6a8_2 (1.7 percent more),
19.95 in q5a8_2 (2.2) and 20.48 in q4a8_2 (4.9, the first beyond 3) (`ci/bench/accuracy --smollm2`)."""
_PART_OF_MEMORY = 0.5
"""Maximum fraction, for a model's weights, of the memory that build steps may use (nine tenths of the
machine's). A quantization scheme with which they exceed it is not chosen, except that of 4 bits, the
smallest. The rest is for the KV cache and for other programs."""
_BYTES = {8: 1.07, 6: 0.83, 5: 0.71, 4: 0.58}
"""Bits of a quantized weight -> bytes of storage per weight, scales included."""
_MARKS = {"F32": 32.0, "F16": 16.0, "Q8": 8.5, "Q6": 6.6, "Q3": 3.9, "Q2": 3.2}
"""Text in the name of a GGUF file, in upper case -> bits of storage per weight, scales included, by which the
number of parameters is estimated from the file's size. The first of this table that occurs in the name
counts."""
_USUAL_BITS = 5.0
"""Bits per weight, scales included, that are assumed for a GGUF file whose name states no type: most such
files have types of 4 or 5 bits."""


@dataclass(frozen=True)
class SchemeChoice:
    """The name of a quantization scheme, such as "q4a8_2", and the reason why it was chosen."""

    scheme: str
    reason: str
    """The reason why the quantization scheme was chosen, to follow the scheme's name in a message, such as
    "which fits this CPU". If a scheme with 8 or with 4 bits was the alternative, the reason names it."""


def choose_scheme(words: str, count: int | None = None, memory: int | None = None) -> SchemeChoice:
    """Chooses the quantization scheme for a model if the user named none, and returns its name with the
    reason. The scheme has 4 bits per weight, or more for a model of less than a billion parameters: as many,
    up to 8, as let the weights fit into half of the memory. If the number of parameters is unknown, or
    nothing fits, it has 4 bits.

    words: triple, processor and features of the machine, separated by spaces. count: number of the model's
    parameters; None if it is unknown. memory: bytes for weights and everything else; None: nine tenths of
    this machine's."""
    by_bits = _schemes(words)
    four, eight = by_bits[4], by_bits[8]
    if count is None:
        return SchemeChoice(four, f"which fits this CPU; {eight} loses less of a small model")
    room = (machine.memory() if memory is None else memory) * _PART_OF_MEMORY
    fitting = [bits for bits in by_bits if count * _BYTES[bits] <= room]
    if not fitting:
        return SchemeChoice(four, "the smallest; it may be too large for this machine's memory")
    if count < SMALL and max(fitting) > 4:
        chosen = by_bits[max(fitting)]
        return SchemeChoice(chosen, f"since a model this small loses much in 4 bits; {four} is smaller")
    return SchemeChoice(four, f"which fits this CPU; {eight} loses less")


def _schemes(words: str) -> dict[int, str]:
    """Returns number of bits of a weight -> name of the quantization scheme with such weights that suits a
    machine, most bits first: 8 and 4, on machines with int8 products also 6 and 5. words: triple, processor
    and features of the machine, separated by spaces.

    int8 products need instructions that sum bytes: AVX2 and later, or Arm's dot product; other processors
    multiply floats about as fast. With AMX the 4-bit scheme is q4a8_1 instead of q4a8_2, since only weights
    with a single scale are multiplied in tile registers.
    """
    _, cpu, *features = words.split()
    if not (cpu in ("x86-64-v3", "x86-64-v4", "apple-m1") or "+dotprod" in features):
        return {8: "q8f16_1", 4: "q4f16_1"}
    return {8: "q8a8_1", 6: "q6a8_2", 5: "q5a8_2", 4: "q4a8_1" if "+amx-bf16" in features else "q4a8_2"}


def parameter_count(source: str) -> int | None:
    """Returns the number of parameters of a checkpoint; None if it cannot be determined, such as for a
    damaged checkpoint or a hub that cannot be reached.

    source: the path of a directory or a GGUF file, or an hf:// address. For an address the number follows
    from the sizes of the weights files on the hub, with two bytes per parameter, or with the bits that the
    name of a GGUF file states.
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
    from mlcbuild.checkpoints.fetch import gguf_parts, needed_files

    repository = hub.parse_source(source)
    if repository is None:
        return None
    _, files = hub.list_files(repository)
    if repository.file:
        size = sum(files[name].size for name in gguf_parts(files, repository.file))
        marks = (bits for mark, bits in _MARKS.items() if mark in repository.file.upper())
        return int(8 * size / next(marks, _USUAL_BITS))
    if "config.json" not in files:
        return None
    names = {name for name in files if name.endswith(".safetensors")}
    weights = [name for name in needed_files(files, names) if name.endswith(".safetensors")]
    return sum(files[name].size for name in weights) // 2
