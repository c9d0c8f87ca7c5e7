"""Runs single GPU kernels for tests: through wgpu on this machine's adapter, and through OpenCL on pocl."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.program import Shader, evaluate
from mlcbuild_runtime.devices import gpu_adapter, gpu_program
from numpy.typing import NDArray

from mlcbuild.compiler.gpu.shader_text import OPENCL, WGSL, lower
from mlcbuild.compiler.gpu.tensorir import KernelBuilder, for_features
from tests import gpu_harness

Arrays = Mapping[str, NDArray[Any]]
Make = Callable[..., KernelBuilder]


def sizes(shader: Shader, scalars: Mapping[str, int]) -> list[int]:
    """Returns the size in bytes of each binding of a kernel, in order, rounded up to a multiple of 4."""
    return [-(-evaluate(binding.size, scalars) // 4) * 4 for binding in shader.bindings]


def padded(array: NDArray[Any], size: int) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    assert size - 4 < len(data) <= size, "an array is as large as its binding"
    return data.ljust(size, b"\0")


@cache
def device() -> Any:
    """Returns a device of this machine's GPU adapter. Skips the test if there is no adapter."""
    gpu_harness.needs_adapter()
    return gpu_adapter.open_device(gpu_adapter.choose())


def on_adapter(
    make: Make,
    arguments: tuple[object, ...],
    scalars: Mapping[str, int],
    arrays: Arrays,
    features: frozenset[str] = frozenset(),
) -> dict[str, NDArray[Any]]:
    """Executes one GPU kernel through wgpu. Returns buffer name -> contents after the execution, in the type
    of the input, for every buffer that the kernel writes. make: function that creates the kernel from
    `arguments`; scalars: name -> integer argument; arrays: buffer name -> input; features: optional device
    features that the kernel uses. Skips the test without a GPU adapter."""
    import wgpu

    gpu = device()
    with for_features(features):
        shader, text = lower(make("kernel", *arguments), WGSL)
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    buffers = [
        gpu.create_buffer_with_data(data=padded(arrays[binding.name], size), usage=usage)
        for binding, size in zip(shader.bindings, sizes(shader, scalars), strict=True)
    ]
    x, y = (evaluate(extent, scalars) for extent in shader.grid)
    values = [scalars[name] for name in shader.scalars[: shader.uniforms]] + [max(0, x - 1)]
    uniforms = gpu.create_buffer_with_data(
        data=np.array(values, np.int32).tobytes(), usage=wgpu.BufferUsage.UNIFORM
    )
    pipeline = gpu.create_compute_pipeline(
        layout="auto",
        compute={"module": gpu_program.shader_module(gpu, text), "entry_point": shader.entry},
    )
    bound = [
        {"binding": index, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
        for index, buffer in enumerate([*buffers, uniforms])
    ]
    encoder = gpu.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=bound))
    work.dispatch_workgroups(x, y, 1)
    work.end()
    gpu.queue.submit([encoder.finish()])
    return {
        binding.name: np.frombuffer(gpu.queue.read_buffer(buffer), arrays[binding.name].dtype)
        for binding, buffer in zip(shader.bindings, buffers, strict=True)
        if binding.written
    }


@cache
def opencl() -> Any:
    """Returns an OpenCL context of the software device pocl. Skips the test if OpenCL is missing."""
    cl = pytest.importorskip("pyopencl", reason="OpenCL runs with the package pyopencl")
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
    try:
        devices = [gpu for platform in cl.get_platforms() for gpu in platform.get_devices()]
    except cl.LogicError:
        devices = []
    if not devices:
        pytest.skip("OpenCL has no device here: apt-get install pocl-opencl-icd")
    return cl.Context(devices[:1])


def on_opencl(
    make: Make, arguments: tuple[object, ...], scalars: Mapping[str, int], arrays: Arrays
) -> dict[str, NDArray[Any]]:
    """Executes one GPU kernel through OpenCL. Returns buffer name -> contents after the execution, in the
    type of the input, for every buffer of the kernel. make: function that creates the kernel from
    `arguments`; scalars: name -> integer argument; arrays: buffer name -> input. Skips the test without
    OpenCL."""
    context = opencl()
    import pyopencl as cl

    queue = cl.CommandQueue(context)
    shader, text = lower(make("kernel", *arguments), OPENCL)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [
        cl.Buffer(context, flags, hostbuf=np.frombuffer(padded(arrays[binding.name], size), np.uint8))
        for binding, size in zip(shader.bindings, sizes(shader, scalars), strict=True)
    ]
    x, y = (evaluate(extent, scalars) for extent in shader.grid)
    values = [np.int32(scalars[name]) for name in shader.scalars[: shader.uniforms]]
    function = cl.Kernel(cl.Program(context, text).build(), shader.entry)
    function(queue, (x * shader.threads, y), (shader.threads, 1), *buffers, *values)
    results = {}
    for binding, buffer in zip(shader.bindings, buffers, strict=True):
        out = np.empty(buffer.size // 4, np.uint32).view(arrays[binding.name].dtype)
        cl.enqueue_copy(queue, out, buffer)
        results[binding.name] = out
    return results


HOSTS = {"adapter": on_adapter, "opencl": on_opencl}
"""Name of the API that executes a GPU kernel ("adapter" for wgpu, "opencl") -> function that executes one
kernel by it and returns buffer name -> contents after the execution."""
