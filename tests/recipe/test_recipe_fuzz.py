"""Tests that any bytes in place of a recipe give a recipe or a list of problems, and that a recipe which
mlcbuild writes can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlcbuild.documents.document import Data
from mlcbuild.errors import InputError
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe import RequestedLimits, expand, load
from mlcbuild.targets.presets import resolve
from tests.recipes import HEAD, project, read

__all__ = ["project"]

_TEXT = """
version models quantizations targets matrix include exclude model quantization target compile verify bundle
output vars lock context_window prefill_chunk max_batch prompts max_kl source scheme overrides match
name extends triple cpu features tiny q4f16_1 x86-64-v3 host models/tiny hf://a/b ${x} ${ a/../b
~ . .. {model} dist
"""
_WORDS = st.sampled_from(_TEXT.split())
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=6),
    max_leaves=30,
)
_SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1) | _VALUES,
        "models": st.just({"tiny": "models/tiny"}) | _VALUES,
        "quantizations": st.just(["q4f16_1"]) | _VALUES,
        "targets": st.just(["x86-64-v3"]) | _VALUES,
        "vars": _VALUES,
        "matrix": _VALUES,
        "compile": _VALUES,
        "verify": _VALUES,
        "bundle": _VALUES,
        "lock": _VALUES,
    },
)
_FUZZ = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@_FUZZ
@given(_SECTIONS)
def test_any_data_gives_a_recipe_or_problems(project: Path, value: dict[str, Data]) -> None:
    _load_or_fail(yaml.safe_dump(value, allow_unicode=True).encode())


@_FUZZ
@given(st.binary(max_size=100), st.integers(0, len(HEAD)), st.integers(0, 20))
def test_any_bytes_give_a_recipe_or_problems(project: Path, data: bytes, at: int, gone: int) -> None:
    _load_or_fail(HEAD.encode()[:at] + data + HEAD.encode()[at + gone :])


def _load_or_fail(data: bytes) -> None:
    Path("recipes/fuzz.yaml").write_bytes(data)
    try:
        recipe = load(Path("recipes/fuzz.yaml"))
    except InputError as error:
        assert error.problems
        assert all(problem.message and "\n\n" not in problem.message for problem in error.problems)
        return
    variants = expand(recipe)
    assert variants
    assert len({variant.name for variant in variants}) == len(variants)
    assert len({str(variant.output).lower() for variant in variants}) == len(variants)


_IDS = st.from_regex("[a-z][a-z0-9_]{0,3}", fullmatch=True)
_SETTINGS = st.fixed_dictionaries(
    {}, optional={"context_window": st.integers(600, 9000), "max_batch": st.integers(1, 99)}
)


@_FUZZ
@given(
    st.sets(_IDS, min_size=1, max_size=3),
    st.dictionaries(_IDS, st.sampled_from(sorted(SCHEMES)), min_size=1, max_size=3),
    st.dictionaries(_IDS, st.sampled_from(["x86-64-v2", "aarch64-linux"]), min_size=1, max_size=3),
    _SETTINGS,
)
def test_what_is_written_is_read(
    project: Path, models: set[str], schemes: dict[str, str], targets: dict[str, str], limits: dict[str, int]
) -> None:
    targets.pop("host", None)
    targets = targets or {"t": "x86-64-v2"}
    data = {
        "version": 1,
        "models": dict.fromkeys(sorted(models), "models/tiny"),
        "quantizations": schemes,
        "targets": targets,
        "compile": limits,
    }
    recipe = read(yaml.safe_dump(data, sort_keys=False))
    assert list(recipe.models) == sorted(models)
    assert {name: scheme.name for name, scheme in recipe.schemes.items()} == schemes
    assert {name: replace(item, name="") for name, item in recipe.targets.items()} == {
        name: replace(resolve(preset), name="") for name, preset in targets.items()
    }
    variants = expand(recipe)
    assert [(v.model.name, v.quantization, v.target.name) for v in variants] == [
        (model, scheme, target) for model in sorted(models) for scheme in schemes for target in targets
    ]
    assert {v.limits for v in variants} == {RequestedLimits(**limits)}
