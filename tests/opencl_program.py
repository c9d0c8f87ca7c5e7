"""Executes GPU programs through OpenCL: a second host program for tests, with the interface of
`DeviceProgram` but without wgpu and WGSL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.program import Program, evaluate, scalar_values
from mlcbuild_runtime.devices import gpu_program, tensors
from mlcbuild_runtime.devices.gpu import GpuExecutor
from numpy.typing import NDArray

from mlcbuild.compiler.gpu.emitter import Emitter
from mlcbuild.compiler.gpu.launch_plan import GpuDecoder
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.shader_text import OPENCL
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Storage
from tests import gpu_kernels


def through_opencl(model: GpuExecutor, config: ModelConfig, scheme: Storage) -> GpuExecutor:
    """Returns an executor for the GPU program of `model` that executes it through OpenCL instead of wgpu,
    with the same weights. config, scheme: the model and quantization for which the OpenCL sources are
    generated. Skips the test without OpenCL."""
    gpu_kernels.opencl()
    builder = LaunchBuilder(config, scheme, model.limits, emitter=Emitter(OPENCL))
    GpuDecoder(builder).emit()
    texts = {name: builder.emitter.texts[shader.file] for name, shader in builder.emitter.shaders.items()}
    program: Any = OpenClProgram(model, texts)
    return GpuExecutor(model.path, model.manifest, program)


class OpenClProgram:
    """Executes a GPU program through OpenCL: holds its buffers and compiled kernels, and launches them in the
    program's order."""

    name = "OpenCL"

    def __init__(self, model: GpuExecutor, texts: Mapping[str, str]) -> None:
        """Loads the GPU program and the weights of a bundle, and compiles its kernels by OpenCL. model: the
        same bundle, opened by the usual executor; texts: name of a kernel -> its OpenCL C source."""
        import pyopencl as cl

        self._cl, self.pages, self.program = cl, model.pages, model.device.program
        context = gpu_kernels.opencl()
        self._queue = cl.CommandQueue(context)
        sizes = {**self.program.param_bytes(), **self.program.buffer_bytes(self.pages)}
        self._buffers = {
            name: cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for name, size in sizes.items()
        }
        self._kernels = {
            name: cl.Kernel(cl.Program(context, texts[name]).build(), shader.entry)
            for name, shader in self.program.kernels.items()
        }
        self._upload(model.manifest, self.program, model)

    def _upload(self, manifest: Manifest, program: Program, model: GpuExecutor) -> None:
        arrays = tensors.load(model.path, manifest.weights, program.params).arrays
        for (name, *_), array in zip(program.params, arrays, strict=True):
            self._cl.enqueue_copy(self._queue, self._buffers[name], np.ascontiguousarray(array))
        for name, rope in program.ropes.items():
            self._cl.enqueue_copy(self._queue, self._buffers[name], gpu_program.angles(rope))

    def write(self, name: str, data: NDArray[np.int32]) -> None:
        self._cl.enqueue_copy(self._queue, self._buffers[name], np.ascontiguousarray(data))

    def read(self, name: str, first: int, count: int) -> NDArray[np.int32]:
        words = np.empty(count, np.int32)
        self._cl.enqueue_copy(self._queue, words, self._buffers[name], src_offset=4 * first)
        return words

    def run(self, calls: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        for function, sizes in calls:
            for launch in self.program.variant(function, sizes).launches:
                shader = self.program.kernels[launch.kernel]
                scalars = scalar_values(shader, launch, {**sizes, "pages": self.pages})
                x, y = (evaluate(extent, scalars) for extent in shader.grid)
                if not (x and y):
                    continue
                bound = [self._part(use.name, use.offset) for use in launch.uses]
                values = [np.int32(scalars[name]) for name in shader.scalars[: shader.uniforms]]
                grid, group = (x * shader.threads, y), (shader.threads, 1)
                self._kernels[launch.kernel](self._queue, grid, group, *bound, *values)

    def _part(self, name: str, offset: int) -> Any:
        whole = self._buffers[name]
        return whole.get_sub_region(offset, whole.size - offset) if offset else whole

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.release()
