"""Reads the importance of the columns of a model's matrices, float32 [columns] for each matrix, which the
step `calibrate/<model>` of a build measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INPUT = "calibration"
"""Name of the step input that is the output directory of the step `calibrate/<model>`, with the importance of
matrix columns."""
IMPORTANCE = "importance.npz"
"""Name of the file in which the step `calibrate/<model>` stores the importance of matrix columns: an array
float32 [columns] under each parameter's name, the mean square of the activations that are multiplied with a
column, rounded to five significant bits."""

REPORT = "calibration.json"
"""Name of the file in which the step `calibrate/<model>` states what it measured, and which bundles include:
a JSON object with the number of `prompts` and of `tokens`, the names of the `matrices`, and the `blake3` of
importance.npz."""


def importance_of(inputs: Mapping[str, Path]) -> Mapping[str, NDArray[np.float32]]:
    """Returns name of a matrix -> importance of its columns, float32 [columns], for a step that packs
    weights: the mean square of the activations that are multiplied with a column. Matrices of experts are
    absent. inputs: name of an input of the step -> its directory; without an input "calibration" the result
    is {}."""
    if INPUT not in inputs:
        return {}
    import numpy as np

    with np.load(inputs[INPUT] / IMPORTANCE) as arrays:
        return {name: arrays[name] for name in arrays.files}
