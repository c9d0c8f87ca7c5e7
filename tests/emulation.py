"""Executes kernels for other processors on this machine: instructions that it lacks are replaced by functions
in LLVM IR.

A kernel is compiled for its target as usual. In the optimized IR, each intrinsic that stands for a single
instruction is replaced by a call of a function defined below. LLVM then generates code for a processor that
this machine can run: a vector of 512 bits becomes two of 256, and tiles are kept in memory. So the tests
execute the target's program with its register tiles, masks and remainders, but not LLVM's choice of
instructions.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from mlcbuild_format import processors

from mlcbuild.compiler.cpu.isa import ISAS, tvm_target
from mlcbuild.targets.target import Target

BASE = Target("base", "x86_64-unknown-linux-gnu", "x86-64-v3")
"""Target on which emulated kernels run: any x86-64 processor with AVX2."""
MODULE = (
    r"^target triple = (.*)$",
    r"^target datalayout = (.*)$",
    r'^!\d+ = (!{i32 \d, !"tvm_target", .*)$',
)
"""Regular expressions of the lines in LLVM IR that name the target of a module."""


def available() -> bool:
    """Returns True if this machine can execute emulated kernels, that is, if its processor has AVX2."""
    needed = next(isa for isa in ISAS if isa.name == "avx2").features
    return set(needed) <= (processors.present() or frozenset())


def emulated(ir: str) -> Any:
    """Returns a module with the functions in `ir`, LLVM IR of kernels for any target, that this machine can
    execute. Raises AssertionError for an intrinsic that has no replacement here."""
    used = set(re.findall(r"@(llvm\.(?:x86|aarch64)\.[\w.]+)", ir))
    missing = used - DEFINITIONS.keys()
    assert not missing, f"tests/emulation.py lacks a definition of {', '.join(sorted(missing))}"
    for name in used:
        ir = re.sub(rf"^declare .*@{re.escape(name)}\(.*\n", "", ir, flags=re.MULTILINE)
        ir = ir.replace(f"@{name}(", f"@emulated.{name}(")
        ir += DEFINITIONS[name].replace("NAME", f"emulated.{name}")
    if any("@slot" in DEFINITIONS[name] for name in used):
        ir += _TILES
    return _loaded(_retargeted(ir))


def _retargeted(ir: str) -> str:
    nothing = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0)).with_attr("global_symbol", "nothing")
    base = tvm.compile(tvm.IRModule({"nothing": nothing}), target=tvm_target(BASE)).mod.inspect_source("ll")
    for line in MODULE:
        target_line, inputs = (re.search(line, text, re.MULTILINE) for text in (str(base), ir))
        assert target_line is not None and inputs is not None, line
        ir = ir.replace(inputs[1], target_line[1])
    ir = re.sub(r'"target-cpu"="[^"]*"', f'"target-cpu"="{BASE.cpu}"', ir)
    return re.sub(r' ?"(?:target-features|target-abi|tune-cpu)"="[^"]*"', "", ir)


def _loaded(ir: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernels.ll")
        path.write_text(ir)
        return tvm_ffi.load_module(str(path))


def _indexes(numbers: Iterable[int]) -> str:
    listed = [f"i32 {number}" for number in numbers]
    return f"<{len(listed)} x i32> <{', '.join(listed)}>"


def _every(step: int, start: int, count: int, source: str, kind: str = "i32") -> str:
    """Returns an LLVM IR expression that selects the elements start, start + step, ... (`count` of them) from
    a vector of count * step elements."""
    whole = f"<{count * step} x {kind}>"
    return f"shufflevector {whole} {source}, {whole} poison, {_indexes(range(start, count * step, step))}"


def _dot(lanes: int, first: str) -> str:
    """Returns an LLVM IR function that adds the products of four pairs of bytes to each int32 lane. first:
    how the bytes of the first operand are extended to int32; those of the second are signed."""
    wide = f"<{4 * lanes} x i32>"
    sums = "".join(
        f"  %e{j} = {_every(4, j, lanes, '%p')}\n  %s{j + 1} = add <{lanes} x i32> %s{j}, %e{j}\n"
        for j in range(4)
    )
    return f"""
define internal <{lanes} x i32> @NAME(<{lanes} x i32> %t, <{4 * lanes} x i8> %a, <{4 * lanes} x i8> %b) {{
  %x = {first} <{4 * lanes} x i8> %a to {wide}
  %y = sext <{4 * lanes} x i8> %b to {wide}
  %p = mul {wide} %x, %y
  %s0 = add <{lanes} x i32> %t, zeroinitializer
{sums}  ret <{lanes} x i32> %s4
}}
"""


def _matrix() -> str:
    """Returns LLVM IR of a function that adds products of [2, 8] and [8, 2] signed bytes to four int32
    sums."""
    cells = ""
    for cell in range(4):
        row, column = divmod(cell, 2)
        steps = [f"  %c{cell}s0 = extractelement <4 x i32> %t, i32 {cell}\n"]
        for k in range(8):
            name = f"%c{cell}k{k}"
            steps.append(
                f"  {name}a = extractelement <16 x i32> %x, i32 {8 * row + k}\n"
                f"  {name}b = extractelement <16 x i32> %y, i32 {8 * column + k}\n"
                f"  {name}p = mul i32 {name}a, {name}b\n"
                f"  %c{cell}s{k + 1} = add i32 %c{cell}s{k}, {name}p\n"
            )
        before = "poison" if cell == 0 else f"%r{cell - 1}"
        steps.append(f"  %r{cell} = insertelement <4 x i32> {before}, i32 %c{cell}s8, i32 {cell}\n")
        cells += "".join(steps)
    return f"""
define internal <4 x i32> @NAME(<4 x i32> %t, <16 x i8> %a, <16 x i8> %b) {{
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
{cells}  ret <4 x i32> %r3
}}
"""


def _pairs(first: str, narrow: str, end: Sequence[str], inputs: int) -> str:
    """Returns the text of an LLVM IR function that multiplies two vectors element by element as int32 and
    adds each two neighbouring products. first: the instruction (sext or zext) that extends the first vector;
    narrow: LLVM type of the elements; inputs: number of elements; end: lines that compute the result from
    %sum and return it."""
    wide, half = f"<{inputs} x i32>", inputs // 2
    body = "\n".join(f"  {line}" for line in end)
    kind = "i16" if narrow == "i8" else "i32"
    return f"""
define internal <{half} x {kind}> @NAME(<{inputs} x {narrow}> %a, <{inputs} x {narrow}> %b) {{
  %x = {first} <{inputs} x {narrow}> %a to {wide}
  %y = sext <{inputs} x {narrow}> %b to {wide}
  %p = mul {wide} %x, %y
  %even = {_every(2, 0, half, "%p")}
  %odd = {_every(2, 1, half, "%p")}
  %sum = add <{half} x i32> %even, %odd
{body}
}}
"""


def _chosen(count: int, bits: int, run: int) -> str:
    """Returns an LLVM IR function that selects `count` integers of `bits` bits by their indices in the runs
    of `run` integers in which they lie, as VPERMW (one run), VPSHUFB and TBL do for indices below `run`."""
    kind, lines, last = f"<{count} x i{bits}>", [], "poison"
    for i in range(count):
        lines += [
            f"  %i{i} = extractelement {kind} %low, i32 {i}",
            f"  %p{i} = add i{bits} %i{i}, {i // run * run}",
            f"  %v{i} = extractelement {kind} %a, i{bits} %p{i}",
            f"  %r{i} = insertelement {kind} {last}, i{bits} %v{i}, i32 {i}",
        ]
        last = f"%r{i}"
    body = "\n".join(lines)
    return f"""
define internal {kind} @NAME({kind} %a, {kind} %indexes) {{
  %low = and {kind} %indexes, splat (i{bits} {run - 1})
{body}
  ret {kind} {last}
}}
"""


def _shifted_bytes() -> str:
    """Returns the text of an LLVM IR function that computes what the x86 instruction VPMULTISHIFTQB does:
    each result byte is the low byte of the 64-bit word of `data` at the same place, rotated right by the
    number of bits in the same byte of `by`."""
    lines = ["  %d = bitcast <64 x i8> %data to <8 x i64>"]
    last = "zeroinitializer"
    for i in range(8):
        lines += [
            f"  %n{i} = {_every(8, i, 8, '%by', 'i8')}",
            f"  %c{i} = zext <8 x i8> %n{i} to <8 x i64>",
            f"  %t{i} = call <8 x i64> @llvm.fshr.v8i64(<8 x i64> %d, <8 x i64> %d, <8 x i64> %c{i})",
            f"  %b{i} = and <8 x i64> %t{i}, splat (i64 255)",
            f"  %m{i} = shl <8 x i64> %b{i}, splat (i64 {8 * i})",
            f"  %r{i} = or <8 x i64> {last}, %m{i}",
        ]
        last = f"%r{i}"
    body = "\n".join(lines)
    return f"""
declare <8 x i64> @llvm.fshr.v8i64(<8 x i64>, <8 x i64>, <8 x i64>)
define internal <64 x i8> @NAME(<64 x i8> %by, <64 x i8> %data) {{
{body}
  %r = bitcast <8 x i64> {last} to <64 x i8>
  ret <64 x i8> %r
}}
"""


def _move(load: bool) -> str:
    """Returns an LLVM IR function that loads or stores an AMX tile; `stride` is the distance of its rows in
    memory, in bytes."""
    to, source = ("%own", "%other") if load else ("%other", "%own")
    return f"""
define internal void @NAME(i8 %number, ptr %memory, i64 %stride) {{
entry:
  %tile = call ptr @slot(i8 %number)
  br label %rows
rows:
  %i = phi i64 [ 0, %entry ], [ %next, %rows ]
  %inside = shl i64 %i, 6
  %own = getelementptr i8, ptr %tile, i64 %inside
  %outside = mul i64 %i, %stride
  %other = getelementptr i8, ptr %memory, i64 %outside
  %row = load <64 x i8>, ptr {source}, align 1
  store <64 x i8> %row, ptr {to}, align 1
  %next = add i64 %i, 1
  %end = icmp eq i64 %next, 16
  br i1 %end, label %done, label %rows
done:
  ret void
}}
"""


_HALVES = """
define internal <16 x float> @NAME(<16 x i16> %bits, <16 x float> %other, i16 %mask, i32 %rounding) {
  %half = bitcast <16 x i16> %bits to <16 x half>
  %wide = fpext <16 x half> %half to <16 x float>
  %kept = bitcast i16 %mask to <16 x i1>
  %r = select <16 x i1> %kept, <16 x float> %wide, <16 x float> %other
  ret <16 x float> %r
}
"""
_FRACTION = """
define internal <16 x float> @NAME(<16 x float> %x, i32 %way, <16 x float> %other, i16 %mask, i32 %rounding) {
  %down = call <16 x float> @llvm.floor.v16f32(<16 x float> %x)
  %r = fsub <16 x float> %x, %down
  ret <16 x float> %r
}
"""
_SCALED = """
define internal <16 x float> @NAME(
    <16 x float> %a, <16 x float> %b, <16 x float> %other, i16 %mask, i32 %rounding) {
  %down = call <16 x float> @llvm.floor.v16f32(<16 x float> %b)
  %least = call <16 x float> @llvm.maxnum.v16f32(
      <16 x float> %down, <16 x float> splat (float -3.000000e+02))
  %clipped = call <16 x float> @llvm.minnum.v16f32(
      <16 x float> %least, <16 x float> splat (float 2.500000e+02))
  %n = fptosi <16 x float> %clipped to <16 x i32>
  %first = sdiv <16 x i32> %n, splat (i32 3)
  %second = sub <16 x i32> %n, %first
  %third = sdiv <16 x i32> %second, splat (i32 2)
  %fourth = sub <16 x i32> %second, %third
  %e1 = add <16 x i32> %first, splat (i32 127)
  %e2 = add <16 x i32> %third, splat (i32 127)
  %e3 = add <16 x i32> %fourth, splat (i32 127)
  %b1 = shl <16 x i32> %e1, splat (i32 23)
  %b2 = shl <16 x i32> %e2, splat (i32 23)
  %b3 = shl <16 x i32> %e3, splat (i32 23)
  %f1 = bitcast <16 x i32> %b1 to <16 x float>
  %f2 = bitcast <16 x i32> %b2 to <16 x float>
  %f3 = bitcast <16 x i32> %b3 to <16 x float>
  %m1 = fmul <16 x float> %a, %f1
  %m2 = fmul <16 x float> %m1, %f2
  %m3 = fmul <16 x float> %m2, %f3
  ret <16 x float> %m3
}
"""
_RECIPROCAL = """
define internal <16 x float> @NAME(<16 x float> %x, <16 x float> %other, i16 %mask) {
  %r = fdiv <16 x float> splat (float 1.000000e+00), %x
  ret <16 x float> %r
}
"""
_NOTHING = "\ndefine internal void @NAME(ptr %config) {\n  ret void\n}\n"
_RELEASE = "\ndefine internal void @NAME() {\n  ret void\n}\n"
_ZERO = """
define internal void @NAME(i8 %number) {
  %tile = call ptr @slot(i8 %number)
  store <1024 x i8> zeroinitializer, ptr %tile, align 1
  ret void
}
"""
_PRODUCT = """
define internal void @NAME(i8 %c, i8 %a, i8 %b) {
entry:
  %sums = call ptr @slot(i8 %c)
  %left = call ptr @slot(i8 %a)
  %right = call ptr @slot(i8 %b)
  br label %row
row:
  %i = phi i64 [ 0, %entry ], [ %i1, %after ]
  %down = shl i64 %i, 6
  %sum = getelementptr i8, ptr %sums, i64 %down
  %old = load <16 x float>, ptr %sum, align 1
  br label %pair
pair:
  %k = phi i64 [ 0, %row ], [ %k1, %pair ]
  %total = phi <16 x float> [ %old, %row ], [ %second, %pair ]
  %across = shl i64 %k, 2
  %where = add i64 %down, %across
  %from = getelementptr i8, ptr %left, i64 %where
  %x = load i32, ptr %from, align 1
  %xl = shl i32 %x, 16
  %xh = and i32 %x, -65536
  %fl = bitcast i32 %xl to float
  %fh = bitcast i32 %xh to float
  %vl0 = insertelement <16 x float> poison, float %fl, i32 0
  %vl = shufflevector <16 x float> %vl0, <16 x float> poison, <16 x i32> zeroinitializer
  %vh0 = insertelement <16 x float> poison, float %fh, i32 0
  %vh = shufflevector <16 x float> %vh0, <16 x float> poison, <16 x i32> zeroinitializer
  %line = shl i64 %k, 6
  %weights = getelementptr i8, ptr %right, i64 %line
  %y = load <16 x i32>, ptr %weights, align 1
  %yl = shl <16 x i32> %y, splat (i32 16)
  %yh = and <16 x i32> %y, splat (i32 -65536)
  %gl = bitcast <16 x i32> %yl to <16 x float>
  %gh = bitcast <16 x i32> %yh to <16 x float>
  %first = call <16 x float> @llvm.fma.v16f32(<16 x float> %vl, <16 x float> %gl, <16 x float> %total)
  %second = call <16 x float> @llvm.fma.v16f32(<16 x float> %vh, <16 x float> %gh, <16 x float> %first)
  %k1 = add i64 %k, 1
  %kend = icmp eq i64 %k1, 16
  br i1 %kend, label %after, label %pair
after:
  store <16 x float> %second, ptr %sum, align 1
  %i1 = add i64 %i, 1
  %iend = icmp eq i64 %i1, 16
  br i1 %iend, label %done, label %row
done:
  ret void
}
"""
_TILES = """
@tiles = internal global [64 x [8192 x i8]] zeroinitializer, align 64
@owners = internal global [64 x i64] zeroinitializer
declare ptr @llvm.thread.pointer.p0()
define internal ptr @slot(i8 %number) {
entry:
  %thread = call ptr @llvm.thread.pointer.p0()
  %me = ptrtoint ptr %thread to i64
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %look ]
  %place = getelementptr [64 x i64], ptr @owners, i64 0, i64 %i
  %swap = cmpxchg ptr %place, i64 0, i64 %me seq_cst seq_cst
  %old = extractvalue { i64, i1 } %swap, 0
  %new = extractvalue { i64, i1 } %swap, 1
  %own = icmp eq i64 %old, %me
  %mine = or i1 %new, %own
  %more = add i64 %i, 1
  %next = and i64 %more, 63
  br i1 %mine, label %done, label %look
done:
  %which = zext i8 %number to i64
  %inside = shl i64 %which, 10
  %tile = getelementptr [64 x [8192 x i8]], ptr @tiles, i64 0, i64 %i, i64 %inside
  ret ptr %tile
}
"""
"""LLVM IR that reserves memory for eight tiles per thread, each of 16 rows of 64 bytes, as the kernels
configure AMX."""
_SATURATED = (
    "%low = call <32 x i32> @llvm.smax.v32i32(<32 x i32> %sum, <32 x i32> splat (i32 -32768))",
    "%both = call <32 x i32> @llvm.smin.v32i32(<32 x i32> %low, <32 x i32> splat (i32 32767))",
    "%r = trunc <32 x i32> %both to <32 x i16>",
    "ret <32 x i16> %r",
)
DEFINITIONS = {
    "llvm.x86.avx512.vpdpbusd.512": _dot(16, "zext"),
    "llvm.x86.avx512.vpdpbusd.256": _dot(8, "zext"),
    "llvm.aarch64.neon.sdot.v4i32.v16i8": _dot(4, "sext"),
    "llvm.aarch64.neon.smmla.v4i32.v16i8": _matrix(),
    "llvm.x86.avx512.pmaddubs.w.512": _pairs("zext", "i8", _SATURATED, 64),
    "llvm.x86.avx512.pmaddw.d.512": _pairs("sext", "i16", ("ret <16 x i32> %sum",), 32),
    "llvm.x86.avx512.mask.vcvtph2ps.512": _HALVES,
    "llvm.x86.avx512.permvar.hi.512": _chosen(32, 16, 32),
    "llvm.x86.avx512.pshuf.b.512": _chosen(64, 8, 16),
    "llvm.aarch64.neon.tbl1.v16i8": _chosen(16, 8, 16),
    "llvm.x86.avx512.pmultishift.qb.512": _shifted_bytes(),
    "llvm.x86.avx512.mask.reduce.ps.512": _FRACTION,
    "llvm.x86.avx512.mask.scalef.ps.512": _SCALED,
    "llvm.x86.avx512.rcp14.ps.512": _RECIPROCAL,
    "llvm.x86.ldtilecfg": _NOTHING,
    "llvm.x86.tilerelease": _RELEASE,
    "llvm.x86.tilezero": _ZERO,
    "llvm.x86.tileloadd64": _move(load=True),
    "llvm.x86.tileloaddt164": _move(load=True),
    "llvm.x86.tilestored64": _move(load=False),
    "llvm.x86.tdpbf16ps": _PRODUCT,
}
"""LLVM's name of an intrinsic -> an LLVM IR function that does what the instruction does. NAME in it stands
for the function's name."""
