"""Reads the `quantizations` and `targets` sections of a recipe."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.canon import digest
from mlcbuild.documents.document import Where
from mlcbuild.errors import SetupError, UsageError, did_you_mean
from mlcbuild.quant import Scheme, as_is
from mlcbuild.quant.format import layouts
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe.budgets import is_budget, listed_name, read_budget
from mlcbuild.recipe.reading import Reading
from mlcbuild.recipe.settings import prompts_fault, read_prompts
from mlcbuild.targets import presets
from mlcbuild.targets.target import Target


def read_schemes(reading: Reading) -> dict[str, Scheme]:
    """Reads the `quantizations` of a recipe, and returns name in the recipe -> quantization scheme for the
    valid entries. In a list, the name is the item itself or, for a budget, its limit, such as max_size-800MB.
    For each of the others, such as a second budget of one name, a problem is added to the recipe's list. In a
    mapping, an entry called like a built-in scheme, but with another value than that name, is a problem, too,
    and in the result. reading: the recipe's data and its problems."""
    schemes: dict[str, Scheme] = {}
    for i in range(len(reading.items("quantizations"))):
        place: Where = ("quantizations", i)
        text, name = reading.text(*place), listed_name(reading, place)
        scheme = _builtin(reading, place, text) if text is not None else _listed_budget(reading, place)
        if name in schemes and text is None:
            message = (
                f"an earlier budget is called '{name}', too: write quantizations as a mapping, which gives "
                "each a name of its own"
            )
            reading.report(place, message)
        elif name and scheme:
            schemes[name] = scheme
    for name, value in reading.mapping("quantizations").items():
        where: Where = ("quantizations", name)
        short = isinstance(value, str)
        if name in (*SCHEMES, as_is.NAME) and value != name:
            message = f"'{name}' is a built-in scheme: give your own quantization another name"
            reading.report(where, message, on_key=True)
        scheme = _builtin(reading, where, reading.text(*where)) if short else _read_scheme(reading, where)
        if scheme:
            schemes[name] = scheme
    return schemes


def _listed_budget(reading: Reading, where: Where) -> Scheme | None:
    """Reads an item of a recipe's list of quantizations that is a mapping, such as {max_size: 800MB}, and
    returns it as a scheme with that budget. Returns None for an invalid one, with a problem added to the
    recipe's list. where: path of the item."""
    if where in reading.bad or not is_budget(reading, where):
        return None
    return read_budget(reading, where)


def _builtin(reading: Reading, where: Where, name: str | None) -> Scheme | None:
    if name is None:
        return None
    if name == as_is.NAME:
        return as_is.AS_IS
    if name not in SCHEMES:
        names = [*SCHEMES, as_is.NAME]
        reading.report(where, f"quantization '{name}' is unknown; {did_you_mean(name, names)}")
    return SCHEMES.get(name)


def _read_scheme(reading: Reading, where: Where) -> Scheme | None:
    """Reads a quantization that is a mapping, and returns it as a scheme: a built-in scheme with overrides
    for some parameters and prompts for calibration, or a budget of size or loss. Returns None if scheme or
    budget are invalid; overrides without a valid pattern or scheme are left out, those whose pattern is
    repeated or has an empty part are not. For all of these a problem is added to the recipe's list. where:
    its path in the recipe.

    The scheme's name is derived from its contents except the prompts, so that it does not depend on the name
    in the recipe.
    """
    if is_budget(reading, where):
        return read_budget(reading, where)
    base = _builtin(reading, (*where, "scheme"), reading.text(*where, "scheme"))
    overrides: list[tuple[str, Scheme]] = []
    for i in range(len(reading.items(*where, "overrides"))):
        entry: Where = (*where, "overrides", i)
        match = reading.text(*entry, "match")
        scheme = _builtin(reading, (*entry, "scheme"), reading.text(*entry, "scheme"))
        if match is None or scheme is None:
            continue
        if as_is.is_as_is(scheme):
            message = "'as-is' cannot be an override; make it the scheme, and override the other parameters"
            reading.report((*entry, "scheme"), message)
            continue
        if not all(match.split("|")):
            reading.report((*entry, "match"), f"'{match}' has an empty pattern next to a '|'")
        if match in [pattern for pattern, _ in overrides]:
            reading.report((*entry, "match"), f"'{match}' is in an earlier override, which has precedence")
        overrides.append((match, scheme))
    if base is None:
        return None
    if overrides:
        content = [base.name, [[match, scheme.name] for match, scheme in overrides]]
        name = f"{base.name}-{digest('scheme/1', content)[:8]}"
        base = replace(base, name=name, overrides=tuple(overrides))
    return _calibrated(reading, where, base)


def _calibrated(reading: Reading, where: Where, scheme: Scheme) -> Scheme:
    """Returns `scheme` with the prompts under the key `calibrate` of a quantization, or unchanged if there is
    no such key. Invalid prompts become a problem of the recipe, and the result has () in their place. Prompts
    that none of its formats can use are a problem, too, but in the result. where: path of the quantization in
    the recipe. The scheme keeps its name, since libraries do not depend on the calibration."""
    prompts = read_prompts(reading, (*where, "calibrate"), prompts_fault)
    if prompts is None:
        return scheme
    parts = (scheme, *(other for _, other in scheme.overrides))
    if not any(map(_can_be_calibrated, parts)):
        names = ", ".join(name for name, other in SCHEMES.items() if _can_be_calibrated(other))
        message = f"no scheme of this quantization can be calibrated; those that can are {names}"
        reading.report((*where, "calibrate"), message, on_key=True)
    return replace(scheme, calibration=prompts)


def _can_be_calibrated(scheme: Scheme) -> bool:
    """Returns True if a scheme's format can choose scales by the importance of columns; False for `as-is`.
    Its overrides are not considered."""
    if as_is.is_as_is(scheme):
        return False
    return any(form.pack_calibrated is not None for form in layouts(scheme.format).values())


def read_targets(reading: Reading) -> dict[str, Target]:
    """Reads the `targets` of a recipe, and returns name in the recipe -> target (machine to compile for),
    with this name, for the valid entries. For each of the others a problem is added to the recipe's list. In
    a mapping, an entry called like a preset or `host`, but with another value than that name, is a problem,
    too, and in the result if it is valid. reading: the recipe's data and its problems. Raises SetupError or
    InputError if `targets` is a mapping and the presets of mlcbuild are missing or invalid."""
    resolved: dict[str, Target | None] = {}
    for i in range(len(reading.items("targets"))):
        name = reading.text("targets", i)
        if name:
            resolved[name] = _resolve(reading, ("targets", i), name)
    for name in reading.mapping("targets"):
        where: Where = ("targets", name)
        text = reading.text(*where)
        if name in (*presets.presets(), presets.HOST) and text != name:
            kind = "this machine" if name == presets.HOST else "a preset"
            reading.report(where, f"'{name}' is {kind}: give your own target another name", on_key=True)
        if text is not None:
            resolved[name] = _resolve(reading, where, text)
        else:
            resolved[name] = presets.parse(reading.document, where, name, reading.problems)
    return {name: replace(target, name=name) for name, target in resolved.items() if target}


def _resolve(reading: Reading, where: Where, name: str) -> Target | None:
    try:
        return presets.resolve(name)
    except (UsageError, SetupError) as error:
        reading.report(where, str(error))
        return None
