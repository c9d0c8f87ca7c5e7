"""The functions of a library, as its users call them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import IRModule, relax
from tvm.ir import GlobalVar
from tvm.relax.frontend.nn import Tensor
from tvm.tirx import Expr, Var

from mlcbuild.compiler.decoder import (
    Decoder,
    batch_variables,
    handle,
    layer_functions,
    packed_params,
    size,
    trunk_function,
    unpacked,
    variable,
)
from mlcbuild.compiler.kernels.sampling_row import COLUMNS
from mlcbuild.compiler.loop import emit_steps
from mlcbuild.models import Param


def build(decoder: Decoder) -> IRModule:
    """The module of a library with its kernels, before any pass."""
    _create_cache(decoder)
    _embed(decoder)
    layers = layer_functions(decoder)
    trunk = trunk_function(decoder, layers)
    to_rows = trunk_function(decoder, layers, chosen=True) if decoder.gathers else trunk
    _prefill(decoder, trunk, "batch_verify", True, drafts=True)
    for name, batched in (("prefill", False), ("batch_prefill", True)):
        _prefill(decoder, to_rows, name, batched)
        _hidden_states(decoder, trunk, f"{name}_to_last_hidden_states", batched)
    for name, batched in (("decode", False), ("batch_decode", True)):
        _decode(decoder, trunk, name, batched)
    _choose(decoder)
    step = _step(decoder, trunk, "step", drafts=True)
    emit_steps(decoder.builder, step, partial(_sequences, decoder), decoder.attributes())
    _step(decoder, to_rows, "step_prefill", drafts=False)
    return decoder.builder.finalize()


def _create_cache(decoder: Decoder) -> None:
    """create_paged_kv_cache(num_pages) -> the cache, not initialised: what was not written is never used."""
    builder, heads = decoder.builder, decoder.parts.heads
    count = size("num_pages")
    asked = relax.Var("num_pages", relax.ShapeType([count]))
    with builder.function("create_paged_kv_cache", [asked], pure=False):
        shape = relax.ShapeExpr(list(heads.cache_shape(count)))
        made = builder.emit(relax.op.builtin.alloc_tensor(shape, heads.dtype, 0, "global"))
        builder.emit_func_output(made)


def _embed(decoder: Decoder) -> None:
    builder = decoder.builder
    tokens = variable("tokens", (size("n"),), "int32")
    packed = packed_params(decoder)
    with builder.function("embed", [tokens, packed], decoder.attributes(), pure=False):
        weights = unpacked(decoder, packed, decoder.params[:1])
        builder.emit_func_output(decoder.parts.embed(handle(tokens), weights)._expr)


def _stream(
    decoder: Decoder,
    trunk: GlobalVar,
    x: relax.Var,
    rest: list[relax.Var],
    prompt: bool,
    rows: Sequence[relax.Var] = (),
) -> Tensor:
    """A call of `trunk` with embeddings x and the rest of a function's arguments; without forks where it has
    none."""
    if len(rest) < 9:
        rest = [*rest[:-1], relax.const(np.zeros((0, 3), np.int32)), rest[-1]]
    given = [x, *rest, relax.prim_value(int(prompt)), *rows]
    return handle(decoder.builder.emit(relax.Call(trunk, given)))


def _logits(
    decoder: Decoder, trunk: GlobalVar, x: relax.Var, rows: relax.Var, rest: list[relax.Var], prompt: bool
) -> Tensor:
    """As `_stream`, then the logits [q, vocab] of the rows int32 [q]."""
    parts, weights = decoder.parts, unpacked(decoder, rest[-1], _head_params(decoder))
    norm = weights["norm.weight"][0]
    if prompt and decoder.gathers:
        return parts.logits(parts.rms_norm(_stream(decoder, trunk, x, rest, prompt, [rows]), norm), weights)
    x = _stream(decoder, trunk, x, rest, prompt)
    return parts.logits(parts.chosen_norm(x, handle(rows), norm), weights)


def _prefill(decoder: Decoder, trunk: GlobalVar, name: str, batched: bool, drafts: bool = False) -> None:
    """Logits of chosen rows: (input_embeds [1, n, hidden], logit_positions int32 [q], batch ..., params). For
    drafts, each row is computed as `decode` does it, bit by bit, and forks come after the batch."""
    builder, hidden = decoder.builder, decoder.config.hidden_size
    n, q, b = size("n"), size("q"), size("b") if batched else 1
    given = variable("input_embeds", (1, n, hidden), "float32")
    chosen = variable("logit_positions", (q,), "int32")
    batch, packed = batch_variables(decoder, n, b, drafts), packed_params(decoder)
    with builder.function(name, [given, chosen, *batch, packed], decoder.attributes(), pure=False):
        x = _reshaped(builder, given, (n, hidden))
        logits = _logits(decoder, trunk, x, chosen, [*batch, packed], not drafts)
        builder.emit_func_output(_reshaped(builder, logits._expr, (1, q, decoder.config.vocab_size)))


def _hidden_states(decoder: Decoder, trunk: GlobalVar, name: str, batched: bool) -> None:
    """What the logits of each row would be made of, after the last norm, [1, n, hidden]:
    (input_embeds [1, n, hidden], batch ..., params). For embeddings of texts."""
    builder, hidden = decoder.builder, decoder.config.hidden_size
    n, b = size("n"), size("b") if batched else 1
    given = variable("input_embeds", (1, n, hidden), "float32")
    batch, packed = batch_variables(decoder, n, b), packed_params(decoder)
    with builder.function(name, [given, *batch, packed], decoder.attributes(), pure=False):
        x = _stream(decoder, trunk, _reshaped(builder, given, (n, hidden)), [*batch, packed], True)
        weights = unpacked(decoder, packed, _head_params(decoder)[:1])
        normed = decoder.parts.rms_norm(x, weights["norm.weight"][0])
        builder.emit_func_output(_reshaped(builder, normed._expr, (1, n, hidden)))


def _decode(decoder: Decoder, trunk: GlobalVar, name: str, batched: bool) -> None:
    """Logits of one row for each sequence: (input_embeds [b, 1, hidden], batch ..., params)."""
    builder, hidden = decoder.builder, decoder.config.hidden_size
    b = size("b") if batched else 1
    given = variable("input_embeds", (b, 1, hidden), "float32")
    batch, packed = batch_variables(decoder, b, b), packed_params(decoder)
    with builder.function(name, [given, *batch, packed], decoder.attributes(), pure=False):
        x = _stream(decoder, trunk, _reshaped(builder, given, (b, hidden)), [*batch, packed], False)
        weights = unpacked(decoder, packed, _head_params(decoder))
        normed = decoder.parts.rms_norm(x, weights["norm.weight"][0])
        logits = decoder.parts.logits(normed, weights)
        builder.emit_func_output(_reshaped(builder, logits._expr, (b, 1, decoder.config.vocab_size)))


def _choose(decoder: Decoder) -> None:
    """Sets tokens: (logits [q, v], which become masked, ways float64 [q, COLUMNS], tokens int32 [q], masks
    int32 [m, w]) -> logits."""
    builder, parts, q, width = decoder.builder, decoder.parts, size("q"), size("v")
    logits, ways = variable("logits", (q, width), "float32"), variable("ways", (q, COLUMNS), "float64")
    tokens, masks = variable("tokens", (q,), "int32"), variable("masks", (size("m"), size("w")), "int32")
    with builder.function("choose", [logits, ways, tokens, masks], decoder.attributes(), pure=False):
        masked = parts.masked(handle(logits), handle(masks))
        shaped = _reshaped(builder, masked._expr, (1, q, width))
        builder.emit_func_output(parts.chosen(*map(handle, (shaped, ways, tokens)))._expr)


def _step(decoder: Decoder, trunk: GlobalVar, name: str, drafts: bool) -> GlobalVar:
    """What `embed`, a forward function and `choose` do, in one call: (tokens int32 [n], logit_positions int32
    [q], ways float64 [q, COLUMNS], chosen int32 [q] in place, masks int32 [m, w], batch ..., forks?, params)
    -> logits float32 [1, q, vocab], masked. Prompts have no forks; other rows get the bits of `decode`."""
    builder, parts, n, q = decoder.builder, decoder.parts, size("n"), size("q")
    tokens, rows = variable("tokens", (n,), "int32"), variable("logit_positions", (q,), "int32")
    ways, chosen = variable("ways", (q, COLUMNS), "float64"), variable("chosen", (q,), "int32")
    masks = variable("masks", (size("m"), size("w")), "int32")
    batch, packed = batch_variables(decoder, n, size("b"), drafts), packed_params(decoder)
    given = [tokens, rows, ways, chosen, masks, *batch, packed]
    with builder.function(name, given, decoder.attributes(), pure=False):
        embedded = parts.embed(handle(tokens), unpacked(decoder, packed, decoder.params[:1]))
        logits = _logits(decoder, trunk, embedded._expr, rows, [*batch, packed], not drafts)
        logits = parts.masked(logits, handle(masks))
        shaped = _reshaped(builder, logits._expr, (1, q, decoder.config.vocab_size))
        made: GlobalVar = builder.emit_func_output(parts.chosen(*map(handle, (shaped, ways, chosen)))._expr)
    return made


def _sequences(decoder: Decoder, n: Var) -> list[relax.Var]:
    """What a step of n sequences with one token each has of them, and the packed weights."""
    return [*batch_variables(decoder, n, n), packed_params(decoder)]


def _head_params(decoder: Decoder) -> list[Param]:
    """What turns the residual stream into logits: the last norm, then the product's matrix."""
    names = ("norm.weight", "embed.weight" if decoder.config.tie_embeddings else "lm_head.weight")
    params = {param.name: param for param in decoder.params}
    return [params[name] for name in names]


def _reshaped(builder: relax.BlockBuilder, x: relax.Expr, shape: Sequence[Expr | int]) -> relax.Var:
    """The same memory under another shape."""
    return builder.emit(relax.op.reshape(x, list(shape)))
