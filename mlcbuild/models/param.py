"""A parameter of a model, and the activations that feed-forwards share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Stored = Literal["scheme", "plain", "float32"]
"""How a parameter is stored. scheme: as the scheme says, which packs matrices. plain: without quantization,
in the scheme's floating point type. float32: so in every scheme."""


@dataclass(frozen=True)
class Param:
    """One parameter as the mathematics sees it, before any packing. Matrices are [out, in].

    A stack of matrices is [experts, out, in]: each of them is packed by itself.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...] = ()
    """Rows of each part that checkpoints may store as a tensor of its own, in order; (): it has no parts. In
    a stack, they are rows of each matrix."""
    stored: Stored = "scheme"

    @property
    def matrix(self) -> tuple[int, int] | None:
        """[out, in] of the matrix, or of each one of a stack, that a scheme packs; None: it is not packed."""
        if self.stored != "scheme" or len(self.shape) < 2:
            return None
        return self.shape[-2], self.shape[-1]

    @property
    def count(self) -> int:
        """Matrices of a stack; 1 of anything else."""
        return self.shape[0] if len(self.shape) == 3 else 1
