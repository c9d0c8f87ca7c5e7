"""Emits kernels for RMSNorm, LayerNorm and additions to the residual stream, all in float32.

The residual stream `x` [n, hidden] is one float32 tensor that every layer adds to in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, registers, size_var

SERIAL_ROWS = 8
"""Maximum number of rows that one core normalizes, or adds to the residual stream, alone, since waking the
other cores would take longer; `ci/bench/kernels --threads 2` prints how long waking takes.
"""

Read = Callable[[Expr], Expr]
Write = Callable[[Expr, Expr], None]
Weights = tuple[Buffer | None, Buffer | None]
"""(weights, biases) of a norm, as buffers; each is None if the norm lacks it."""


@dataclass(frozen=True)
class Norm:
    """A norm over `size` values for CPU kernels: RMSNorm, or LayerNorm if `centered`. `eps` is added to the
    mean square (the variance in LayerNorm) before the square root, `offset` to each weight.
    """

    isa: ISA
    size: int
    eps: float
    offset: float
    centered: bool = False
    """True for LayerNorm, which subtracts the mean before scaling."""
    weight: str | None = "float32"
    """Stored dtype of a norm's weights; None: the norm has no weights. The attribute `bias` is the stored
    dtype of its biases, or None."""
    bias: str | None = None

    @property
    def floats(self) -> Floats:
        return Floats.dividing(self.isa, self.size)

    @property
    def name(self) -> str:
        return "layer_norm" if self.centered else "rms_norm"

    def tensors(self, declare: Callable[[str, str], Buffer], name: str = "") -> Weights:
        """Declares buffers for the weights and biases that the norm has, and returns (weights, biases), None
        for a missing one. declare: function of (buffer name, dtype) that declares and returns a buffer; name:
        prefix of the buffers' names.
        """
        weight = declare(f"{name}weight", self.weight) if self.weight else None
        return weight, declare(f"{name}bias", self.bias) if self.bias else None

    def mean(self, read: Read) -> Expr:
        """Emits the mean of a row of values, float32, and returns it. read: function from an index to the
        vector of values that starts there.
        """
        floats = self.floats
        sums = registers(1, floats.lanes)[0]
        floats.store(sums, floats.constant(0.0), 0)
        with T.serial(self.size // floats.lanes) as k:
            floats.store(sums, floats.load(sums, 0) + read(k * floats.lanes), 0)
        total = floats.fold(floats.load(sums, 0), lambda a, b: a + b)
        return T.bind(total * floats.scalar.constant(1 / self.size))

    def scale(self, read: Read) -> Expr:
        """Emits 1 / sqrt(mean(v^2) + eps) of a row's values v and returns it. read: function from an index to
        the vector of values that starts there.
        """
        one, step = self.floats, self.floats.lanes
        parts = 4 if self.size % (4 * step) == 0 else 1
        wide_floats = Floats(self.isa, parts * step)
        sums = registers(1, wide_floats.lanes)[0]
        wide_floats.store(sums, wide_floats.constant(0.0), 0)
        with T.serial(self.size // wide_floats.lanes) as k:
            for part in range(parts):
                value = T.bind(read(k * wide_floats.lanes + part * step))
                one.store(sums, one.fma(value, value, one.load(sums, part * step)), part * step)
        partial_sums = [one.load(sums, part * step) for part in range(parts)]
        mean = one.fold(sum(partial_sums[1:], partial_sums[0]), lambda a, b: a + b) * one.scalar.constant(
            1 / self.size
        )
        return T.bind(T.float32(1.0) / T.sqrt(mean + one.scalar.constant(self.eps)))

    def row(self, read: Read, weights: Weights, write: Write, first: Expr | int = 0) -> None:
        """Emits the norm of one row of values, RMSNorm or LayerNorm. read: function from an index to the
        vector of values that starts there, called for each pass over the row; weights: buffers of weights and
        biases, None for a missing one, where `offset` is added to weights before they are multiplied; write:
        function of (index, vector) that stores the vector there; first: index of the row's first weight and
        bias.
        """
        floats = self.floats
        if self.centered:
            mean, uncentered = floats.spread(self.mean(read)), read
            read = lambda at: uncentered(at) - mean  # noqa: E731
        scale, (weight, bias) = self.scale(read), weights
        with T.serial(self.size // floats.lanes) as k:
            at = k * floats.lanes
            value = read(at) * floats.spread(scale)
            if weight is not None:
                factor = floats.load(weight, first + at)
                value = value * (factor + floats.constant(self.offset) if self.offset else factor)
            if bias is not None:
                value = value + floats.load(bias, first + at)
            write(at, value)


def all_rows(norm: Norm) -> PrimFunc:
    """Returns the kernel (x float32 [n, size], weight [size], bias [size], out float32 [n, size]) that writes
    the norm of every row of x to out. It lacks the arguments weight and bias if the norm does.
    """
    with kernel(norm.name) as function:
        rows = size_var("n")
        x = function.tensor("x", (rows, norm.size))
        weights = norm.tensors(lambda name, dtype: function.tensor(name, (norm.size,), dtype))
        out = function.tensor("out", (rows, norm.size))
        with function.body():
            over_rows(rows, SERIAL_ROWS, lambda row: norm.row(*_between(norm, (x, row), weights, (out, row))))
    return function.func


def gather_norm(norm: Norm) -> PrimFunc:
    """Returns the kernel (x float32 [n, size], rows int32 [q], weight [size], bias [size], out float32 [q,
    size]) that writes to out the norms of the rows of x with the indices `rows`. It lacks the arguments
    weight and bias if the norm does.
    """
    with kernel(f"gather_{norm.name}") as function:
        total, count = size_var("n"), size_var("q")
        x = function.tensor("x", (total, norm.size))
        rows = function.tensor("rows", (count,), "int32")
        weights = norm.tensors(lambda name, dtype: function.tensor(name, (norm.size,), dtype))
        out = function.tensor("out", (count, norm.size))

        def one_row(row: Expr) -> None:
            source = T.bind(rows[row])
            norm.row(*_between(norm, (x, source), weights, (out, row)))

        with function.body():
            over_rows(count, SERIAL_ROWS, one_row)
    return function.func


def _between(
    norm: Norm, source: tuple[Buffer, Expr], weights: Weights, target: tuple[Buffer, Expr]
) -> tuple[Read, Weights, Write]:
    """Returns the arguments (read, weights, write) for Norm.row, which emits the norm of a row: `read` loads
    a vector of the source row, `write` stores one to the target row, and `weights`, the buffers of the norm's
    weights and biases, is passed on. source, target: (buffer, index of the row).
    """
    floats = norm.floats
    return (
        lambda at: floats.load(*source, at),
        weights,
        lambda at, value: floats.store(target[0], value, target[1], at),
    )


@dataclass(frozen=True)
class Residual:
    """An addition to the residual stream x that is not fused with a product: x += scale * norm(delta + bias),
    where norm and bias may be absent.
    """

    isa: ISA
    size: int
    bias: str | None
    """Stored type of the bias that is added to `delta`, the rows that attention or feed-forward computed;
    None: there is no bias.
    """
    norm: Norm | None
    """The norm that is applied to the rows that attention or feed-forward computed, after their bias, before
    they are added to the residual stream (as in Gemma 2); None: there is no norm.
    """
    scale: float = 1.0

    @property
    def name(self) -> str:
        words = {"bias": self.bias, "post_norm": self.norm, "scaled": self.scale != 1, "add": "always"}
        return "_".join(word for word, present in words.items() if present)

    @property
    def floats(self) -> Floats:
        return Floats.dividing(self.isa, self.size)


def residual(spec: Residual) -> PrimFunc:
    """Returns the kernel (delta float32 [n, size], bias [size], norm weight [size], norm bias [size], x
    float32 [n, size] in place) that computes x += scale * norm(delta + bias). `spec` names the constant
    `scale`, the norm and the bias; the kernel has no arguments for a norm or bias that is None there.
    """
    size, norm = spec.size, spec.norm
    with kernel(spec.name) as function:
        rows = size_var("n")
        delta = function.tensor("delta", (rows, size))
        bias = function.tensor("bias", (size,), spec.bias) if spec.bias else None
        post: Weights = (None, None)
        if norm is not None:
            post = norm.tensors(lambda name, dtype: function.tensor(name, (size,), dtype), "post_")
        x = function.tensor("x", (rows, size))
        with function.body():
            over_rows(rows, SERIAL_ROWS, lambda row: _add_row(spec, (delta, row), (bias, post), (x, row)))
    return function.func


def _add_row(
    spec: Residual,
    delta: tuple[Buffer, Expr],
    extras: tuple[Buffer | None, Weights],
    x: tuple[Buffer, Expr],
) -> None:
    floats, (bias, post) = spec.floats, extras

    def read(at: Expr) -> Expr:
        value = floats.load(*delta, at)
        return value + floats.load(bias, at) if bias is not None else value

    def add(at: Expr, value: Expr) -> None:
        if spec.scale != 1:
            value = value * floats.constant(spec.scale)
        floats.store(x[0], floats.load(*x, at) + value, x[1], at)

    if spec.norm is not None:
        spec.norm.row(read, post, add)
        return
    with T.serial(spec.size // floats.lanes) as k:
        add(k * floats.lanes, read(k * floats.lanes))
