"""Translates attention into kernel launches for a GPU: grouped-query attention, and latent attention
(MLA).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlcbuild_format.program import Expression, Launch

from mlcbuild.compiler.gpu.kernels import (
    heads,
    latent_heads,
    norm_rows,
    page_layout,
    paged_attention,
    prompt_attention,
)
from mlcbuild.compiler.gpu.kernels.heads import HeadsSpec
from mlcbuild.compiler.gpu.kernels.latent_heads import LatentSpec
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec
from mlcbuild.compiler.gpu.kernels.paged_attention import NO_WINDOW, AttentionSpec
from mlcbuild.compiler.gpu.launches import Buffers, LaunchBuilder, NormedProduct
from mlcbuild.models import Attention, LatentAttention, LayerSpec, RmsNorm

_SPLIT_TOKENS = 512
"""In decoding, attention divides the keys of each row and group of heads among several workgroups: one for
this number of tokens of the context window, or of the layer's attention window if that is smaller, rounded
up, and at most 8."""
_MAX_SPLITS = 8


def attention_spec(build: LaunchBuilder, index: int, layer: LayerSpec) -> AttentionSpec:
    """Returns the AttentionSpec, the description from which GPU kernels are built, of the attention of the
    layer with the index `index`.
    """
    mixer, is_half = layer.mixer, build.scheme.dtype == "float16"
    reach = min(build.limits.context_window, mixer.window or NO_WINDOW)
    splits = max(1, min(_MAX_SPLITS, -(-reach // _SPLIT_TOKENS)))
    if isinstance(mixer, LatentAttention):
        cache = CacheSpec(mixer.heads, 1, mixer.cached, is_half, mixer.latent)
        return AttentionSpec(cache, mixer.scale, None, splits)
    cache = CacheSpec(mixer.heads, mixer.kv_heads, mixer.head_dim, is_half)
    half_sinks = build.is_half(f"layers.{index}.attn.sinks") if mixer.sinks else None
    return AttentionSpec(cache, mixer.scale, mixer.softcap, splits, mixer.alibi, half_sinks)


def attention_columns(build: LaunchBuilder, index: int, layer: LayerSpec) -> dict[str, int]:
    """Returns workspace buffer name -> number of 32-bit columns per row that the attention of one layer of a
    GPU program needs in it.
    """
    mixer, cache = layer.mixer, attention_spec(build, index, layer).cache
    needed = {"query": cache.heads * cache.head_dim, "attended": cache.heads * cache.value_dim}
    if not isinstance(mixer, LatentAttention):
        return {**needed, "qkv": cache.width}
    if mixer.query_latent:
        needed |= {"query_latent": mixer.query_latent, "query_normed": mixer.query_latent}
    return {
        **needed,
        "queries": mixer.heads * mixer.query_dim,
        "plain": mixer.heads * mixer.head_dim,
        "latents": mixer.cached,
        "values": mixer.heads * mixer.value_dim,
    }


def attention_launches(
    build: LaunchBuilder, index: int, layer: LayerSpec, rows: int | None
) -> tuple[list[Launch], list[Launch]]:
    """Returns two lists of kernel launches for the attention of the layer with the number `index`: those that
    compute the heads' results, from the norm and the qkv product on, and those that multiply these with the
    output projection and add the product to the residual stream. rows: rows of x per workgroup for the
    matrix-vector products of decoding; None: launches for prompts.
    """
    if isinstance(layer.mixer, LatentAttention):
        return _latent_attention(build, index, layer, rows)
    base = f"layers.{index}.attn"
    launches = build.normed(f"{base}_norm", layer, rows)
    launches += build.normed_product(f"{base}.qkv.weight", f"{base}_norm", layer, rows, "qkv")
    launches += _prepare_heads(build, index, layer.mixer)
    launches += _attend(build, index, layer, rows)
    adding = build.residual_product(f"{base}.o.weight", f"{base}_post_norm", layer, rows, "attended")
    return launches, adding


def _attend(build: LaunchBuilder, index: int, layer: LayerSpec, rows: int | None) -> list[Launch]:
    """Returns the kernel launches that compute attention's results from rotated queries and the KV cache,
    which already holds the keys and values of the call's own tokens. rows: None for prompts; any number for
    decoding, whose first launch copies the KV cache pages of forks."""
    mixer, spec, places = layer.mixer, attention_spec(build, index, layer), build.calls.places
    pages = f"pages.{index}"
    sinks = {} if spec.half_sinks is None else {"sinks": f"layers.{index}.attn.sinks"}
    window = min(mixer.window or NO_WINDOW, NO_WINDOW)
    buffers: Buffers = {"query": "query", "inputs": "inputs", "pages": pages}
    sizes: dict[str, Expression] = {"n": "n", "pages_count": "pages", "window": window}
    if rows is None:
        attend, sizes["t"] = prompt_attention.attend_prompt, "t"
        return [build.launch(attend, (spec, places), sizes, {**buffers, **sinks, "y": "attended"})]
    forks: dict[str, Expression] = {"pages_count": "pages", "count": "f"}
    joined: Buffers = {"part": "part", "y": "attended", **sinks}
    return [
        build.launch(page_layout.fork, (spec.cache, places), forks, {"inputs": "inputs", "pages": pages}),
        build.launch(paged_attention.attend, (spec, places), sizes, {**buffers, "part": "part"}),
        build.launch(paged_attention.combine, (spec,), {"n": "n"}, joined),
    ]


def _prepare_heads(build: LaunchBuilder, index: int, mixer: Attention) -> list[Launch]:
    base, config = f"layers.{index}.attn", build.config
    buffers = {"qkv": "qkv", "query": "query", "inputs": "inputs", "pages": f"pages.{index}"}
    norms: Mapping[str, Any] = {}
    spec = HeadsSpec(span=mixer.qk_norm_span, norm_last=mixer.qk_norm_last, clip=mixer.clip)
    if mixer.rope is not None:
        rope = config.ropes[mixer.rope]
        rows = build.limits.context_window
        spec = replace(spec, rope_dim=rope.dim, rows=rows, query_scale=rope.query_scale)
        buffers["table"] = f"rope.{mixer.rope}"
    if mixer.qk_norm is not None:
        norm = build.norm(f"{base}.q_norm", mixer.qk_norm, mixer.head_dim)
        spec = replace(spec, norm=norm)
        norms = build.norm_buffers(f"{base}.q_norm", norm, ("q_weight", "q_shift"))
        norms = {**norms, **build.norm_buffers(f"{base}.k_norm", norm, ("k_weight", "k_shift"))}
    left_out = {"queries": ("pages", "k_weight", "k_shift"), "cached": ("query", "q_weight", "q_shift")}
    cache = CacheSpec(mixer.heads, mixer.kv_heads, mixer.head_dim, build.scheme.dtype == "float16")
    launches, sizes = [], {"n": "n", "pages_count": "pages"}
    for part in heads.launch_parts(spec):
        unused = left_out.get(part, ())
        bindings = {name: buffer for name, buffer in {**buffers, **norms}.items() if name not in unused}
        arguments = (cache, spec, build.calls.places, part)
        launches.append(build.launch(heads.prepare_heads, arguments, sizes, bindings))
    return launches


def _latent_attention(
    build: LaunchBuilder, index: int, layer: LayerSpec, rows: int | None
) -> tuple[list[Launch], list[Launch]]:
    """Returns two lists of kernel launches for a layer's latent attention: those that compute the heads'
    results, and those that multiply these with the output projection and add the product to the residual
    stream. Each head multiplies its queries and its results by matrices of its own. rows: rows of x per
    workgroup in decoding; None for prompts.
    """
    base, mixer, places = f"layers.{index}.attn", layer.mixer, build.calls.places
    assert isinstance(mixer, LatentAttention)
    sizes = (mixer.heads, mixer.latent, mixer.head_dim, mixer.rope_dim, build.limits.context_window)
    spec, cache = LatentSpec(*sizes), attention_spec(build, index, layer).cache
    queries = NormedProduct(f"{base}.q.weight", "queries")
    if mixer.query_latent:
        queries = NormedProduct(f"{base}.q_a.weight", "query_latent")
    products = queries, NormedProduct(f"{base}.kv_a.weight", "latents")
    launches = build.normed(f"{base}_norm", layer, rows)
    launches += build.normed_pair(products, f"{base}_norm", layer, rows)
    if mixer.query_latent:
        launches += _expanded_queries(build, base, mixer, rows)
    norm = build.norm(f"{base}.kv_a_norm", RmsNorm(mixer.eps), mixer.latent)
    buffers: Buffers = {
        **{name: name for name in ("queries", "plain", "query", "latents", "inputs")},
        "table": f"rope.{mixer.rope}",
        "pages": f"pages.{index}",
        **build.norm_buffers(f"{base}.kv_a_norm", norm),
    }
    arguments = (cache, spec, norm, places)
    scalars: dict[str, Expression] = {"n": "n", "pages_count": "pages"}
    launches.append(build.launch(latent_heads.prepare_latents, arguments, scalars, buffers))
    launches.append(_head_product(build, f"{base}.k_b.weight", rows, ("plain", "query"), mixer.cached))
    launches += _attend(build, index, layer, rows)
    launches.append(_head_product(build, f"{base}.v_b.weight", rows, ("attended", "values"), 0))
    adding = build.residual_product(f"{base}.o.weight", f"{base}_post_norm", layer, rows, "values")
    return launches, adding


def _expanded_queries(
    build: LaunchBuilder, base: str, mixer: LatentAttention, rows: int | None
) -> list[Launch]:
    """Returns the kernel launches that compute the queries of latent attention, before rotation, in the
    buffer `queries`, from their latents in the buffer `query_latent`. base: prefix of the names of the
    attention's parameters; rows: rows of x per workgroup in decoding; None for prompts.
    """
    weight, name = f"{base}.q_b.weight", f"{base}.q_a_norm"
    norm = build.norm(name, RmsNorm(mixer.eps), mixer.query_latent)
    if rows is not None:
        spec = build.product(weight, norm=norm)
        buffers: Buffers = {"x": "query_latent", "y": "queries", **build.norm_buffers(name, norm)}
        return [build.multiply(weight, spec, rows, buffers)]
    normed: Buffers = {"x": "query_latent", "y": "query_normed", **build.norm_buffers(name, norm)}
    return [
        build.launch(norm_rows.norm, (norm,), {"n": "n"}, normed),
        build.multiply(weight, build.product(weight), rows, {"x": "query_normed", "y": "queries"}),
    ]


def _head_product(
    build: LaunchBuilder, name: str, rows: int | None, places: tuple[str, str], stride: int
) -> Launch:
    """Returns the launch of a kernel that multiplies the vector of each attention head by the head's own
    matrix; the parameter `name` holds the matrices of all heads. rows: rows of x per workgroup in decoding;
    None: a launch for prompts; places: (name of the buffer to read, name of the buffer to write); stride:
    columns per head in the buffer to write, if they are more than the product computes, else 0."""
    count, (source, out) = build.params[name].count, places
    spec = build.product(name, stride=stride)
    make: Callable[..., Any] = latent_heads.head_gemm if rows is None else latent_heads.head_gemv
    sizes: dict[str, Expression] = {"n": "n", "vectors": ("mul", "n", count)}
    return build.launch(make, (spec, count), sizes, {"x": source, "y": out, **build.matrix(name)})
