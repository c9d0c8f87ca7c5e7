"""One decoder for every family: a ModelConfig as a Relax module whose functions are the library's.

Every layer calls one private function (one for each way in which layers are stored), so the program hardly
grows with the number of layers; a layer's number and window are arguments. The residual stream and the cache
are changed in place, which is why these functions are impure: no pass may drop a call of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from tvm import relax
from tvm.ir import GlobalVar, PrimType
from tvm.relax.frontend.nn import Tensor
from tvm.tirx import Expr, Var

from mlcbuild import quant
from mlcbuild.compiler.kernels.attention import NO_WINDOW
from mlcbuild.compiler.kernels.fusion import Fusion, Given, Source
from mlcbuild.compiler.kernels.linear import Linear
from mlcbuild.compiler.layers import Batch, Parts, Weights
from mlcbuild.compiler.limits import Limits
from mlcbuild.models import ModelConfig, Param, frequencies, parameters
from mlcbuild.quant import StoredTensor


@dataclass(frozen=True)
class Decoder:
    """What a library is made of, and the builder that collects its functions."""

    parts: Parts
    limits: Limits
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)

    @property
    def config(self) -> ModelConfig:
        return self.parts.config

    @cached_property
    def params(self) -> tuple[Param, ...]:
        return parameters(self.config)

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Everything that the packed `params` argument holds, in order."""
        return quant.stored_parameters(self.params, self.parts.scheme)

    def layer_params(self, layer: int) -> list[Param]:
        return [param for param in self.params if param.name.startswith(f"layers.{layer}.")]

    @cached_property
    def room(self) -> dict[str, int]:
        """Columns of the tensors that all layers work in, one after the other."""
        config = self.config
        room = {
            "qkv": self.parts.heads.width,
            "pair": 2 * config.intermediate_size,
        }
        outputs = [p for p in self.params if p.name.endswith(".attn.o.weight")]
        if not all(self.parts.hands_on(self.parts.linear(p.name, (p.shape[0], p.shape[1]))) for p in outputs):
            room["seen"] = config.num_heads * config.head_dim
        extras = {"attn.o.bias", "attn_post_norm.weight", "mlp.down.bias", "mlp_post_norm.weight"}
        if extras & {param.name.removeprefix("layers.0.") for param in self.layer_params(0)}:
            room["delta"] = config.hidden_size
        return room

    @property
    def gathers(self) -> bool:
        """The last layer computes no more than keys and values, and what is chosen of a prompt's rows. Tile
        registers' rows lie in tiles, from which none can be taken."""
        config, room = self.config, self.room
        fits = config.hidden_size <= room["qkv"] and room.get("seen", 0) <= room["pair"]
        return not self.parts.isa.amx and fits

    def products(self) -> Iterator[tuple[str, str, str | None]]:
        """(parameter, kernel, reason if it is a slow one) of each matrix product, and of the lookup."""
        parts = self.parts
        yield "embed.lookup", parts.table.name, None
        tied = self.config.tie_embeddings
        for param in self.params:
            if len(param.shape) == 2 and (tied or param.name != "embed.weight"):
                rows, columns = param.shape
                product = parts.linear(param.name, (rows, columns))
                yield param.name, product.name, product.fallback or self._gated_fallback(param)

    def _gated_fallback(self, param: Param) -> str | None:
        layer, _, rest = param.name.partition(".mlp.")
        if rest != "down.weight":
            return None
        params = {other.name: other for other in self.params}
        first, second = (
            self.parts.linear(name, (params[name].shape[0], params[name].shape[1]))
            for name in (f"{layer}.mlp.gate_up.weight", param.name)
        )
        return self.parts.gated_fallback(first, second, f"{layer}.mlp.gate_up.bias" in params)

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


def batch_variables(decoder: Decoder, n: Expr | int, b: Expr | int, tree: bool = False) -> list[relax.Var]:
    """The arguments that describe a batch, in the order of every forward function; of trees, forks, too."""
    cache = decoder.parts.heads
    return [
        variable("pages", cache.cache_shape(size("num_pages")), cache.dtype),
        variable("positions", (n,), "int32"),
        variable("slots", (n,), "int32"),
        variable("q_indptr", (b + 1,), "int32"),
        variable("page_indptr", (b + 1,), "int32"),
        variable("page_table", (size("p"),), "int32"),
        variable("kv_lengths", (b,), "int32"),
        *[variable("forks", (size("f"), 3), "int32")] * tree,
    ]


def packed_params(decoder: Decoder) -> relax.Var:
    fields = [relax.TensorType(list(tensor.shape), tensor.dtype) for tensor in decoder.tensors]
    return relax.Var("params", relax.TupleType(fields))


def unpacked(decoder: Decoder, packed: relax.Var, params: Sequence[Param]) -> Weights:
    """The stored tensors of some parameters, out of the packed argument."""
    place = {tensor.name: index for index, tensor in enumerate(decoder.tensors)}
    return {
        param.name: [
            handle(decoder.builder.emit(relax.TupleGetItem(packed, place[tensor.name]), name_hint="weight"))
            for tensor in quant.stored(param, decoder.parts.scheme)
        ]
        for param in params
    }


def layer_functions(decoder: Decoder) -> list[GlobalVar]:
    """The function of each layer; layers whose parameters are stored alike have the same one."""
    made: dict[object, GlobalVar] = {}
    found = []
    for layer in range(decoder.config.num_layers):
        params = decoder.layer_params(layer)
        kind = tuple(quant.scheme_for(decoder.parts.scheme, param.name) for param in params)
        if kind not in made:
            made[kind] = _layer(decoder, layer, f"layer_{len(made)}" if made else "layer")
        found.append(made[kind])
    return found


def _layer(decoder: Decoder, layer: int, name: str, chosen: bool = False) -> GlobalVar:
    """(x, angles, room ..., batch ..., forks, (layer, window), prompt, rows?, weights ...) -> x, changed in
    place, as pages are. `chosen`: of the rows int32 [q] only."""
    builder, config = decoder.builder, decoder.config
    n = size("n")
    x = variable("x", (n, config.hidden_size), "float32")
    turns = variable("angles", (n, config.rope.dim), "float32")
    room = {name: variable(name, (n, width), "float32") for name, width in decoder.room.items()}
    batch = batch_variables(decoder, n, size("b"), tree=True)
    place, prompt = (number("layer"), number("window")), number("prompt")
    rows = [_rows()] * chosen
    weights: dict[str, list[Tensor]] = {}
    params = {p.name.removeprefix(f"layers.{layer}."): p for p in decoder.layer_params(layer)}
    for short, param in params.items():
        tensors = quant.stored(param, decoder.parts.scheme)
        weights[short] = [handle(variable(short, tensor.shape, tensor.dtype)) for tensor in tensors]
    given = [tensor._expr for tensors in weights.values() for tensor in tensors]
    with builder.function(
        name,
        [x, turns, *room.values(), *batch, *place, prompt, *rows, *given],
        decoder.attributes(),
        pure=False,
        private=True,
    ):
        handles = {name: handle(variable) for name, variable in room.items()}
        body = _Layer(decoder.parts, params, weights, handles, prompt)
        seen = body.attend(handle(x), handle(turns), Batch(*map(handle, batch)), place)
        changed = body.rest_of(handle(x), seen, handle(*rows)) if chosen else body.rest(handle(x), seen)
        made: GlobalVar = builder.emit_func_output(changed._expr)
    return made


@dataclass(frozen=True)
class _Layer:
    """One pre-norm layer: x += attention(norm(x)); x += mlp(norm(x))."""

    parts: Parts
    params: Mapping[str, Param]
    """Of the layer, by their names in it."""
    weights: Weights
    room: Mapping[str, Tensor]
    prompt: relax.Var
    """Not 0 when the rows are prompts'."""

    def optional(self, name: str) -> Sequence[Tensor]:
        return self.weights.get(name, ())

    def linear(self, name: str) -> Linear:
        param = self.params[f"{name}.weight"]
        rows, columns = param.shape
        return self.parts.linear(param.name, (rows, columns))

    def product(self, name: str, fusion: Fusion, given: Sequence[Tensor], out: Tensor) -> Tensor:
        """What the fusion's source makes of `given`, [n, columns], times a weight, into `out`."""
        made = self.linear(name)
        return made.into(out, fusion, given, self.weights[f"{name}.weight"], self.prompt)

    def add_product(self, x: Tensor, name: str, source: Source, given: Sequence[Tensor], post: str) -> Tensor:
        """x += the product, in one step unless the family has a bias or a norm in between."""
        extras = self.optional(f"{name}.bias"), self.optional(post)
        if not any(extras):
            return self.product(name, Fusion(source, residual=True), given, x)
        delta = self.product(name, Fusion(source), given, self.room["delta"])
        return self.parts.add(x, delta, *extras)

    def rest_of(self, x: Tensor, seen: Tensor, chosen: Tensor) -> Tensor:
        """`rest` for the rows `chosen` int32 [q] only, in memory of which nothing is needed any more."""
        count, gather = chosen.shape[0], self.parts.gather
        x = gather(x, chosen, self.view("qkv", count, int(x.shape[1])))
        seen = gather(seen, chosen, self.view("pair", count, int(seen.shape[1])))
        room = {name: self.view(name, count, int(whole.shape[1])) for name, whole in self.room.items()}
        return replace(self, room=room).rest(x, seen)

    def view(self, name: str, rows: Expr, width: int) -> Tensor:
        """The beginning of a tensor of the room as one of another shape."""
        whole, shape = self.room[name]._expr, relax.ShapeExpr([rows, width])
        made = relax.op.memory.view(whole, shape, "float32", 0)
        return handle(relax.BlockBuilder.current().emit(made))

    def attend(self, x: Tensor, turns: Tensor, batch: Batch, place: tuple[relax.Var, relax.Var]) -> Tensor:
        """What attention gives, for all rows; their keys and values are in the cache then."""
        parts, room = self.parts, self.room
        weight = self.weights["attn_norm.weight"][0]
        qkv = self.product("attn.qkv", Fusion(parts.normed(weight)), [x, weight], room["qkv"])
        qkv, pages = parts.rope_append(qkv, turns, batch, place[0], self.weights)
        columns = parts.hands_on(self.linear("attn.o"))
        seen = room["pair" if columns else "seen"]
        return parts.attention(qkv, pages, batch, (*place, self.prompt), seen)

    def rest(self, x: Tensor, seen: Tensor) -> Tensor:
        """What follows attention, which has given `seen`: it concerns each row by itself."""
        parts, room, columns = self.parts, self.room, self.parts.hands_on(self.linear("attn.o"))
        x = self.add_product(x, "attn.o", Given(columns), [seen], "attn_post_norm.weight")
        weight, bias = self.weights["mlp_norm.weight"][0], self.optional("mlp.gate_up.bias")
        packs = parts.packs(self.linear("mlp.gate_up"), self.linear("mlp.down"), bias)
        first = Fusion(parts.normed(weight), gate=parts.gate if packs else None)
        pair = self.product("mlp.gate_up", first, [x, weight], room["pair"])
        return self.add_product(
            x, "mlp.down", parts.gated(bias, packs), [pair, *bias], "mlp_post_norm.weight"
        )


def trunk_function(decoder: Decoder, layers: Sequence[GlobalVar], chosen: bool = False) -> GlobalVar:
    """(embeddings [n, hidden], batch ..., forks, params, prompt, rows?) -> the residual stream after all
    layers [n, hidden]. `chosen`: of the rows int32 [q] only, which are no more than n."""
    builder, config, parts = decoder.builder, decoder.config, decoder.parts
    n = size("n")
    given = variable("embeddings", (n, config.hidden_size), "float32")
    batch, packed = batch_variables(decoder, n, size("b"), tree=True), packed_params(decoder)
    prompt, rows = number("prompt"), [_rows()] * chosen
    inv_freq, factor = frequencies(config.rope, decoder.limits.context_window)
    given_all, name = [given, *batch, packed, prompt, *rows], "trunk_to_rows" if chosen else "trunk"
    last = config.num_layers - 1
    if chosen:
        layers = [*layers[:last], _layer(decoder, last, "last_layer", chosen)]
    with builder.function(name, given_all, decoder.attributes(), pure=False, private=True):
        table = handle(relax.const(np.array(inv_freq, np.float32)))
        turns = parts.angles(handle(batch[1]), table, factor)
        shapes = [relax.ShapeExpr([n, width]) for width in decoder.room.values()]
        # They are not initialised.
        room = [builder.emit(relax.op.builtin.alloc_tensor(s, "float32", 0, "global")) for s in shapes]
        # The caller's embeddings stay as they are. Nothing may be allocated after this: the memory planner
        # does not know that what a layer returns is what it was given.
        x = parts.copy(handle(given))._expr
        for layer, function in enumerate(layers):
            window = config.windows[layer] or NO_WINDOW
            place = [relax.prim_value(number) for number in (layer, min(window, NO_WINDOW))]
            weights = unpacked(decoder, packed, decoder.layer_params(layer))
            tensors = [tensor._expr for stored in weights.values() for tensor in stored]
            numbers = [*place, prompt, *(rows if layer == last else [])]
            x = builder.emit(relax.Call(function, [x, turns._expr, *room, *batch, *numbers, *tensors]))
        made: GlobalVar = builder.emit_func_output(x)
    return made
