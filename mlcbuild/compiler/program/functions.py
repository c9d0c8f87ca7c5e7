"""Emits the exported functions of a compiled library, with the names and arguments that
mlcbuild_format/abi.py lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from mlcbuild_format import abi
from tvm import IRModule, relax
from tvm.ir import GlobalVar
from tvm.relax.frontend.nn import Tensor
from tvm.tirx import Expr

from mlcbuild.compiler.program.decode_loop import emit_steps
from mlcbuild.compiler.program.decoder import (
    Decoder,
    handle,
    layer_functions,
    size,
    trunk_function,
    unpacked,
    variables,
)
from mlcbuild.compiler.program.ops import Variables
from mlcbuild.models import Param

NORM = ("norm.weight", "norm.bias")
"""Names of the parameters of the norm after the last layer."""


def build(decoder: Decoder) -> IRModule:
    """Returns the Relax module of a decoder, before any compiler pass: all functions that a compiled library
    exports, and the private functions and kernels that they call. It has the functions of the decode loop
    (`step_on` and `steps`) only if the backend supports them."""
    _create_cache(decoder)
    _embed(decoder)
    layers = layer_functions(decoder)
    trunk = trunk_function(decoder, layers)
    to_rows = trunk_function(decoder, layers, selects_rows=True) if decoder.ops.selects_rows else trunk
    _hidden_states(decoder, trunk)
    _sample_tokens(decoder)
    step = _step(decoder, trunk, abi.STEP)
    if decoder.ops.decode_loop:
        arguments = partial(_one_token_each, decoder)
        emit_steps(decoder.builder, (step, decoder.ops.next_inputs), arguments, decoder.attributes())
    _step(decoder, to_rows, abi.STEP_PREFILL)
    return decoder.builder.finalize()


def _create_cache(decoder: Decoder) -> None:
    """Adds the exported function that allocates and returns a KV cache of `num_pages` pages. Its memory is
    not initialised, because results never depend on memory that was not written.
    """
    builder, cache = decoder.builder, decoder.ops.cache
    count = size("num_pages")
    shape_argument = relax.Var(abi.CREATE_CACHE.names[0], relax.ShapeType([count]))
    with builder.function(abi.CREATE_CACHE.name, [shape_argument], pure=False):
        shape = relax.ShapeExpr(list(cache.cache_shape(count)))
        cache_tensor = builder.emit(relax.op.builtin.alloc_tensor(shape, cache.dtype, 0, "global"))
        builder.emit_func_output(cache_tensor)


@contextmanager
def _function(
    decoder: Decoder, function: abi.Function, sizes: Mapping[str, Expr | int] | None = None
) -> Iterator[Variables]:
    """Begins an exported function of the compiled library, as abi.py describes it, in the module under
    construction, as a context manager that yields the function's arguments: name -> variable. The caller
    emits the function's result inside the context, with emit_func_output. sizes: name of a dimension of the
    arguments, such as n (new tokens) -> its value; other dimensions become symbolic."""
    arguments = variables(decoder, function.arguments, sizes)
    with decoder.builder.function(function.name, [*arguments.values()], decoder.attributes(), pure=False):
        yield arguments


def _embed(decoder: Decoder) -> None:
    with _function(decoder, abi.EMBED) as arguments:
        decoder.builder.emit_func_output(_embedded(decoder, arguments)._expr)


def _embedded(decoder: Decoder, arguments: Variables) -> Tensor:
    names = ("embed.weight", "embed_norm.weight", "embed_norm.bias")
    weights = unpacked(decoder, arguments["params"], _params(decoder, *names))
    return decoder.ops.embed(handle(arguments["tokens"]), weights)


def _stream(
    decoder: Decoder,
    trunk: GlobalVar,
    x: relax.Var,
    arguments: Variables,
    prompt: bool,
    rows: Sequence[relax.Var] = (),
) -> Tensor:
    """Emits a call of `trunk`, the private function of all layers, and returns the residual stream after the
    last layer, float32 [n, hidden], or [q, hidden] if `rows` has a variable.

    x: embeddings [n, hidden]. arguments: name of an argument of the exported function, such as positions ->
    variable. Without the argument `forks`, no pages of the KV cache are copied. prompt: True if the rows are
    prompt tokens. rows: (), or one int32 [q] variable with the indices of the rows to return.
    """
    batch = [arguments[argument.name] for argument in abi.BATCH]
    forks = arguments.get("forks", relax.const(np.zeros((0, 3), np.int32)))
    call = [x, *batch, forks, arguments["params"], relax.prim_value(int(prompt)), *rows]
    return handle(decoder.builder.emit(relax.Call(trunk, call)))


def _logits(decoder: Decoder, trunk: GlobalVar, x: relax.Var, arguments: Variables, prompt: bool) -> Tensor:
    """Emits all layers and the output matrix, and returns the logits float32 [q, vocab] of the rows whose
    indices are in the argument `logit_positions`, int32 [q].

    trunk: the private function of all layers; for prompts, the one with an argument `rows` if the backend can
    select rows. x: embeddings [n, hidden]. arguments: those of the exported function, name -> variable.
    prompt: True if the kernels for prompt tokens are used."""
    ops, rows = decoder.ops, arguments["logit_positions"]
    weights = unpacked(decoder, arguments["params"], _head_params(decoder))
    if prompt and decoder.ops.selects_rows:
        return ops.logits(
            ops.last_norm(_stream(decoder, trunk, x, arguments, prompt, [rows]), weights), weights
        )
    x = _stream(decoder, trunk, x, arguments, prompt)
    return ops.logits(ops.select_rows(x, handle(rows), weights), weights)


def _hidden_states(decoder: Decoder, trunk: GlobalVar) -> None:
    """Adds the exported function that maps embeddings float32 [1, n, hidden] to the hidden states of all rows
    after the last norm, float32 [1, n, hidden]. Text embeddings are computed from them."""
    builder, hidden = decoder.builder, decoder.config.hidden_size
    n = size("n")
    with _function(decoder, abi.HIDDEN_STATES, {"n": n}) as arguments:
        x = _stream(
            decoder, trunk, _reshaped(builder, arguments["input_embeds"], (n, hidden)), arguments, True
        )
        weights = unpacked(decoder, arguments["params"], _params(decoder, *NORM))
        normed = decoder.ops.last_norm(x, weights)
        builder.emit_func_output(_reshaped(builder, normed._expr, (1, n, hidden)))


def _sample_tokens(decoder: Decoder) -> None:
    q, width = size("q"), size("v")
    with _function(decoder, abi.SAMPLE, {"q": q, "v": width}) as arguments:
        drawn = _draw(decoder, handle(arguments["logits"]), arguments, "tokens", (1, q, width))
        decoder.builder.emit_func_output(drawn)


def _draw(
    decoder: Decoder, logits: Tensor, arguments: Variables, out: str, shape: tuple[Expr | int, ...]
) -> relax.Expr:
    """Emits code that masks `logits` in place, with the argument `masks`, and samples a token from each row,
    by the argument `sampling_params`, into the argument called `out`; returns the logits as a view with the
    shape `shape`. arguments: those of the exported function, name -> variable."""
    masked = decoder.ops.mask(logits, handle(arguments["masks"]))
    shaped = _reshaped(decoder.builder, masked._expr, shape)
    return decoder.ops.sample(*map(handle, (shaped, arguments["sampling_params"], arguments[out])))._expr


def _step(decoder: Decoder, trunk: GlobalVar, function: abi.Function) -> GlobalVar:
    """Adds an exported function of the library, `step` or `step_prefill` as `function` describes it, that
    computes embeddings, all layers and logits and samples tokens into its argument `sampled` in one call, and
    returns its GlobalVar. The exported function returns the masked logits, float32 [1, q, vocab]. `step` also
    copies pages of the KV cache, as its argument `forks` lists them, (source, destination, tokens);
    `step_prefill` copies none. trunk: the private function of all layers."""
    q = size("q")
    with _function(decoder, function, {"q": q}) as arguments:
        embedded = _embedded(decoder, arguments)
        logits = _logits(decoder, trunk, embedded._expr, arguments, "forks" not in arguments)
        drawn = _draw(decoder, logits, arguments, "sampled", (1, q, decoder.config.vocab_size))
        emitted: GlobalVar = decoder.builder.emit_func_output(drawn)
    return emitted


def _one_token_each(decoder: Decoder, function: abi.Function) -> Variables:
    """Returns argument name -> new variable for an exported function of the library whose batch has one new
    token per sequence, so that n, the number of tokens, and b, that of sequences, are the same dimension.
    """
    n = size("n")
    return variables(decoder, function.arguments, {"n": n, "b": n})


def _head_params(decoder: Decoder) -> list[Param]:
    """Returns the parameters of the norm after the last layer and of the output matrix, the embedding matrix
    if the model ties them, with the biases that the model has."""
    matrix = "embed.weight" if decoder.config.tie_embeddings else "lm_head.weight"
    return _params(decoder, *NORM, matrix, "lm_head.bias")


def _params(decoder: Decoder, *names: str) -> list[Param]:
    """Returns the model's parameters that have one of these names, in the order of the names; names that the
    model lacks are left out.
    """
    params = {param.name: param for param in decoder.params}
    return [params[name] for name in names if name in params]


def _reshaped(builder: relax.BlockBuilder, x: relax.Expr, shape: Sequence[Expr | int]) -> relax.Var:
    """Emits a view of x with another shape, in the same memory, and returns it."""
    return builder.emit(relax.op.reshape(x, list(shape)))
