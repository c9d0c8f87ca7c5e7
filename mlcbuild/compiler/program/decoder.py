"""One decoder for every family: a ModelConfig as a Relax module whose functions are the library's.

Every layer calls one private function (one for each way in which layers are stored), so the program hardly
grows with the number of layers; a layer's number and window are arguments. The residual stream and the cache
are changed in place, which is why these functions are impure: no pass may drop a call of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from mlcbuild_format import abi
from tvm import relax
from tvm.ir import GlobalVar, PrimType
from tvm.relax.frontend.nn import Tensor
from tvm.tirx import Expr, Var

from mlcbuild import quant
from mlcbuild.compiler.program.limits import Limits
from mlcbuild.compiler.program.ops import NO_WINDOW, Batch, Layer, Ops, Rows, Weights
from mlcbuild.models import ModelConfig, Param, frequencies, parameters
from mlcbuild.quant import StoredTensor

BATCH_AND_FORKS = (*abi.BATCH, abi.FORKS)
"""What the private functions take of a step."""


@dataclass(frozen=True)
class Decoder:
    """What a library is made of, and the builder that collects its functions."""

    ops: Ops
    limits: Limits
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)

    @property
    def config(self) -> ModelConfig:
        return self.ops.config

    @cached_property
    def params(self) -> tuple[Param, ...]:
        return parameters(self.config)

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Everything that the packed `params` argument holds, in order."""
        return quant.stored_parameters(self.params, self.ops.scheme)

    def layer_params(self, layer: int) -> list[Param]:
        return [param for param in self.params if param.name.startswith(f"layers.{layer}.")]

    def attributes(self) -> dict[str, object]:
        """Plan every buffer, results too, for the largest sizes: a few big blocks are then used again and
        again, where exact sizes would leave one block in the runtime's pool for each size ever seen."""
        return {"tir_var_upper_bound": self.limits.bounds, "relax.memory_plan_dynamic_func_output": True}


def size(name: str) -> Var:
    return Var(name, "int64")


def variable(name: str, shape: Sequence[Expr | int], dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def number(name: str) -> relax.Var:
    """An int64 argument that kernels get as it is. A dimension would be taken apart and put together again
    in every layer."""
    return relax.Var(name, PrimType("int64"))


def _rows() -> relax.Var:
    """The argument that chooses rows."""
    return variable("rows", (size("q"),), "int32")


def handle(value: relax.Expr) -> Tensor:
    return Tensor(_expr=value)


def variables(
    decoder: Decoder, arguments: Sequence[abi.Argument], sizes: Mapping[str, Expr | int] | None = None
) -> dict[str, relax.Var]:
    """Returns new variables for arguments of the ABI, by name, in order.

    `sizes` maps names of the ABI's sizes to dimensions; any other size becomes a symbolic one.
    """
    known: dict[str, Expr | int] = {"hidden": decoder.config.hidden_size, **(sizes or {})}

    def extent(name: str | int) -> Expr | int:
        if isinstance(name, int):
            return name
        base, _, more = name.partition("+")
        dimension = known.setdefault(base, size(base))
        return dimension + int(more) if more else dimension

    found = {}
    for argument in arguments:
        if argument == abi.PARAMS:
            found[argument.name] = packed_params(decoder)
        elif argument.dtype is None:
            cache = decoder.ops.cache
            found[argument.name] = variable("pages", cache.cache_shape(size("num_pages")), cache.dtype)
        else:
            found[argument.name] = variable(argument.name, [*map(extent, argument.shape)], argument.dtype)
    return found


def packed_params(decoder: Decoder) -> relax.Var:
    fields = [relax.TensorType(list(tensor.shape), tensor.dtype) for tensor in decoder.tensors]
    return relax.Var("params", relax.TupleType(fields))


def unpacked(decoder: Decoder, packed: relax.Var, params: Sequence[Param]) -> Weights:
    """The stored tensors of some parameters, out of the packed argument."""
    place = {tensor.name: index for index, tensor in enumerate(decoder.tensors)}
    return {
        param.name: [
            handle(decoder.builder.emit(relax.TupleGetItem(packed, place[tensor.name]), name_hint="weight"))
            for tensor in quant.stored(param, decoder.ops.scheme)
        ]
        for param in params
    }


def layer_functions(decoder: Decoder) -> list[GlobalVar]:
    """The function of each layer; layers whose parameters are stored alike have the same one."""
    made: dict[object, GlobalVar] = {}
    found = []
    for layer in range(decoder.config.num_layers):
        params = decoder.layer_params(layer)
        prefix = f"layers.{layer}."
        kind = tuple(
            (param.name.removeprefix(prefix), quant.scheme_for(decoder.ops.scheme, param.name))
            for param in params
        )
        if kind not in made:
            made[kind] = _layer(decoder, layer, f"layer_{len(made)}" if made else "layer")
        found.append(made[kind])
    return found


def _layer(decoder: Decoder, layer: int, name: str, chosen: bool = False) -> GlobalVar:
    """Adds (x, angles, scratch ..., batch ..., forks, (layer, window), prompt, rows?, weights ...) -> x.

    x and pages are changed in place. `chosen`: x of the rows int32 [q] only.
    """
    builder, config = decoder.builder, decoder.config
    n = size("n")
    x = variable("x", (n, config.hidden_size), "float32")
    turns = variable("angles", (n, config.rope.dim), "float32")
    scratch = {
        name: variable(name, (n, width), dtype) for name, (width, dtype) in decoder.ops.scratch().items()
    }
    batch = variables(decoder, BATCH_AND_FORKS, {"n": n})
    place, prompt = (number("layer"), number("window")), number("prompt")
    rows = [_rows()] * chosen
    weights: dict[str, list[Tensor]] = {}
    params = {p.name.removeprefix(f"layers.{layer}."): p for p in decoder.layer_params(layer)}
    for short, param in params.items():
        tensors = quant.stored(param, decoder.ops.scheme)
        weights[short] = [handle(variable(short, tensor.shape, tensor.dtype)) for tensor in tensors]
    given = [tensor._expr for tensors in weights.values() for tensor in tensors]
    with builder.function(
        name,
        [x, turns, *scratch.values(), *batch.values(), *place, prompt, *rows, *given],
        decoder.attributes(),
        pure=False,
        private=True,
    ):
        where = Batch(**{name: handle(value) for name, value in batch.items()})
        one = Layer(params, weights, handle(turns), where, *place, prompt)
        given_rows = Rows(handle(x), {name: handle(variable) for name, variable in scratch.items()})
        attended = decoder.ops.attention(given_rows, one, handle(*rows) if chosen else None)
        changed = decoder.ops.feed_forward(attended, one)
        made: GlobalVar = builder.emit_func_output(changed._expr)
    return made


def trunk_function(decoder: Decoder, layers: Sequence[GlobalVar], chosen: bool = False) -> GlobalVar:
    """(embeddings [n, hidden], batch ..., forks, params, prompt, rows?) -> the residual stream after all
    layers [n, hidden]. `chosen`: of the rows int32 [q] only, which are no more than n."""
    builder, config, ops = decoder.builder, decoder.config, decoder.ops
    n = size("n")
    given = variable("embeddings", (n, config.hidden_size), "float32")
    batch, packed = variables(decoder, BATCH_AND_FORKS, {"n": n}), packed_params(decoder)
    prompt, rows = number("prompt"), [_rows()] * chosen
    inv_freq, factor = frequencies(config.rope, decoder.limits.context_window)
    given_all, name = [given, *batch.values(), packed, prompt, *rows], "trunk_to_rows" if chosen else "trunk"
    last = config.num_layers - 1
    if chosen:
        layers = [*layers[:last], _layer(decoder, last, "last_layer", chosen)]
    with builder.function(name, given_all, decoder.attributes(), pure=False, private=True):
        table = handle(relax.const(np.array(inv_freq, np.float32)))
        turns = ops.angles(handle(batch["positions"]), table, factor)
        # They are not initialised.
        scratch = [
            builder.emit(relax.op.builtin.alloc_tensor(relax.ShapeExpr([n, width]), dtype, 0, "global"))
            for width, dtype in ops.scratch().values()
        ]
        # The caller's embeddings stay as they are. Nothing may be allocated after this: the memory planner
        # does not know that what a layer returns is what it was given.
        x = ops.copy(handle(given))._expr
        for layer, function in enumerate(layers):
            window = config.windows[layer] or NO_WINDOW
            place = [relax.prim_value(number) for number in (layer, min(window, NO_WINDOW))]
            weights = unpacked(decoder, packed, decoder.layer_params(layer))
            tensors = [tensor._expr for stored in weights.values() for tensor in stored]
            numbers = [*place, prompt, *(rows if layer == last else [])]
            x = builder.emit(
                relax.Call(function, [x, turns._expr, *scratch, *batch.values(), *numbers, *tensors])
            )
        made: GlobalVar = builder.emit_func_output(x)
    return made
