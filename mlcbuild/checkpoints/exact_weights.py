"""Reads the parameters of a checkpoint as exact float32 values, for the conversion to a quantization scheme
and for the float32 reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcbuild.checkpoints.mapping import PLAIN, Views, locate
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.models import ModelConfig, TensorNames
from mlcbuild.quant.stack import Stack

T = TypeVar("T")
Weight: TypeAlias = Any
"""The values of a model's parameter: a float32 array, or a Stack, whose matrices are read one at a time."""


class LazyMapping(Mapping[str, T]):
    """A read-only mapping that calls `load` with the key each time a value is accessed. Its keys are fixed;
    any other raises KeyError."""

    def __init__(self, names: Iterable[str], load: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._load = load

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_tensor_names(directory: Path) -> TensorNames:
    """Reads tensors.json, which the config step wrote to `directory`, and returns it as a TensorNames: name
    of a parameter -> the checkpoint tensors whose rows, joined along axis 0, are the parameter.
    """
    return TensorNames.from_json(json.loads((directory / "tensors.json").read_bytes()))


def checkpoint(
    path: Path, config: ModelConfig, names: TensorNames, views: Views = PLAIN
) -> Mapping[str, Weight]:
    """Returns parameter name -> exact float32 values of the model in a checkpoint: an array, or a Stack of
    matrices. Values are read from the files again at each access.

    names: for each parameter, the tensors that hold it. views: the functions that dequantize the stored
    tensors and merge adapters; by default, tensors are used as they are. Raises CheckpointError at once for
    damaged headers and for tensors that are missing or do not fit the config, and at an access for a file
    that cannot be read.
    """
    sources = {source.param.name: source for source in locate(path, config, names, views)}

    def load(name: str) -> Weight:
        source = sources[name]
        rows = source.rows // source.param.count

        def matrix(index: int) -> NDArray[np.float32]:
            with Rows() as reader:
                return reader.wide(source, index * rows, (index + 1) * rows)

        if source.param.matrix is None or len(source.param.shape) == 2:
            return matrix(0)
        return Stack((source.param.count, *source.param.matrix), matrix)

    return LazyMapping(sources, load)
