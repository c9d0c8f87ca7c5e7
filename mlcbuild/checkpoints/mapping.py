"""Maps the parameters of a model to the tensors of a Hugging Face checkpoint, and to the rows of these
tensors.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.checkpoint_kinds import kind_of
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.number_types import READABLE
from mlcbuild.checkpoints.row_reader import ParameterSource, Rows
from mlcbuild.checkpoints.shard_index import INDEX, index_faults, weights_files
from mlcbuild.checkpoints.shards import ComputedTensor, PackedTensor
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, Param, Piece, TensorNames, parameters, surplus
from mlcbuild.models.tensor_names import other_names

HEAD = "lm_head.weight"
_ONLY_HEAD = (
    "models for embeddings have none: set tie_word_embeddings to true in config.json, which changes no"
    " embedding"
)
LINES = 60
"""Maximum number of problems of a checkpoint that one error lists; further ones are only counted."""
View: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""A view of a checkpoint: a function that receives name -> stored tensor and returns the tensors, by name,
that replace them. Raises CheckpointError for tensors that are missing or do not fit together.
"""


@dataclass(frozen=True)
class Views:
    """The two functions that, one after the other, turn the tensors stored in a checkpoint into the tensors
    of its model."""

    quantized: View = dict
    """Function that receives the tensors in a checkpoint's files (name -> tensor) and returns the same
    mapping with the stored tensors of each quantized matrix (codes, scales and so on) replaced by one tensor
    with its values. Other tensors stay.
    """
    adapted: View = dict
    """Function that merges LoRA adapters into a checkpoint's tensors: from transformers' tensor name ->
    tensor to the same names with merged tensors.
    """


PLAIN = Views()
"""The Views for a checkpoint that is neither quantized nor combined with LoRA adapters: two functions that
return its tensors unchanged.
"""


def locate(
    root: Path, config: ModelConfig, names: TensorNames, views: Views = PLAIN, *, remark: bool = False
) -> tuple[ParameterSource, ...]:
    """Returns, for each parameter of a model in the order of `parameters(config)`, the checkpoint's tensors
    that hold it.

    root: a GGUF file, or a directory with model.safetensors or, when that is absent,
    model.safetensors.index.json and the files it names (the order in which transformers looks), or else
    safetensors files of any other names, or else PyTorch's files. Files are only read. names: for each
    parameter, the names of its tensors; views: transformations of the stored tensors. remark: True if tensors
    that the model does not need are also reported by the run, not only in the step's log.

    Raises CheckpointError with the problems of all files and tensors (at most 60, then a count), also for
    tensors that no known reason lets the model leave out, and for an output matrix that differs from the
    embedding although the config ties them.
    """
    stored, index, problems = _read(root)
    complete, reason = not problems, partial(surplus, config, unused=names.unused)
    tensors = _viewed(stored, names, views if complete else PLAIN)
    table = _table(config, names, tensors)
    located, misfits = _located(config, table, tensors)
    problems += misfits
    needed = {part.tensor: param for param, parts in table.items() for part in parts}
    if complete:  # If a file could not be read, it may hold the missing tensors.
        problems += index_faults(root / INDEX, index, stored, reason)
        missing = [name for name in needed if name not in tensors]
        remedy = _ONLY_HEAD if missing == [HEAD] else "fetch the whole checkpoint"
        problems += [
            f"{root}: tensor '{name}' is missing ({needed[name]} needs it); {remedy}" for name in missing
        ]
    unread = {name: reason(name) for name in tensors if name not in needed}
    problems += [
        f"{tensors[name].path}: tensor '{name}' belongs to no parameter of family '{config.family}'; is "
        "config.json of this checkpoint?"
        for name, why in unread.items()
        if why is None
    ]
    if not problems:
        if remark:
            _remark(unread)
        _report("left out", unread)
        notes = {name: getattr(tensors[name], "note", "") for name in needed}
        _report("read", {name: note for name, note in notes.items() if note})
        if config.tie_embeddings and HEAD in unread:
            problems += _untied(config, located[0], tensors[HEAD])
    fail(problems)
    return tuple(located)


def _read(root: Path) -> tuple[dict[str, Tensor], dict[str, str] | None, list[str]]:
    """Reads the headers of all weights files of the checkpoint at the path `root`. Returns (tensor name in
    the files -> tensor, index file's mapping of tensor names to file names or None, error messages). Raises
    CheckpointError instead if there are no weights files, or a file that is not safetensors (GGUF or PyTorch)
    is damaged.
    """
    reader = kind_of(root).reader
    if reader is not None:
        return import_module(reader).read_tensors(root), None, []
    files, index = weights_files(root)
    tensors, problems = _tensors(root, files)
    return tensors, index, problems


def _viewed(stored: Mapping[str, Tensor], names: TensorNames, views: Views) -> dict[str, Tensor]:
    """Returns transformers' name of a tensor -> the tensor, after both functions of `views`: dequantization
    of the stored tensors, and merging of LoRA adapters. stored: name in the checkpoint's files -> tensor;
    names: the model's tensor names, which show whether the checkpoint has other prefixes. CheckpointErrors of
    these functions are not caught."""
    tensors = views.quantized(stored)
    sources = [part.tensor for pieces in names.sources.values() for part in pieces]
    others = other_names(sources, [*tensors])
    return views.adapted({others.get(name, name): tensor for name, tensor in tensors.items()})


def _located(
    config: ModelConfig, table: Mapping[str, tuple[Piece, ...]], tensors: Mapping[str, Tensor]
) -> tuple[list[ParameterSource], list[str]]:
    """Locates the parameters of a model in a checkpoint's files. Returns (parameters with their stored
    tensors, seen as vectors or matrices, for those parameters all of whose tensors exist, also if one does
    not fit; error messages for tensors of a wrong dtype or shape). The caller reports missing tensors. table:
    parameter name -> the tensors that make it up; tensors: name -> stored tensor."""
    located, problems = [], []
    for param in parameters(config):
        parts = table[param.name]
        pieces = tuple(tensors[part.tensor] for part in parts if part.tensor in tensors)
        if len(pieces) == len(parts):
            if len(param.shape) == 1 and (param.parts or "correct" in param.name) and "qkv" not in param.name:
                pieces = tuple(_flat(piece) for piece in pieces)
            problems += _misfits(ParameterSource(param, pieces), parts)
            ranges = () if all(part.in_order for part in parts) else parts
            located.append(ParameterSource(param, tuple(_joined(piece) for piece in pieces), ranges))
    return located, problems


def _remark(unread: Mapping[str, str | None]) -> None:
    """Prints to the step's log, for each reason why tensors of a checkpoint are left out, a `note:` line,
    which the run shows, with the name of the tensor or, for several, their number and one of their names.
    unread: tensor name -> reason."""
    for reason, count in Counter(unread.values()).items():
        first = min(name for name, why in unread.items() if why == reason)
        names = first if count == 1 else f"{count} tensors, such as {first}"
        sys.stderr.write(f"note: left out {names}: {reason}\n")


def _report(action: str, reasons: Mapping[str, str | None]) -> None:
    """Prints to the step's log a line with the number of tensors for each group of tensors that have the same
    reason and names that differ only in numbers. action: what was done with the tensors, such as "left out";
    reasons: tensor name -> reason, which ends the line."""
    kinds: dict[tuple[str, str | None], int] = {}
    for name, reason in reasons.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), reason
        kinds[kind] = kinds.get(kind, 0) + 1
    for (name, reason), count in kinds.items():
        sys.stderr.write(f"{action}: {count} of {name}: {reason}\n")


def _flat(piece: Tensor) -> Tensor:
    """Returns the description of a checkpoint's tensor as a vector of the same elements and type."""
    return replace(piece, shape=(math.prod(piece.shape),))


def _table(
    config: ModelConfig, names: TensorNames, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Piece, ...]]:
    """Returns parameter name -> the checkpoint's tensors, or the rows of them, that make up the parameter,
    including tensors that the checkpoint lacks. names: the names that the model's family lists; tensors:
    those that the checkpoint has. The embedding is read from the output matrix if the config ties them and
    the checkpoint has no tensor for the embedding."""
    table = dict(names.sources)
    embedding = parameters(config)[0].name
    if config.tie_embeddings and HEAD in tensors and table[embedding][0].tensor not in tensors:
        # A writer that drops shared tensors keeps one name of them, and it may be the other one.
        table[embedding] = (Piece(HEAD, config.vocab_size),)
    return table


def fail(problems: list[str]) -> None:
    """Raises CheckpointError with the error messages `problems`, one per line (at most 60, then a count);
    does nothing if there are none.
    """
    if len(problems) > LINES:
        problems = [*problems[:LINES], f"... and {len(problems) - LINES} more problems of these kinds"]
    if problems:
        raise CheckpointError("\n".join(map(printable, problems)))


def _tensors(root: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Reads the headers of the weights files `names` in the directory `root`. Returns (tensor name -> tensor
    for all files that can be read; error messages for missing and damaged files and for tensors in two files,
    of which the first counts).
    """
    tensors: dict[str, Tensor] = {}
    problems = []
    for name in names:
        if not (root / name).is_file():
            problems.append(
                f"{root / INDEX}: it names '{name}', which is not there; fetch the whole checkpoint"
            )
            continue
        try:
            header = read_header(root / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for tensor in header.tensors:
            if tensor.name in tensors:
                problems.append(
                    f"{tensor.path}: tensor '{tensor.name}' is also in {tensors[tensor.name].path.name}; "
                    "fetch the checkpoint again"
                )
            tensors.setdefault(tensor.name, tensor)
    return tensors, problems


def _misfits(source: ParameterSource, expected: Sequence[Piece]) -> list[str]:
    """Returns an error message for each stored tensor of a model parameter whose dtype or shape is wrong.
    expected: for each of these tensors, in the same order, the number of rows that config.json requires, and
    whether the matrix is stored transposed. The number of columns is that of the parameter."""
    problems = []
    # A stack may be one tensor, or matrices of one expert each.
    stacked = len(expected) == 1 and expected[0].rows == source.param.shape[0]
    rest = source.param.shape[1:] if stacked else source.row_shape
    for piece, part in zip(source.pieces, expected, strict=True):
        shape = (part.stored_rows, *rest)
        if part.transposed:
            out, columns = source.param.shape[-2:]
            count = part.rows // out
            # A stack is one tensor of three dimensions, or of two where it has other rows, too.
            stacked = len(source.param.shape) == 3 and part.block == columns
            shape = (count, part.block, out) if stacked else (count * part.block, out)
        if piece.shape != shape:
            problems.append(
                f"{piece.path}: tensor '{piece.name}' must have the shape {list(shape)}, as config.json "
                f"says; found {list(piece.shape)}"
            )
        if piece.dtype not in READABLE and not isinstance(piece, PackedTensor | ComputedTensor):
            problems.append(
                f"{piece.path}: tensor '{piece.name}' is {piece.dtype}; weights are {', '.join(READABLE)}: "
                "use the original, unquantized checkpoint"
            )
    return problems


def _joined(piece: Tensor) -> Tensor:
    """Returns a view of a tensor [a, b, c] as a matrix [a * b, c] with the same bytes; other tensors are
    returned unchanged.
    """
    if len(piece.shape) != 3:
        return piece
    return replace(piece, shape=(piece.shape[0] * piece.shape[1], piece.shape[2]))


def _untied(config: ModelConfig, embedding: ParameterSource, head: Tensor) -> list[str]:
    """Returns one error message in a list if the checkpoint's output matrix `head` must equal the embedding,
    because the config ties them, but does not; otherwise [].

    Releases of transformers disagree on what a different matrix means (older ones overwrite it, version 5
    unties it), so it is refused.
    """
    other = ParameterSource(Param(HEAD, embedding.param.shape), (head,))
    if not _misfits(other, (Piece(HEAD, config.vocab_size),)):
        step = max(1, (1 << 20) // embedding.param.shape[1])
        with Rows() as rows:
            spans = [(start, start + step) for start in range(0, embedding.param.shape[0], step)]
            if all(np.array_equal(rows.wide(embedding, *span), rows.wide(other, *span)) for span in spans):
                return []
    return [
        f"{head.path}: tensor '{HEAD}' differs from '{embedding.pieces[0].name}', but config.json ties them; "
        f"set tie_word_embeddings to false in config.json if '{HEAD}' is meant, else remove the tensor; an "
        "adapter must replace both alike (PEFT's ensure_weight_tying)"
    ]
