"""Reads the importance of the columns of a model's matrices, which a step `calibrate/<model>` measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INPUT = "calibration"
"""Name of the step input that is the directory with the importance of columns."""
IMPORTANCE = "importance.npz"
"""Name of the file in it: arrays named after parameters, float32 [columns], each the mean square of the
activations that are multiplied with a column, rounded to five significant bits.
"""

REPORT = "calibration.json"
"""Name of the file in it that bundles contain: a JSON object with the number of `prompts` and of `tokens`,
the names of the `matrices` whose columns were measured, and the `blake3` of IMPORTANCE.
"""


def importance_of(inputs: Mapping[str, Path]) -> Mapping[str, NDArray[np.float32]]:
    """Returns name of a matrix -> importance of its columns, float32 [columns], from the input of a step that
    packs weights; {} for a step without calibration. Matrices of experts are absent.
    """
    if INPUT not in inputs:
        return {}
    import numpy as np

    with np.load(inputs[INPUT] / IMPORTANCE) as arrays:
        return {name: arrays[name] for name in arrays.files}
