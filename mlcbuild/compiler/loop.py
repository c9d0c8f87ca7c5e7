"""Several steps of decoding in one call of a library.

What its caller does between two steps takes longer than it should: it finds its code and data in no cache
after all weights of a model have gone through them. So a library has a loop over its own `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm import relax
from tvm.ir import GlobalVar
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op
from tvm.relax.utils import copy_with_new_vars
from tvm.tirx import Var

from mlcbuild.compiler.kernels.follow import follow
from mlcbuild.compiler.kernels.sampling_row import COLUMNS

Sequences = Callable[[Var], Sequence[relax.Var]]
"""The last arguments of `step` but for its forks, the cache first and the weights last, for n sequences that
have one token each."""


def emit_steps(
    builder: relax.BlockBuilder, step: GlobalVar, sequences: Sequences, attributes: Mapping[str, object]
) -> None:
    """Adds `steps`: (tokens int32 [n] in place, logit_positions int32 [n], ways float64 [n, COLUMNS] in
    place, numbers float64 [k, n], heeds int32 [n], ends int32 [e], stop int32 [1], taken int32 [k, n] in
    place, state int32 [2] in place, batch ... of which positions, slots and lengths are changed in place,
    params) -> bool []; see kernels.follow."""
    one = _one_step(builder, step, sequences, attributes)
    # An attribute, since the builder would know a mere copy again.
    first = copy_with_new_vars(builder.get()[one]).with_attr("mlcbuild.steps", 1)
    rest = builder.add_func(first, "rest_of_steps")
    given = _arguments(sequences)
    with builder.function("steps", given, attributes, pure=False):
        again = builder.emit(relax.Call(one, given))
        steps = builder.emit_func_output(builder.emit(relax.If(again, relax.Call(rest, given), again)))
    # It calls itself: the virtual machine has no other form for a loop.
    builder.update_func(rest, copy_with_new_vars(builder.get()[steps]).without_attr("global_symbol"))


def _one_step(
    builder: relax.BlockBuilder, step: GlobalVar, sequences: Sequences, attributes: Mapping[str, object]
) -> GlobalVar:
    """Whether there is another. Nobody looks at the logits, which are given back when this function ends."""
    given = _arguments(sequences)
    tokens, rows, ways, *follows, taken, state = given[:9]
    batch, packed = given[9:-1], given[-1]
    _, positions, slots, _, *pages, lengths = batch
    masks, forks = (relax.const(np.zeros(shape, np.int32)) for shape in ((0, 1), (0, 3)))
    with builder.function("one_of_steps", given, attributes, pure=False, private=True):
        builder.emit(relax.Call(step, [tokens, rows, ways, tokens, masks, *batch, forks, packed]))
        again = _follow([tokens, *pages, *follows], [positions, slots, lengths, ways, taken, state])
        made: GlobalVar = builder.emit_func_output(again)
    return made


def _follow(fixed: Sequence[relax.Var], changed: Sequence[relax.Var]) -> relax.Expr:
    out = [Tensor.placeholder(variable.ty.shape, str(variable.ty.dtype)) for variable in changed]
    out.append(Tensor.placeholder([], "bool"))
    arguments, count = [*fixed, *changed], len(fixed) + len(changed)
    handles = [Tensor(_expr=variable) for variable in arguments]
    found = tensor_ir_inplace_op(follow(), "follow", handles, [*range(len(fixed), count), -1], out)
    return found[-1]._expr


def _arguments(sequences: Sequences) -> list[relax.Var]:
    n, k = Var("n", "int64"), Var("k", "int64")
    kinds: list[tuple[str, tuple[object, ...], str]] = [
        ("tokens", (n,), "int32"),
        ("logit_positions", (n,), "int32"),
        ("ways", (n, COLUMNS), "float64"),
        ("numbers", (k, n), "float64"),
        ("heeds", (n,), "int32"),
        ("ends", (Var("e", "int64"),), "int32"),
        ("stop", (1,), "int32"),
        ("taken", (k, n), "int32"),
        ("state", (2,), "int32"),
    ]
    own = [relax.Var(name, relax.TensorType(list(shape), dtype)) for name, shape, dtype in kinds]
    return [*own, *sequences(n)]
