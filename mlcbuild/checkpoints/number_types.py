"""Converts the types of numbers in a checkpoint's tensors to float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcbuild.quant.floats import widen

DTYPES: Mapping[str, np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
"""Name of a dtype in safetensors -> NumPy dtype, for the types of weights that are packed without conversion;
uint16 holds the bits of bfloat16.
"""


def _small_floats(fraction: int, bias: int, nan: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns a table, float32 [256]: the value of each byte as an 8-bit float with a sign bit, `fraction`
    fraction bits and the exponent bias `bias`. nan: the bytes that are NaN. The format has no infinities."""
    codes = np.arange(256)
    exponent, low = (codes & 127) >> fraction, codes & (1 << fraction) - 1
    integer_part = np.where(exponent > 0, 1 << fraction, 0) + low
    values = np.ldexp(integer_part.astype(np.float32), np.maximum(exponent, 1) - bias - fraction)
    signed: NDArray[np.float32] = np.where(codes < 128, values, -values).astype(np.float32)
    signed[list(nan)] = np.nan
    return signed


SMALL_FLOATS: Mapping[str, NDArray[np.float32]] = {
    "F8_E4M3": _small_floats(3, 7, (127, 255)),
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
    "F8_E4M3FNUZ": _small_floats(3, 8, (128,)),
    "F8_E5M2FNUZ": _small_floats(2, 16, (128,)),
    "F8_E8M0": np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)),
}
"""Name of an 8-bit float in safetensors -> the float32 value of each byte. E4M3 and E5M2 are defined in
https://arxiv.org/abs/2209.05433, their FNUZ forms in https://arxiv.org/abs/2206.02915, and E8M0 in the OCP
Microscaling specification 1.0."""
_OTHERS: Mapping[str, type[np.generic]] = {
    "F64": np.float64,
    "I8": np.int8,
    "U8": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
}
"""Name of a safetensors dtype that weights may have besides DTYPES and 8-bit floats (a float64 or an integer
of 8 or 16 bits) -> NumPy dtype. float32 represents the integers exactly; float64 is rounded."""
READABLE = (*DTYPES, *_OTHERS, *SMALL_FLOATS)
"""Names, in safetensors, of all dtypes that weights may have."""
_ELEMENTS: Mapping[str, type[np.generic]] = {
    **_OTHERS,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
}


def element_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype in which elements of the safetensors dtype `name` are read from files: uint16
    for the bits of bfloat16, uint8 for the bytes of 8-bit floats and of unknown dtypes.
    """
    return DTYPES[name] if name in DTYPES else np.dtype(_ELEMENTS.get(name, np.uint8))


def convert(raw: NDArray[Any], name: str, out: NDArray[np.float32]) -> None:
    """Converts elements of a tensor, as they were read from a file, to float32 and writes them to `out`,
    which has their shape; a float64 beyond the range of float32 becomes infinite. name: the safetensors dtype
    of the elements, one of READABLE.
    """
    if name in SMALL_FLOATS:
        np.take(SMALL_FLOATS[name], raw, out=out, mode="clip")
    elif name in DTYPES:
        widen(raw, out)
    else:
        with np.errstate(over="ignore"):  # Infinite weights are refused where weights are stored.
            np.copyto(out, raw, casting="same_kind" if name == "F64" else "safe")


def values_of(raw: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Returns elements of a tensor, as they were read from a file, as a new float32 array of the same shape.
    A float64 beyond the range of float32 becomes infinite. name: the safetensors dtype of the elements, one
    of READABLE.
    """
    out = np.empty(raw.shape, np.float32)
    convert(raw, name, out)
    return out
