"""Computes the size in bytes that a budget of size allows a model's stored weights, and expresses a choice of
one scheme per parameter as one scheme with overrides for name patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from mlcbuild_format import sizes

from mlcbuild.models import Param
from mlcbuild.quant.as_is import name_patterns
from mlcbuild.quant.scheme import BudgetKind, Storage, stored_bytes


def base_and_overrides(
    names: Mapping[str, str], params: Sequence[Param]
) -> tuple[str, list[tuple[str, str]]]:
    """Returns (name of the scheme that most parameters have, overrides for the others as pairs (pattern of
    names, scheme name)). Of schemes with equally many, the first in alphabetical order counts. names:
    parameter name -> scheme name, in the model's order, not empty; params: all parameters."""
    by_scheme: dict[str, list[str]] = {}
    for param, scheme in names.items():
        by_scheme.setdefault(scheme, []).append(param)
    ordered = sorted(by_scheme.items(), key=lambda item: (-len(item[1]), item[0]))
    every = [param.name for param in params]
    overrides = [
        (pattern, scheme) for scheme, matrices in ordered[1:] for pattern in name_patterns(matrices, every)
    ]
    return ordered[0][0], overrides


def weight_count(params: Sequence[Param]) -> int:
    """Returns the number of weights of a model. Its stored bits divided by this number are bits per
    weight."""
    return sum(prod(param.shape) for param in params)


def byte_limit(kind: BudgetKind, limit: float, params: Sequence[Param]) -> int | None:
    """Returns the maximum size of a model's stored tensors under a budget, in bytes; None for the budget
    `max_kl`. limit: bits per weight for the budget `target_bits`, bytes for `max_size`; the result is rounded
    down."""
    if kind == "max_kl":
        return None
    return int(limit if kind == "max_size" else limit * weight_count(params) / 8)


def budget_fault(
    kind: BudgetKind, limit: float, candidates: Sequence[Storage], params: Sequence[Param]
) -> str:
    """Checks whether a budget of size can be met: `limit` bits per weight or bytes, depending on `kind`.
    Returns an error message if the model exceeds it even in the smallest candidate scheme for each parameter;
    "" if it does not, or for the budget `max_kl`, which limits loss."""
    most = byte_limit(kind, limit, params)
    least = sum(min(stored_bytes([param], candidate) for candidate in candidates) for param in params)
    if most is None or least <= most:
        return ""
    names = ", ".join(candidate.name for candidate in candidates)
    size = f"{8 * least / weight_count(params):.4g} bits a weight, {sizes.show(least)}"
    stated = f"{limit:g}" if kind == "target_bits" else sizes.show(limit)
    return (
        f"{kind} is {stated}, but the smallest mixture of {names} has {size}; raise {kind}, or add smaller "
        "candidates"
    )
