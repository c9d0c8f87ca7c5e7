"""Defines the interface between `compiler/program` and its backends: what a device computes in a program.

The unit is half a layer and not a kernel, since each device decides which operations it fuses. Methods are
called while a Relax function is being built: they emit calls and return handles of the results.
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
"""Name of an argument in the ABI -> its variable, in the order of the ABI."""
NO_WINDOW = 1 << 30
"""Value of the window, in tokens, of a layer that attends to every token."""


@dataclass(frozen=True)
class Batch:
    """The tensors that describe the batch of a step, as abi.BATCH and abi.FORKS list them."""

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
    """The inputs of the function that computes one layer, except the rows x. Layers that are alike share one
    function.
    """

    spec: LayerSpec
    """Description of the first layer that uses the function; others may have another window and another
    rotary embedding.
    """
    params: Mapping[str, Param]
    """Name of a parameter in the layer -> its description."""
    weights: Weights
    """Name of a parameter in the layer -> its stored tensors."""
    angles: Tensor | None
    """The result of `Ops.angles` for the layer's rotary embedding; None if it has none."""
    batch: Batch
    index: relax.Var
    """The layer's index in the cache, an int64."""
    window: relax.Var
    """Number of tokens that a token attends to, an int64; NO_WINDOW for all."""
    prompt: relax.Var
    """An int64 that is not 0 if the rows belong to prompts."""


@dataclass(frozen=True)
class ResidualRows:
    """Rows of the residual stream, together with scratch tensors of the same number of rows."""

    x: Tensor
    scratch: Mapping[str, Tensor]


class CacheLayout(Protocol):
    """The shape and type of the tensor that holds keys and values, in the layout that the device's attention
    reads.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def page_bytes(self) -> int:
        """Returns the number of bytes of one page of the KV cache, summed over all layers."""
        ...

    def cache_shape(self, pages: Expr | int) -> tuple[Expr | int, ...]: ...


class Ops(Protocol):
    """The operations by which one device computes the parts of a library."""

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
        """Returns True if the last layer of a prompt can be limited to keys, values and the selected rows."""
        ...

    @property
    def decode_loop(self) -> bool:
        """Returns True if the library can have `step_on` and `steps`, several decode steps in one call."""
        ...

    @property
    def plan(self) -> Phases:
        """Returns the compiler passes up to memory planning."""
        ...

    @property
    def lower(self) -> Phases: ...

    @property
    def kernels(self) -> Phases:
        """Returns the passes that TVM applies to kernels after memory planning and before code generation."""
        ...

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Returns name -> (columns, dtype) of the scratch tensors that the layers use one after the other."""
        ...

    def embed(self, tokens: Tensor, weights: Weights) -> Tensor:
        """Emits the embeddings of tokens int32 [n], scaled and normalized as the family requires, and returns
        float32 [n, hidden].
        """
        ...

    def add_positions(self, x: Tensor, positions: Tensor, table: List[Tensor]) -> Tensor:
        """Emits a copy of x plus the learned rows of positions int32 [n], and returns it. table: the stored
        tensors of `position.weight`.
        """
        ...

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float, spec: Rope) -> Tensor:
        """Emits cosines and sines of positions int32 [n], times `factor`, for one rotary embedding of the
        model; the query's scale is a last column if the rope has one.

        inv_freq: float32 [dim / 2]. Returns float32 [n, spec.columns].
        """
        ...

    def copy(self, x: Tensor) -> Tensor: ...

    def attention(self, rows: ResidualRows, layer: Layer, selected: Tensor | None = None) -> ResidualRows:
        """Emits the layer's attention, which adds its result to x in place and writes new keys and values to
        the cache, and returns the rows of the residual stream for the feed-forward.

        selected: int32 [q], the only rows to return, or None; see selects_rows.
        """
        ...

    def feed_forward(self, rows: ResidualRows, layer: Layer) -> Tensor:
        """Emits the layer's feed-forward, whose result is added to x in place, and returns x."""
        ...

    def last_norm(self, x: Tensor, weights: Weights) -> Tensor: ...

    def select_rows(self, x: Tensor, rows: Tensor, weights: Weights) -> Tensor:
        """Emits the model's last norm of some rows of x, and returns them. rows: their indices, int32 [q]."""
        ...

    def logits(self, x: Tensor, weights: Weights) -> Tensor:
        """Emits the logits, biased, scaled and capped, of x float32 [q, hidden] after the last norm, and
        returns float32 [q, vocab].
        """
        ...

    def mask(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Emits code that sets the logits of tokens that a mask excludes to minus infinity, in place, and
        returns the logits.
        """
        ...

    def sample(self, logits: Tensor, params: Tensor, out: Tensor) -> Tensor:
        """Emits the sampling of a token from each row of logits [1, q, vocab] into `out`, and returns the
        logits.
        """
        ...

    def next_inputs(self, arguments: Variables) -> None:
        """Emits code that changes the arguments of a decode step, in place, into the arguments of the next
        step.
        """
        ...

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns two mappings for the library's metadata: use -> kernel for each kind of matrix, and use ->
        reason for kernels that are slow.
        """
        ...

    def workspace(self, limits: Limits, mod: IRModule) -> int:
        """Returns the number of bytes that calls need beside weights and cache. mod: the module with planned
        memory.
        """
        ...
