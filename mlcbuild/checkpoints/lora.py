"""Merges LoRA adapters of PEFT into a checkpoint while its rows are read.

A merged matrix is W + s B A in float32: the product, then multiplied by the scale s, then added, each
operation rounded, so that it has the bits that PEFT computes, except in very rare cases (see `_multiply`).
DoRA scales each row of the result to a length that it has learnt. Nothing is kept in memory but the rows that
are read, so a model of any size can be merged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from mlcbuild.checkpoints.checkpoint_kinds import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.mapping import HEAD
from mlcbuild.checkpoints.shards import ComputedTensor, RowReader
from mlcbuild.checkpoints.torch_files import read_file
from mlcbuild.errors import CheckpointError
from mlcbuild.quant.floats import widened

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("", "model."),
)
"""Prefixes of tensor names, as pairs: (prefix in an adapter that was trained on a larger model, such as one
with a vision tower, or on a model without its output matrix; prefix of the same tensors in the checkpoint).
The first pair that leads to a tensor of the checkpoint counts."""
_TABLES = ("embed_tokens", "wte")
"""Last parts of the names of token embeddings in models whose output matrix is HEAD."""
_DTYPES = ("F32", "F16", "BF16")
_PRODUCTS = 1 << 15
"""Number of elements of the product of a LoRA adapter's factors that are computed at once; they stay in a
core's cache.
"""

_LANES = 8
"""Number of partial sums to which PyTorch's norm adds squares, on every CPU: its reductions use 256-bit
vectors even where there are 512-bit ones.
"""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its config, its tensors, and the factor of its change of the base model."""

    directory: Path
    weight: float
    """Factor by which the adapter's change of the base model is multiplied, in addition to the scale that the
    adapter's config states, such as alpha / rank."""
    config: AdapterConfig
    parts: Mapping[str, Mapping[str, Tensor]]
    """Name of a module of the base model -> tensors of the adapter for it: part (A, B, magnitude_vector,
    embedding_A, embedding_B) -> tensor.
    """
    replaced_tensors: Mapping[str, Tensor]
    """Name of a tensor of the base model -> the tensor of the adapter that replaces it."""


@dataclass(frozen=True)
class _Change:
    """The change that one LoRA adapter makes to one matrix: a product of two factors that is added."""

    left: Tensor
    """The left factor of a LoRA change of a matrix: B [rows, rank]; if the attribute `crossed` is True (the
    transpose of B A is added), A [rank, rows], which is transposed when it is read."""
    right: Tensor
    """The right factor of a LoRA change of a matrix: A [rank, columns]; if the attribute `crossed` is True
    (the transpose of B A is added), B [columns, rank], which is transposed when it is read."""
    scale: np.float32
    crossed: bool
    """True if the transpose of the LoRA product B A is added to the matrix: to an embedding table, or to a
    matrix that the base model stores as [in, out].
    """
    magnitude: Tensor | None


def merging(directories: Sequence[tuple[Path, float]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint, by transformers' names, with LoRA adapters merged into them one
    after the other when rows are read. Tensors that are changed become float32; the others are returned as
    they are. directories: pairs (directory of an adapter, factor of its change). Raises CheckpointError for
    an adapter that is damaged or unsupported, does not fit the checkpoint, or replaces a tensor that an
    adapter before it has changed or replaced; a change of a replaced tensor is allowed. A checkpoint without
    an output matrix, in which it is the embedding, gets that of an adapter, or the base's embedding if an
    adapter replaces only the embedding of input tokens."""
    # Both are keyed by transformers' names: `name` of a tensor is its name in the checkpoint's files.
    changes: dict[str, list[_Change]] = {}
    merged = dict(tensors)
    for directory, weight in directories:
        adapter = read_adapter(directory, weight)
        aliases = _aliases(adapter, tensors)
        for own_name, tensor in adapter.replaced_tensors.items():
            name = aliases.get(own_name, own_name)
            if name in tensors or name != HEAD:  # The model's reader checks an output matrix of its own.
                _check_shape(tensor, _base(adapter, name, tensors).shape)
            if name in changes or merged.get(name) is not tensors.get(name):
                raise _fault(
                    tensor,
                    "replaces a tensor that an adapter before it has changed; list this adapter before that "
                    "one, or leave one of them out",
                )
            merged[name] = tensor
        for name in _untied_tables(adapter, aliases, tensors):
            # As in PEFT, the output matrix stays the base's embedding.
            merged.setdefault(HEAD, tensors[name])
        for module, parts in adapter.parts.items():
            name = aliases.get(f"{module}.weight", f"{module}.weight")
            base = _base(adapter, name, tensors)
            changes.setdefault(name, []).append(_change(adapter, module, parts, base))
    for name, module_changes in changes.items():
        base = merged[name]
        load = partial(_merged, base, module_changes)
        merged[name] = ComputedTensor(base.name, "F32", base.shape, base.path, base.start, base.size, load)
    return merged


def _untied_tables(adapter: Adapter, aliases: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names in `tensors`, the checkpoint, of embeddings that an adapter replaces by a copy which
    shares no weights with the output matrix. aliases: the adapter's name of a tensor -> that in `tensors`."""
    tables = tuple(f"{module}.weight" for module in _TABLES if module in adapter.config.untied)
    names = [aliases.get(name, name) for name in adapter.replaced_tensors]
    return [name for name in names if name in tensors and name.endswith(tables)]


def read_adapter(directory: Path, weight: float) -> Adapter:
    """Reads the config of a LoRA adapter in a directory and the header of its weights file, and returns an
    Adapter, whose weights are read later. weight: factor of the adapter's change of the base model, which
    must be 1 if the adapter replaces whole tensors. Raises CheckpointError for an adapter that breaks this,
    or is damaged or unsupported.
    """
    config = read_adapter_config(directory)
    path = next((directory / name for name in ADAPTER_WEIGHTS if (directory / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{directory}: it has {ADAPTER_CONFIG}, but no {ADAPTER_WEIGHTS[0]}")
    parts: dict[str, dict[str, Tensor]] = {}
    replaced_tensors: dict[str, Tensor] = {}
    for tensor in read_file(path) if path.suffix == ".bin" else read_header(path).tensors:
        if tensor.dtype not in _DTYPES:
            raise _fault(tensor, f"is {tensor.dtype}; adapters must be {', '.join(_DTYPES)}")
        name = tensor.name.removeprefix(_PREFIX)
        if match := _PART.fullmatch(name):
            parts.setdefault(match["module"], {})[match["part"].removeprefix("lora_")] = tensor
        elif "lora_" in name:
            raise _fault(tensor, "is no part of a plain LoRA adapter; merge it with PEFT")
        else:
            replaced_tensors[name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = tensor
    if not parts and not replaced_tensors:
        raise CheckpointError(f"{path}: it holds no tensors; save the adapter again")
    if replaced_tensors and weight != 1:
        name = printable(next(iter(replaced_tensors)))
        raise CheckpointError(f"{path}: '{name}' replaces weights of the base, which no 'weight' can scale")
    return Adapter(directory, weight, config, parts, replaced_tensors)


def _aliases(adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the adapter's name of a tensor that it changes -> the tensor's name in `tensors`, the
    checkpoint. They have different prefixes if the adapter was trained on a larger model with this one in it.
    Only names that differ are listed, and none that the checkpoint lacks under every prefix.
    """
    aliases = {}
    for name in (*adapter.replaced_tensors, *(f"{module}.weight" for module in adapter.parts)):
        others = [to + name.removeprefix(prefix) for prefix, to in _PREFIXES if name.startswith(prefix)]
        stored = [other for other in others if other in tensors or other == HEAD]
        if name not in tensors and stored:
            aliases[name] = stored[0]
    return aliases


def _base(adapter: Adapter, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        hint = "was it trained for another model?"
        if name == HEAD:
            hint = "if the model's output matrix is its embedding, merge the adapter with PEFT"
        raise CheckpointError(
            f"{adapter.directory}: it changes '{printable(name)}', which the checkpoint does not hold; {hint}"
        )
    return tensors[name]


def _change(adapter: Adapter, module: str, parts: Mapping[str, Tensor], base: Tensor) -> _Change:
    """Checks a LoRA adapter's tensors for one module of the model and returns the change of the matrix `base`
    that they make. parts: A, B, magnitude_vector, embedding_A or embedding_B -> tensor. Raises
    CheckpointError if tensors are missing, do not fit `base` or the adapter's config, or combine DoRA with a
    matrix [in, out], which cannot be merged here.
    """
    is_table = "embedding_A" in parts
    names = ("embedding_A", "embedding_B") if is_table else ("A", "B")
    missing = [f"lora_{name}" for name in names if name not in parts]
    magnitude = parts.get("magnitude_vector")
    if missing or (magnitude is None and adapter.config.dora):
        lacking_parts = " and ".join(missing) or "lora_magnitude_vector"
        raise CheckpointError(f"{adapter.directory}: module '{printable(module)}' lacks its {lacking_parts}")
    if magnitude is not None and not adapter.config.dora:
        raise _fault(magnitude, "belongs to DoRA, but adapter_config.json has no use_dora")
    first, second = (parts[name] for name in names)
    crossed = is_table or adapter.config.transposed
    if magnitude is not None and crossed:
        raise _fault(magnitude, "belongs to a matrix [in, out] with DoRA; merge the adapter with PEFT")
    if len(base.shape) != 2:
        raise _fault(first, f"changes '{printable(base.name)}', which is no matrix; merge it with PEFT")
    rank, (rows, columns) = adapter.config.rank_of(module), base.shape
    if crossed:
        rows, columns = columns, rows
    _check_shape(first, (rank, columns))
    _check_shape(second, (rows, rank))
    if magnitude is not None:
        _check_shape(magnitude, (rows,))
    scale = np.float32(adapter.weight * adapter.config.scale(module))
    left, right = (first, second) if crossed else (second, first)
    return _Change(left, right, scale, crossed, magnitude)


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise _fault(
            tensor,
            f"must have the shape {list(shape)}, as its config and the base say; found {list(tensor.shape)}",
        )


def _fault(tensor: Tensor, message: str) -> CheckpointError:
    return CheckpointError(f"{tensor.path}: tensor '{printable(tensor.name)}' {message}")


def _merged(base: Tensor, changes: Sequence[_Change], reader: RowReader, first: int, count: int) -> Floats:
    """Returns `count` rows of a base model's matrix from row `first` on, as float32 [count, columns], with
    the changes of all LoRA adapters in `changes` applied one after the other. reader: reads the files.
    """
    original = reader.values(base, first, count)
    rows = original.copy() if len(changes) > 1 else original
    for change in changes:
        delta = _delta(change, reader, first, count)
        delta *= change.scale
        if change.magnitude is None:
            rows += delta
            continue
        # PEFT measures the rows of the unmerged base, even for a second adapter.
        with np.errstate(all="ignore"):  # Infinite weights are refused where weights are stored.
            factor = reader.values(change.magnitude, first, count) / _lengths(original + delta)
            rows += delta
            rows *= factor[:, None]
    return rows


def _lengths(rows: Floats) -> Floats:
    """Returns the Euclidean length of each row of a matrix [count, columns], with the bits of PyTorch's norm
    on CPUs, which adds the squares of every eighth element in float32, then these eight sums, then the
    elements after the last full eight. On 4,096 columns it is up to 3.3 units of the last place from the
    exact length."""
    count, columns = rows.shape
    squares = rows * rows
    left = columns - columns % _LANES
    sums = np.zeros((count, _LANES), np.float32)
    for start in range(0, left, _LANES):
        sums += squares[:, start : start + _LANES]
    total = np.zeros(count, np.float32)
    for addend in (*sums.T, *squares[:, left:].T):
        total += addend
    return np.sqrt(total)


def _delta(change: _Change, reader: RowReader, first: int, count: int) -> Floats:
    """Returns `count` rows, from row `first` on, of the product of a LoRA adapter's two factors, as float32
    [count, columns], not yet multiplied by the scale.
    """
    if change.crossed:
        left = reader.elements(change.left, (0, change.left.shape[0]), (first, first + count))
        left = widened(left).T
        right = reader.values(change.right, 0, change.right.shape[0]).T
    else:
        left = reader.values(change.left, first, count)
        right = reader.values(change.right, 0, change.right.shape[0])
    out = np.empty((count, right.shape[1]), np.float32)
    wide_left, wide_right = left.astype(np.float64), right.astype(np.float64)
    step = max(1, _PRODUCTS // max(1, out.shape[1]))
    with np.errstate(all="ignore"):  # Infinite weights are refused where weights are stored.
        for start in range(0, count, step):
            _multiply(wide_left[start : start + step], wide_right, out[start : start + step])
    return out


def _multiply(left: NDArray[np.float64], right: NDArray[np.float64], out: Floats) -> None:
    """Writes left [rows, rank] @ right [rank, columns] to `out`, float32 [rows, columns]. Both factors are
    float64 arrays of float32 values. Products are added in the order of ranks; each sum is rounded to float64
    and then to float32, which is the result of a fused multiply-add in float32 except in very rare cases.

    Libraries of matrix products, PyTorch's too, have this order for small ranks on CPUs with FMA. Here the
    result is the same on every machine: the product of two float32 is exact in float64.
    """
    total, product = np.zeros(out.shape), np.empty(out.shape)
    for index in range(left.shape[1]):
        np.multiply(left[:, index, None], right[index], out=product)
        product += total
        np.copyto(out, product, casting="same_kind")
        np.copyto(total, out)
