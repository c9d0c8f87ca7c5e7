"""Computes a mixture of experts in NumPy: the experts that each row (token) chooses, their weights, and their
sum.

Shapes: n rows, e experts, c choices of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mlcbuild.models import Clamp, Experts, Router
from mlcbuild.models.experts import SMALLEST_LOGIT

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Weight: TypeAlias = Callable[..., Array]
"""Function from (name of a parameter within the layer, optional index of an expert) to the parameter's
values, or to those of one expert.
"""
Gate: TypeAlias = Callable[[Array], Array]


def experts(spec: Experts, weight: Weight, activation: Gate, x: Array) -> Array:
    """Returns, for each of n tokens, the sum of the chosen experts' outputs, weighted by the router, plus, if
    there are shared experts, their output times that of their gate (1 without a gate), [n, hidden]. x:
    normalized activations [n, hidden]; weight: function from (parameter's name, optional index of an expert)
    to values; activation: the activation function of the gates.
    """
    logits = x @ weight("mlp.router.weight").T
    if spec.router.bias:
        logits = logits + weight("mlp.router.bias")
    correction = weight("mlp.router.correction") if spec.router.correction else None
    chosen, weights = route(spec.router, spec.chosen, logits, correction)
    total = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        total[rows] += weights[rows, places, None] * _expert(spec, weight, activation, (x[rows], expert))
    if spec.shared_size:
        pair = x @ weight("mlp.shared.gate_up.weight").T
        shared = _gated(None, activation, pair) @ weight("mlp.shared.down.weight").T
        if spec.shared_gate:
            shared = shared * _sigmoid(x @ weight("mlp.shared_gate.weight").T)
        total = total + shared
    return total


def route(router: Router, count: int, logits: Array, correction: Array | None) -> tuple[Array, Array]:
    """Chooses `count` of e experts for each of n rows from the router's logits [n, e], and returns (indices
    of the chosen experts, int [n, count]; their weights, [n, count]). Scores are the softmax or sigmoid of
    the logits; weights are the chosen scores, normalized to sum 1 if the router says so, times the router's
    scale. correction: numbers [e] added to the scores only for choosing, or None. A router with groups of
    experts chooses from the best groups only, compared, as `router.group_by_largest` says, by their largest
    score or by the sum of their two largest; one of the kind SparseMixer always chooses two, with weights of
    its own.

    The largest score, with its correction, comes first; of equal scores, the lowest index.
    """
    if router.scores == "sparsemixer":
        assert router.jitter is not None
        return _sparsemixer(logits, logits.dtype.type(router.jitter))
    scores = _softmax(logits) if router.scores == "softmax" else _sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = choice.reshape(len(choice), router.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -1 if router.group_by_largest else -2 :].sum(axis=-1)
        is_kept = np.zeros(best.shape, bool)
        np.put_along_axis(is_kept, _largest(best, router.groups_kept), True, axis=-1)
        choice = np.where(is_kept[..., None], grouped, -np.inf).reshape(choice.shape)
    chosen = _largest(choice, count)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if router.normalized:
        # A sum of sigmoids may be 0 in float32; that of a softmax is at least 1 / e.
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), weights.dtype.type(1e-20))
    return chosen, weights * weights.dtype.type(router.scale)


def _largest(scores: Array, count: int) -> Array:
    """Returns the column indices, int [n, count], of the `count` largest scores in each row of scores [n, e],
    largest first; of equal scores the lowest index comes first.
    """
    order: Array = np.argsort(-scores, axis=-1, kind="stable")
    return order[:, :count]


def _sparsemixer(logits: Array, jitter: Any) -> tuple[Array, Array]:
    rows, left = np.arange(len(logits)), logits.copy()
    chosen, weights = np.empty((len(logits), 2), np.intp), np.empty((len(logits), 2), logits.dtype)
    for turn in range(2):
        largest = left.max(axis=-1, keepdims=True)
        size = np.maximum(np.maximum(np.abs(logits), largest), SMALLEST_LOGIT)
        far = (largest - logits) / size > 2 * jitter
        chosen[:, turn] = left.argmax(axis=-1)
        weights[:, turn] = _softmax(np.where(far, -np.inf, left))[rows, chosen[:, turn]]
        left[rows, chosen[:, turn]] = -np.inf
    return chosen, weights


def _expert(spec: Experts, weight: Weight, activation: Gate, inputs: tuple[Array, int]) -> Array:
    """Returns the output rows [n, hidden] of one expert, not yet weighted by the router. inputs: (normalized
    rows [n, hidden] of the tokens that chose this expert, index of the expert).
    """
    x, expert = inputs
    pair = x @ weight("mlp.experts.gate_up.weight", expert).T
    if spec.bias:
        pair = pair + weight("mlp.experts.gate_up.bias", expert)
    inner = _gated(spec.clamp, activation, pair)
    bias = weight("mlp.experts.down.bias", expert) if spec.bias else x.dtype.type(0)
    y: Array = inner @ weight("mlp.experts.down.weight", expert).T + bias
    return y


def _gated(clamp: Clamp | None, activation: Gate, pair: Array) -> Array:
    """Returns the product [n, size] of an expert's activated gates and its ups. pair: [n, 2 * size], the
    gates first, then the ups. With a Clamp, gates are limited to at most its limit and ups to -limit ..
    limit, and the result is (up + 1) * gate * sigmoid(alpha * gate) instead.
    """
    gate, up = np.split(pair, 2, axis=-1)
    if clamp is None:
        passed: Array = activation(gate) * up
        return passed
    limit, alpha = pair.dtype.type(clamp.limit), pair.dtype.type(clamp.alpha)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    passed = (up + 1) * gate
    passed *= _sigmoid(alpha * gate)
    return passed


def _softmax(logits: Array) -> Array:
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: Array = shares / shares.sum(axis=-1, keepdims=True)
    return scores


def _sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)), computed through tanh, which does not overflow."""
    half = x.dtype.type(0.5)
    share: Array = half * (1 + np.tanh(half * x))
    return share
