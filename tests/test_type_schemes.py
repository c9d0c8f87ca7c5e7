"""Tests of all model types with all schemes, on tiny random checkpoints. ci/bench/type_schemes also runs
whole builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.models import parsing
from tests import typecheckpoints, typegoldens
from tests.libharness import EVERY
from tests.schemes import SCHEMES

TYPES = parsing.family_names() if EVERY else ("bloom", "deepseek_v3", "gpt_oss", "qwen2_moe")


def test_every_type_has_a_checkpoint() -> None:
    names = {*typecheckpoints.FOLDERS, *typecheckpoints.STACKS, *typegoldens.CONFIGS}
    assert set(parsing.family_names()) <= names
    assert set(typecheckpoints.LIMITS) == set(SCHEMES)


@pytest.mark.parametrize("name", TYPES)
def test_type_in_every_scheme_computes_about_the_same(name: str, tmp_path: Path) -> None:
    checkpoint = typecheckpoints.write(name, tmp_path / name)
    exact = typecheckpoints.exact_logits(checkpoint)
    for scheme, limit in typecheckpoints.LIMITS.items():
        loss = typecheckpoints.loss(checkpoint, SCHEMES[scheme], tmp_path / scheme, exact=exact)
        assert loss <= limit, scheme
