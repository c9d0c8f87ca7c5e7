"""Emits the attention and the feed-forward of transformer layers, and the code around them, as calls of CPU
kernels: the implementation of program.ops.Ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlcbuild_format.abi import PAGE
from mlcbuild_format.limits import Limits
from tvm import IRModule, relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op
from tvm.target import Target as TvmTarget
from tvm.tirx import Expr

from mlcbuild.compiler import phases
from mlcbuild.compiler.cpu import workspace
from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.cpu.kernels import next_inputs
from mlcbuild.compiler.cpu.kernels.attention_plan import PART
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import Linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given, RowSource
from mlcbuild.compiler.cpu.latents import Latents, latent_columns
from mlcbuild.compiler.cpu.lowering import KERNELS
from mlcbuild.compiler.cpu.mixture import Mixture
from mlcbuild.compiler.cpu.parts import Parts, norm_weights
from mlcbuild.compiler.program.ops import Layer, ResidualRows, Variables
from mlcbuild.models import Attention, Dense, Experts, LatentAttention, LayerSpec, parameters


@dataclass(frozen=True)
class CpuOps(Parts):
    """Emits the operations of a model's program, such as attention and feed-forward, for one model,
    quantization scheme and CPU target; it implements program.ops.Ops.
    """

    decode_loop = True
    plan, lower, kernels = phases.PLAN, phases.LOWER, KERNELS

    @cached_property
    def target(self) -> TvmTarget:
        return tvm_target(self.machine)

    @cached_property
    def cache(self) -> Heads:
        return self.heads(self.config.layers[0].mixer)

    @cached_property
    def room(self) -> dict[str, int]:
        """Returns scratch tensor name -> number of its float32 columns, the maximum that any layer of the
        model needs. "attended" is left out if every layer can store the results of attention in "pair"."""
        room: dict[str, int] = {}
        for layer in dict.fromkeys(self.config.layers):
            for name, columns in self._columns(layer).items():
                room[name] = max(columns, room.get(name, 0))
        if all(self._amx_tile_columns(index) for index in range(len(self.config.layers))):
            del room["attended"]
        return room

    def _columns(self, layer: LayerSpec) -> dict[str, int]:
        """Returns scratch tensor name -> number of float32 columns that one layer, attention and
        feed-forward, needs in this tensor."""
        mixer = layer.mixer
        columns = {
            "qkv": self.heads(mixer).width,
            **self.feed_forward_columns(layer.feed_forward),
        }
        if isinstance(mixer, Attention):
            columns["attended"] = mixer.heads * mixer.head_dim
        else:
            for name, count in latent_columns(mixer).items():
                columns[name] = max(count, columns.get(name, 0))
        is_scaled = layer.residual_scale != 1.0
        if mixer.output_bias or layer.feed_forward.bias or layer.norms.after is not None or is_scaled:
            columns["delta"] = self.config.hidden_size
        if layer.residual != "sequential":
            columns["branch"] = self.config.hidden_size
            if isinstance(layer.feed_forward, Experts):
                columns["delta"] = self.config.hidden_size
        return columns

    def _amx_tile_columns(self, index: int) -> int:
        """Returns the number of columns with which the scratch tensor "pair" is viewed if the attention of
        the layer `index` can store the results of prompt rows in it, packed as tiles for AMX; 0 if it cannot.
        """
        layer = self.config.layers[index]
        mixer = layer.mixer
        dim = mixer.value_dim if isinstance(mixer, LatentAttention) else mixer.head_dim
        width = mixer.heads * dim
        output = self.linear(f"layers.{index}.attn.o.weight", (self.config.hidden_size, width))
        return self.amx_tile_columns(layer, output)

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        return {name: (columns, "float32") for name, columns in self.room.items()}

    @property
    def selects_rows(self) -> bool:
        """Returns True if the last layer can, after its attention, compute only selected rows. This requires
        that AMX is not used, since it stores rows packed in tiles, and that the selected rows fit into
        scratch tensors.
        """
        config, room = self.config, self.room
        fits = config.hidden_size <= room["qkv"] and room.get("attended", 0) <= room["pair"]
        return not self.isa.amx and fits

    def attention(self, rows: ResidualRows, layer: Layer, selected: Tensor | None = None) -> ResidualRows:
        halves = _Halves(self, layer, rows.scratch)
        attended, x = halves.attend(rows.x), rows.x
        if selected is not None:
            halves, x, attended = halves.selected(x, attended, selected)
        return ResidualRows(*halves.project(x, attended))

    def feed_forward(self, rows: ResidualRows, layer: Layer) -> Tensor:
        return _Halves(self, layer, rows.scratch).feed_forward(rows.x)

    def next_inputs(self, arguments: Variables) -> None:
        emit_next_inputs(arguments)

    def workspace(self, limits: Limits, mod: IRModule) -> int:
        return workspace.workspace(limits, self.config.vocab_size, mod)

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns two mappings: use of a kernel -> name of the kernel, and use -> reason why its kernel is
        slower than the processor allows, for these uses only.

        A use is a form of attention, such as "attention.prompt", "embed.lookup", or the name of a weight
        matrix. Without the prefix `layers.N.`, a matrix name stands for all layers except those that are
        listed with the prefix because they have another kernel.
        """
        form = "_int8" if self.cache.has_scales else ""
        chosen: dict[str, str] = {
            "attention": f"paged_attention{form}.{self.isa.name}",
            "attention.decode": f"paged_attention{form}_by_{PART * PAGE}.{self.isa.name}",
        }
        attention = self.attending(self.config.layers[0].mixer)
        if attention.uses_tiles:
            chosen["attention.prompt"] = f"paged_attention{form}_bf16.{self.isa.name}"
        fallbacks: dict[str, str] = {}
        if reason := attention.fallback:
            fallbacks["attention.prompt"] = reason
        for name, kernel, reason in self._products():
            kind = name.split(".", 2)[2] if name.startswith("layers.") else name
            key = kind if chosen.setdefault(kind, kernel) == kernel else name
            chosen[key] = kernel
            if reason:
                fallbacks[key] = reason
        return dict(sorted(chosen.items())), dict(sorted(fallbacks.items()))

    def _products(self) -> Iterator[tuple[str, str, str | None]]:
        """Yields (parameter name, name of its kernel, reason why the kernel is slow or None) for each matrix
        product, and before them for the embedding lookup, as "embed.lookup".
        """
        yield "embed.lookup", self.table.name, None
        params = parameters(self.config)
        shapes = {param.name: param.shape for param in params}
        for param in params:
            looked_up = {"position.weight", "" if self.config.tie_embeddings else "embed.weight"}
            if param.matrix and param.name not in looked_up:
                product = self.linear(param.name, param.matrix)
                reason = product.fallback or self._gated_fallback(param.name, shapes)
                yield param.name, product.name, reason

    def _gated_fallback(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Returns the reason why the values act(gate) * up, the input of a gated feed-forward's second
        matrix, are not packed in the tiles of AMX for prompts. Returns None if they are packed, if AMX is not
        used, or if the parameter `name` is not such a matrix, layers.N.mlp.down.weight. shapes: parameter
        name -> shape.
        """
        layer, _, rest = name.partition(".mlp.")
        if rest != "down.weight" or f"{layer}.mlp.gate_up.weight" not in shapes:
            return None
        first, second = (
            self.linear(matrix, (shapes[matrix][0], shapes[matrix][1]))
            for matrix in (f"{layer}.mlp.gate_up.weight", name)
        )
        return self.gated_fallback(first, second, f"{layer}.mlp.gate_up.bias" in shapes)


def emit_next_inputs(arguments: Variables) -> None:
    """Emits the call of the kernel that turns the arguments of a decode step, in place, into those of the
    next step. arguments: name of an argument of the library function `step_on` -> variable.
    """
    fixed = [arguments[name] for name in next_inputs.FIXED]
    changed = [arguments[name] for name in next_inputs.CHANGED]
    out = [Tensor.placeholder(variable.ty.shape, str(variable.ty.dtype)) for variable in changed]
    handles = [Tensor(_expr=variable) for variable in [*fixed, *changed]]
    places = [*range(len(fixed), len(handles))]
    tensor_ir_inplace_op(next_inputs.follow(), "follow", handles, places, out)


@dataclass(frozen=True)
class _Halves:
    """Emits the two halves of one layer, attention and feed-forward. In sequence: x += attention(norm(x)); x
    += mlp(norm(x)). In parallel both halves read the same x, so the result of attention is kept in scratch
    memory until the feed-forward has read x.
    """

    parts: Parts
    layer: Layer
    room: Mapping[str, Tensor]
    """Scratch tensor name -> float32 tensor with as many rows as the layer computes."""

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec

    def optional(self, name: str) -> Sequence[Tensor]:
        return self.layer.weights.get(name, ())

    @property
    def is_parallel(self) -> bool:
        return self.spec.residual != "sequential"

    def source(self, half: str, width: int) -> tuple[RowSource, list[Tensor]]:
        """Returns the input rows of a layer's attention or feed-forward as a pair: the object that emits, in
        the kernel of the first product, their computation from the residual stream; and the stored tensors of
        their norm, [] if there is none. half: "attn" or "mlp"; width: number of columns of the residual
        stream."""
        before = self.spec.norms.before
        if before is None:
            return Given(), []
        shared = self.spec.residual == "parallel_shared"
        tensors = norm_weights(self.layer.weights, "attn_norm" if shared else f"{half}_norm")
        return self.parts.normed(before, width, tensors), tensors

    def linear(self, name: str) -> Linear:
        param = self.layer.params[f"{name}.weight"]
        rows, columns = param.shape
        return self.parts.linear(param.name, (rows, columns))

    def product(self, name: str, fusion: Fusion, inputs: Sequence[Tensor], out: Tensor) -> Tensor:
        """Emits the product of input rows with the layer's matrix `name` into `out`, and returns `out`.
        fusion: operations that the same kernel computes before and after the product; inputs: the tensors
        from which the input rows are computed.
        """
        weights = self.layer.weights[f"{name}.weight"]
        return self.linear(name).into(out, fusion, inputs, weights, self.layer.prompt)

    def add_product(
        self, x: Tensor, name: str, source: RowSource, inputs: Sequence[Tensor], post: str
    ) -> Tensor:
        """Emits x += the product of input rows with the layer's matrix `name`, in one kernel unless the layer
        has a bias, a norm or a scale in between; returns x. source: emits the computation of the input rows
        from the tensors `inputs` in the product's kernel; post: name of the norm after the product, used if
        the layer has one there.
        """
        extras = self.optional(f"{name}.bias"), norm_weights(self.layer.weights, post)
        if self._adds_at_once(name):
            return self.product(name, Fusion(source, residual=True), inputs, x)
        delta = self.product(name, Fusion(source), inputs, self.room["delta"])
        return self.parts.add(self.spec, x, delta, *extras)

    def _adds_at_once(self, name: str) -> bool:
        is_fusible = self.spec.norms.after is None and self.spec.residual_scale == 1.0
        return is_fusible and not self.optional(f"{name}.bias")

    def selected(self, x: Tensor, attended: Tensor, rows: Tensor) -> tuple[_Halves, Tensor, Tensor]:
        """Emits copies of the rows of x and of `attended`, the result of attention, whose indices are in
        `rows`, int32 [q]. The scratch tensors "qkv" and "pair" hold the copies. Returns (a copy of self with
        scratch tensors of q rows, selected rows of x, selected rows of `attended`).
        """
        count, gather = rows.shape[0], self.parts.gather
        x = gather(x, rows, self.view("qkv", count, int(x.shape[1])))
        attended = gather(attended, rows, self.view("pair", count, int(attended.shape[1])))
        room = {name: self.view(name, count, int(tensor.shape[1])) for name, tensor in self.room.items()}
        return replace(self, room=room), x, attended

    def scratch(self, name: str, width: int) -> Tensor:
        """Returns the beginning of the scratch tensor `name` in the shape [n, width], where n is the number
        of rows that the layer computes; other layers may use more columns of the same memory.
        """
        tensor = self.room[name]
        return tensor if int(tensor.shape[1]) == width else self.view(name, tensor.shape[0], width)

    def view(self, name: str, rows: Expr, width: int) -> Tensor:
        """Emits a view of the beginning of the scratch tensor `name`, float32 [rows, width], and
        returns it.
        """
        tensor, shape = self.room[name]._expr, relax.ShapeExpr([rows, width])
        view = relax.op.memory.view(tensor, shape, "float32", 0)
        return Tensor(_expr=relax.BlockBuilder.current().emit(view))

    def attend(self, x: Tensor) -> Tensor:
        """Emits attention, with the norm before it but without the output product, for the rows of the
        residual stream x, and returns its result, float32 [n, heads * value_dim]. If the output product can
        read it as tiles for AMX, the tensor has more columns: in calls for prompts its start holds the tiles,
        in other calls each row starts with the result. The emitted code also writes keys and values to the
        cache."""
        parts, spec = self.parts, self.spec.mixer
        source, weights = self.source("attn", int(x.shape[1]))
        if isinstance(spec, LatentAttention):
            return Latents(parts, self.layer, self.view, self.product).attend(source, [x, *weights])
        room = self.scratch("qkv", parts.heads(spec).width)
        qkv = self.product("attn.qkv", Fusion(source), [x, *weights], room)
        qkv, pages = parts.rope_append(spec, qkv, self.layer)
        columns = parts.amx_tile_columns(self.spec, self.linear("attn.o"))
        width = spec.heads * spec.head_dim
        out = self.scratch("pair", columns) if columns else self.scratch("attended", width)
        return parts.paged_attention(spec, qkv, pages, self.layer, out)

    def project(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Emits x += the product of `attended`, the result of attention, with the output matrix, after bias,
        norm and scale if there are any, in place, and returns (x, all scratch tensors of the layer: name ->
        tensor). In a layer whose attention and feed-forward both read the old x, x stays unchanged and the
        product alone is stored in the scratch tensor "branch".
        """
        source = Given(self.parts.amx_tile_columns(self.spec, self.linear("attn.o")))
        if self.is_parallel:
            branch = self.product("attn.o", Fusion(source), [attended], self.room["branch"])
            return x, {**self.room, "branch": branch}
        return self.add_product(x, "attn.o", source, [attended], "attn_post_norm"), self.room

    def add_branch(self, x: Tensor) -> Tensor:
        """Emits x += the stored result of attention, after its bias, norm and scale if there are any, in a
        layer whose attention and feed-forward both read the old x, and returns x; other layers return x
        unchanged. It is called after the feed-forward has read the old x.
        """
        if not self.is_parallel:
            return x
        extras = self.optional("attn.o.bias"), norm_weights(self.layer.weights, "attn_post_norm")
        return self.parts.add(self.spec, x, self.room["branch"], *extras)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Emits the feed-forward of the layer, x += mlp(norm(x)), in place, and returns x. In a layer whose
        attention and feed-forward both read the old x, it also adds the stored result of attention.
        """
        spec = self.spec.feed_forward
        if isinstance(spec, Experts):
            return self._experts(x)
        return self._gated(spec, x) if spec.gated else self._plain(spec, x)

    def _experts(self, x: Tensor) -> Tensor:
        mixture, width = Mixture(self.parts, self.layer, self.view), int(x.shape[1])
        source, weights = self.source("mlp", width)
        if self._adds_at_once("mlp") and not self.is_parallel:
            return mixture.add((source, [x, *weights]), x, False)
        delta = mixture.add((source, [x, *weights]), self.scratch("delta", width), True)
        post = norm_weights(self.layer.weights, "mlp_post_norm")
        return self.parts.add(self.spec, self.add_branch(x), delta, (), post)

    def _gated(self, spec: Dense, x: Tensor) -> Tensor:
        parts, bias = self.parts, self.optional("mlp.gate_up.bias")
        source, weights = self.source("mlp", int(x.shape[1]))
        packs = parts.packs(self.linear("mlp.gate_up"), self.linear("mlp.down"), bias)
        first = Fusion(source, gate=parts.gate(spec) if packs else None)
        room = self.scratch("pair", parts.pair_columns(spec))
        pair = self.product("mlp.gate_up", first, [x, *weights], room)
        second = parts.gated(spec, bias, packs)
        return self.add_product(self.add_branch(x), "mlp.down", second, [pair, *bias], "mlp_post_norm")

    def _plain(self, spec: Dense, x: Tensor) -> Tensor:
        parts, bias, scalars = self.parts, self.optional("mlp.up.bias"), self.optional("mlp.xielu")
        source, weights = self.source("mlp", int(x.shape[1]))
        room = self.scratch("pair", parts.pair_columns(spec))
        up = self.product("mlp.up", Fusion(source), [x, *weights], room)
        second, inputs = parts.activated(spec, bias, scalars), [up, *bias, *scalars]
        return self.add_product(self.add_branch(x), "mlp.down", second, inputs, "mlp_post_norm")
