"""Defines the interface between `compiler/program`, which builds a model's program, and the backends, which
emit the computations of one device.

The interface has a method for the attention and one for the feed-forward of a layer, not one per kernel,
since each device decides which operations it fuses. Methods are called while a Relax function is being built:
they emit calls and return handles of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

from mlcbuild_format.limits import Limits
from tvm import IRModule, relax
from tvm.relax.frontend.nn import Tensor
from tvm.target import Target as TvmTarget
from tvm.tirx import Expr

from mlcbuild.compiler.phases import Phases
from mlcbuild.models import LayerSpec, ModelConfig, Param, Rope
from mlcbuild.quant import Storage

Weights = Mapping[str, List[Tensor]]
"""Mapping of parameter name -> the tensors that store the parameter, such as codes and scales, in the order
in which its format lists them."""
Variables = Mapping[str, relax.Var]
"""Name of an argument of a library function, as abi.py lists it -> its Relax variable, in the same order."""
NO_WINDOW = 1 << 30
"""Window size in tokens that means no window: each token attends to itself and all tokens before it."""


@dataclass(frozen=True)
class Batch:
    """The tensors that describe the batch of a step to attention: KV cache, positions and cache slots of
    tokens, page table, lengths, and copies of pages (forks).
    """

    pages: Tensor
    positions: Tensor
    slots: Tensor
    q_indptr: Tensor
    page_indptr: Tensor
    page_table: Tensor
    kv_lengths: Tensor
    forks: Tensor


@dataclass(frozen=True)
class Layer:
    """The inputs of the Relax function that computes one transformer layer, except the rows of the residual
    stream. Layers that are stored in the same way and differ only in window and in the frequencies of their
    rotary embedding share one function."""

    spec: LayerSpec
    """Description of the layer. If several layers share the Relax function, it is that of the first; the
    others may have another window and another rotary embedding, which are arguments.
    """
    params: Mapping[str, Param]
    """Parameter name without the prefix `layers.N.` -> description of the parameter."""
    weights: Weights
    """Parameter name without the prefix `layers.N.` -> the tensors that store the parameter."""
    angles: Tensor | None
    """Cosines and sines of the layer's rotary embedding at the positions of the n tokens, float32 [n,
    columns]: the cosines of dim / 2 angles, then their sines, both times the attention factor, then the scale
    of queries if there is one. None if the layer has no rotary embedding."""
    batch: Batch
    index: relax.Var
    """The layer's index in the KV cache, which holds all layers, an int64."""
    window: relax.Var
    """Number of latest tokens that a token attends to, itself included, an int64; NO_WINDOW for all."""
    prompt: relax.Var
    """An int64 that is not 0 if the tokens that a layer computes belong to prompts, not to decode steps."""


@dataclass(frozen=True)
class ResidualRows:
    """Rows of the residual stream, x float32 [n, hidden], together with scratch tensors of n rows, by
    name.
    """

    x: Tensor
    scratch: Mapping[str, Tensor]


class CacheLayout(Protocol):
    """The dtype of the one tensor that holds the KV cache of all layers, and its shape for a number of pages,
    in the layout that the device's attention reads."""

    @property
    def dtype(self) -> str: ...

    @property
    def page_bytes(self) -> int:
        """Returns the number of bytes of one page of the KV cache, summed over all layers."""
        ...

    def cache_shape(self, pages: Expr | int) -> tuple[Expr | int, ...]: ...


class Ops(Protocol):
    """The interface of a backend: methods that emit the computations of a model's program for one device, and
    properties of the compilation.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def scheme(self) -> Storage: ...

    @property
    def target(self) -> TvmTarget: ...

    @property
    def cache(self) -> CacheLayout: ...

    @property
    def selects_rows(self) -> bool:
        """Returns True if this device's operations can compute the last layer, for prompts, only for the rows
        whose logits are needed. Keys and values are still computed for all rows."""
        ...

    @property
    def decode_loop(self) -> bool:
        """Returns True if the library can have the functions `step_on` and `steps`, which run several decode
        steps in one call.
        """
        ...

    @property
    def plan(self) -> Phases:
        """Returns the compiler passes that come first, up to and including memory planning; they transform
        the model's Relax module as it was built.
        """
        ...

    @property
    def lower(self) -> Phases: ...

    @property
    def kernels(self) -> Phases:
        """Returns the compiler passes that TVM applies to kernels after memory planning and before code
        generation.
        """
        ...

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Returns the scratch tensors, with one row per token, that every layer reuses: name -> (number of
        columns, dtype)."""
        ...

    def embed(self, tokens: Tensor, weights: Weights) -> Tensor:
        """Emits the embedding lookup of tokens int32 [n], with the model's scale and norm if it has them, and
        returns float32 [n, hidden]."""
        ...

    def add_positions(self, x: Tensor, positions: Tensor, table: List[Tensor]) -> Tensor:
        """Emits a copy of x float32 [n, hidden] plus the learned embeddings of positions int32 [n], and
        returns it. table: the stored tensors of the parameter `position.weight`, whose row position + the
        model's position_offset is added."""
        ...

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float, spec: Rope) -> Tensor:
        """Emits cosines and sines of one rotary embedding and returns them, float32 [n, columns]: the dim / 2
        cosines of a position, then as many sines, both times `factor`, then the scale of queries if `spec`,
        the rotary embedding, has one. positions: int32 [n]; inv_freq: float32 [dim / 2]."""
        ...

    def copy(self, x: Tensor) -> Tensor: ...

    def attention(self, rows: ResidualRows, layer: Layer, selected: Tensor | None = None) -> ResidualRows:
        """Emits the attention of a layer, which writes new keys and values to the KV cache and adds its
        result in place to the residual stream, rows.x float32 [n, hidden]; returns the rows that the
        feed-forward reads. With `selected`, the result is added to copies of the selected rows instead, which
        are returned, and rows.x stays unchanged. In a layer whose feed-forward reads the old x, the result is
        not added but kept in a scratch tensor.

        selected: int32 [q], the indices of the only rows to return, or None for all rows; backends whose
        property `selects_rows` is False accept only None."""
        ...

    def feed_forward(self, rows: ResidualRows, layer: Layer) -> Tensor:
        """Emits the feed-forward of a layer, adds its result, and that of attention if it is kept in a
        scratch tensor, in place to the residual stream, rows.x float32 [n, hidden], and returns that
        tensor."""
        ...

    def last_norm(self, x: Tensor, weights: Weights) -> Tensor: ...

    def select_rows(self, x: Tensor, rows: Tensor, weights: Weights) -> Tensor:
        """Emits the model's last norm for the rows of x float32 [n, hidden] whose indices `rows`, int32 [q],
        holds, and returns float32 [q, hidden].
        """
        ...

    def logits(self, x: Tensor, weights: Weights) -> Tensor:
        """Emits the product of x float32 [q, hidden], after the last norm, with the output matrix, then bias,
        scale and soft cap if the model has them, and returns the logits float32 [q, vocab]."""
        ...

    def mask(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Emits code that sets the logits of excluded tokens to minus infinity, in place, and returns the
        logits. masks: int32 [m, 1 + w], each row the index of a row of logits, then w words with one bit per
        token, lowest token in the lowest bit, 0 if excluded. Rows of logits without a mask stay unchanged."""
        ...

    def sample(self, logits: Tensor, params: Tensor, out: Tensor) -> Tensor:
        """Emits the sampling of a token from each row of logits [1, q, vocab] into `out`, int32 [q], and
        returns the unchanged logits. params: float64 [q, 5], for each row 1 / temperature (0: the most likely
        token; negative: none), logit_drop (at most 0, as temperature * log(min_p): logits below the row's
        largest + logit_drop are dropped), top_p (1: all tokens), top_k (0: all tokens) and a random number in
        [0, 1). `out` gets -2 for a row whose 1 / temperature is negative, -1 for one with a logit that is
        NaN, or whose largest logit is infinite."""
        ...

    def next_inputs(self, arguments: Variables) -> None:
        """Emits code that changes the arguments of a decode step, in place, into those of the next step: it
        copies the sampled tokens to `sampled_tokens` and sets `continues`, True if another step follows in
        the same call. It also advances positions, cache slots and lengths by one token and replaces the
        random numbers, unless the loop ends, which it does for all sequences as soon as one of them ends.
        arguments: name of an argument of the library function `step_on`, which computes one of several decode
        steps -> variable."""
        ...

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns two mappings for the library's metadata: use -> name of its kernel, and use -> reason why
        its kernel is slower than the device allows, only for such uses. A use is a form of attention, such as
        "attention.prompt", or the name of a matrix, without the prefix `layers.N.` where one kernel serves
        all layers."""
        ...

    def workspace(self, limits: Limits, mod: IRModule) -> int:
        """Returns the maximum number of bytes that a call of the library needs in addition to weights and KV
        cache, with the scratch arrays of kernels for one thread. mod: the library's module after memory
        planning."""
        ...
