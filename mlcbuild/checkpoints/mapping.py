"""Maps a Hugging Face checkpoint on disk to the parameters of a model: tensors and rows."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
from mlcbuild_format import regular, strict_json
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.checkpoint_kinds import kind_of
from mlcbuild.checkpoints.shards import PackedTensor, read_header
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, Param, Piece, TensorNames, parameters, surplus
from mlcbuild.models.tensor_names import other_names
from mlcbuild.quant.floats import Array, widen, widened

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 64 << 20
"""Largest INDEX in bytes: it has a line for each tensor, of which large checkpoints have some 100,000."""
OTHER_KINDS = ("adapter", "consolidated")
"""First parts of the names of files with other contents, or with the same weights under other names."""
HEAD = "lm_head.weight"
LINES = 60
"""Number of problems that one error lists; the others are counted."""

DTYPES: Mapping[str, np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
"""The dtypes that weights may have. NumPy has no bfloat16: its bits are held in uint16."""


@dataclass(frozen=True)
class Source:
    """A parameter of the model in a checkpoint: tensors stacked along axis 0."""

    param: Param
    pieces: tuple[Tensor, ...]
    """Tensors in the order of rows. A tensor with a stack of matrices has its first two dimensions joined."""
    parts: tuple[Piece, ...] = ()
    """The rows that each piece holds; (): all of them, in order."""

    @property
    def rows(self) -> int:
        """Number of rows; for a stack, the sum over its matrices."""
        return math.prod(self.param.shape[:2]) if len(self.param.shape) == 3 else self.param.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.param.shape[2:] if len(self.param.shape) == 3 else self.param.shape[1:]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of the parameter in each piece."""
        if self.parts:
            return tuple(part.rows for part in self.parts)
        return tuple(piece.shape[0] for piece in self.pieces)

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]:
        """The dtype of its rows when they are read: that of all pieces, or float32 when they differ."""
        dtypes = {"F32" if isinstance(piece, PackedTensor) else piece.dtype for piece in self.pieces}
        return DTYPES[dtypes.pop() if len(dtypes) == 1 else "F32"]

    def __str__(self) -> str:
        return f"{self.param.name} ({', '.join(piece.name for piece in self.pieces)})"


def locate(root: Path, config: ModelConfig, names: TensorNames) -> tuple[Source, ...]:
    """Finds the tensors of every parameter, in the order of `parameters(config)`.

    root: a GGUF file, or a directory with model.safetensors or, when that is absent,
    model.safetensors.index.json and the files it names (the order in which transformers looks), or else
    safetensors files of any other names. It is only read.

    Raises CheckpointError that lists every problem of every file and tensor.
    """
    index: dict[str, str] | None = None
    problems: list[str] = []
    reader = kind_of(root).reader
    if reader is None:
        files, index = _files(root)
        tensors, problems = _tensors(root, files)
    else:
        tensors = import_module(reader).read_tensors(root)
    complete, reason = not problems, partial(surplus, config, unused=names.unused)
    found = []
    sources = [part.tensor for own in names.sources.values() for part in own]
    others = other_names(sources, [*tensors])
    tensors = {others.get(name, name): tensor for name, tensor in tensors.items()}
    index = index and {others.get(name, name): file for name, file in index.items()}
    table = _table(config, names, tensors)
    for param in parameters(config):
        parts = table[param.name]
        pieces = tuple(tensors[part.tensor] for part in parts if part.tensor in tensors)
        if len(pieces) == len(parts):
            if len(param.shape) == 1 and param.parts and not param.name.endswith("qkv.bias"):
                pieces = tuple(_flat(piece) for piece in pieces)
            problems += _misfits(Source(param, pieces), parts)
            ranges = parts if any(part.block for part in parts) else ()
            found.append(Source(param, tuple(_joined(piece) for piece in pieces), ranges))
    wanted = {part.tensor: param for param, parts in table.items() for part in parts}
    if complete:  # else a file that could not be read may hold them
        problems += _index_faults(root / INDEX, index, tensors, reason)
        problems += [
            f"{root}: tensor '{name}' is missing ({param} needs it); fetch the whole checkpoint"
            for name, param in wanted.items()
            if name not in tensors
        ]
    problems += [
        f"{tensors[name].path}: tensor '{name}' belongs to no parameter of family '{config.family}'; is "
        "config.json of this checkpoint?"
        for name in tensors
        if name not in wanted and reason(name) is None
    ]
    if not problems:
        _report({name: reason(name) for name in tensors if name not in wanted})
    if not problems and config.tie_embeddings and HEAD in tensors and HEAD not in wanted:
        problems += _untied(config, found[0], tensors[HEAD])
    fail(problems)
    return tuple(found)


def _report(unread: Mapping[str, str | None]) -> None:
    """Prints which tensors are left out and why: numbers in names as one line, with their count."""
    kinds: dict[tuple[str, str | None], int] = {}
    for name, reason in unread.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), reason
        kinds[kind] = kinds.get(kind, 0) + 1
    for (name, reason), count in kinds.items():
        sys.stderr.write(f"left out: {count} of {name}: {reason}\n")


def _flat(piece: Tensor) -> Tensor:
    """Returns a tensor as the vector of the same bytes."""
    return replace(piece, shape=(math.prod(piece.shape),))


def _table(
    config: ModelConfig, names: TensorNames, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Piece, ...]]:
    """Returns parameter -> the tensors that make it up."""
    table = dict(names.sources)
    embedding = parameters(config)[0].name
    if config.tie_embeddings and HEAD in tensors and table[embedding][0].tensor not in tensors:
        # A writer that drops shared tensors keeps one name of them, and it may be the other one.
        table[embedding] = (Piece(HEAD, config.vocab_size),)
    return table


def fail(problems: list[str]) -> None:
    """Raises CheckpointError with the problems, one a line, when there are any."""
    if len(problems) > LINES:
        problems = [*problems[:LINES], f"... and {len(problems) - LINES} more problems of these kinds"]
    if problems:
        raise CheckpointError("\n".join(problems))


def _files(root: Path) -> tuple[list[str], dict[str, str] | None]:
    """Returns the names of a checkpoint's files, and its index or None."""
    if (root / SINGLE).is_file():
        return [SINGLE], None
    if (root / INDEX).is_file():
        index = _index(root / INDEX)
        return sorted(set(index.values())), index
    others = sorted(path.name for path in root.glob("*.safetensors") if not path.name.startswith(OTHER_KINDS))
    if not others:
        hint = "convert its .bin files to safetensors" if list(root.glob("*.bin")) else "fetch the checkpoint"
        raise CheckpointError(f"{root}: it has no {SINGLE}, no {INDEX} and no other weights; {hint}")
    return others, None


def _tensors(root: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns all tensors by name, and the problems of the files."""
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


def _index(path: Path) -> dict[str, str]:
    """Reads INDEX as tensor name -> file name. Raises CheckpointError."""
    try:
        document = strict_json.decoder()(regular.read(path, LARGEST_INDEX).decode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); fetch the file again") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{path}: it must hold a 'weight_map' of tensors to files; fetch the file again"
        )
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: it puts tensor '{name}' in {file!r}; it must name a .safetensors file beside itself"
            )
    return found


def _index_faults(
    path: Path,
    index: Mapping[str, str] | None,
    tensors: Mapping[str, Tensor],
    reason: Callable[[str], str | None],
) -> list[str]:
    """`reason` returns why a tensor may be left out, or None."""
    if index is None:
        return []
    problems = [
        f"{path}: it puts tensor '{name}' in {file}, which does not hold it; fetch the checkpoint again"
        for name, file in index.items()
        if name not in tensors or tensors[name].path.name != file
    ]
    problems += [
        f"{path}: it does not list tensor '{name}', which {tensor.path.name} holds; fetch it again"
        for name, tensor in tensors.items()
        if name not in index and reason(name) is None
    ]
    return problems


def _misfits(source: Source, expected: Sequence[Piece]) -> list[str]:
    """Returns a message for each tensor with a wrong dtype or shape."""
    problems = []
    # A stack may be one tensor, or matrices of one expert each.
    stacked = len(expected) == 1 and expected[0].rows == source.param.shape[0]
    rest = source.param.shape[1:] if stacked else source.row_shape
    for piece, part in zip(source.pieces, expected, strict=True):
        shape = (part.stored_rows, *rest)
        if piece.shape != shape:
            problems.append(
                f"{piece.path}: tensor '{piece.name}' must have the shape {list(shape)}, as config.json "
                f"says; found {list(piece.shape)}"
            )
        if piece.dtype not in DTYPES and not isinstance(piece, PackedTensor):
            problems.append(
                f"{piece.path}: tensor '{piece.name}' is {piece.dtype}; weights must be {', '.join(DTYPES)}: "
                "use the original, unquantized checkpoint"
            )
    return problems


def _joined(piece: Tensor) -> Tensor:
    """Returns a tensor of three dimensions as the matrix with the same bytes."""
    if len(piece.shape) != 3:
        return piece
    return replace(piece, shape=(piece.shape[0] * piece.shape[1], piece.shape[2]))


def _untied(config: ModelConfig, embedding: Source, head: Tensor) -> list[str]:
    """A checkpoint may store a tied output matrix, but only as a copy of the embedding.

    Releases of transformers disagree on what a different one means (older ones overwrite it, version 5
    unties it), so it is refused.
    """
    other = Source(Param(HEAD, embedding.param.shape), (head,))
    if not _misfits(other, (Piece(HEAD, config.vocab_size),)):
        step = max(1, (1 << 20) // embedding.param.shape[1])
        with Rows() as rows:
            spans = [(start, start + step) for start in range(0, embedding.param.shape[0], step)]
            if all(np.array_equal(rows.wide(embedding, *span), rows.wide(other, *span)) for span in spans):
                return []
    return [
        f"{head.path}: tensor '{HEAD}' differs from '{embedding.pieces[0].name}', but config.json ties them; "
        f"set tie_word_embeddings to false in config.json if '{HEAD}' is meant, else remove the tensor"
    ]


class Rows:
    """Reads rows of parameters into preallocated memory. It keeps files open; each thread needs its own."""

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, source: Source, start: int, out: Array) -> None:
        """Reads rows from `start` on into `out` [rows, ...], whose dtype must be source.dtype.

        Raises CheckpointError when a file cannot be read or was truncated.
        """
        for number, first, part in _spans(source, start, out):
            piece = source.pieces[number]
            if source.parts and source.parts[number].block:
                self._taken(piece, source.parts[number], first, part)
            elif isinstance(piece, PackedTensor):
                self._decoded(piece, first, part.view(np.float32))
            elif DTYPES[piece.dtype] == part.dtype:
                self._fill(piece, first, part)
            else:
                raw = np.empty(part.shape, DTYPES[piece.dtype])
                self._fill(piece, first, raw)
                widen(raw, part.view(np.float32))

    def _taken(self, piece: Tensor, ranges: Piece, first: int, out: Array) -> None:
        """Reads rows of a parameter that come in another order, or among others, in the tensor."""
        taken = np.array(ranges.taken)
        blocks, places = np.divmod(np.arange(first, first + len(out)), len(taken))
        rows = blocks * ranges.block + taken[places]
        low, high = int(rows.min()), int(rows.max()) + 1
        raw = np.empty((high - low, *out.shape[1:]), DTYPES[piece.dtype])
        self._fill(piece, low, raw)
        if raw.dtype == out.dtype:
            out[...] = raw[rows - low]
        else:
            widen(np.ascontiguousarray(raw[rows - low]), out.view(np.float32))

    def wide(self, source: Source, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 (cut at the end) in float32, in new memory."""
        stop = min(stop, source.rows)
        raw = np.empty((stop - start, *source.row_shape), source.dtype)
        self.read(source, start, raw)
        return widened(raw)

    def _decoded(self, piece: PackedTensor, first: int, out: NDArray[np.float32]) -> None:
        """Reads rows of a packed tensor in the order in which transformers has them."""
        if not piece.interleaved_heads:
            self._decode(piece, first, out)
            return
        dim = piece.shape[0] // piece.interleaved_heads
        start, stop = first // dim * dim, -(-(first + len(out)) // dim) * dim
        heads = np.empty((stop - start, *piece.shape[1:]), np.float32)
        self._decode(piece, start, heads)
        halves = heads.reshape(-1, dim // 2, 2, *piece.shape[1:]).swapaxes(1, 2)
        out[...] = halves.reshape(heads.shape)[first - start : first - start + len(out)]

    def _decode(self, piece: PackedTensor, first: int, out: NDArray[np.float32]) -> None:
        """Reads rows in the order in which they are stored."""
        rows = np.empty((len(out), piece.size // piece.shape[0]), np.uint8)
        self._fill(piece, first, rows)
        piece.decode(rows, out.reshape(len(out), -1))

    def _fill(self, piece: Tensor, row: int, out: Array) -> None:
        view = out.reshape(-1).view(np.uint8).data
        try:
            file = self._files.get(piece.path)
            if file is None:
                file = self._stack.enter_context(FileIO(piece.path, "rb"))
                self._files[piece.path] = file
            file.seek(piece.start + row * (piece.size // piece.shape[0]))
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{piece.path}: it became shorter while it was read; run again")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{piece.path}: cannot be read ({error.strerror}); run again") from None


def _spans(source: Source, start: int, out: Array) -> Iterator[tuple[int, int, Array]]:
    """Yields (index of the piece, its first row, part of `out` to fill) for each piece under the rows."""
    stop, base = start + out.shape[0], 0
    for number, count in enumerate(source.counts):
        first, last = max(start, base), min(stop, base + count)
        if first < last:
            yield number, first - base, out[first - start : last - start]
        base += count
