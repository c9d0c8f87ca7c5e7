"""Translates kernels from TensorIR to the source text that a device's driver compiles, with TVM's code
generators.

All languages have the same order of parameters, so one GPU program serves them all.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from mlcbuild_format.program import GUARANTEED, SUBGROUPS, Binding, Shader
from tvm import tirx
from tvm.ir.transform import Pass, Sequential
from tvm.s_tir import transform as S
from tvm.target import Target as TvmTarget
from tvm.tirx import transform as X

from mlcbuild.compiler.gpu.tensorir import KernelBuilder
from mlcbuild.errors import CompileError

HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
"""TVM's target for host code, which would launch a kernel from the CPU. TVM lowers this code together with
the kernel; mlcbuild discards it, since the runtime launches kernels itself."""

LOWER: Sequence[Callable[[], Pass]] = (
    S.ConvertBlocksToOpaque,
    S.LowerOpaqueBlock,
    X.FlattenBuffer,
    partial(X.NarrowDataType, 32),
    partial(X.VectorizeLoop, True),
    X.StorageRewrite,
    X.UnrollLoop,
    X.StmtSimplify,
    S.RewriteUnsafeSelect,
    X.VerifyMemory,
    X.AnnotateEntryFunc,
    partial(S.ThreadSync, "shared"),
    S.MergeSharedMemoryAllocations,
    X.SplitHostDevice,
    X.MakePackedAPI,
)
"""Passes that lower a kernel, in order, up to the separation of the host's part. Kernels arrive scheduled, so
TVM's own list, which is twice as long, gives the same text in several times the time. Kernels are simplified
once: doing it before loops are unrolled, too, takes as long as all other passes and saves 0.1 % of the text.
Elimination of common subexpressions would add unused definitions, a tenth of the text, and drivers eliminate
them themselves.
"""


@dataclass(frozen=True)
class Dialect:
    """A language of GPU kernels, such as WGSL, and the functions that TVM's code generator for it lacks."""

    kind: str
    """TVM's name of the kind of target for a language of GPU kernels, such as webgpu for WGSL."""
    ending: str
    """Suffix of the names of kernel files in a GPU language, without the dot, such as wgsl."""
    prelude: str
    """Source text, in the kernel language, of functions that TVM's code generators lack and that need no
    optional feature of a device. A kernel's text includes it if it calls one of them."""
    prelude_last: bool
    """True if the source text `prelude` must follow a kernel's source text, False if it precedes it."""


WGSL = Dialect(
    "webgpu",
    "wgsl",
    """
fn half_lo(u : u32) -> f32 { return unpack2x16float(u).x; }
fn half_hi(u : u32) -> f32 { return unpack2x16float(u).y; }
fn pack_halves(a : f32, b : f32) -> u32 { return pack2x16float(vec2<f32>(a, b)); }
fn either(c : bool, a : f32, b : f32) -> f32 { return select(b, a, c); }
""",
    prelude_last=True,
)
_SUBGROUPS = """
fn lanes_add(lanes : u32, value : f32, step : u32) -> f32 {
let other = subgroupShuffleXor(value, select(0u, step, step < lanes));
return value + select(0.0, other, step < lanes);
}
fn lanes_max(lanes : u32, value : f32, step : u32) -> f32 {
return max(value, subgroupShuffleXor(value, select(0u, step, step < lanes)));
}
fn lane_runs(lanes : u32, count : u32) -> i32 { return i32(max(count / lanes, 1u)); }
fn lane_stride(lanes : u32, count : u32) -> i32 { return i32(min(lanes, count)); }
"""
"""Source text of WGSL functions for sums and maxima over runs of `count` consecutive threads. lanes_add and
lanes_max combine the values of two threads of a subgroup that are `step` apart; if `step` is not below
`lanes`, the number of threads in a subgroup, they return `value` unchanged. lane_runs returns how many
subgroups a run has, whose results the kernel combines, and lane_stride how many threads apart these results
are."""
_PACKED = """
fn packed(a : f32, b : f32, c : f32, d : f32) -> u32 {
return pack4xI8(vec4<i32>(round(vec4<f32>(a, b, c, d))));
}
"""
"""WGSL function that rounds four float32, ties to even, and packs them into a u32 as signed bytes, the first
in the lowest byte. Nothing is clamped: the numbers must be from -128 to 127.
"""
_THREAD = "@builtin(local_invocation_id) threadIdx : vec3<u32>\n) {\n"
_THREAD_OF_SUBGROUP = """@builtin(subgroup_id) subgroup : u32,
@builtin(subgroup_size) lanes : u32,
@builtin(subgroup_invocation_id) lane : u32
) {
let threadIdx = vec3<u32>(subgroup * lanes + lane, 0u, 0u);
"""
"""End of the parameter list of a WGSL kernel with subgroups, and its first statement. They compute the index
of the thread in the workgroup from its subgroup and its index there, since WebGPU does not say which threads
of a workgroup a subgroup has.
"""
OPENCL = Dialect(
    "opencl",
    "cl",
    """float half_lo(uint u) { ushort h = (ushort)u; return vload_half(0, (const half*)&h); }
float half_hi(uint u) { ushort h = (ushort)(u >> 16); return vload_half(0, (const half*)&h); }
uint pack_halves(float a, float b) {
  ushort l, h; vstore_half_rte(a, 0, (half*)&l); vstore_half_rte(b, 0, (half*)&h);
  return (uint)l | ((uint)h << 16);
}
float either(bool c, float a, float b) { return c ? a : b; }
""",
    prelude_last=False,
)
"""The rules for translating GPU kernels to OpenCL C instead of WGSL, so that tests can execute them with an
OpenCL driver."""
_RESERVED = frozenset(
    {"active", "alias", "array", "binding_array", "mat", "ptr", "target", "template", "vec"}
)
"""Reserved words of WGSL that are valid Python names but must not name a scalar of a kernel."""


def lower(builder: KernelBuilder, dialect: Dialect = WGSL) -> tuple[Shader, str]:
    """Translates a finished kernel and returns (its Shader, the description in the GPU program; its source
    text). Raises CompileError if a scalar has a name that WGSL reserves, or a buffer is not used; TVM's
    exceptions pass unchanged."""
    reserved = _RESERVED.intersection(builder.scalars)
    if reserved:
        raise CompileError(f"kernel {builder.name}: '{sorted(reserved)[0]}' is a reserved word of WGSL")
    threads, shared = GUARANTEED.threads, GUARANTEED.shared_bytes
    options = {"max_num_threads": threads}
    if dialect is WGSL:
        options["max_shared_memory_per_block"] = shared
    target = TvmTarget({"kind": dialect.kind, **options}, host=HOST)
    device, own_target = _device_module(builder, target)
    ((_, function),) = device.functions.items()
    params = [str(param.name) for param in function.params]
    module = tvm.get_global_func(f"target.build.{dialect.kind}")(device, own_target)
    text = _text(module.inspect_source(), dialect)
    if re.search(r"\bpacked\(", text):
        text += _PACKED
    if SUBGROUPS in builder.features and re.search(_LANES, text):
        text = _with_subgroups(text)
    written = _written(module, builder.name) if dialect is WGSL else ()
    return _shader(builder, params, written, dialect), text


def _device_module(builder: KernelBuilder, target: TvmTarget) -> tuple[tvm.IRModule, TvmTarget]:
    module = tirx.transform.BindTarget(target)(tvm.IRModule({builder.name: builder.function}))
    split = sys.modules["tvm.tirx.build"].split_host_device_mods
    _, devices = split(Sequential([make() for make in LOWER])(module))
    ((own_target, device),) = devices.items()
    return X.LowerIntrin()(device), own_target


def _text(source: str, dialect: Dialect) -> str:
    lines = [line.strip() for line in source.splitlines()]
    text = "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"
    if not re.search(r"\b(half_lo|half_hi|pack_halves|either)\(", text):
        return text
    return text + dialect.prelude if dialect.prelude_last else dialect.prelude + text


_LANES = r"\b(lanes_add|lanes_max|lane_runs|lane_stride)\("


def _with_subgroups(text: str) -> str:
    """Returns the WGSL text of a kernel that calls functions of subgroups, such as lanes_add, completed by
    `enable subgroups`, the builtin parameters that these functions need, and their definitions.
    """
    assert _THREAD in text
    text = re.sub(_LANES, r"\1(lanes, ", text.replace(_THREAD, _THREAD_OF_SUBGROUP, 1))
    return f"enable subgroups;\n{text}{_SUBGROUPS}"


def _written(module: tvm.runtime.Module, name: str) -> Sequence[int]:
    """Returns, for each buffer of a kernel in the order of its parameters, 1 if the kernel writes it, else 0,
    as TVM declares it in WGSL.
    """
    information = json.loads(module.inspect_source("func_info"))[f"{name}_kernel"]
    tag = information["launch_param_tags"][-1]
    written: list[int] = json.loads(tag[tag.index("[") :])
    return written


def _shader(
    builder: KernelBuilder, params: Sequence[str], written: Sequence[int], dialect: Dialect
) -> Shader:
    names = [name.removesuffix("_ptr") for name in params if name.endswith("_ptr")]
    uniforms = [name for name in params if not name.endswith("_ptr")]
    if set(names) != set(builder.buffers) or set(uniforms) - set(builder.scalars):
        raise CompileError(
            f"kernel {builder.name}: it was lowered with the parameters {', '.join(params)}, and made with"
            f" {', '.join([*builder.buffers, *builder.scalars])}: a buffer is not used"
        )
    others = [name for name in builder.scalars if name not in uniforms]
    flags = written or [0] * len(names)
    bindings = (
        Binding(name, bool(flag), builder.buffers[name]) for name, flag in zip(names, flags, strict=True)
    )
    return Shader(
        file=f"kernels/{builder.name}.{dialect.ending}",
        entry=f"{builder.name}_kernel",
        threads=builder.threads,
        shared_bytes=builder.shared_bytes,
        bindings=tuple(bindings),
        scalars=(*uniforms, *others),
        uniforms=len(uniforms),
        grid=builder.grid,
    )
