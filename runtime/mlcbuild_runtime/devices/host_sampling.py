"""Samples tokens from logits on the host, in float64: from a whole row, or from its 64 largest logits."""

from __future__ import annotations

from math import exp, inf

import numpy as np
from mlcbuild_format import abi
from numpy.typing import NDArray

from mlcbuild_runtime.executor.batch import Masks
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow

_MARGIN = 1e-4
"""Assumed relative error of a sum of float32 exponentials; the real error is smaller."""


def apply_masks(logits: Floats, masks: Masks) -> None:
    """Sets the logits of tokens that are not allowed to minus infinity in `logits`, the caller's array of the
    shape [rows, vocabulary]. masks: for each mask (index of a row of logits, int32 words with one bit per
    token, lowest token first, 1 if the token is allowed)."""
    for row, mask in masks:
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
        logits[row, bits[: logits.shape[1]] == 0] = -np.inf


def draw(logits: Floats, row: SamplingRow) -> int:
    """Returns a token sampled in float64 from one row of logits, float32 [vocabulary]; at temperature 0, the
    most likely one. row: its sampling parameters, whose filters apply in the order top_k, min_p, top_p.
    Returns NO_TOKEN (-2) if they ask for no token, INVALID_TOKEN (-1) if a logit is NaN or the largest one is
    infinite."""
    params = abi.SamplingParams(*row)
    if params.inverse_temperature < 0:
        return abi.NO_TOKEN
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return abi.INVALID_TOKEN
    if params.inverse_temperature == 0:
        return best
    below = logits.astype(np.float64) - float(logits[best])
    return int(_drawn(below, params, None))


def _drawn(below: NDArray[np.float64], params: abi.SamplingParams, total: float | None) -> int:
    """Applies the temperature and the filters in `params`, and returns the index in `below` of the token that
    their random number then selects. below: each logit minus the row's largest one, of all tokens or of the
    most likely ones; total: the sum of exp(logit - largest) over all tokens, to which top_p refers, if
    `below` lacks some that the filters would keep; else None."""
    allowed = below >= params.logit_drop
    if 0 < params.top_k < len(below):
        allowed &= below >= np.partition(below, -int(params.top_k))[-int(params.top_k)]
    weights = np.where(allowed, np.exp(below * params.inverse_temperature), 0.0)
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        kept_count = int(np.searchsorted(sums, params.top_p * (sums[-1] if total is None else total))) + 1
        weights[weights < weights[order[min(kept_count, len(order)) - 1]]] = 0.0
    sums = np.cumsum(weights)
    return min(int(np.searchsorted(sums, params.random * sums[-1], side="right")), len(sums) - 1)


def draw_from_top(top: NDArray[np.int32], row: SamplingRow) -> int | None:
    """Returns the token that sampling from a whole row of logits would return, or None if the row's 64
    largest logits do not determine it; INVALID_TOKEN (-1) if a logit is NaN or the largest one is infinite.

    row: sampling parameters with a temperature above 0. top: int32 words that hold the bits of the largest
    logit, those of the sum of exp(logit - largest) over the whole row, and then for each of the 64 largest
    logits, in any order, its bits and its token.
    """
    params = abi.SamplingParams(*row)
    largest, total = top[:2].view(np.float32)
    # A NaN may have the smallest key of the kernel, but the sum is NaN then.
    if not (np.isfinite(largest) and np.isfinite(total)):
        return abi.INVALID_TOKEN
    order = np.argsort(top[3::2])
    tokens, values = top[3::2][order], top[2::2][order].view(np.float32)
    below = values.astype(np.float64) - float(largest)
    lowest, count = float(below.min()), len(below)
    closed = lowest < params.logit_drop
    if 0 < params.top_k < count:
        closed |= bool(np.partition(below, -int(params.top_k))[-int(params.top_k)] > lowest)
    if closed:
        return int(tokens[_drawn(below, params, None)])
    # With another filter, top_p refers to a sum over tokens that are not all known here.
    if params.top_p >= 1 or params.inverse_temperature != 1 or params.logit_drop > -inf or params.top_k > 0:
        return None
    sums = np.cumsum(np.sort(np.exp(below))[::-1])
    near = np.abs(sums - params.top_p * float(total)) <= _MARGIN * float(total)
    last = sums[-1] - exp(lowest)
    if near.any() or last < params.top_p * float(total):
        return None
    return int(tokens[_drawn(below, params, float(total))])
