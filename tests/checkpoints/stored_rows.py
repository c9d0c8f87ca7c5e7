"""Arrays in place of the stored tensors of a checkpoint, and a reader that returns ranges of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray


@dataclass
class ArrayReader:
    """A reader that returns rows of the arrays of a mapping: tensor name -> array."""

    arrays: dict[str, NDArray[Any]]

    def tensor(self, name: str, dtype: str) -> Tensor:
        array = self.arrays[name]
        return Tensor(name, dtype, array.shape, Path("model.safetensors"), 0, array.nbytes)

    def values(self, tensor: Tensor, first: int, count: int) -> NDArray[np.float32]:
        return self.arrays[tensor.name][first : first + count].astype(np.float32)

    def elements(
        self, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        chosen = self.arrays[tensor.name][slice(*rows)]
        return chosen if columns is None else chosen[:, slice(*columns)]
