"""Reads the quantizations of a recipe that name a budget (a limit of bits per weight, size or KL divergence)
instead of a scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from mlcbuild_format import sizes

from mlcbuild.canon import digest
from mlcbuild.documents.document import Where
from mlcbuild.errors import did_you_mean
from mlcbuild.quant import Scheme
from mlcbuild.quant.format import layouts
from mlcbuild.quant.scheme import Budget, BudgetKind
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe.reading import Reading

KINDS: tuple[BudgetKind, ...] = get_args(BudgetKind)
CANDIDATES = ("q4a8_1", "q4a8_2", "q5a8_1", "q5a8_2", "q6a8_2", "q8a8_1")
"""Names of the schemes from which one is chosen for each matrix under a budget of size or loss, if the recipe
names none; they are sorted by size before use."""


def is_budget(reading: Reading, where: Where) -> bool:
    """Returns True if a quantization in a recipe states neither a scheme nor overrides, and so must state a
    budget: a limit of bits, size or KL divergence. For an item of a list, returns True only if it states one.
    where: its path in the recipe. Keys that exclude each other (a budget, and a scheme, overrides, calibrate
    or another budget), overrides without a scheme, and a quantization without scheme and budget, become
    problems of the recipe."""
    keys = reading.mapping(*where).keys()
    kinds = [kind for kind in KINDS if kind in keys]
    if isinstance(where[-1], int):
        return _is_listed_budget(reading, where, kinds)
    listed = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
    if "scheme" in keys or "overrides" in keys:
        for key in (*kinds, *(["candidates"] if "candidates" in keys else [])):
            message = f"'{key}' belongs to a budget, which chooses scheme and overrides itself; remove either"
            reading.report((*where, key), message, on_key=True)
        if "scheme" not in keys:
            reading.report(where, f"'{where[-1]}' needs the key 'scheme', the scheme of all other parameters")
        return False
    if not kinds:
        reading.report(where, f"'{where[-1]}' needs the key 'scheme', or a budget: {listed}")
    elif "calibrate" in keys:
        message = "a budget measures schemes without calibration; calibrate the fragment that it writes"
        reading.report((*where, "calibrate"), message, on_key=True)
    _report_further(reading, where, kinds)
    return True


def _is_listed_budget(reading: Reading, where: Where, kinds: Sequence[BudgetKind]) -> bool:
    """Returns True if an item of a recipe's list of quantizations states a budget: a limit of bits, size or
    KL divergence. Adds a problem to the recipe's list for each key that is allowed only where a quantization
    has a name (scheme, overrides, calibrate), for an item with neither these nor a budget, and for each
    further budget. where: path of the item in the recipe; kinds: those of its keys that state a budget, such
    as "max_size"."""
    named = [key for key in ("scheme", "overrides", "calibrate") if key in reading.mapping(*where)]
    for key in named:
        message = (
            f"'{key}' needs a name in place of the list: write quantizations as a mapping of names to schemes"
        )
        reading.report((*where, key), message, on_key=True)
    if not kinds and not named:
        listed = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        reading.report(where, f"a mapping in a list of quantizations needs a budget: {listed}")
    _report_further(reading, where, kinds)
    return bool(kinds)


def _report_further(reading: Reading, where: Where, kinds: Sequence[BudgetKind]) -> None:
    """Adds a problem to the recipe's list for each further budget of a quantization, which may have only one:
    a limit of bits, size or KL divergence. where: path of the quantization in the recipe; kinds: those of its
    keys that state a budget, such as "max_size", in order."""
    for kind in kinds[1:]:
        message = f"'{kind}' and '{kinds[0]}' are two budgets; give each a quantization of its own"
        reading.report((*where, kind), message, on_key=True)


def listed_name(reading: Reading, where: Where) -> str | None:
    """Returns the name of a quantization in a list: the item itself if it is text, or for a budget its kind
    and value without spaces, such as max_size-800MB or target_bits-4.5; of several budgets the first of
    target_bits, max_size and max_kl counts. Returns None for an item without a valid name, and adds no
    problem to the recipe's list. where: path of the item in the recipe."""
    text = reading.text(*where)
    if text is not None:
        return text
    kind = next((kind for kind in KINDS if kind in reading.mapping(*where)), None)
    value = None if kind is None else reading.get(*where, kind)
    if isinstance(value, str):
        return f"{kind}-{value.replace(' ', '')}" if _is_size(value) else None
    return f"{kind}-{value:g}" if isinstance(value, int | float) else None


def _is_size(text: str) -> bool:
    try:
        sizes.parse(text)
    except ValueError:
        return False
    return True


def read_budget(reading: Reading, where: Where) -> Scheme | None:
    """Reads a recipe's quantization that names a budget (a limit of bits, size or KL divergence) and
    candidate schemes instead of one scheme, and returns it as a `Scheme` with that budget, whose name is
    derived from limit and candidates; None for an invalid one, with a problem added to the recipe's list.
    where: its path in the recipe."""
    keys = reading.mapping(*where).keys()
    kind = next((kind for kind in KINDS if kind in keys), None)
    candidates = _candidates(reading, where)
    limit = None if kind is None else _limit(reading, where, kind)
    if kind is None or limit is None or candidates is None:
        return None
    budget = Budget(kind, limit, candidates)
    content = [kind, repr(limit), [scheme.name for scheme in candidates]]
    largest = candidates[-1]
    name = f"budget-{digest('scheme/1', content)[:8]}"
    return Scheme(name, largest.format, largest.activation_bits, budget=budget)


def _limit(reading: Reading, where: Where, kind: BudgetKind) -> float | None:
    if kind != "max_size":
        value = reading.get(*where, kind)
        return float(value) if isinstance(value, int | float) else None
    text = reading.text(*where, kind)
    try:
        return None if text is None else float(sizes.parse(text))
    except ValueError as error:
        reading.report((*where, kind), f"'{kind}' {error}")
        return None


def _candidates(reading: Reading, where: Where) -> tuple[Scheme, ...] | None:
    """Returns the candidate schemes from which one is chosen for each matrix under a budget, from the
    smallest to the largest: those that the recipe lists in the quantization at the path `where`, or six
    default ones if it lists none. Returns None, with a problem added to the recipe's list, if one is invalid
    or fewer than two are listed."""
    names, is_valid = list(CANDIDATES), True
    if "candidates" in reading.mapping(*where):
        count = len(reading.items(*where, "candidates"))
        texts = [reading.text(*where, "candidates", i) for i in range(count)]
        names, is_valid = [name for name in texts if name is not None], None not in texts
        if is_valid and len(names) < 2:
            message = f"a budget chooses among at least two candidates, found {len(names)}"
            reading.report((*where, "candidates"), message)
            is_valid = False
    for i, name in enumerate(names):
        if name not in SCHEMES:
            message = f"candidate '{name}' is no built-in scheme; {did_you_mean(name, SCHEMES)}"
            reading.report((*where, "candidates", i), message)
            is_valid = False
    if not is_valid:
        return None
    return tuple(sorted((SCHEMES[name] for name in names), key=_size))


def _size(scheme: Scheme) -> tuple[float, str]:
    by_layout = layouts(scheme.format)
    return min(form.bits_per_weight for form in by_layout.values()), scheme.name
