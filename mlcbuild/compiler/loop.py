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

AGAIN = 10
"""Which argument says whether there is another step."""
Sequences = Callable[[Var], Sequence[relax.Var]]
"""The last arguments of `step` but for its forks, the cache first and the weights last, for n sequences that
have one token each."""


def emit_steps(
    builder: relax.BlockBuilder, step: GlobalVar, sequences: Sequences, attributes: Mapping[str, object]
) -> None:
    """Adds `step_on`: (tokens int32 [n] in place, logit_positions int32 [n], ways float64 [n, COLUMNS] in
    place, masks int32 [m, w], numbers float64 [k, n], heeds int32 [n], ends int32 [e], stop int32 [1], taken
    int32 [k, n] in place, state int32 [3] in place, again bool [] in place, batch ... of which positions,
    slots and lengths are changed in place, params) -> logits float32 [1, n, vocab], masked; what it changes
    are the arguments of the next step, see kernels.follow. And `steps`, which goes on as long as `again` says
    so, and returns it; without masks."""
    given = _arguments(sequences)
    tokens, rows, ways, masks, *follows, taken, state, again = given[:11]
    batch, packed = given[11:-1], given[-1]
    _, positions, slots, _, *pages, lengths = batch
    forks = relax.const(np.zeros((0, 3), np.int32))
    with builder.function("step_on", given, {**attributes}, pure=False):
        call = relax.Call(step, [tokens, rows, ways, tokens, masks, *batch, forks, packed])
        logits = builder.emit(call)
        _follow([tokens, *pages, *follows], [positions, slots, lengths, ways, taken, state, again])
        one = builder.emit_func_output(logits)
    _emit_loop(builder, one, sequences, attributes)


def _emit_loop(
    builder: relax.BlockBuilder, one: GlobalVar, sequences: Sequences, attributes: Mapping[str, object]
) -> None:
    given = _arguments(sequences)
    with builder.function("one_of_steps", given, {**attributes}, pure=False, private=True):
        builder.emit(relax.Call(one, given))  # Its logits are given back when this function ends.
        inner = builder.emit_func_output(given[AGAIN])
    # An attribute, since the builder would know a mere copy again.
    first = copy_with_new_vars(builder.get()[inner]).with_attr("mlcbuild.steps", 1)
    rest, given = builder.add_func(first, "rest_of_steps"), _arguments(sequences)
    with builder.function("steps", given, {**attributes}, pure=False):
        again = builder.emit(relax.Call(inner, given))
        steps = builder.emit_func_output(builder.emit(relax.If(again, relax.Call(rest, given), again)))
    # It calls itself: the virtual machine has no other form for a loop.
    builder.update_func(rest, copy_with_new_vars(builder.get()[steps]).without_attr("global_symbol"))


def _follow(fixed: Sequence[relax.Var], changed: Sequence[relax.Var]) -> None:
    out = [Tensor.placeholder(variable.ty.shape, str(variable.ty.dtype)) for variable in changed]
    handles = [Tensor(_expr=variable) for variable in [*fixed, *changed]]
    places = [*range(len(fixed), len(handles))]
    tensor_ir_inplace_op(follow(), "follow", handles, places, out)


def _arguments(sequences: Sequences) -> list[relax.Var]:
    n, k = Var("n", "int64"), Var("k", "int64")
    kinds: list[tuple[str, tuple[object, ...], str]] = [
        ("tokens", (n,), "int32"),
        ("logit_positions", (n,), "int32"),
        ("ways", (n, COLUMNS), "float64"),
        ("masks", (Var("m", "int64"), Var("w", "int64")), "int32"),
        ("numbers", (k, n), "float64"),
        ("heeds", (n,), "int32"),
        ("ends", (Var("e", "int64"),), "int32"),
        ("stop", (1,), "int32"),
        ("taken", (k, n), "int32"),
        ("state", (3,), "int32"),
        ("again", (), "bool"),
    ]
    own = [relax.Var(name, relax.TensorType(list(shape), dtype)) for name, shape, dtype in kinds]
    return [*own, *sequences(n)]
