"""Defines a parameter of a model, and the activation functions of feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
"""Name of an activation function. gelu_tanh is gelu by its approximation with tanh, gelu the exact one, by
erf; relu2 is max(x, 0)^2. xielu (Huang and Schlag, 2024) has four scalar parameters in each layer, in the
order alpha_p, alpha_n, beta, eps: with a = softplus(alpha_p) and b = beta + softplus(alpha_n), it is a x^2 +
beta x above 0, else b (exp(min(x, eps)) - 1 - x) + beta x."""
Stored = Literal["scheme", "plain", "float32"]
"""How a parameter is stored. scheme: in the format of the quantization scheme, which packs matrices. plain:
without quantization, in the scheme's floating point type. float32: in float32 in every scheme."""


@dataclass(frozen=True)
class Param:
    """One parameter of a model with its shape before any packing. A matrix is [out, in].

    Several matrices of equal size, such as one for each expert, are one parameter [count, out, in]; each
    matrix is packed separately.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...] = ()
    """Numbers of rows of the matrices or vectors that a parameter joins, such as gate and up, and that
    checkpoints may store as separate tensors, in order; (): nothing is joined. For a parameter [count, out,
    in], the rows count within one matrix."""
    stored: Stored = "scheme"

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Returns (out, in) of the matrix that a quantization scheme packs, or of each of the matrices in a
        parameter [count, out, in]; None for a parameter that is not quantized."""
        if self.stored != "scheme" or len(self.shape) < 2:
            return None
        return self.shape[-2], self.shape[-1]

    @property
    def count(self) -> int:
        """Returns the number of matrices in a parameter [count, out, in]; 1 for any other parameter."""
        return self.shape[0] if len(self.shape) == 3 else 1
