"""A stack of matrices whose values are computed when they are read, such as the weights of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class Stack:
    """The weights of all experts of a layer, [experts, out, in], computed one expert at a time: those of a
    large model do not fit into memory in float32."""

    shape: tuple[int, int, int]
    load: Callable[[int], NDArray[np.float32]]
    """Function from the number of an expert to its matrix [out, in]."""

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        return self.load(index)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.float32]:
        """Returns all matrices of the stack as one array. NumPy calls this method when the stack is used as
        an array.
        """
        return np.stack([self.load(index) for index in range(self.shape[0])]).astype(dtype or np.float32)
