"""Tests that the sizes of groups and tiles fit each other and are defined in a single module."""

from __future__ import annotations

import ast

from mlcbuild.quant.format import format_names, layouts
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE_ROWS
from tests.conftest import ROOT


def test_sizes_fit_each_other() -> None:
    assert QUADS * QUAD == GROUP
    for name in format_names():
        for form in layouts(name).values():
            assert form.group_size in (0, GROUP // 2, GROUP) and form.rows_per_index in (1, TILE_ROWS)


def test_no_other_module_defines_them() -> None:
    """Checks that only one module defines the sizes of groups and tiles: a second definition could change
    without the first."""
    names = {"GROUP", "QUAD", "QUADS", "TILE_ROWS", "PLANES"}
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mlcbuild").rglob("*.py")
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.Assign)
        if names & {target.id for target in node.targets if isinstance(target, ast.Name)}
    }
    assert modules == {"mlcbuild/quant/groups.py"}
