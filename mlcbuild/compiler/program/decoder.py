"""Translates the ModelConfig of any model family into private Relax functions for its layers. The functions
that a compiled library exports, such as `step`, call them.

Layers that are stored in the same way and differ only in window and in the frequencies of their rotary
embedding call one private function, so the program hardly grows with the number of layers. The residual
stream and the KV cache are changed in place, which is why these functions are impure: no pass may drop a call
of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.limits import Limits
from tvm import relax
from tvm.ir import GlobalVar, PrimType
from tvm.relax.frontend.nn import Tensor
from tvm.tirx import Expr, Var

from mlcbuild import quant
from mlcbuild.compiler.program.ops import NO_WINDOW, Batch, Layer, Ops, ResidualRows, Weights
from mlcbuild.models import LayerSpec, ModelConfig, Param, Rope, frequencies, parameters
from mlcbuild.models.layers import layer_parameters
from mlcbuild.quant import StoredTensor

BATCH_AND_FORKS = (*abi.BATCH, abi.FORKS)
"""Descriptions (name, dtype, dimensions) of arguments of a compiled library's functions. First come those
that describe the batch of a step, such as positions and page table; the last is `forks`, int32 [f, 3], in
which each row requests a copy within the KV cache: (source page, destination page, number of tokens). The
private functions of layers have the same arguments."""


@dataclass(frozen=True)
class Decoder:
    """A compiled library under construction: the backend's operations with their model, the limits on batch
    and context, and the builder that collects the functions.
    """

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
        """Returns all stored tensors of the model, in the order of the tuple `params`, an argument of the
        library's functions.
        """
        return quant.stored_parameters(self.params, self.ops.scheme)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Returns stored tensor name -> its index in the tuple `params`, an argument of the library's
        functions.
        """
        return {tensor.name: index for index, tensor in enumerate(self.tensors)}

    def layer_params(self, layer: int) -> dict[str, Param]:
        """Returns the parameters of the layer with the index `layer`: name without the prefix `layers.N.` ->
        description of the parameter, whose field `name` has the prefix.
        """
        layer_params = layer_parameters(self.config.layers[layer], self.config.hidden_size)
        return {param.name: replace(param, name=f"layers.{layer}.{param.name}") for param in layer_params}

    def attributes(self) -> dict[str, object]:
        """Returns the attributes of a Relax function by which TVM's memory planner reserves every buffer,
        results included, for the library's limits.

        A few big blocks are then reused again and again. Exact sizes would leave one block per size in the
        runtime's memory pool.
        """
        return {"tir_var_upper_bound": bounds(self.limits), "relax.memory_plan_dynamic_func_output": True}


def bounds(limits: Limits) -> dict[str, int]:
    """Returns symbolic dimension -> its maximum under the library's limits, for which memory is planned: n
    new tokens, q rows of logits, b sequences, p entries of the page table."""
    return {"n": limits.rows, "q": limits.rows, "b": limits.max_batch, "p": limits.pages}


def size(name: str) -> Var:
    return Var(name, "int64")


def variable(name: str, shape: Sequence[Expr | int], dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def number(name: str) -> relax.Var:
    """Returns a new int64 scalar argument of a Relax function, which kernels receive as a number. If it were
    a dimension of a shape, every layer would unpack the shape and create it again.
    """
    return relax.Var(name, PrimType("int64"))


def _rows() -> relax.Var:
    """Returns a new Relax variable `rows`, int32 [q], for an argument of a function that holds the indices of
    selected rows of a batch.
    """
    return variable("rows", (size("q"),), "int32")


def handle(value: relax.Expr) -> Tensor:
    return Tensor(_expr=value)


def variables(
    decoder: Decoder, arguments: Sequence[abi.Argument], sizes: Mapping[str, Expr | int] | None = None
) -> dict[str, relax.Var]:
    """Returns argument name -> new Relax variable for arguments of a compiled library's function, as abi.py
    describes them, in their order.

    sizes: name of a dimension of the arguments, such as n -> its value; of those that it lacks, `hidden` is
    the model's, and the others become symbolic, the same name being the same variable in all arguments.
    """
    dimensions: dict[str, Expr | int] = {"hidden": decoder.config.hidden_size, **(sizes or {})}

    def extent(name: str | int) -> Expr | int:
        if isinstance(name, int):
            return name
        base, _, more = name.partition("+")
        dimension = dimensions.setdefault(base, size(base))
        return dimension + int(more) if more else dimension

    by_name = {}
    for argument in arguments:
        if argument == abi.PARAMS:
            by_name[argument.name] = packed_params(decoder)
        elif argument.dtype is None:
            cache = decoder.ops.cache
            by_name[argument.name] = variable("pages", cache.cache_shape(size("num_pages")), cache.dtype)
        else:
            by_name[argument.name] = variable(argument.name, [*map(extent, argument.shape)], argument.dtype)
    return by_name


def packed_params(decoder: Decoder) -> relax.Var:
    fields = [relax.TensorType(list(tensor.shape), tensor.dtype) for tensor in decoder.tensors]
    return relax.Var("params", relax.TupleType(fields))


def unpacked(decoder: Decoder, packed: relax.Var, params: Sequence[Param]) -> Weights:
    """Emits code that reads the tensors of `params` from the tuple of all weights, and returns parameter name
    -> stored tensors, such as codes and scales, in the order in which its format lists them. packed: the
    variable of that tuple."""
    return {
        param.name: [
            handle(
                decoder.builder.emit(
                    relax.TupleGetItem(packed, decoder.places[tensor.name]), name_hint="weight"
                )
            )
            for tensor in quant.stored(param, decoder.ops.scheme)
        ]
        for param in params
    }


def layer_functions(decoder: Decoder) -> list[GlobalVar]:
    """Adds the private Relax functions that compute the layers to the module, and returns the function of
    each layer, in order. Layers that are stored in the same way and differ only in window and in the
    frequencies of their rotary embedding share one."""
    functions: dict[object, GlobalVar] = {}
    by_layer = []
    for index, spec in enumerate(decoder.config.layers):
        params = decoder.layer_params(index).values()
        stored = tuple(quant.scheme_for(decoder.ops.scheme, param.name) for param in params)
        rope = _rope(decoder, spec)
        columns = (rope.dim, rope.query_scale) if rope else None
        kind = (_without_arguments(spec), columns, stored)
        if kind not in functions:
            functions[kind] = _layer(decoder, index, f"layer_{len(functions)}" if functions else "layer")
        by_layer.append(functions[kind])
    return by_layer


def _without_arguments(spec: LayerSpec) -> LayerSpec:
    """Returns a layer's description without its window, and with index 0 in place of that of its rotary
    embedding if it has one: both are arguments of the layer's function. Layers with equal results can share a
    function if they are stored in the same way, and if their rotary embeddings have the same dimensions and
    scale of queries."""
    rope = None if spec.mixer.rope is None else 0
    return replace(spec, mixer=replace(spec.mixer, window=None, rope=rope))


def _rope(decoder: Decoder, spec: LayerSpec) -> Rope | None:
    return None if spec.mixer.rope is None else decoder.config.ropes[spec.mixer.rope]


def _layer(decoder: Decoder, index: int, name: str, selects_rows: bool = False) -> GlobalVar:
    """Adds a private Relax function that computes any layer of the same kind as layer number `index`, and
    returns it. It maps x, the residual stream float32 [n, hidden], to x. Its other arguments are, in this
    order: cosines and sines if the layer has a rotary embedding; scratch tensors; the tensors of the batch,
    then forks (copies of cache pages); three int64: the number of the layer to compute, its attention window
    in tokens (NO_WINDOW if it has none), and prompt, not 0 for prompts; `rows`, int32 [q], if `selects_rows`;
    the layer's weights.

    x and the KV cache are changed in place. selects_rows: True if the function returns the new values of only
    those rows of x whose indices are in `rows`, [q, hidden], as copies, and leaves x unchanged."""
    builder, config = decoder.builder, decoder.config
    spec, params, n = config.layers[index], decoder.layer_params(index), size("n")
    x = variable("x", (n, config.hidden_size), "float32")
    rope = _rope(decoder, spec)
    angles = [variable("angles", (n, rope.columns), "float32")] if rope else []
    scratch = {
        name: variable(name, (n, width), dtype) for name, (width, dtype) in decoder.ops.scratch().items()
    }
    batch = variables(decoder, BATCH_AND_FORKS, {"n": n})
    place, prompt = (number("layer"), number("window")), number("prompt")
    rows = [_rows()] * selects_rows
    weights: dict[str, list[Tensor]] = {}
    for short, param in params.items():
        tensors = quant.stored(param, decoder.ops.scheme)
        weights[short] = [handle(variable(short, tensor.shape, tensor.dtype)) for tensor in tensors]
    stored = [tensor._expr for tensors in weights.values() for tensor in tensors]
    with builder.function(
        name,
        [x, *angles, *scratch.values(), *batch.values(), *place, prompt, *rows, *stored],
        decoder.attributes(),
        pure=False,
        private=True,
    ):
        tensors_of_batch = Batch(**{name: handle(value) for name, value in batch.items()})
        turns = handle(*angles) if angles else None
        layer = Layer(spec, params, weights, turns, tensors_of_batch, *place, prompt)
        start = ResidualRows(handle(x), {name: handle(variable) for name, variable in scratch.items()})
        attended = decoder.ops.attention(start, layer, handle(*rows) if selects_rows else None)
        result = decoder.ops.feed_forward(attended, layer)
        function: GlobalVar = builder.emit_func_output(result._expr)
    return function


def trunk_function(decoder: Decoder, layers: Sequence[GlobalVar], selects_rows: bool = False) -> GlobalVar:
    """Adds the private Relax function of all layers and returns it. It maps embeddings float32 [n, hidden],
    the batch's tensors, `forks` (copies of pages), all weights and `prompt` (not 0 for prompts) to the
    residual stream [n, hidden]. selects_rows: True if it has a last argument `rows`, int32 [q], that limits
    the result to the rows with these indices, [q, hidden]. layers: the function of each layer; with
    `selects_rows`, a new one takes the place of the last."""
    builder, config, ops = decoder.builder, decoder.config, decoder.ops
    n = size("n")
    embeddings = variable("embeddings", (n, config.hidden_size), "float32")
    batch, packed = variables(decoder, BATCH_AND_FORKS, {"n": n}), packed_params(decoder)
    prompt, rows = number("prompt"), [_rows()] * selects_rows
    name, arguments = "trunk", [embeddings, *batch.values(), packed, prompt, *rows]
    last = len(config.layers) - 1
    if selects_rows:
        name, layers = "trunk_to_rows", [*layers[:last], _layer(decoder, last, "last_layer", selects_rows)]
    with builder.function(name, arguments, decoder.attributes(), pure=False, private=True):
        angles = [_angles(decoder, rope, handle(batch["positions"])) for rope in config.ropes]
        # Scratch tensors are not initialised.
        scratch = [
            builder.emit(relax.op.builtin.alloc_tensor(relax.ShapeExpr([n, width]), dtype, 0, "global"))
            for width, dtype in ops.scratch().values()
        ]
        # The caller's embeddings are not changed. Nothing may be allocated after this: the memory planner
        # cannot see that a layer returns its argument.
        x = _start(decoder, handle(embeddings), handle(batch["positions"]), packed)._expr
        for index, function in enumerate(layers):
            mixer = config.layers[index].mixer
            window = NO_WINDOW if mixer.window is None else min(mixer.window, NO_WINDOW)
            numbers = [relax.prim_value(index), relax.prim_value(window), prompt]
            numbers += rows if index == last else []
            weights = unpacked(decoder, packed, [*decoder.layer_params(index).values()])
            tensors = [tensor._expr for stored in weights.values() for tensor in stored]
            turns = [] if mixer.rope is None else [angles[mixer.rope]._expr]
            inputs = [x, *turns, *scratch, *batch.values(), *numbers, *tensors]
            x = builder.emit(relax.Call(function, inputs))
        trunk: GlobalVar = builder.emit_func_output(x)
    return trunk


def _start(decoder: Decoder, embeddings: Tensor, positions: Tensor, packed: relax.Var) -> Tensor:
    """Emits the residual stream before the first layer, a copy of the embeddings float32 [n, hidden] plus
    learned positions if the model has them, and returns it.
    """
    if not decoder.config.learned_positions:
        return decoder.ops.copy(embeddings)
    table = [param for param in decoder.params if param.name == "position.weight"]
    stored = unpacked(decoder, packed, table)["position.weight"]
    return decoder.ops.add_positions(embeddings, positions, stored)


def _angles(decoder: Decoder, rope: Rope, positions: Tensor) -> Tensor:
    """Emits the cosines and sines of one rotary embedding at `positions`, int32 [n], and returns them,
    float32 [n, columns]: the dim / 2 cosines of a position, then as many sines, both times the embedding's
    attention factor, then the scale of queries if the embedding has one. Frequencies may depend on the
    library's context window."""
    inv_freq, factor = frequencies(rope, decoder.limits.context_window)
    return decoder.ops.angles(positions, handle(relax.const(np.array(inv_freq, np.float32))), factor, rope)
