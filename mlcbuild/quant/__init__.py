"""Quantization: schemes, what they store, and how weights are packed.

Schemes (scheme.py) are read by recipes and `--help`, so importing this package loads no NumPy; the formats
are defined in packing.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcbuild.quant.scheme import (
    SCHEMES,
    Layout,
    Scheme,
    StoredTensor,
    bits_per_weight,
    check_overrides,
    from_json,
    scheme_for,
    stored,
    stored_bytes,
    stored_parameters,
    to_json,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.packing import Array

__all__ = [
    "SCHEMES",
    "Layout",
    "Scheme",
    "StoredTensor",
    "bits_per_weight",
    "check_overrides",
    "from_json",
    "pack",
    "scheme_for",
    "stored",
    "stored_bytes",
    "stored_parameters",
    "to_json",
    "unpack",
]


def pack(weight: Array, scheme: Scheme, name: str = "matrix") -> tuple[Array, Array]:
    """See packing.pack."""
    from mlcbuild.quant import packing

    return packing.pack(weight, scheme, name)


def unpack(q_weight: Array, q_scale: Array, scheme: Scheme, shape: tuple[int, int]) -> NDArray[np.float32]:
    """See packing.unpack."""
    from mlcbuild.quant import packing

    return packing.unpack(q_weight, q_scale, scheme, shape)
