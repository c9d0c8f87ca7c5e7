"""Generates kernels and their arguments, on which other values of the CPU compiler's tuned constants are
timed against the present values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from cpu_parts.products import COLD, noise, tensor
from mlcbuild_format.abi import PAGE
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import expert_product
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.expert_product import ExpertMatrices
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given
from mlcbuild.compiler.cpu.kernels.sampling import sample
from mlcbuild.compiler.program.ops import NO_WINDOW
from mlcbuild.models.config import Param
from mlcbuild.quant import stored
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.backends import BACKENDS
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class Load:
    """One size of the inputs with which a kernel is timed: its label, and the arguments of the kernel's
    calls."""

    label: str
    calls: list[tuple[object, ...]]
    """Argument lists of the kernel's calls. They are used in turn, so that the weights of a call are in no
    cache."""


@dataclass(frozen=True)
class Workload:
    """A kernel to time, and the loads (sizes of the inputs, with arguments) with which it is timed."""

    function: Callable[[], PrimFunc]
    """Function without parameters that generates the measured kernel's code again, so that constants which
    have been changed since take effect, and returns it as a PrimFunc of TVM, which is not compiled."""
    loads: Iterator[Load]


def product(target: Target, scheme: str, shape: tuple[int, int], rows: list[int]) -> Workload:
    """Returns a kernel to time, with its arguments: the product of activations with a quantized matrix.
    scheme: quantization of the matrix; shape: its [n outputs, k inputs]; rows: the numbers of rows of
    activations, for each of which there is a set of arguments (load)."""
    storage = BACKENDS["cpu"].storage(SCHEMES[scheme])
    created = linear(isa_for(target), storage, *shape)

    def loads() -> Iterator[Load]:
        rng, tensors = np.random.default_rng(0), stored(Param("w", shape), storage)
        size = sum(item.size for item in tensors)
        weights = [
            [tensor(noise(rng, t.shape, t.dtype)) for t in tensors] for _ in range(max(1, COLD // size))
        ]
        for m in rows:
            x = tensor(rng.standard_normal((m, shape[1]), dtype="float32"))
            out = tensor(np.zeros((m, shape[0]), "float32"))
            prompt = [int(m > 16)] if created.has_prompt_variant else []
            turns = weights[: max(1, 200 // m)] if m <= 64 else weights[:1]
            yield Load(f"{shape[0]}x{shape[1]} m={m}", [(x, *arrays, *prompt, out) for arrays in turns])

    return Workload(lambda: kernel(created, Fusion()), loads())


def attend(target: Target) -> Workload:
    """Returns a kernel to time, with its arguments: attention with the heads of SmolLM2-135M and a float16 KV
    cache. There are sets of arguments (loads) for one new token of one sequence of 512 or 8192 tokens, and,
    with sequences of 2048 tokens, for one new token of each of 8, and for 4, 16 or 32 new tokens, such as
    draft tokens, of one."""
    heads = Heads(1, 9, 3, 64, "float16")
    spec = AttentionKernel(isa_for(target), heads, heads.dim**-0.5, None)

    def loads() -> Iterator[Load]:
        rng = np.random.default_rng(0)
        for sequences, new, length in (
            (1, 1, 512),
            (1, 1, 8192),
            (8, 1, 2048),
            (1, 4, 2048),
            (1, 16, 2048),
            (1, 32, 2048),
        ):
            rows, each = sequences * new, length // PAGE
            pages = tensor(rng.standard_normal(heads.cache_shape(sequences * each)).astype("float16"))
            qkv = tensor(rng.standard_normal((rows, heads.width), dtype="float32"))
            ends = np.tile(np.arange(length - new, length, dtype="int32"), sequences)
            index = [[0, *accumulate([count] * sequences)] for count in (new, each)]
            tables = [tensor(np.array(values, "int32")) for values in (*index, range(sequences * each))]
            lengths = tensor(np.full(sequences, length, "int32"))
            out = tensor(np.zeros((rows, heads.query * heads.value_dim), "float32"))
            call = (qkv, pages, *tables, lengths, tensor(ends), 0, NO_WINDOW, 0, out)
            yield Load(f"{sequences} x {new} rows at {length}", [call])

    return Workload(lambda: attention(spec), loads())


def draw(target: Target) -> Workload:
    """Returns the kernel that samples tokens, with the sets of arguments (loads) for timing it: 1 or 8 rows
    of logits for two sizes of the vocabulary, with temperature 1, with and without top_p 0.9."""

    def loads() -> Iterator[Load]:
        rng = np.random.default_rng(0)
        for vocabulary, rows in ((49152, 1), (49152, 8), (151936, 8)):
            logits = tensor(rng.standard_normal((1, rows, vocabulary), dtype="float32") * 3)
            out = tensor(np.zeros(rows, "int32"))
            for top_p in (1.0, 0.9):
                columns = np.tile([1.0, -np.inf, top_p, 0.0, 0.5], (rows, 1))
                yield Load(f"{rows} x {vocabulary}, top_p {top_p}", [(logits, tensor(columns), out)])

    return Workload(lambda: sample(isa_for(target)), loads())


def experts(target: Target, scheme: str, shape: tuple[int, int], rows: list[int]) -> Workload:
    """Returns a kernel to time, with its arguments: the down projection of a mixture of 64 experts, of which
    each row (token) uses 8. scheme: quantization of the matrices; shape: [n outputs, k inputs] of each; rows:
    the numbers of rows, for each of which there is a set of arguments (load)."""
    storage = BACKENDS["cpu"].storage(SCHEMES[scheme])
    stack = ExpertMatrices(linear(isa_for(target), storage, *shape), 64, 8)

    def loads() -> Iterator[Load]:
        rng = np.random.default_rng(0)
        param = Param("layers.0.mlp.experts.down.weight", (stack.count, *shape))
        weights = [tensor(noise(rng, t.shape, t.dtype)) for t in stored(param, storage)]
        for m in rows:
            x = tensor(rng.standard_normal((m * stack.chosen, shape[1]), dtype="float32"))
            out = tensor(np.zeros((m, shape[0]), "float32"))
            picks = [tensor(choices(rng, m, stack)) for _ in range(max(1, 32 // m))]
            yield Load(f"{shape[0]}x{shape[1]} m={m}", [(chosen, x, *weights, out) for chosen in picks])

    return Workload(lambda: expert_product.kernel(stack, Given(), True), loads())


def choices(rng: np.random.Generator, m: int, stack: ExpertMatrices) -> np.ndarray:
    """Returns random choices of experts for m tokens, in the form in which the router's kernel writes them:
    float32 [m, 2 * c] for c experts per token, first their numbers in ascending order, then their weights,
    all 1 / c.
    """
    numbers = np.sort(rng.permuted(np.tile(np.arange(stack.count), (m, 1)), axis=1)[:, : stack.chosen])
    return np.concatenate([numbers, np.full(numbers.shape, 1 / stack.chosen)], axis=1).astype("float32")
