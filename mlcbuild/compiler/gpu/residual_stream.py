"""Tracks the residual stream of a decoding step on a GPU: the buffer that holds it, and a sum that is still
to be added.

A layer with norms after attention and feed-forward adds norm(delta) to the stream. Decoding leaves this
addition to the next matrix product: each workgroup adds while it reads, and one of them writes the new stream
to the other of two buffers, since all others read the old one in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.program import GUARANTEED

from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.models import LayerNorm

OTHER = {"x": "x_next", "x_next": "x"}
"""Name of one of the two buffers of the residual stream -> name of the other."""


@dataclass(frozen=True)
class PendingSum:
    """A sum, scale * norm(delta) of the buffer `delta`, that is still to be added to the residual stream."""

    name: str
    """Prefix of the names of the parameters of a norm after attention or feed-forward, such as
    layers.0.attn_post_norm."""
    norm: NormSpec
    scale: float
    """Factor by which each normalized row of the buffer `delta`, the output of attention or feed-forward, is
    multiplied before it is added to the residual stream."""


@dataclass
class ResidualStream:
    """The state of the residual stream while launches are built in order: the buffer that holds it, and a sum
    that is still to be added.
    """

    buffer: str = "x"
    pending: PendingSum | None = None


def can_add(pending: PendingSum, spec: ProductSpec) -> bool:
    """Returns True if the kernel of the matrix product `spec` can add `pending`, a postponed sum scale *
    norm(delta), to the residual stream x while it reads x. It cannot if the norm is a LayerNorm, if the
    product ends with the activation xIELU or a gate for each row, or if the kernel would bind more buffers
    than every device can."""
    norm = spec.norm
    if isinstance(pending.norm.norm, LayerNorm) or spec.activation == "xielu" or spec.row_gate:
        return False
    # x, delta and the new x, and what the two norms and the product bind.
    bound = 3 + pending.norm.buffers + spec.own_buffers + (0 if norm is None else norm.buffers)
    return bound <= GUARANTEED.storage_buffers
