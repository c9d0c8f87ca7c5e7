"""Defines GPU programs, which bundles for GPUs have instead of compiled host code. See runtime/README.md.

A program lists, for each function, launches of kernels over named buffers. Byte sizes, scalars and grids are
expressions over the sizes of a call, such as its rows. Every operation of an expression is monotone in every
size, and buffers are allocated for the largest sizes, so a check at the largest sizes holds for all calls.

A program may come from a stranger: program_json.py checks types and ranges, and `check` here that no launch
reaches beyond its buffers or a device's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mlcbuild_format.fields import FieldError
from mlcbuild_format.signature import Tensor

FORMAT = "mlcbuild-program/2"
DEVICE_VARIABLE = "MLCBUILD_DEVICE"
"""Environment variable that chooses the GPU adapter to use, by a part of its name or by its number among the
machine's adapters, counted from 0."""
FEATURES_VARIABLE = "MLCBUILD_DEVICE_FEATURES"
"""Environment variable with the names, separated by commas, of the optional features of a GPU that may be
used; all may if it is not set."""
PROGRAM = "program.json"
"""Name of the file in a bundle that holds its GPU program."""
Expression: TypeAlias = "int | str | tuple[str, Expression, Expression]"
"""An expression over the sizes of a GPU program's call, or over a kernel's scalars: a whole number, the name
of a size or scalar, or (operation, left, right) with one of the operations add, mul, div, min, max."""
Sizes: TypeAlias = Mapping[str, int]
"""Name of a size of a GPU program's call, such as its number of rows -> the value of the size."""
Kind = Literal["workspace", "cache", "inputs", "rope"]
"""Kind of a GPU program's buffer. workspace: kept between the launches of a call. cache: kept between calls.
inputs: the int32 inputs of a call, written by the host in one upload. rope: cosines and sines that the host
computes when the program is loaded."""

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: -(-left // right),
    "min": min,
    "max": max,
}
"""Name of an operation in expressions -> function that computes it from the left and the right operand. `div`
rounds up, and its divisor is a whole number above 0."""
MAX_INT32 = (1 << 31) - 1
SUBGROUPS, SHADER_F16 = "subgroups", "shader-f16"
PACKED_PRODUCTS = "packed_4x8_integer_dot_product"
FEATURES = (PACKED_PRODUCTS, SHADER_F16, SUBGROUPS)
"""Optional features of a GPU for which a kernel may have another source text, by their names in WebGPU or
WGSL. `subgroups` also means that shaders may use WGSL's subgroup_id."""
ITEM_BYTES = {"float32": 4, "float16": 2, "uint32": 4, "uint8": 1}
WORD = 4
"""Size of an int32 in bytes. The size of every buffer is a multiple of it."""


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a device, by the names of WebGPU's limits; the defaults are what WebGPU guarantees."""

    storage_buffers: int = 8
    """Maximum number of storage buffers of one kernel: WebGPU's maxStorageBuffersPerShaderStage."""
    binding_bytes: int = 128 << 20
    """Maximum number of bytes of a buffer that a kernel may bind: WebGPU's maxStorageBufferBindingSize."""
    buffer_bytes: int = 256 << 20
    """Maximum size of one buffer in bytes: WebGPU's maxBufferSize."""
    threads: int = 256
    """Maximum number of threads in a workgroup: WebGPU's maxComputeInvocationsPerWorkgroup."""
    shared_bytes: int = 16384
    """Maximum bytes of memory that the threads of a workgroup share: WebGPU's
    maxComputeWorkgroupStorageSize."""
    workgroups: int = 65535
    """Maximum number of workgroups of a launch in one dimension: WebGPU's
    maxComputeWorkgroupsPerDimension."""
    alignment: int = 256
    """Alignment, in bytes, of a binding's offset in its buffer: WebGPU's minStorageBufferOffsetAlignment."""


GUARANTEED = DeviceLimits()


@dataclass(frozen=True)
class Binding:
    """A parameter of a GPU kernel that is a storage buffer: its name, whether the kernel writes it, and how
    many bytes of it are accessed."""

    name: str
    written: bool
    size: Expression
    """Number of bytes that the kernel may access from the start of the binding: a whole number, or an
    expression over the names of the kernel's scalars."""


@dataclass(frozen=True)
class Alternative:
    """Another source text of a shader, for devices with optional features. Entry, threads, bindings, scalars
    and grid are those of the shader."""

    features: tuple[str, ...]
    """The optional features of a GPU that this source text of a shader uses; only a device with all of them
    can run the text."""
    file: str
    shared_bytes: int


@dataclass(frozen=True)
class Shader:
    """A compute shader of a GPU program. Its uniform buffer holds int32 words: the scalars that the code
    reads, then the number of workgroups in x minus 1 (0 if there are none)."""

    file: str
    entry: str
    threads: int
    """Number of threads in a workgroup of the shader; workgroups have one dimension."""
    shared_bytes: int
    bindings: tuple[Binding, ...]
    scalars: tuple[str, ...]
    uniforms: int
    """Number of a shader's scalars (int32 parameters of a launch) that its code reads: the first ones. The
    others occur only in expressions for sizes, such as the number of workgroups."""
    grid: tuple[Expression, Expression]
    """Number of workgroups of a launch in x and y, as expressions over the shader's scalars. If one is 0,
    nothing is launched."""
    alternatives: tuple[Alternative, ...] = ()
    """Other source texts of this shader, for devices with optional features, the fastest first."""

    def best(self, features: Collection[str]) -> Shader:
        """Returns this shader with the fastest source text for a device: the first of its alternative texts
        that uses no other optional features than `features`, those of the device, else its own text. The
        result has no alternatives."""
        for other in self.alternatives:
            if set(other.features) <= set(features):
                return replace(self, file=other.file, shared_bytes=other.shared_bytes, alternatives=())
        return replace(self, alternatives=())


@dataclass(frozen=True)
class Buffer:
    kind: Kind
    size: Expression
    """Size of the GPU buffer in bytes: a whole number, or an expression over the sizes of a call of the GPU
    program, such as "n", its number of rows."""


@dataclass(frozen=True)
class Section:
    """The place of one input of a GPU program's call, such as the tokens, in the buffer that holds all int32
    inputs."""

    start: int
    """Index of the input's first int32 word in the buffer of all inputs."""
    size: Expression
    """Size of one input of a GPU program's call in int32 words: a whole number, or an expression over the
    sizes of the call, such as "n", its number of rows."""


@dataclass(frozen=True)
class RopeTable:
    """A buffer of cosines and sines for rotary embeddings, float32 [rows, 2 * len(inv_freq)], with one row
    per position: the cosines of position * inv_freq, then the sines, all multiplied by `factor`."""

    rows: int
    inv_freq: tuple[float, ...]
    factor: float


@dataclass(frozen=True)
class BoundBuffer:
    """A buffer, or a parameter of the model, that a launch passes to a kernel as one of its storage
    buffers."""

    name: str
    offset: int = 0
    """Offset in bytes at which the binding begins in its buffer, a multiple of 256."""


@dataclass(frozen=True)
class Launch:
    kernel: str
    uses: tuple[BoundBuffer, ...]
    """The buffers and model parameters that a launch of a kernel binds, in the order of the kernel's
    bindings."""
    scalars: tuple[Expression, ...]
    """The values of the kernel's scalars in a launch, in the kernel's order, as expressions over the sizes of
    the call."""


@dataclass(frozen=True)
class CallVariant:
    """The launches of kernels that compute one function of a GPU program, for calls whose sizes are at most
    `sizes`."""

    sizes: Sizes
    """Name of a size, such as the number of rows -> its maximum in calls that this variant of the function
    can compute.
    """
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Program:
    """A GPU program, the content of program.json: its kernels and buffers, and for each of its functions the
    launches of kernels that compute it."""

    signature: str
    params: tuple[Tensor, ...]
    """(name, shape, dtype, layout) of every tensor in which the model's weights are stored, in the order of
    the model's parameters. layout: name of the physical order of the elements, such as "row"."""
    sizes: Sizes
    """Name of a size, such as the number of rows -> its maximum in any call; a smaller number of `pages` may
    be chosen when the GPU program is loaded.
    """
    kernels: Mapping[str, Shader]
    buffers: Mapping[str, Buffer]
    inputs: Mapping[str, Section]
    ropes: Mapping[str, RopeTable]
    """Name of a GPU buffer for rotary embeddings -> the number of positions, the frequencies in radians per
    position, and the factor of the cosines and sines with which the host fills it when the program is
    loaded."""
    functions: Mapping[str, tuple[CallVariant, ...]]
    """Name of a function of the GPU program -> its variants, each a list of launches for calls up to maximum
    sizes, such as a number of rows. A call uses the first variant whose maximum sizes it does not exceed."""

    def variant(self, function: str, sizes: Sizes) -> CallVariant:
        """Returns the first variant of one function of a GPU program that can compute a call. sizes: name of
        a size, such as the number of rows -> its value in the call; an absent size counts as 0. Raises
        ValueError if all variants are too small, KeyError if there is no such function."""
        for variant in self.functions[function]:
            if all(sizes.get(name, 0) <= largest for name, largest in variant.sizes.items()):
                return variant
        raise ValueError(f"{function} takes no call of the sizes {dict(sizes)}")

    def for_device(self, features: Collection[str]) -> Program:
        """Returns a copy of this GPU program with the fastest source text of every kernel for a device.
        features: the optional features of WebGPU that the device has."""
        return replace(self, kernels={name: kernel.best(features) for name, kernel in self.kernels.items()})

    def param_bytes(self) -> dict[str, int]:
        """Returns name of a tensor in which the model's weights are stored -> size in bytes of its buffer on
        a GPU, a multiple of 4."""
        return {name: rounded(math.prod(shape) * ITEM_BYTES[dtype]) for name, shape, dtype, _ in self.params}

    def buffer_bytes(self, pages: int) -> dict[str, int]:
        """Returns name of a GPU buffer, those of the weights aside -> its size in bytes, a multiple of 4, for
        the largest calls and a KV cache of `pages` pages."""
        sizes = {**self.sizes, "pages": pages}
        return {name: rounded(evaluate(buffer.size, sizes)) for name, buffer in self.buffers.items()}


def rounded(size: int) -> int:
    """Returns the size in bytes of a GPU buffer that holds `size` bytes: the next multiple of 4, at least
    4."""
    return max(WORD, -(-size // WORD) * WORD)


def evaluate(expression: Expression, sizes: Sizes) -> int:
    """Returns the value of an expression over the sizes of a GPU program's call, or over a kernel's scalars.
    sizes: name of a size or scalar -> its value. Raises KeyError for a name without a value."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    name, left, right = expression
    return OPERATIONS[name](evaluate(left, sizes), evaluate(right, sizes))


def check(program: Program, pages: int, device: DeviceLimits = GUARANTEED) -> None:
    """Raises FieldError unless every launch of a GPU program, with the largest sizes of a call, stays within
    its buffers and the limits of `device`, and writes no constant and no buffer that is bound twice. pages:
    number of pages of the KV cache."""
    present = {**program.param_bytes(), **program.buffer_bytes(pages)}
    for name, size in present.items():
        if size > device.buffer_bytes:
            raise FieldError(f"'{name}' takes {size} bytes, and a buffer of the device {device.buffer_bytes}")
    for name, kernel in program.kernels.items():
        _check_kernel(name, kernel, device)
    checked: set[tuple[object, ...]] = set()
    for function, variants in program.functions.items():
        for index, variant in enumerate(variants):
            sizes = {**program.sizes, **variant.sizes, "pages": pages}
            for number, launch in enumerate(variant.launches):
                case = (launch, tuple(sizes.items()))
                if case in checked:
                    continue
                checked.add(case)
                try:
                    _check_launch(program, launch, sizes, present, device)
                except FieldError as error:
                    place = f"'functions.{function}[{index}].launches[{number}]'"
                    raise FieldError(f"{place}: {error}") from None


def _check_kernel(name: str, kernel: Shader, device: DeviceLimits) -> None:
    shared = [kernel.shared_bytes, *(other.shared_bytes for other in kernel.alternatives)]
    needs = {
        "threads": (kernel.threads, device.threads),
        "bytes of shared memory": (max(shared), device.shared_bytes),
        "storage buffers": (len(kernel.bindings), device.storage_buffers),
    }
    for resource, (needed, limit) in needs.items():
        if needed > limit:
            raise FieldError(f"'kernels.{name}' needs {needed} {resource}, and the device has {limit}")


def _check_launch(
    program: Program, launch: Launch, sizes: Sizes, present: Sizes, device: DeviceLimits
) -> None:
    """Raises FieldError unless one launch of a GPU program stays within its buffers and the device's limits.
    sizes: name of a size, such as the number of rows -> its maximum in calls that use the launch; present:
    name of a buffer or parameter -> its size in bytes."""
    kernel = program.kernels[launch.kernel]
    scalars = scalar_values(kernel, launch, sizes)
    if max(scalars.values(), default=0) > MAX_INT32:
        raise FieldError(f"a scalar of kernel '{launch.kernel}' exceeds {MAX_INT32}")
    for extent in kernel.grid:
        if evaluate(extent, scalars) > device.workgroups:
            raise FieldError(
                f"kernel '{launch.kernel}' needs {evaluate(extent, scalars)} workgroups in one dimension, and"
                f" the device has {device.workgroups}"
            )
    for binding, use in zip(kernel.bindings, launch.uses, strict=True):
        size = evaluate(binding.size, scalars)
        if use.offset % device.alignment:
            raise FieldError(f"'{use.name}' is bound at byte {use.offset}, no multiple of {device.alignment}")
        if use.offset + size > present[use.name]:
            raise FieldError(
                f"kernel '{launch.kernel}' accesses {size} bytes of '{use.name}' from byte {use.offset} on,"
                f" which has {present[use.name]}"
            )
        if size > device.binding_bytes:
            raise FieldError(
                f"kernel '{launch.kernel}' accesses {size} bytes of '{use.name}' at once, and the device"
                f" allows {device.binding_bytes}"
            )
    _check_aliasing(kernel, launch, program)


def _check_aliasing(kernel: Shader, launch: Launch, program: Program) -> None:
    """Raises FieldError if a kernel's launch writes to a buffer that is bound to it twice, which WebGPU
    forbids even for separate ranges, or to a constant: weights or tables of rotary embeddings."""
    uses = list(zip(kernel.bindings, launch.uses, strict=True))
    written = [use.name for binding, use in uses if binding.written]
    names = [use.name for use in launch.uses]
    constant = {name for name, *_ in program.params} | set(program.ropes)
    for name in written:
        if names.count(name) > 1:
            raise FieldError(f"kernel '{launch.kernel}' writes '{name}', which is bound to it twice")
        if name in constant:
            raise FieldError(f"kernel '{launch.kernel}' writes '{name}', which is constant")


def scalar_values(kernel: Shader, launch: Launch, sizes: Sizes) -> dict[str, int]:
    """Returns name of a scalar of the kernel -> its value in one launch of the kernel, in the kernel's order.
    sizes: name of a size of the call, such as the number of rows -> its value."""
    values = (evaluate(expression, sizes) for expression in launch.scalars)
    return dict(zip(kernel.scalars, values, strict=True))
