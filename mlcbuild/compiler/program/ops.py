"""The work of a device in a program: the interface between `compiler/program` and its backends.

The unit is half a layer and not a kernel, since what is fused with what is the device's business. Methods
are called while a Relax function is being built: they emit calls and return handles of what these give.
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
"""Name of a parameter -> its stored tensors, in stored order."""
Variables = Mapping[str, relax.Var]
"""Name of an argument in the ABI -> the variable, in the order of the ABI."""
NO_WINDOW = 1 << 30
"""The window of a layer that attends to every token."""


@dataclass(frozen=True)
class Batch:
    """The tensors of abi.BATCH and abi.FORKS."""

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
    """The inputs of a layer's function beside its rows. Layers that are alike share one function."""

    spec: LayerSpec
    """The first layer of the function; others may have another window and another rope."""
    params: Mapping[str, Param]
    """By their names in the layer."""
    weights: Weights
    """Name of a parameter in the layer -> its stored tensors."""
    angles: Tensor | None
    """The result of `Ops.angles` for the layer's rope; None: it has none."""
    batch: Batch
    index: relax.Var
    """int64: the layer's place in the cache."""
    window: relax.Var
    """int64: tokens that a token attends to; NO_WINDOW for all."""
    prompt: relax.Var
    """int64: not 0 when the rows are those of prompts."""


@dataclass(frozen=True)
class Rows:
    """Rows of the residual stream, with scratch tensors of as many rows."""

    x: Tensor
    scratch: Mapping[str, Tensor]


class CacheLayout(Protocol):
    """The tensor that holds keys and values, as the device's attention wants it."""

    @property
    def dtype(self) -> str: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def cache_shape(self, pages: Expr | int) -> tuple[Expr | int, ...]: ...


class Ops(Protocol):
    """One device's part of one library."""

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
        """The last layer of a prompt can compute no more than keys, values and the selected rows."""
        ...

    @property
    def decode_loop(self) -> bool:
        """The library can have `step_on` and `steps`."""
        ...

    @property
    def plan(self) -> Phases:
        """Up to the point at which memory is known."""
        ...

    @property
    def lower(self) -> Phases: ...

    @property
    def kernels(self) -> Phases:
        """The phases of kernels after that, before code is generated."""
        ...

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Returns name -> (columns, dtype) of tensors that all layers work in, one after the other."""
        ...

    def embed(self, tokens: Tensor, weights: Weights) -> Tensor:
        """Returns the embeddings of tokens int32 [n], float32 [n, hidden], scaled and normalized as the
        family does."""
        ...

    def add_positions(self, x: Tensor, positions: Tensor, table: List[Tensor]) -> Tensor:
        """Returns a copy of x plus the learned rows of positions int32 [n]. table: the stored tensors of
        `position.weight`."""
        ...

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float, spec: Rope) -> Tensor:
        """Returns cosines and sines, times `factor`, of positions int32 [n], for one rope of the model, and
        the query's scale in a last column if the rope has one.

        inv_freq: float32 [dim / 2]. The result is float32 [n, spec.columns].
        """
        ...

    def copy(self, x: Tensor) -> Tensor: ...

    def attention(self, rows: Rows, layer: Layer, selected: Tensor | None = None) -> Rows:
        """Adds the mixer of `layer.spec` to x in place, with new keys and values in the cache.

        `selected` int32 [q]: returns these rows only; see selects_rows.
        """
        ...

    def feed_forward(self, rows: Rows, layer: Layer) -> Tensor:
        """Adds the feed-forward of `layer.spec` to x in place; returns x."""
        ...

    def last_norm(self, x: Tensor, weights: Weights) -> Tensor: ...

    def select_rows(self, x: Tensor, rows: Tensor, weights: Weights) -> Tensor:
        """Returns the last norm of the rows int32 [q] of x."""
        ...

    def logits(self, x: Tensor, weights: Weights) -> Tensor:
        """x float32 [q, hidden] after the last norm -> float32 [q, vocab]: biased, scaled and capped."""
        ...

    def mask(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Sets the logits of tokens that a mask leaves out to minus infinity, in place."""
        ...

    def sample(self, logits: Tensor, params: Tensor, out: Tensor) -> Tensor:
        """Draws a token from each row of logits [1, q, vocab] into `out`, and returns the logits."""
        ...

    def next_inputs(self, given: Variables) -> None:
        """Turns the arguments of `step_on` into those of the step that follows, in place."""
        ...

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the kernel of each kind of matrix, and why slow ones were taken, for the metadata."""
        ...

    def workspace(self, limits: Limits, mod: IRModule) -> int:
        """Returns the bytes that calls need beside weights and cache, from a module with planned memory."""
        ...
