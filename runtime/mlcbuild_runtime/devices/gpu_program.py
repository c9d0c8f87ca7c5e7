"""A GPU program on a device: its buffers, pipelines and bind groups, and the launches of its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from mlcbuild_format import files, program_json
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError, DeviceLostError, EngineError
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.program import (
    CallVariant,
    DeviceLimits,
    Program,
    RopeTable,
    Shader,
    Sizes,
    check,
    evaluate,
    scalar_values,
)
from mlcbuild_format.signature import signature
from numpy.typing import NDArray

from mlcbuild_runtime.devices import gpu_adapter, tensors

MAX_PROGRAM = 16 << 20
"""Largest program.json that is read, in bytes. A layer with experts takes 8 kB of it. Parsed, a hostile one
takes up to ten times its size in memory."""
MAX_KERNEL = 4 << 20
"""Maximum size in bytes of the source text (WGSL) of one kernel; a bundle with a larger one is refused."""
_UPLOAD = 64 << 20
"""Number of bytes of weights that are copied to the GPU at once."""
_ENABLE_SUBGROUPS = "enable subgroups;\n"
"""First line of the WGSL text of a kernel that uses subgroups, an optional feature of WebGPU."""
_RECORD = 256
"""Number of bytes from the uniforms of one launch to those of the next: WebGPU's
minUniformBufferOffsetAlignment."""


def read(path: Path, manifest: Manifest) -> Program:
    """Returns the GPU program of the bundle in directory `path` after checking it. Raises BundleError for a
    program that is missing, damaged, larger than 16 MiB, or belongs to another bundle."""
    file = path / manifest.library
    data = files.read_bytes(file, MAX_PROGRAM)
    try:
        program = program_json.parse(parse_json(data))
    except ValueError as error:
        raise BundleError(f"{file}: not a usable GPU program: {error}; build the bundle again") from None
    if program.signature != manifest.signature or signature(program.params) != manifest.signature:
        raise BundleError(
            f"{manifest.library} takes weights of signature {program.signature[:12]}, but the manifest and"
            f" the weights are {manifest.signature[:12]}: the program was built for another model or scheme"
        )
    return program


@dataclass
class _Prepared:
    """The kernel launches of one function of a GPU program, for calls up to certain sizes, with the
    pipelines, bind groups and numbers of workgroups that they need."""

    variant: CallVariant
    uniforms: Any
    steps: list[tuple[Any, Any, Struct]]
    """The kernel launches of this GPU function in order, each as (compute pipeline, bind group, struct format
    that packs the kernel's int32 scalars for the uniform buffer)."""
    sizes: Sizes | None = None
    grids: Sequence[tuple[int, int]] = ()
    """Number of workgroups (x, y) of each kernel launch in a call of this GPU function. The numbers hold for
    calls whose sizes, such as the number of rows, equal the attribute `sizes`: those of the last call."""


class DeviceProgram:
    """A GPU program on a device, with its buffers, its pipelines and the weights. Creating it raises
    BundleError for a program that the device cannot run, or weights that are damaged or not those that the
    program takes, SetupError if the driver refuses the device, or the system cannot map the weights."""

    def __init__(self, path: Path, manifest: Manifest, adapter: Any, program: Program, pages: int) -> None:
        import wgpu

        self._wgpu, self._path, self.program, self.pages = wgpu, path, program, pages
        self.name = gpu_adapter.describe(adapter)
        fits(path, program, pages, gpu_adapter.limits(adapter), self.name)
        self.device = gpu_adapter.open_device(adapter)
        self.queue = self.device.queue
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        sizes = {**program.param_bytes(), **program.buffer_bytes(pages)}
        try:
            self._buffers = {
                name: self.device.create_buffer(size=size, usage=usage) for name, size in sizes.items()
            }
            self._pipelines = {name: self._pipeline(shader) for name, shader in program.kernels.items()}
        except wgpu.GPUError as error:
            raise BundleError(f"{path}: {self.name} cannot hold the bundle: {_line(error)}") from None
        self._prepared: dict[tuple[str, int], _Prepared] = {}
        self._upload(path, manifest)
        for name, rope in program.ropes.items():
            self.queue.write_buffer(self._buffers[name], 0, angles(rope))
        self.launches = 0
        """Number of kernel launches since the GPU program was loaded."""
        self.uniform_uploads = 0

    @property
    def allocated_bytes(self) -> int:
        """Returns the number of bytes of all GPU buffers except those of uniforms."""
        return sum(buffer.size for buffer in self._buffers.values())

    def _pipeline(self, shader: Shader) -> Any:
        text = files.read_text(self._path / shader.file, MAX_KERNEL)
        visible = self._wgpu.ShaderStage.COMPUTE
        kinds = ["storage" if binding.written else "read-only-storage" for binding in shader.bindings]
        entries = [
            {"binding": index, "visibility": visible, "buffer": {"type": kind}}
            for index, kind in enumerate([*kinds, "uniform"])
        ]
        layout = self.device.create_bind_group_layout(entries=entries)
        try:
            module = shader_module(self.device, text)
            return self.device.create_compute_pipeline(
                layout=self.device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": shader.entry},
            )
        except self._wgpu.GPUError as error:
            raise BundleError(
                f"{self._path / shader.file}: {self.name} does not take the kernel: {_line(error)}"
            ) from None

    def _upload(self, path: Path, manifest: Manifest) -> None:
        weights = tensors.load(path, manifest.weights, self.program.params)
        for (name, *_), array in zip(self.program.params, weights.arrays, strict=True):
            data = array.reshape(-1).view(np.uint8)
            for start in range(0, data.size, _UPLOAD):
                part = data[start : start + _UPLOAD]
                if part.size % 4:
                    part = np.pad(part, (0, -part.size % 4))
                self.write(name, part, start)

    def write(self, name: str, data: NDArray[np.int32] | NDArray[np.uint8], start: int = 0) -> None:
        """Writes data, a multiple of four bytes, to the GPU buffer `name` from its byte `start` on; calls of
        the program that are executed later read them. Raises EngineError if the GPU fails."""
        self._guarded(lambda: self.queue.write_buffer(self._buffers[name], start, data))

    def read(self, name: str, first: int, count: int) -> NDArray[np.int32]:
        """Returns `count` int32 words of the GPU buffer `name`, from word `first` on, after all earlier calls
        have been computed. Raises EngineError if the GPU fails."""
        data = self._guarded(lambda: self.queue.read_buffer(self._buffers[name], 4 * first, 4 * count))
        return np.frombuffer(data, np.int32)

    def run(self, calls: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        """Submits calls of the GPU program's functions together, which the GPU computes in this order, and
        does not wait for them. calls: (function, name of a size -> value) each. Raises EngineError if the GPU
        fails, ValueError for a call larger than the function allows, or two of one function with different
        sizes, whose scalars would share a buffer."""
        self._guarded(lambda: self._submit(calls))

    def _submit(self, calls: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        prepared = [self._ready(name, sizes) for name, sizes in calls]
        for call, (name, sizes) in zip(prepared, calls, strict=True):
            if call.sizes != sizes:
                raise ValueError(f"two calls of '{name}' with different sizes cannot be submitted together")
        encoder = self.device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        for call in prepared:
            for (pipeline, group, _), (x, y) in zip(call.steps, call.grids, strict=True):
                if x and y:
                    compute.set_pipeline(pipeline)
                    compute.set_bind_group(0, group)
                    compute.dispatch_workgroups(x, y, 1)
                    self.launches += 1
        compute.end()
        self.queue.submit([encoder.finish()])

    def _ready(self, function: str, sizes: Mapping[str, int]) -> _Prepared:
        """Returns the kernel launches of a GPU function for one call, after uploading their scalars
        (uniforms) and computing their numbers of workgroups, if the sizes differ from those of the last call.
        sizes: name of a size, such as the number of rows -> its value in the call. Raises ValueError if the
        function allows no call of these sizes."""
        variant = self.program.variant(function, sizes)
        place = self.program.functions[function].index(variant)
        call = self._prepared.get((function, place))
        if call is None:
            call = self._prepared[function, place] = self._prepare(variant)
        if call.sizes != sizes:
            self._set_sizes(call, sizes)
        return call

    def _prepare(self, variant: CallVariant) -> _Prepared:
        usage = self._wgpu.BufferUsage.UNIFORM | self._wgpu.BufferUsage.COPY_DST
        size = _RECORD * max(1, len(variant.launches))
        uniforms = self.device.create_buffer(size=size, usage=usage)
        largest = {**self.program.sizes, **variant.sizes, "pages": self.pages}
        steps = []
        for index, launch in enumerate(variant.launches):
            shader, pipeline = self.program.kernels[launch.kernel], self._pipelines[launch.kernel]
            scalars = scalar_values(shader, launch, largest)
            ranges = [
                {"buffer": self._buffers[use.name], "offset": use.offset, "size": max(4, -(-size // 4) * 4)}
                for use, size in zip(
                    launch.uses, (evaluate(binding.size, scalars) for binding in shader.bindings), strict=True
                )
            ]
            words = shader.uniforms + 1
            ranges.append({"buffer": uniforms, "offset": _RECORD * index, "size": 4 * words})
            group = self.device.create_bind_group(
                layout=pipeline.get_bind_group_layout(0),
                entries=[{"binding": place, "resource": resource} for place, resource in enumerate(ranges)],
            )
            steps.append((pipeline, group, Struct(f"<{words}I")))
        return _Prepared(variant, uniforms, steps)

    def _set_sizes(self, call: _Prepared, sizes: Mapping[str, int]) -> None:
        sizes = dict(sizes)
        block, grids = bytearray(_RECORD * max(1, len(call.steps))), []
        for index, launch in enumerate(call.variant.launches):
            shader = self.program.kernels[launch.kernel]
            scalars = scalar_values(shader, launch, {**sizes, "pages": self.pages})
            x, y = (evaluate(extent, scalars) for extent in shader.grid)
            values = [scalars[name] for name in shader.scalars[: shader.uniforms]]
            call.steps[index][2].pack_into(block, _RECORD * index, *values, max(0, x - 1))
            grids.append((x, y))
        self.queue.write_buffer(call.uniforms, 0, bytes(block))
        self.uniform_uploads += 1
        call.sizes, call.grids = sizes, grids

    def _guarded(self, action: Any) -> Any:
        """Calls `action` and returns its result. Raises EngineError if the GPU fails, DeviceLostError if it
        then fails also to read a word of a buffer."""
        failures = self._wgpu.GPUError, RuntimeError
        try:
            return action()
        except failures as error:
            reason = f"{self.name} failed: {_line(error)}"
        try:
            self.queue.read_buffer(next(iter(self._buffers.values())), 0, 4)
        except failures:
            raise DeviceLostError(f"{reason}; restart the server") from None
        raise EngineError(reason)

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()
        self._prepared.clear()
        self.device.destroy()


def shader_module(device: Any, text: str) -> Any:
    """Returns the shader module that the device compiles from `text`, the WGSL source of a kernel. Raises
    wgpu.GPUError if the device refuses the text."""
    try:
        return device.create_shader_module(code=text)
    except Exception:
        # wgpu 0.32 has the functions of this extension without the line, and refuses the line.
        if not text.startswith(_ENABLE_SUBGROUPS):
            raise
        return device.create_shader_module(code=text.removeprefix(_ENABLE_SUBGROUPS))


def fits(path: Path, program: Program, pages: int, device: DeviceLimits, name: str) -> None:
    """Raises BundleError for a GPU program whose buffers or launches exceed the limits of a device. pages:
    number of pages of the KV cache; name: the device, for the message."""
    try:
        check(program, pages, device)
    except FieldError as error:
        raise BundleError(f"{path}: {name} cannot run the bundle: {error}") from None


def cache_pages(program: Program, most: int, device: DeviceLimits) -> int:
    """Returns the number of pages, at most `most`, that each layer's KV cache can have on a device, whose
    buffers are limited in size; 0 if not even one page fits."""
    each = [
        evaluate(buffer.size, {**program.sizes, "pages": 1})
        for buffer in program.buffers.values()
        if buffer.kind == "cache"
    ]
    return min(most, min(device.binding_bytes, device.buffer_bytes) // max([1, *each]))


def angles(rope: RopeTable) -> NDArray[np.float32]:
    """Returns the cosines and sines of rotary embeddings, float32 [rows, 2 * frequencies], with one row per
    position: cosines, then sines. The angles are rounded to float32 as transformers rounds them, and the
    table is multiplied by the embedding's factor."""
    turns = np.arange(rope.rows, dtype=np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
    wide = turns.astype(np.float64)
    table = np.concatenate([np.cos(wide), np.sin(wide)], axis=1) * rope.factor
    return table.astype(np.float32)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400]
