"""Defines a lazy three-dimensional array of matrices that are computed when they are read, such as the
weights of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class Stack:
    """A lazy float32 array [experts, out, in] of the weights of all experts of a layer. Indexing computes the
    matrix of one expert anew each time, because all of them may not fit into memory."""

    shape: tuple[int, int, int]
    load: Callable[[int], NDArray[np.float32]]
    """Function from the index of an expert to its matrix, float32 [out, in]."""

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        return self.load(index)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.float32]:
        """Returns the matrices of all experts as one array [experts, out, in] of type `dtype`, float32 if
        that is None. NumPy calls this method when the lazy array is used as an ordinary one."""
        return np.stack([self.load(index) for index in range(self.shape[0])]).astype(dtype or np.float32)
