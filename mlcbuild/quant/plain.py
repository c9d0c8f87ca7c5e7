"""Defines stored formats without quantization: a matrix is one float32 or float16 tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from mlcbuild.quant.format import ITEM_BYTES, Format, FormatTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.floats import Array, Scratch


def plain(dtype: Literal["float32", "float16"]) -> Format:
    """Returns the format that stores a matrix [N, K] as one tensor [N, K] of type `dtype`. Its `pack` raises
    CheckpointError for weights that are infinite or NaN or, if `dtype` is float16, too large for it. Its
    functions import NumPy only when called, since planning a build loads formats."""

    def pack(weight: Array, scratch: Scratch, name: str) -> Sequence[Array]:
        from mlcbuild.quant.floats import narrow

        return (narrow(weight, dtype, scratch, name),)

    tensor = FormatTensor("weight", dtype, lambda rows, columns: (rows, columns))
    return Format((tensor,), pack, _unpack, 8 * ITEM_BYTES[dtype], dtype=dtype)


def _unpack(tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    import numpy as np

    return tensors[0].astype(np.float32)
