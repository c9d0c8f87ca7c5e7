"""Converts a checkpoint's weights to a quantization scheme, writes them as weights files, and reads such
files.

Conversion streams: worker threads read, pack and write ranges of rows. So memory use does not grow with the
model, and the bytes written do not depend on the number of threads.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType

import numpy as np
from mlcbuild_format.safetensors import ALIGNMENT, NUMPY, Tensor
from mlcbuild_format.signature import signature
from mlcbuild_format.versions import WEIGHTS as FORMAT
from numpy.typing import NDArray

from mlcbuild import models, progress
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
from mlcbuild.checkpoints.checkpoint_views import views_of
from mlcbuild.checkpoints.exact_weights import LazyMapping, Weight, read_tensor_names
from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.mapping import fail, locate
from mlcbuild.checkpoints.row_reader import ParameterSource, Rows
from mlcbuild.checkpoints.shards import ComputedTensor, Shard, lay_out
from mlcbuild.errors import CheckpointError, StepError, UsageError
from mlcbuild.models import ModelConfig, Param, parameters
from mlcbuild.quant import (
    Storage,
    StoredTensor,
    check_overrides,
    plain_dtype,
    rows_per_index,
    scheme_for,
    stored,
    stored_parameters,
)
from mlcbuild.quant.choice import scheme_of
from mlcbuild.quant.codebooks import quantized_again
from mlcbuild.quant.floats import Array, Scratch, narrow
from mlcbuild.quant.importance import importance_of
from mlcbuild.quant.stack import Stack

SHARD_BYTES = 2_000_000_000
"""Maximum bytes of tensor data in one weights file; only a file with a single larger tensor exceeds it."""
CHUNK_BYTES = 4 << 20
"""Number of checkpoint bytes that a worker thread reads at once, about: it reads whole rows."""
BLOCK_BYTES = 2 << 20
"""Bytes of one write to a weights file, at a multiple of this number in the file; the last may be shorter.
Systems then keep the file in huge pages if they can; with small ones, TLB misses take a tenth of decoding."""


def convert(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: converts inputs["checkpoint"] to the step's quantization scheme
    (params["scheme"], or a budget step's choice), and writes weights files to `out`.

    inputs["config"] is the directory of the normalised config.json. Uses the cores that MLCBUILD_CORES
    grants, else all. Raises CheckpointError with all problems, UsageError if an override (a scheme for some
    parameters) has no effect or a format lacks the scheme's layout, StepError when `out` cannot be written.
    """
    scheme = scheme_of(params, inputs)
    config = models.from_json(json.loads((inputs["config"] / "config.json").read_bytes()))
    problems = check_overrides(scheme, parameters(config))
    if problems:
        raise UsageError("\n".join(problems))
    path, names = checkpoint_path(params, inputs), read_tensor_names(inputs["config"])
    sources = locate(path, config, names, views_of(params, inputs), remark=True)
    cores = int(os.environ.get("MLCBUILD_CORES") or os.cpu_count() or 1)
    write(sources, scheme, out, cores, importance_of(inputs))


def write(
    sources: Sequence[ParameterSource],
    scheme: Storage,
    out: Path,
    cores: int = 1,
    importance: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> None:
    """Quantizes every parameter to a scheme, and writes the weights files weights-0000i-of-0000N.safetensors
    to `out`; a `note:` line in the log names types that `as-is` cannot keep. sources: where each parameter is
    in the checkpoint; cores: number of threads; importance: name of a matrix -> importance of its columns,
    float32 [columns]. Raises CheckpointError with all problems, UsageError if a format lacks the scheme's
    physical layout, StepError when `out` cannot be written."""
    tensors = stored_parameters([source.param for source in sources], scheme)
    tied = signature((tensor.name, tensor.shape, tensor.dtype, tensor.layout) for tensor in tensors)
    metadata = {"format": FORMAT, "signature": tied, "scheme": scheme.name}
    notes = {piece.note for source in sources for piece in source.pieces if isinstance(piece, ComputedTensor)}
    changed = [source for source in sources if scheme_for(scheme, source.param.name).format != "f32"]
    if remark := quantized_again(scheme.name, (source.kinds for source in changed)):
        sys.stderr.write(f"note: {remark}\n")
        notes.add(remark)
    if notes - {""}:
        metadata["source"] = "; ".join(sorted(notes - {""}))
    shards = lay_out(tensors, metadata, SHARD_BYTES)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            files = [_Blocks(stack.enter_context(FileIO(out / s.name, "wb")), s.file.size) for s in shards]
            for shard, file in zip(shards, files, strict=True):
                file.put(0, np.frombuffer(shard.file.header, np.uint8))
            _work(_Plan(tuple(sources), scheme, _places(tensors, shards, files), importance), cores)
    except OSError as error:
        size = sum(shard.file.size for shard in shards)
        raise StepError(
            f"{out}: the weights cannot be written ({error.strerror}); they need {size} bytes: "
            "free space there, check its permissions, and run again"
        ) from None


class _Blocks:
    """An output file of `size` bytes that worker threads fill in any order, each byte once. A block is
    written to disk once all of its bytes have arrived.
    """

    def __init__(self, file: FileIO, size: int) -> None:
        self._file, self._size = file, size
        self._lock = threading.Lock()
        self._begun: dict[int, tuple[NDArray[np.uint8], int]] = {}
        """Number of a block of the output file -> (the block's bytes, how many of them are still missing)."""
        self._spare: list[NDArray[np.uint8]] = []

    def put(self, start: int, part: NDArray[np.uint8]) -> None:
        """Copies bytes to the offset `start` of the output file, and writes each block that becomes
        complete. Raises OSError if the file cannot be written."""
        while part.size:
            number, offset = divmod(start, BLOCK_BYTES)
            piece = part[: BLOCK_BYTES - offset]
            self._fill(number, offset, piece)
            start, part = start + piece.size, part[piece.size :]

    def _fill(self, number: int, offset: int, piece: NDArray[np.uint8]) -> None:
        at = number * BLOCK_BYTES
        with self._lock:
            if number not in self._begun:
                block = self._spare.pop() if self._spare else np.empty(BLOCK_BYTES, np.uint8)
                self._begun[number] = block, min(BLOCK_BYTES, self._size - at)
            block = self._begun[number][0]
        block[offset : offset + piece.size] = piece
        with self._lock:
            left = self._begun[number][1] - piece.size
            self._begun[number] = block, left
            if left:
                return
            del self._begun[number]
        view = block[: self._size - at].data
        while view:
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written
        with self._lock:
            self._spare.append(block)


@dataclass(frozen=True)
class _Place:
    """The location of one stored tensor of a quantized parameter: weights file, byte offset, and stride."""

    file: _Blocks
    start: int
    """Offset of the tensor's first byte from the beginning of the file, in bytes."""
    stride: int
    """Number of bytes that one index of the stored tensor's axis 0 occupies; an index is a row, a tile of
    rows, or an element of a vector."""


def _places(
    tensors: Sequence[StoredTensor], shards: Sequence[Shard], files: Sequence[_Blocks]
) -> dict[str, _Place]:
    pairs = list(zip(shards, files, strict=True))
    places = {name: (file, start) for shard, file in pairs for name, start in shard.file.starts.items()}
    return {tensor.name: _Place(*places[tensor.name], tensor.size // tensor.shape[0]) for tensor in tensors}


@dataclass(frozen=True)
class _Plan:
    sources: tuple[ParameterSource, ...]
    scheme: Storage
    places: Mapping[str, _Place]
    importance: Mapping[str, NDArray[np.float32]]
    """Name of a matrix -> importance of its columns, float32 [columns]: the mean squares of the activations
    that a calibration measured for each column. Matrices without calibration are absent.
    """

    def jobs(self) -> Iterator[_Job]:
        """Yields the jobs of a conversion, each of which converts a range of rows of one parameter, about
        CHUNK_BYTES of the checkpoint. Each range starts at an index of axis 0 of the stored tensors.
        """
        for source in self.sources:
            unit = rows_per_index(source.param, self.scheme)
            size = math.prod(source.row_shape) * source.dtype.itemsize * unit
            step = max(1, CHUNK_BYTES // size) * unit
            rows = source.rows // source.param.count
            for matrix in range(source.param.count):
                index = matrix * -(-rows // unit)
                for start in range(0, rows, step):
                    first, last = (matrix * rows + row for row in (start, min(start + step, rows)))
                    yield _Job(source, first, last, index + start // unit)


@dataclass(frozen=True)
class _Job:
    """One job of a conversion: rows start..stop-1 of one parameter, counted through all matrices of a stack;
    a job's rows are all of one matrix."""

    source: ParameterSource
    start: int
    stop: int
    index: int
    """Index along axis 0 of the stored tensors at which the converted rows of this job are written."""

    @property
    def size(self) -> int:
        """Returns the number of checkpoint bytes that this job of a conversion reads."""
        return (self.stop - self.start) * math.prod(self.source.row_shape) * self.source.dtype.itemsize


class _Queue:
    """The state that the threads share which convert a checkpoint: remaining jobs (ranges of rows of one
    parameter), bytes read so far for the progress report, and error messages.
    """

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self._left = iter(jobs)
        self._total = sum(job.size for job in jobs)
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._problems: dict[str, tuple[int, str]] = {}

    def take(self) -> _Job | None:
        with self._lock:
            return None if self._stopped else next(self._left, None)

    def finish(self, job: _Job, problem: str | None) -> None:
        """Marks a job, which converts a range of rows of one parameter, as done. problem: its error message,
        or None. Of several problems of a parameter, the one of the job with the lowest first row is reported,
        so that the report does not depend on the order in which threads work.
        """
        with self._lock:
            self._done += job.size
            if problem is not None:
                name = job.source.param.name
                self._problems[name] = min((job.start, problem), self._problems.get(name, (job.stop, "")))
            progress.report(self._done, self._total, "B")

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def problems(self, sources: Sequence[ParameterSource]) -> list[str]:
        """Returns the error messages of a conversion, at most one for each parameter, in the order of the
        parameters in `sources`.
        """
        names = [source.param.name for source in sources]
        return [self._problems[name][1] for name in names if name in self._problems]


def _work(plan: _Plan, cores: int) -> None:
    """Runs all jobs of a conversion on `cores` threads. Raises CheckpointError when they have ended, with one
    problem of each parameter that has any; any other exception of a job stops the conversion and is raised.
    """
    queue = _Queue(tuple(plan.jobs()))
    with ThreadPoolExecutor(cores, thread_name_prefix="weights") as pool:
        futures = [pool.submit(_drain, queue, plan) for _ in range(cores)]
        try:
            for future in futures:
                future.result()
        finally:
            queue.stop()
    fail(queue.problems(plan.sources))


def _drain(queue: _Queue, plan: _Plan) -> None:
    try:
        with _Worker(plan) as worker:
            while (job := queue.take()) is not None:
                problem = None
                try:
                    worker.run(job)
                except CheckpointError as error:
                    problem = str(error)
                queue.finish(job, problem)
    except BaseException:
        queue.stop()
        raise


class _Worker:
    """One thread of a conversion. It reads, packs and writes ranges of rows, and reuses its buffers."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._rows = self._stack.enter_context(Rows())
        self._scratch = Scratch()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def run(self, job: _Job) -> None:
        """Quantizes one range of a parameter's rows and writes it to the weights file. Raises CheckpointError
        for weights that cannot be read or that the scheme cannot store, and OSError if the output cannot be
        written.
        """
        param = job.source.param
        scheme = scheme_for(self._plan.scheme, param.name)
        for tensor, part in zip(stored(param, scheme), self._packed(job, scheme), strict=True):
            self._write(tensor.name, job.index, part)

    def _packed(self, job: _Job, scheme: Storage) -> Sequence[Array]:
        param, keep = job.source.param, scheme.definition.pack_blocks
        if param.matrix is not None and keep is not None:
            return keep(self._rows.blocks(job.source, job.start, job.stop), str(job.source))
        raw = self._scratch.array("raw", (job.stop - job.start, *job.source.row_shape), job.source.dtype)
        self._rows.read(job.source, job.start, raw)
        if param.matrix is not None:
            calibrated, importance = scheme.definition.pack_calibrated, self._plan.importance.get(param.name)
            if calibrated is not None and importance is not None:
                return calibrated(raw, importance, str(job.source))
            return scheme.definition.pack(raw, self._scratch, str(job.source))
        return (narrow(raw, plain_dtype(param, scheme), self._scratch, str(job.source)),)

    def _write(self, name: str, index: int, part: Array) -> None:
        place = self._plan.places[name]
        place.file.put(place.start + index * place.stride, part.reshape(-1).view(np.uint8))


def read(path: Path) -> Mapping[str, Array]:
    """Returns name of a tensor -> array for a weights file, or for all weights files in a directory. Each
    access maps the tensor into memory, read-only, or copies it if it does not start at a multiple of 64
    bytes. Raises CheckpointError when a file was not written by mlcbuild or is damaged, or when a directory
    lacks one file of a set or all.
    """
    paths = sorted(path.glob("weights-*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise CheckpointError(f"{path}: it holds no weights files (weights-*.safetensors); build them again")
    tensors: dict[str, Tensor] = {}
    for file in paths:
        header = read_header(file)
        if header.metadata.get("format") != FORMAT:
            file_format = header.metadata.get("format")
            raise CheckpointError(
                f"{file}: its format must be {FORMAT}, found {file_format!r}; build it again"
            )
        tensors |= {tensor.name: tensor for tensor in header.tensors}
    if path.is_dir() and not paths[-1].name.endswith(f"-of-{len(paths):05}.safetensors"):
        raise CheckpointError(f"{path}: of its weights files only {len(paths)} are there; build them again")

    def load(name: str) -> Array:
        tensor = tensors[name]
        mapped = np.memmap(tensor.path, np.uint8, "r", tensor.start, (tensor.size,))
        array: Array = mapped.view(np.ndarray).view(NUMPY[tensor.dtype]).reshape(tensor.shape)
        return array if tensor.start % ALIGNMENT == 0 else array.copy()

    return LazyMapping(tensors, load)


def unpacked(path: Path, config: ModelConfig, scheme: Storage) -> Mapping[str, Weight]:
    """Returns parameter name -> float32 values, computed from the quantized weights files in the directory
    `path`, which must hold this model in this scheme. Values are unpacked again at each access. Raises
    CheckpointError for damaged or missing files.
    """
    tensors = read(path)
    params = {param.name: param for param in parameters(config)}

    def load(name: str) -> Weight:
        param = params[name]
        return unpacked_parameter(param, scheme, [tensors[tensor.name] for tensor in stored(param, scheme)])

    return LazyMapping(params, load)


def unpacked_parameter(param: Param, scheme: Storage, parts: Sequence[Array]) -> Weight:
    """Returns the float32 values of a quantized parameter: an array, or a stack of matrices that are unpacked
    one at a time. parts: the arrays of its stored tensors, such as codes and scales."""
    matrix, storage = param.matrix, scheme_for(scheme, param.name)
    if matrix is None:
        return parts[0].astype(np.float32)
    if len(param.shape) == 2:
        return storage.definition.unpack(parts, matrix)
    stacks = [part.reshape(param.count, -1, *part.shape[1:]) for part in parts]

    def load(index: int) -> NDArray[np.float32]:
        return storage.definition.unpack([stack[index] for stack in stacks], matrix)

    return Stack((param.count, *matrix), load)
