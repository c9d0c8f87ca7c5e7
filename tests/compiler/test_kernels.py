"""Tests of matrix products and embeddings in every format and instruction set, compared with float64
NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from tvm import relax
from tvm.relax.frontend.nn import Tensor as NnTensor
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc, Var

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import embedding
from mlcbuild.compiler.cpu.kernels.embedding import Embedding
from mlcbuild.compiler.cpu.kernels.linear import Linear, kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.compiler.cpu.kernels.vectors import argument, prim_func
from mlcbuild.compiler.cpu.workspace import taken_by
from mlcbuild.quant import Storage
from tests import kernelbench
from tests.kernelbench import SAME_FLOATS, TARGETS, Module, Tensor
from tests.libharness import EVERY
from tests.schemes import SCHEMES, SIMPLE, pack, unpack

pytestmark = pytest.mark.xdist_group("kernels")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""

BIAS, MODEL, SHORT, WIDE = (50, 72), (320, 576), (1, 31), (20, 1100)
"""Sizes (rows, columns) of matrices: with remainders in both sizes, with those of a real model, with fewer
columns than one group, and with more than one block of columns. Products with the first have a bias."""
SHAPES = (BIAS, MODEL, SHORT, WIDE)
Size = tuple[int, int]
BYTES = [name for name, scheme in SIMPLE.items() if scheme.activation_bits]
"""Quantization schemes with 8-bit activations."""
PLAIN = [name for name, scheme in SIMPLE.items() if not scheme.bits]
"""Schemes that store the weights as floats."""
FLOATS = [name for name in SIMPLE if name not in {*BYTES, *PLAIN}]
"""Schemes with quantized weights and float32 products."""
ROWS = (1, 2, 3, 5, 6, 7, 8, 13, 33, 65)
TABLES = ((37, 72), (37, 64))
DISTINCT = [name for name in TARGETS if EVERY or name not in SAME_FLOATS]
"""Instruction sets on which embeddings and float32 products are executed."""


def cases(isa: str) -> list[tuple[str, Size]]:
    """Returns (scheme, size of the matrix) of each product that is executed on an instruction set. With
    MLCBUILD_TEST_EVERY these are all pairs. By default each scheme and each size occurs on each instruction
    set, and each pair on one of them."""
    turn, chosen = list(TARGETS).index(isa), [("q4a8_1", MODEL)]
    if EVERY:
        chosen += [(scheme, shape) for scheme in BYTES for shape in SHAPES]
    elif isa == "avx512amx":  # the error of its tiles is measured with more than one block of columns
        chosen += [*((scheme, WIDE) for scheme in BYTES), ("q5a8_1", BIAS), ("q8a8_1", SHORT)]
    else:
        chosen += paired(BYTES, (BIAS, SHORT, WIDE), turn)
    if isa in DISTINCT:
        turn = DISTINCT.index(isa)
        chosen += [(scheme, shape) for scheme in (*PLAIN, *FLOATS) for shape in SHAPES if EVERY]
        chosen += paired(FLOATS, SHAPES, turn) + paired(PLAIN, (BIAS, SHORT, WIDE), turn)
        chosen += [("q0f16", (7, 1))]
    return list(dict.fromkeys(chosen))


def paired(schemes: Sequence[str], shapes: Sequence[Size], turn: int) -> list[tuple[str, Size]]:
    """Returns each scheme with one of the sizes in turn. turn: index of the first scheme's size."""
    return [(scheme, shapes[(turn + index) % len(shapes)]) for index, scheme in enumerate(schemes)]


def tables(isa: str) -> list[tuple[str, Size]]:
    """Returns (scheme, size of the table) of each embedding that is executed on an instruction set: by
    default each scheme with one of the two sizes."""
    turn = DISTINCT.index(isa)
    return [
        (scheme, shape)
        for i, scheme in enumerate(SIMPLE)
        for j, shape in enumerate(TABLES)
        if EVERY or (turn + i + j) % 2
    ]


def widest(isa: str, scheme: str) -> Size:
    """Returns the size of the matrix with most columns that is tested in a scheme on an instruction set."""
    return max((shape for name, shape in cases(isa) if name == scheme), key=lambda shape: shape[1])


each_isa = pytest.mark.parametrize("isa", DISTINCT)
each_int8_isa = pytest.mark.parametrize("isa", list(TARGETS))
each_product = pytest.mark.parametrize(
    ("isa", "scheme", "shape"), [(isa, *case) for isa in TARGETS for case in cases(isa)]
)
each_table = pytest.mark.parametrize(
    ("isa", "scheme", "shape"), [(isa, *case) for isa in DISTINCT for case in tables(isa)]
)


def product(isa: str, scheme: str, shape: Size) -> Linear:
    return linear(isa_for(TARGETS[isa]), SCHEMES[scheme], *shape)


def table(isa: str, scheme: str, shape: Size) -> Embedding:
    return embedding.embedding(isa_for(TARGETS[isa]), SCHEMES[scheme], *shape)


def product_kernel(isa: str, scheme: str, shape: Size) -> PrimFunc:
    """Returns the kernel of a tested product, which adds a bias if the matrix has the size BIAS."""
    return kernel(product(isa, scheme, shape), Fusion(bias=shape == BIAS))


def module(isa: str) -> Module:
    """Returns the compiled kernels that these tests need for one instruction set. They are compiled once per
    process."""
    return kernelbench.once(f"kernels {isa}", lambda: _compiled(isa))


def _compiled(isa: str) -> Module:
    functions = [product_kernel(isa, *case) for case in cases(isa)]
    if isa in DISTINCT:
        functions += [embedding.kernel(table(isa, *case)) for case in tables(isa)]
    return kernelbench.compiled(TARGETS[isa], functions)


@each_product
def test_product(isa: str, scheme: str, shape: Size) -> None:
    kernelbench.need(TARGETS[isa])
    rng = np.random.default_rng(1)
    stored, matrix = kernelbench.weights(rng, SCHEMES[scheme], *shape)
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    added = (bias,) if shape == BIAS else ()
    created = product_kernel(isa, scheme, shape)
    has_prompt_variant = product(isa, scheme, shape).has_prompt_variant
    assert has_prompt_variant == (isa == "avx512amx" and bool(SCHEMES[scheme].activation_bits))
    for m, bfloat16 in [(m, prompt) for m in ROWS for prompt in (False, True)[: 1 + has_prompt_variant]]:
        x = kernelbench.rows(rng, m, shape[1])
        result = module(isa).run(created, (m, shape[0]), x, *stored, *added, prompt=bfloat16)
        observed = x.astype(np.float64) if bfloat16 else kernelbench.activations(x, SCHEMES[scheme])
        expected = observed @ matrix.T + (bias if added else 0)
        bound = (2e-2 if bfloat16 else 8e-6) * np.sqrt(shape[1])
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=f"m={m}")


@each_product
def test_a_row_is_the_same_among_others(isa: str, scheme: str, shape: Size) -> None:
    """Checks that the result of a row has the same bits with any number of other rows, or with up to 15 if
    activations are not quantized. An answer must not depend on the rows, drafts included, that share its
    steps."""
    kernelbench.need(TARGETS[isa])
    rng = np.random.default_rng(2)
    stored, _ = kernelbench.weights(rng, SCHEMES[scheme], *shape)
    added = (rng.standard_normal(shape[0]).astype(np.float32),) if shape == BIAS else ()
    created = product_kernel(isa, scheme, shape)
    x = kernelbench.rows(rng, 70, shape[1])
    many = [17, 20, 33, 70]
    ways = [(False, [*range(2, 17), *many[: 4 if scheme in BYTES else 0]]), (True, [2, 16, *many])]
    for prompt, counts in ways[: 1 + product(isa, scheme, shape).has_prompt_variant]:
        alone = [
            module(isa).run(created, (1, shape[0]), row[None], *stored, *added, prompt=prompt) for row in x
        ]
        for m in counts:
            result = module(isa).run(created, (m, shape[0]), x[:m], *stored, *added, prompt=prompt)
            assert (result == np.concatenate(alone[:m])).all(), (m, prompt)


def test_embeddings_of_different_formats_have_different_names() -> None:
    tables = [table("avx2", scheme, TABLES[0]) for scheme in SCHEMES]
    assert len({item.name for item in tables}) == len(SCHEMES)
    assert len({kernelbench.symbol(embedding.kernel(item)) for item in tables}) == len(SCHEMES)


@each_table
def test_embedding(isa: str, scheme: str, shape: Size) -> None:
    kernelbench.need(TARGETS[isa])
    rng = np.random.default_rng(2)
    stored, matrix = kernelbench.weights(rng, SCHEMES[scheme], *shape)
    tokens = np.array([0, 36, 5, 5, 17, 16, 15], np.int32)
    result = module(isa).run(embedding.kernel(table(isa, scheme, shape)), (7, shape[1]), tokens, *stored)
    np.testing.assert_allclose(result, matrix[tokens], rtol=1e-6, atol=0)


@each_int8_isa
def test_zero_rows_of_x_stay_zero(isa: str) -> None:
    """Checks that rows of zeros give zeros: the scale of such a group is 0, so nothing may be divided by
    it."""
    kernelbench.need(TARGETS[isa])
    stored, _ = kernelbench.weights(np.random.default_rng(3), SCHEMES["q4a8_1"], 320, 576)
    created = kernel(product(isa, "q4a8_1", (320, 576)), Fusion())
    for m in (1, 4, 65):
        result = module(isa).run(created, (m, 320), np.zeros((m, 576), np.float32), *stored)
        assert not result.any()


@each_int8_isa
def test_weights_and_rows_of_every_magnitude(isa: str) -> None:
    """Checks products of 4-bit weights and 8-bit activations at extreme magnitudes: scales of weights from
    2**-24 to more than 20000 with either sign, groups of activations from 1e-33 to 1e30, and groups of zeros
    among both."""
    kernelbench.need(TARGETS[isa])
    rng, scheme, (n, k) = np.random.default_rng(7), SCHEMES["q4a8_1"], (320, 576)
    matrix = rng.standard_normal((n, k // 32, 32)) * np.exp2(rng.integers(-28, 17, (n, k // 32, 1)))
    matrix[rng.random((n, k // 32)) < 0.1] = 0
    words, scales = pack(matrix.reshape(n, k).astype(np.float32), scheme)
    assert abs(scales).min() == 2.0**-24 and abs(scales).max() > 20000 and (scales < 0).any()
    stored, weight = (words, scales), unpack((words, scales), scheme, (n, k)).astype(np.float64)
    created = kernel(product(isa, "q4a8_1", (n, k)), Fusion())
    for m in (1, 4, 65):
        x = rng.standard_normal((m, k // 32, 32)) * 10.0 ** rng.integers(-33, 31, (m, k // 32, 1))
        x[rng.random((m, k // 32)) < 0.1] = 0
        x[0] *= 1e-20
        x = x.reshape(m, k).astype(np.float32)
        observed, actual = kernelbench.activations(x, scheme), module(isa).run(created, (m, n), x, *stored)
        bound = 1e-6 * (np.abs(observed) @ np.abs(weight.T)) + 1e-30
        assert (np.abs(actual - observed @ weight.T) <= bound).all(), m


@each_int8_isa
@pytest.mark.parametrize("scheme", BYTES)
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_stays_one(isa: str, scheme: str, wrong: float) -> None:
    """Checks that a row with one infinite or NaN value has no finite result, wherever the value is, and that
    other rows are not affected."""
    kernelbench.need(TARGETS[isa])
    rng, (n, k) = np.random.default_rng(8), widest(isa, scheme)
    stored: tuple[Tensor, ...] = kernelbench.weights(rng, SCHEMES[scheme], n, k)[0]
    if (n, k) == BIAS:
        stored += (rng.standard_normal(n).astype(np.float32),)
    created = product_kernel(isa, scheme, (n, k))
    for m, bad, place in ((1, 0, 0), (3, 1, k - 1), (9, 8, k // 2), (65, 40, 30)):
        x = kernelbench.rows(rng, m, k)
        right = module(isa).run(created, (m, n), x, *stored)
        x[bad, place] = wrong
        result = module(isa).run(created, (m, n), x, *stored)
        assert not np.isfinite(result[bad]).any(), (m, result[bad])
        rest = np.arange(m) != bad
        assert (result[rest] == right[rest]).all()


@each_isa
def test_float16_of_every_magnitude(isa: str) -> None:
    """Checks that embeddings return zeros, subnormal and normal float16 numbers of either sign exactly."""
    kernelbench.need(TARGETS[isa])
    bits = np.arange(0, 1 << 16, 13, dtype=np.uint32).astype(np.uint16).view(np.float16)
    rows, columns = next(shape for scheme, shape in tables(isa) if scheme == "q0f16")
    finite = bits[np.isfinite(bits)]
    parts = np.resize(finite, (-(-finite.size // (rows * columns)), rows, columns))
    created = embedding.kernel(table(isa, "q0f16", (rows, columns)))
    for plain in parts:
        result = module(isa).run(created, plain.shape, np.arange(rows, dtype=np.int32), plain)
        np.testing.assert_array_equal(result, plain.astype(np.float32))


@pytest.mark.parametrize(("isa", "prompt"), [("portable", False), ("avx512amx", False), ("avx512amx", True)])
def test_error_of_8_bit_activations(isa: str, prompt: bool) -> None:
    """Checks that the error of 4-bit weights and 8-bit activations, relative to the unquantized product of
    gaussian data, is as small as in other 4-bit formats."""
    kernelbench.need(TARGETS[isa])
    rng, (n, k) = np.random.default_rng(4), (320, 576)
    matrix = rng.standard_normal((n, k)).astype(np.float32)
    x = rng.standard_normal((8, k)).astype(np.float32)
    created = kernel(product(isa, "q4a8_1", (n, k)), Fusion())
    result = module(isa).run(created, (8, n), x, *pack(matrix, SCHEMES["q4a8_1"]), prompt=prompt)
    exact = x.astype(np.float64) @ matrix.T.astype(np.float64)
    error = np.sqrt(((result - exact) ** 2).mean() / (exact**2).mean())
    assert error <= 0.087


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [*((scheme, WIDE) for scheme in BYTES), ("q4a8_1", (600, 2350))],
)
def test_tile_registers(scheme: str, shape: Size) -> None:
    """Checks matrix products on AMX tile registers against float64, with more rows than are computed at once.
    The error is small, and results are not smaller on average, as they would be if bits were cut off instead
    of rounded. Inputs that are multiplied by a power of two produce exactly multiplied results."""
    target = TARGETS["avx512amx"]
    kernelbench.need(target)
    rng, (n, k), m = np.random.default_rng(6), shape, 530
    stored, matrix = kernelbench.weights(rng, SCHEMES[scheme], n, k)
    x = rng.standard_normal((m, k)).astype(np.float32)
    created = kernel(product("avx512amx", scheme, shape), Fusion())
    built = module("avx512amx") if shape == WIDE else kernelbench.compiled(target, [created])
    result = built.run(created, (m, n), x, *stored, prompt=True)
    exact = x.astype(np.float64) @ matrix.T
    assert np.sqrt(((result - exact) ** 2).mean() / (exact**2).mean()) < 0.0026
    assert abs((result * exact).sum() / (exact**2).sum() - 1) < 2e-4
    for factor in (np.float32(2**20), np.float32(2**-20)):
        scaled = built.run(created, (m, n), x * factor, *stored, prompt=True)
        np.testing.assert_array_equal(scaled, result * factor)


@pytest.mark.parametrize("scheme", BYTES)
def test_tile_registers_with_large_weights(scheme: str) -> None:
    """Checks that products on AMX tile registers are right with weights that no float16 holds beside their
    factors, and that other columns get the same bits as without them."""
    kernelbench.need(TARGETS["avx512amx"])
    rng, (n, k), m = np.random.default_rng(7), WIDE, 40
    (codes, scales), _ = kernelbench.weights(rng, SCHEMES[scheme], n, k)
    x = rng.standard_normal((m, k)).astype(np.float32)
    created, built = kernel(product("avx512amx", scheme, WIDE), Fusion()), module("avx512amx")
    usual = built.run(created, (m, n), x, codes, scales, prompt=True)
    large = scales.copy()
    large[0, :, 3] *= 4096
    large[0, 0, 4] = 60000
    columns = [3, 4]
    expected = unpack((codes, large), SCHEMES[scheme], (n, k)).astype(np.float64)[columns]
    result = built.run(created, (m, n), x, codes, large, prompt=True)
    exact = x.astype(np.float64) @ expected.T
    assert np.sqrt(((result[:, columns] - exact) ** 2).mean(0) / (exact**2).mean(0)).max() < 0.0026
    np.testing.assert_array_equal(result[:, 16:], usual[:, 16:])


def test_equal_products_share_one_kernel() -> None:
    """Checks that two products of the same shape in one function share one kernel, which is called for any
    number of rows."""
    created = product("portable", "q4f16_1", (72, 72))
    builder = relax.BlockBuilder()
    m = Var("m", "int64")
    inputs = [
        relax.Var("x", relax.TensorType((m, 72), "float32")),
        relax.Var("w", relax.TensorType((72, 12), "uint32")),
        relax.Var("s", relax.TensorType((72, 3), "float16")),
    ]
    with builder.function("main", inputs):
        x, *stored = (NnTensor(_expr=variable) for variable in inputs)
        y = created.apply(created.apply(x, stored), stored)
        builder.emit_func_output(y._expr)
    reply = builder.get()
    names = sorted(str(name.name_hint) for name in reply.functions)
    assert names == ["main", kernelbench.symbol(kernel(created, Fusion()))]


@pytest.mark.parametrize(("isa", "other"), SAME_FLOATS.items())
def test_kernels_with_floats_are_the_same(isa: str, other: str) -> None:
    """Checks that the kernels with float32 products are the same programs for two instruction sets that
    differ in their int8 products only, so that it suffices to execute them on one of the two."""

    assert programs(isa).replace(isa, other) == programs(other)


@cache
def programs(isa: str) -> str:
    """Returns the programs of all float32 products and embeddings that are tested, for the instruction set
    `isa`, as text."""
    other = SAME_FLOATS.get(isa, isa)
    floats = [case for case in cases(other) if not SCHEMES[case[0]].activation_bits]
    functions = [product_kernel(isa, *case) for case in floats]
    functions += [embedding.kernel(table(isa, *case)) for case in tables(other)]
    return "\n".join(str(function.script()) for function in functions)


def test_names_and_fallbacks() -> None:
    assert product("avx512vnni", "q4a8_1", (320, 576)).name == "w4a8.avx512vnni"
    assert product("avx2", "q8f32_1", (320, 576)).name == "w8f32.avx2"
    assert product("avx2", "q4f16_1", (320, 576)).fallback is None
    assert "no vector instructions" in str(product("portable", "q0f32", (320, 576)).fallback)


def test_kernels_are_asked_how_much_they_take() -> None:
    """Checks the estimate of a kernel's scratch memory: arrays of one scope are added, the larger of two
    consecutive scopes counts, small arrays of fixed size are on the stack, and sizes are those of the largest
    dimensions in whole pages."""

    def body() -> None:
        n = Var("n", "int64")
        argument("x", (n, 16), "float32")
        with T.sblock("takes"):
            rows = T.bind((n + 31) // 32 * 32)
            T.alloc_buffer((255,), "float32")
            T.alloc_buffer((rows, 16), "float32")
            with T.If(n > 1):
                with T.Then():
                    T.alloc_buffer((257,), "float32")
                    T.evaluate(0)
                with T.Else():
                    T.alloc_buffer((n, 100), "int8")
                    T.evaluate(0)

    created = prim_func("takes", body)
    assert (
        taken_by(created, {"n": 65}, 0) == 4 * 96 * 16 + 2048 + 8192
    )  # 6 KiB in two pages, then 6,500 bytes
    assert taken_by(created, {}, 1) == 4096 + 4096


@pytest.mark.parametrize("size", [1023, 1024])
def test_arrays_on_the_stack_are_those_that_tvm_puts_there(size: int) -> None:
    """Checks that an array of constant size counts as memory exactly if the compiled kernel allocates it from
    the thread's memory pool."""

    def body() -> None:
        x, out = argument("x", (size,), "int8"), argument("out", (size,), "int8")
        with T.sblock("reverses"):
            array = T.alloc_buffer((size,), "int8")
            for source, target in ((x, array), (array, out)):
                with T.serial(0, size) as i:
                    T.buffer_store(target, source[size - 1 - i], [i])

    created = prim_func("reverses", body)
    code = kernelbench.compiled(TARGETS["portable"], [created]).asm
    assert ("TVMBackendAllocWorkspace" in code) == (taken_by(created, {}, 0) > 0)


def test_kernel_names_tell_formats_and_shapes_apart() -> None:
    shapes = ((32, 64), (64, 32))
    cases = [(scheme, shape, bias) for scheme in SIMPLE for shape in shapes for bias in (False, True)]
    created = [kernel(product("avx2", scheme, shape), Fusion(bias=bias)) for scheme, shape, bias in cases]
    tables = [embedding.kernel(table("avx2", scheme, shape)) for scheme in SIMPLE for shape in shapes]
    names = [kernelbench.symbol(function) for function in created + tables]
    assert len(set(names)) == len(names)


def scheme_kernels(isa: str, scheme: Storage) -> str:
    """Returns the assembly text of all tested matrix products in one quantization scheme, compiled for the
    instruction set `isa`."""
    functions = [product_kernel(isa, *case) for case in cases(isa) if case[0] == scheme.name]
    return "\n".join(module(isa).code(function) for function in functions)
