"""Quantization schemes and stored formats of weights, and the tensors in which they store a model. Importing
this package loads no NumPy.
"""

from __future__ import annotations

from mlcbuild.quant.format import StoredTensor
from mlcbuild.quant.scheme import (
    Scheme,
    Storage,
    check_overrides,
    describe,
    from_json,
    plain_dtype,
    rows_per_index,
    scheme_for,
    storage,
    stored,
    stored_bytes,
    stored_parameters,
    to_json,
)

__all__ = [
    "Scheme",
    "Storage",
    "StoredTensor",
    "check_overrides",
    "describe",
    "from_json",
    "plain_dtype",
    "rows_per_index",
    "scheme_for",
    "storage",
    "stored",
    "stored_bytes",
    "stored_parameters",
    "to_json",
]
