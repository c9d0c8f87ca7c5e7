"""Translates the attention and the feed-forward of a layer into kernel launches for a GPU.

In decoding a dense layer is eight launches: product for queries, keys and values; rotation of heads and
update of the KV cache; copies of pages, if a call has any; attention; combination of its splits; output
product; normalized and gated product; the last product. A norm after attention or feed-forward (Gemma 2) is
computed by the product that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlcbuild_format.program import Launch

from mlcbuild.compiler.gpu.attention_launches import attention_columns, attention_launches
from mlcbuild.compiler.gpu.expert_launches import expert_columns, expert_launches
from mlcbuild.compiler.gpu.kernels import norm_rows
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.models import Dense, Experts, LayerSpec


@dataclass(frozen=True)
class LayerHalf:
    """The kernel launches of a layer's attention or feed-forward: those that compute its result, and those
    that add it to the residual stream.
    """

    before: list[Launch]
    adding: list[Launch]


def layer_launches(build: LaunchBuilder, index: int, layer: LayerSpec, rows: int | None) -> list[Launch]:
    """Returns the kernel launches that compute one layer of the model, the one with the number `index`. For
    decoding it must be called for the layers in order, since `build.stream` records where the residual stream
    is. rows: how many rows of activations one workgroup multiplies in the matrix-vector products of decoding;
    None: launches for prompts."""
    mixer = LayerHalf(*attention_launches(build, index, layer, rows))
    feed_forward = _feed_forward(build, index, layer, rows)
    if layer.residual == "sequential":
        return [*mixer.before, *mixer.adding, *feed_forward.before, *feed_forward.adding]
    # Both halves read the residual stream before either adds to it.
    return [*mixer.before, *feed_forward.before, *mixer.adding, *feed_forward.adding]


def columns(build: LaunchBuilder, index: int, layer: LayerSpec) -> dict[str, int]:
    """Returns workspace buffer name -> number of 32-bit columns per row that a layer needs in it."""
    block, needed = layer.feed_forward, attention_columns(build, index, layer)
    if isinstance(block, Experts):
        needed |= expert_columns(block, build.config.hidden_size)
    elif block.gated:
        needed |= {"gated": block.size, "pair": 2 * block.size}
    else:
        needed["gated"] = block.size
    if layer.norms.after is not None:
        needed["delta"] = build.config.hidden_size
    return needed


def _feed_forward(build: LaunchBuilder, index: int, layer: LayerSpec, rows: int | None) -> LayerHalf:
    base, block = f"layers.{index}.mlp", layer.feed_forward
    shared = layer.residual == "parallel_shared"
    norm_name = f"layers.{index}.attn_norm" if shared else f"{base}_norm"
    # The launches of attention with the same norm have already written `normed`.
    launches = [] if shared else build.normed(norm_name, layer, rows)
    if isinstance(block, Experts):
        before, adding = expert_launches(build, base, norm_name, layer, rows)
        return LayerHalf([*launches, *before], adding)
    launches += _dense(build, base, norm_name, layer, rows)
    adding = build.residual_product(f"{base}.down.weight", f"{base}_post_norm", layer, rows, "gated")
    return LayerHalf(launches, adding)


def _dense(
    build: LaunchBuilder, base: str, norm_name: str, layer: LayerSpec, rows: int | None
) -> list[Launch]:
    """Returns the kernel launches of a dense feed-forward up to its hidden units, act(gate) * up or act(up),
    in the buffer `gated`. base: prefix of its parameters' names; norm_name: name of the norm before it; rows:
    rows of x per workgroup, None for prompts."""
    block = layer.feed_forward
    assert isinstance(block, Dense), "support.py refuses others"
    if not block.gated:
        half = block.activation == "xielu" and build.is_half(f"{base}.xielu")
        fused: dict[str, Any] = {"activation": block.activation, "half_scalars": half}
        return build.normed_product(f"{base}.up.weight", norm_name, layer, rows, "gated", **fused)
    name = f"{base}.gate_up.weight"
    if rows is not None:
        options: dict[str, Any] = {"outputs": block.size, "gate": block.activation}
        return build.normed_product(name, norm_name, layer, rows, "gated", **options)
    product = build.normed_product(name, norm_name, layer, rows, "pair")
    buffers, arguments = {"pair": "pair", "y": "gated"}, (block.size, block.activation)
    return [*product, build.launch(norm_rows.gated, arguments, {"n": "n"}, buffers)]
