"""Measures how strongly prompts use each column of each matrix of a model: writes the mean squares of the
activations that are multiplied with the columns, as importance.npz, and a report. It is the step
`calibrate/<model>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcbuild.canon import Json, file_digest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.bundles.reference import Reference
    from mlcbuild.bundles.reference_logits import TokenProgress

MOST_TOKENS = 8192
"""Maximum number of tokens, of all prompts together, that a calibration measures. With more, the mean squares
of the activations change by less than they are rounded; and all these tokens' activations are in memory
together."""


def calibrate(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: writes to `out` importance.npz, the importance of each column of each matrix of
    a model (the mean square of the activations that are multiplied with it, as quant.importance reads it),
    and calibration.json, a report: the numbers of prompts and tokens, the names of the matrices, and the
    BLAKE3 digest of importance.npz.

    params and inputs: those of the step `reference` (prompts, checkpoint, config and tokenizer), whose
    prompts are shortened alike; only the first MOST_TOKENS tokens count. Activations are those of the exact
    model; experts of a mixture are left out. Raises UsageError when no prompt has two tokens, CheckpointError
    for a checkpoint that cannot be read."""
    import numpy as np

    from mlcbuild.bundles.reference import Reference
    from mlcbuild.bundles.reference_logits import TokenProgress, opened_prompts
    from mlcbuild.quant.importance import IMPORTANCE, REPORT

    config, weights, window, prompts = opened_prompts(params, inputs, "calibrate")
    sequences = _first(prompts, MOST_TOKENS)
    count = sum(map(len, sequences))
    model = Reference(config, weights, context_window=window)
    sums = _sums_of_squares(model, sequences, TokenProgress(count, len(config.layers)))
    means: dict[str, Any] = {name: _rounded(total / count) for name, total in sorted(sums.items())}
    np.savez(out / IMPORTANCE, **means)
    report: dict[str, Json] = {
        "prompts": len(sequences),
        "tokens": count,
        "matrices": list[Json](sorted(sums)),
        "blake3": file_digest(out / IMPORTANCE),
    }
    (out / REPORT).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _first(sequences: Sequence[list[int]], most: int) -> list[list[int]]:
    """Returns the first of the token sequences, in their order, until they have `most` tokens together; the
    last of them is cut where that number is reached. Returns all of them if they have fewer.
    """
    chosen: list[list[int]] = []
    for tokens in sequences:
        if most <= 0:
            break
        chosen.append(tokens[:most])
        most -= len(tokens)
    return chosen


def _sums_of_squares(
    model: Reference, sequences: Sequence[list[int]], note: TokenProgress
) -> dict[str, NDArray[np.float64]]:
    """Returns name of a matrix -> sums, over the tokens of all prompts, of the squared activations that meet
    each of its columns, float64 [columns]. sequences: token ids of each prompt; note: counts tokens for
    progress.

    Layers are computed one after another, each for all prompts, so that weights are read once. Sums are added
    in the order of the prompts, so that no result depends on the number of threads.
    """
    import numpy as np

    from mlcbuild.bundles import reference
    from mlcbuild.bundles.weight_losses import in_threads, with_layer

    sums: dict[str, NDArray[np.float64]] = {}
    states = in_threads(lambda tokens: reference.embedded(model, tokens), sequences)
    for index in range(len(model.config.layers)):
        results = in_threads(partial(_layer, with_layer(model, index), index, note), states)
        states = [x for x, _ in results]
        for name, squares in (item for _, measured in results for item in measured):
            sums[name] = sums[name] + squares if name in sums else squares
    head = "embed.weight" if model.config.tie_embeddings else "lm_head.weight"
    sums[head] = reduce(np.add, (_squares(reference.normalized(model, x)) for x in states))
    return sums


def _layer(
    model: Reference, index: int, note: TokenProgress, x: NDArray[np.float32]
) -> tuple[NDArray[np.float32], list[tuple[str, NDArray[np.float64]]]]:
    """Computes a layer for one prompt; returns (residual stream [n, hidden] after it, pairs of a matrix's
    name and the sums of the squares of the activations that were multiplied with each of its columns). x:
    residual stream before the layer.
    """
    from mlcbuild.bundles import reference

    measured: list[tuple[str, NDArray[np.float64]]] = []

    def record(name: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        measured.append((name, _squares(rows)))
        return rows

    after = reference.layer(replace(model, rounded=record), index, x)[0]
    note.add(len(x))
    return after, measured


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the sum of squares of each column of activations, float64 [columns]. rows: the activations, [n,
    columns].
    """
    import numpy as np

    summed: NDArray[np.float64] = np.square(rows, dtype=np.float64).sum(axis=0)
    return summed


def _rounded(means: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns an array of mean squares rounded to five significant bits, as float32 of the same shape.
    Further bits would depend on the order in which the machine's linear algebra adds.
    """
    import numpy as np

    mantissas, exponents = np.frexp(means)
    rounded: NDArray[np.float32] = np.ldexp(np.rint(mantissas * 32) / 32, exponents).astype(np.float32)
    return rounded
