"""The Ops of a CPU: halves of layers, made of calls of kernels, and what surrounds a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlcbuild_format.abi import PAGE
from tvm import IRModule, relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op
from tvm.target import Target as TvmTarget
from tvm.tirx import Expr

from mlcbuild.compiler import phases
from mlcbuild.compiler.cpu import memory
from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.cpu.kernels import next_inputs
from mlcbuild.compiler.cpu.kernels.attention_plan import PART
from mlcbuild.compiler.cpu.kernels.cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import Linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given, Source
from mlcbuild.compiler.cpu.lowering import KERNELS
from mlcbuild.compiler.cpu.parts import Parts
from mlcbuild.compiler.program.limits import Limits
from mlcbuild.compiler.program.ops import Batch, Layer, Rows, Variables, Weights
from mlcbuild.models import Param, parameters


@dataclass(frozen=True)
class CpuOps(Parts):
    """What program.ops.Ops asks for, with the kernels of an instruction set."""

    decode_loop = True
    plan, lower, kernels = phases.PLAN, phases.LOWER, KERNELS

    @cached_property
    def target(self) -> TvmTarget:
        return tvm_target(self.machine)

    @property
    def cache(self) -> Heads:
        return self.heads

    @cached_property
    def params(self) -> tuple[Param, ...]:
        return parameters(self.config)

    @cached_property
    def room(self) -> dict[str, int]:
        """Columns of the scratch tensors, which are float32."""
        config = self.config
        room = {
            "qkv": self.heads.width,
            "pair": 2 * config.intermediate_size,
        }
        outputs = [p for p in self.params if p.name.endswith(".attn.o.weight")]
        if not all(self.writes_amx_tiles(self.linear(p.name, (p.shape[0], p.shape[1]))) for p in outputs):
            room["seen"] = config.num_heads * config.head_dim
        extras = {"attn.o.bias", "attn_post_norm.weight", "mlp.down.bias", "mlp_post_norm.weight"}
        if extras & {param.name.removeprefix("layers.0.") for param in self.params}:
            room["delta"] = config.hidden_size
        return room

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        return {name: (columns, "float32") for name, columns in self.room.items()}

    @property
    def selects_rows(self) -> bool:
        """Tile registers' rows lie in tiles, from which none can be taken."""
        config, room = self.config, self.room
        fits = config.hidden_size <= room["qkv"] and room.get("seen", 0) <= room["pair"]
        return not self.isa.amx and fits

    def attention(self, rows: Rows, layer: Layer, selected: Tensor | None = None) -> Rows:
        halves = _Halves(self, layer.params, layer.weights, rows.scratch, layer.prompt)
        seen, x = halves.attend(rows.x, layer.angles, layer.batch, (layer.index, layer.window)), rows.x
        if selected is not None:
            halves, x, seen = halves.selected(x, seen, selected)
        return Rows(halves.project(x, seen), halves.room)

    def feed_forward(self, rows: Rows, layer: Layer) -> Tensor:
        halves = _Halves(self, layer.params, layer.weights, rows.scratch, layer.prompt)
        return halves.feed_forward(rows.x)

    def next_inputs(self, given: Variables) -> None:
        emit_next_inputs(given)

    def workspace(self, limits: Limits, mod: IRModule) -> int:
        return memory.workspace(limits, self.config.vocab_size, mod)

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Kernel of each kind of matrix (by name without its layer, where all layers agree), and why slow
        ones were taken. Attention in decoding is cut into parts of so many tokens; prompts may have one on
        tiles."""
        chosen: dict[str, str] = {
            "attention": f"paged_attention.{self.isa.name}",
            "attention.decode": f"paged_attention_by_{PART * PAGE}.{self.isa.name}",
        }
        if self.attending.has_prompt_variant:
            chosen["attention.prompt"] = f"paged_attention_bf16.{self.isa.name}"
        fallbacks: dict[str, str] = {}
        if reason := self.attending.fallback:
            fallbacks["attention.prompt"] = reason
        for name, kernel, reason in self._products():
            kind = name.split(".", 2)[2] if name.startswith("layers.") else name
            key = kind if chosen.setdefault(kind, kernel) == kernel else name
            chosen[key] = kernel
            if reason:
                fallbacks[key] = reason
        return dict(sorted(chosen.items())), dict(sorted(fallbacks.items()))

    def _products(self) -> Iterator[tuple[str, str, str | None]]:
        """(parameter, kernel, reason if it is a slow one) of each matrix product, and of the lookup."""
        yield "embed.lookup", self.table.name, None
        tied = self.config.tie_embeddings
        for param in self.params:
            if len(param.shape) == 2 and (tied or param.name != "embed.weight"):
                rows, columns = param.shape
                product = self.linear(param.name, (rows, columns))
                yield param.name, product.name, product.fallback or self._gated_fallback(param)

    def _gated_fallback(self, param: Param) -> str | None:
        layer, _, rest = param.name.partition(".mlp.")
        if rest != "down.weight":
            return None
        params = {other.name: other for other in self.params}
        first, second = (
            self.linear(name, (params[name].shape[0], params[name].shape[1]))
            for name in (f"{layer}.mlp.gate_up.weight", param.name)
        )
        return self.gated_fallback(first, second, f"{layer}.mlp.gate_up.bias" in params)


def emit_next_inputs(given: Variables) -> None:
    """Emits the kernel that turns the arguments of a step into those of the next one."""
    fixed = [given[name] for name in next_inputs.FIXED]
    changed = [given[name] for name in next_inputs.CHANGED]
    out = [Tensor.placeholder(variable.ty.shape, str(variable.ty.dtype)) for variable in changed]
    handles = [Tensor(_expr=variable) for variable in [*fixed, *changed]]
    places = [*range(len(fixed), len(handles))]
    tensor_ir_inplace_op(next_inputs.follow(), "follow", handles, places, out)


@dataclass(frozen=True)
class _Halves:
    """One pre-norm layer: x += attention(norm(x)); x += mlp(norm(x))."""

    parts: Parts
    params: Mapping[str, Param]
    """Of the layer, by their names in it."""
    weights: Weights
    room: Mapping[str, Tensor]
    """Scratch tensors with as many rows as are worked on."""
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

    def selected(self, x: Tensor, seen: Tensor, rows: Tensor) -> tuple[_Halves, Tensor, Tensor]:
        """The rows int32 [q] of x and of what attention gives, in memory of which nothing is needed any more;
        and the scratch tensors for so many."""
        count, gather = rows.shape[0], self.parts.gather
        x = gather(x, rows, self.view("qkv", count, int(x.shape[1])))
        seen = gather(seen, rows, self.view("pair", count, int(seen.shape[1])))
        room = {name: self.view(name, count, int(whole.shape[1])) for name, whole in self.room.items()}
        return replace(self, room=room), x, seen

    def view(self, name: str, rows: Expr, width: int) -> Tensor:
        """The beginning of a tensor of the room as one of another shape."""
        whole, shape = self.room[name]._expr, relax.ShapeExpr([rows, width])
        made = relax.op.memory.view(whole, shape, "float32", 0)
        return Tensor(_expr=relax.BlockBuilder.current().emit(made))

    def attend(self, x: Tensor, turns: Tensor, batch: Batch, place: tuple[relax.Var, relax.Var]) -> Tensor:
        """What attention gives, for all rows; their keys and values are in the cache then."""
        parts, room = self.parts, self.room
        weight = self.weights["attn_norm.weight"][0]
        qkv = self.product("attn.qkv", Fusion(parts.normed(weight)), [x, weight], room["qkv"])
        qkv, pages = parts.rope_append(qkv, turns, batch, place[0], self.weights)
        columns = parts.writes_amx_tiles(self.linear("attn.o"))
        seen = room["pair" if columns else "seen"]
        return parts.paged_attention(qkv, pages, batch, (*place, self.prompt), seen)

    def project(self, x: Tensor, seen: Tensor) -> Tensor:
        """x += the output product of what attention has given, `seen`."""
        columns = self.parts.writes_amx_tiles(self.linear("attn.o"))
        return self.add_product(x, "attn.o", Given(columns), [seen], "attn_post_norm.weight")

    def feed_forward(self, x: Tensor) -> Tensor:
        parts, room = self.parts, self.room
        weight, bias = self.weights["mlp_norm.weight"][0], self.optional("mlp.gate_up.bias")
        packs = parts.packs(self.linear("mlp.gate_up"), self.linear("mlp.down"), bias)
        first = Fusion(parts.normed(weight), gate=parts.gate if packs else None)
        pair = self.product("mlp.gate_up", first, [x, weight], room["pair"])
        return self.add_product(
            x, "mlp.down", parts.gated(bias, packs), [pair, *bias], "mlp_post_norm.weight"
        )
