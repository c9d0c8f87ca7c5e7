"""Reads rows of parameters from the tensors of a checkpoint, in whatever form the tensors are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.number_types import DTYPES, convert, element_dtype, values_of
from mlcbuild.checkpoints.shards import ComputedTensor, PackedTensor
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Param, Piece
from mlcbuild.quant.blocks import BlockRows
from mlcbuild.quant.floats import Array, widen, widened


@dataclass(frozen=True)
class ParameterSource:
    """The location of one parameter of a model in a checkpoint: the stored tensors that hold its rows."""

    param: Param
    pieces: tuple[Tensor, ...]
    """The stored tensors that hold the rows of one model parameter, in order; joined along axis 0 they are
    the parameter. For a stack of matrices [experts, rows, columns], the rows of all experts count.
    """
    parts: tuple[Piece, ...] = ()
    """For each stored tensor, a Piece: which ranges of its rows or columns are rows of the model's parameter,
    and whether it is transposed. () means that the parameter's rows are all rows of the tensors, in order.
    """

    @property
    def rows(self) -> int:
        """Returns the number of rows of the parameter; for a stack of matrices, the sum over all of them."""
        return math.prod(self.param.shape[:2]) if len(self.param.shape) == 3 else self.param.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.param.shape[2:] if len(self.param.shape) == 3 else self.param.shape[1:]

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns, for each stored tensor, the number of the parameter's rows that it holds."""
        if self.parts:
            return tuple(part.rows for part in self.parts)
        return tuple(piece.shape[0] for piece in self.pieces)

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]:
        """Returns the NumPy dtype in which the parameter's rows are read: that of its stored tensors if they
        agree on float32, float16 or bfloat16 (as uint16), else float32.
        """
        dtypes = {
            "F32" if isinstance(piece, PackedTensor | ComputedTensor) else piece.dtype
            for piece in self.pieces
        }
        return DTYPES.get(dtypes.pop() if len(dtypes) == 1 else "F32", DTYPES["F32"])

    @property
    def kinds(self) -> frozenset[str]:
        """Returns the set of the type names of the parameter's stored tensors, such as "F16" or "Q4_0". A
        tensor of which only some columns are used, or that is read transposed, counts as F32, because no
        block format can keep its values. The exception is a transposed tensor whose values are computed by
        columns (`by_columns`) and all of whose rows are used: it keeps its type."""
        parts = self.parts or (None,) * len(self.pieces)
        return frozenset(
            "F32" if part is not None and _is_rearranged(piece, part) else piece.dtype
            for piece, part in zip(self.pieces, parts, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.param.name} ({', '.join(piece.name for piece in self.pieces)})"


def _is_rearranged(piece: Tensor, part: Piece) -> bool:
    """Returns True if rows of a stored tensor are not rows of the parameter, because columns are selected or
    the tensor is read transposed. The exception, False, is a transposed tensor that is computed by columns
    (`by_columns`) and all of whose rows are used: its loader returns its columns, which are the parameter's
    rows."""
    if part.transposed:
        is_whole = part.taken == [*range(part.block)]
        return not (isinstance(piece, ComputedTensor) and piece.by_columns and is_whole)
    return bool(part.columns)


class Rows:
    """Reads rows of parameters from the files of a checkpoint. The object keeps files open, and is used by
    one thread only. As a context manager it closes them.
    """

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

    def read(self, source: ParameterSource, start: int, out: Array) -> None:
        """Fills an array `out`, [rows, ...], with rows of the parameter that `source` locates, from row
        `start` on. `out` must have the dtype that source.dtype returns; its elements beyond the parameter's
        last row are left unchanged.

        Raises CheckpointError when a file cannot be read or is too short.
        """
        for number, first, part in _spans(source, start, out):
            piece, order = source.pieces[number], source.parts[number] if source.parts else None
            if order and order.transposed:
                self._transposed(piece, order, first, part)
            elif order and order.columns:
                rows = self._rows(piece, first, len(part))
                _cast(rows[:, _indices(order.columns)], part)
            elif order and order.block:
                self._taken(piece, order, first, part)
            else:
                self._plain(piece, first, part)

    def values(self, tensor: Tensor, first: int, count: int) -> NDArray[np.float32]:
        """Returns `count` rows of a stored tensor from row `first` on, as a new float32 array [count,
        columns], or [count] for a vector. Raises CheckpointError if the file cannot be read or is too short.
        """
        out = np.empty((count, *tensor.shape[-1:]) if len(tensor.shape) > 1 else (count,), np.float32)
        self._plain(tensor, first, out)
        return out

    def elements(
        self, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Returns elements [rows, columns] of a stored tensor, or [rows] of a vector, in its stored dtype:
        bfloat16 as uint16, 8-bit floats as uint8. rows, columns: ranges (start, stop); None: all columns. The
        tensor must have a plain dtype of safetensors, not one that must be decoded. Raises CheckpointError if
        the file cannot be read or is too short.

        The rows of a tensor with more than two dimensions are those of all of its matrices, one after the
        other."""
        dtype = element_dtype(tensor.dtype)
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        low, high = columns or (0, width)
        out = np.empty((rows[1] - rows[0], high - low), dtype)
        offset = tensor.start + rows[0] * width * dtype.itemsize
        if (low, high) == (0, width):
            self._fill(tensor, offset, out)
        elif out.size:
            # Mapping the file suits short pieces of many rows: AWQ matrices take half the time of separate
            # reads.
            np.copyto(out, _mapped(tensor, offset, (len(out), width), dtype)[:, low:high])
        return out if len(tensor.shape) > 1 else out.reshape(-1)

    def _plain(self, piece: Tensor, first: int, out: Array) -> None:
        """Fills `out` with rows of a stored tensor from row `first` on, in stored order. `out` has the
        tensor's dtype (if that is float32, float16 or bfloat16 as uint16) or float32. Raises CheckpointError
        if the file cannot be read or is too short.
        """
        if isinstance(piece, ComputedTensor):
            out.view(np.float32)[...] = piece.load(self, first, len(out)).reshape(out.shape)
        elif isinstance(piece, PackedTensor):
            piece.decode(self._raw(piece, first, len(out)), out.view(np.float32).reshape(len(out), -1))
        elif DTYPES.get(piece.dtype) == out.dtype:
            self._fill(piece, piece.start + first * _row_bytes(piece), out)
        else:
            raw = np.empty(out.shape, element_dtype(piece.dtype))
            self._fill(piece, piece.start + first * _row_bytes(piece), raw)
            convert(raw, piece.dtype, out.view(np.float32))

    def _rows(self, piece: Tensor, first: int, count: int) -> Array:
        """Returns `count` rows of a stored matrix, or elements of a vector, from index `first` on. float32,
        float16 and bfloat16 (as uint16) keep their dtype; all other types are converted to float32. Raises
        CheckpointError if the file cannot be read or is too short.
        """
        if isinstance(piece, PackedTensor | ComputedTensor) or piece.dtype not in DTYPES:
            return self.values(piece, first, count)
        raw = np.empty((count, *piece.shape[-1:]) if len(piece.shape) > 1 else (count,), DTYPES[piece.dtype])
        self._fill(piece, piece.start + first * _row_bytes(piece), raw)
        return raw

    def blocks(self, source: ParameterSource, start: int, stop: int) -> list[BlockRows]:
        """Returns rows start..stop-1 of a quantized parameter, not dequantized: a list of BlockRows (integer
        codes with their scales) with some of these rows each, in order.

        Raises CheckpointError when a file cannot be read or is too short, and for a tensor that is not
        quantized.
        """
        parts: list[BlockRows] = []
        for number, first, rows in _ranges(source, start, stop):
            piece, order = source.pieces[number], source.parts[number] if source.parts else None
            if not isinstance(piece, PackedTensor | ComputedTensor) or piece.unpack is None:
                raise CheckpointError(
                    f"{piece.path}: tensor '{piece.name}' is {piece.dtype}, but was quantized when the "
                    "recipe was read; run again"
                )
            parts += self._blocks(piece, order, first, rows)
        return parts

    def _blocks(
        self, piece: PackedTensor | ComputedTensor, order: Piece | None, first: int, count: int
    ) -> Iterator[BlockRows]:
        """Yields `count` rows of a parameter from the stored tensor `piece` as BlockRows (integer codes
        [rows, columns] with their scales), perhaps in several parts. first: index of the first one among the
        rows of the parameter that this tensor holds. order: a Piece, which lists the tensor's rows or columns
        that are rows of the parameter; None: all rows, in order. Raises CheckpointError if the file cannot be
        read or is too short."""
        if order is None or order.in_order:
            yield self._unpacked(piece, first, count)
        elif order.transposed:
            width = piece.shape[1]
            columns = _indices(order.columns or ((0, width, 1),))
            while count:
                matrix, start = divmod(first, len(columns))
                indices = columns[start : start + count]
                low, high = int(indices.min()), int(indices.max()) + 1
                yield self._unpacked(piece, matrix * width + low, high - low).take(indices - low)
                first, count = first + len(indices), count - len(indices)
        else:
            rows = _taken_rows(order, first, count)
            low, high = int(rows.min()), int(rows.max()) + 1
            yield self._unpacked(piece, low, high - low).take(rows - low)

    def _unpacked(self, piece: PackedTensor | ComputedTensor, first: int, count: int) -> BlockRows:
        assert piece.unpack is not None
        if isinstance(piece, PackedTensor):
            return piece.unpack(self._raw(piece, first, count))
        return piece.unpack(self, first, count)

    def _taken(self, piece: Tensor, ranges: Piece, first: int, out: Array) -> None:
        """Fills `out`, [rows, ..], with rows of a parameter from the stored tensor `piece`, which has them in
        another order or among rows of other parameters. first: index of the first one among the rows of the
        parameter that this tensor holds. ranges: a Piece (a description, not the tensor itself), which lists
        the parameter's rows in each block of the tensor's rows. Raises CheckpointError if the file cannot be
        read or is too short."""
        rows = _taken_rows(ranges, first, len(out))
        low, high = int(rows.min()), int(rows.max()) + 1
        _cast(self._rows(piece, low, high - low)[rows - low], out)

    def _transposed(self, piece: Tensor, order: Piece, first: int, out: Array) -> None:
        """Fills `out` with rows of a parameter that are stored as columns of the tensor `piece`. first: index
        of the first one among the rows of the parameter that this tensor holds. The columns from the first to
        the last of them are read, or whole rows if the tensor must be decoded. order: a Piece (a description,
        not the tensor itself), which lists the tensor's columns and rows that belong to the parameter. Raises
        CheckpointError if the file cannot be read or is too short."""
        width = piece.shape[1]
        columns = _indices(order.columns or ((0, width, 1),))
        done = 0
        while done < len(out):
            matrix, start = divmod(first + done, len(columns))
            indices = columns[start : start + len(out) - done]
            low, high = int(indices.min()), int(indices.max()) + 1
            raw = self._lines(piece, order, matrix, low, high)
            _cast(raw[indices - low], out[done : done + len(indices)])
            done += len(indices)

    def _lines(self, piece: Tensor, order: Piece, matrix: int, low: int, high: int) -> Array:
        """Returns columns low..high-1 of one matrix in a stored tensor, each as a row of the result, in the
        stored dtype if that is float32, float16 or bfloat16 (as uint16), else in float32. order: a Piece,
        which lists the matrix's rows that belong to the parameter; matrix: index of the matrix in a stack.
        Raises CheckpointError if the file cannot be read or is too short."""
        base, selected = matrix * order.block, np.array(order.taken)
        if isinstance(piece, ComputedTensor) and piece.by_columns:
            return piece.load(self, matrix * piece.shape[1] + low, high - low)[:, selected]
        if isinstance(piece, PackedTensor | ComputedTensor):
            first = int(selected.min())
            rows = self.values(piece, base + first, int(selected.max()) + 1 - first)
            return np.ascontiguousarray(rows[selected - first, low:high].T)
        raw = np.empty((len(selected), high - low), element_dtype(piece.dtype))
        for line, row in zip(raw, selected, strict=True):
            offset = (base + int(row)) * _row_bytes(piece) + low * raw.itemsize
            self._fill(piece, piece.start + offset, line)
        return raw.T if piece.dtype in DTYPES else values_of(raw, piece.dtype).T

    def wide(self, source: ParameterSource, start: int, stop: int) -> NDArray[np.float32]:
        """Returns rows start..stop-1 of the parameter that `source` locates, as a new float32 array. Rows
        beyond the parameter's end are left out. Raises CheckpointError if a file cannot be read or is too
        short.
        """
        stop = min(stop, source.rows)
        raw = np.empty((stop - start, *source.row_shape), source.dtype)
        self.read(source, start, raw)
        return widened(raw)

    def _raw(self, piece: PackedTensor, first: int, count: int) -> NDArray[np.uint8]:
        """Returns the stored bytes, uint8 [count, bytes of a row], of `count` rows of a tensor from row
        `first` on, in the row order of transformers. Raises CheckpointError if the file cannot be read or is
        too short.
        """
        size = piece.size // piece.shape[0]
        dim = piece.shape[0] // piece.interleaved_heads if piece.interleaved_heads else 1
        start, stop = first // dim * dim, -(-(first + count) // dim) * dim
        rows = np.empty((stop - start, size), np.uint8)
        self._fill(piece, piece.start + start * size, rows)
        if piece.interleaved_heads:
            rows = rows.reshape(-1, dim // 2, 2, size).swapaxes(1, 2).reshape(rows.shape)
        return rows[first - start : first - start + count]

    def _fill(self, piece: Tensor, offset: int, out: NDArray[Any]) -> None:
        """Fills an array with bytes from the file of a stored tensor. offset: position of the first byte in
        the file. Raises CheckpointError if the file cannot be read or is too short.
        """
        view = out.reshape(-1).view(np.uint8).data
        try:
            file = self._files.get(piece.path)
            if file is None:
                file = self._stack.enter_context(FileIO(piece.path, "rb"))
                self._files[piece.path] = file
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{piece.path}: it became shorter while it was read; run again")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{piece.path}: cannot be read ({error.strerror}); run again") from None


def _mapped(tensor: Tensor, offset: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Maps part of a stored tensor's file into memory, and returns it as an array of this shape and dtype;
    the mapping ends when the array is dropped. offset: position of the first byte in the file. Raises
    CheckpointError if the file cannot be read or is too short.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if tensor.path.stat().st_size < offset + size:
            raise CheckpointError(f"{tensor.path}: it became shorter while it was read; run again")
        mapped = np.memmap(tensor.path, np.uint8, "r", offset, (size,))
    except OSError as error:
        raise CheckpointError(f"{tensor.path}: cannot be read ({error.strerror}); run again") from None
    return mapped.view(np.ndarray).view(dtype).reshape(shape)


def _row_bytes(tensor: Tensor) -> int:
    """Returns the number of bytes in one row (along the last axis) of a stored tensor, or in one element of a
    vector."""
    return (
        tensor.size // (math.prod(tensor.shape[:-1]) or 1)
        if len(tensor.shape) > 1
        else tensor.size // (tensor.shape[0] or 1)
    )


def _taken_rows(ranges: Piece, first: int, count: int) -> NDArray[np.intp]:
    """Returns the row indices, in a stored tensor, of rows first..first+count-1 among those rows of a
    parameter that the tensor holds. ranges: a Piece, which lists the parameter's rows within each block of
    the tensor's rows."""
    selected = np.array(ranges.taken)
    blocks, places = np.divmod(np.arange(first, first + count), len(selected))
    rows: NDArray[np.intp] = blocks * ranges.block + selected[places]
    return rows


def _indices(ranges: Sequence[tuple[int, int, int]]) -> NDArray[np.intp]:
    return np.concatenate([np.arange(*part) for part in ranges])


def _cast(raw: Array, out: Array) -> None:
    """Copies values that were read from a tensor into `out`, an array of the same shape and of their dtype or
    float32. raw: float32, float16, or the bits of bfloat16 as uint16.
    """
    if raw.dtype == out.dtype:
        out[...] = raw
    else:
        widen(np.ascontiguousarray(raw), out.view(np.float32))


def _spans(source: ParameterSource, start: int, out: Array) -> Iterator[tuple[int, int, Array]]:
    """Yields (index of a stored tensor, first row, part of `out` to fill) for the tensors that hold a
    parameter's rows from row `start` on, until `out` is full or the parameter ends. The first row is counted
    among those rows of the parameter that the tensor holds."""
    done = 0
    for number, first, count in _ranges(source, start, start + out.shape[0]):
        yield number, first, out[done : done + count]
        done += count


def _ranges(source: ParameterSource, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields (index of a stored tensor, first row, number of rows) for the tensors that hold rows
    start..stop-1 of a parameter; rows beyond its end are left out. The first row is counted among those rows
    of the parameter that the tensor holds."""
    base = 0
    for number, count in enumerate(source.counts):
        first, last = max(start, base), min(stop, base + count)
        if first < last:
            yield number, first - base, last - first
        base += count
