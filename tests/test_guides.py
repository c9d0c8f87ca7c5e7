"""Tests that the recipes, messages and versions in the guides for devices, upgrading and troubleshooting are
those of the program."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mlcbuild.checkpoints import lock
from mlcbuild.models import ModelConfig, layers
from mlcbuild.models.experts import Experts, Router
from mlcbuild.models.family import LAYER, ConfigRules, TensorRules
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.param import Activation
from mlcbuild.models.tensor_names import WHOLE
from tests.conftest import ROOT, TINY
from tests.test_tour import Tour, free_port, shell
from tests.tour import blocks


def section(document: str, heading: str) -> str:
    """Returns the text of a guide from a heading to the next one of the same level."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_columns(text: str) -> list[str]:
    """Returns the names in backticks at the beginning of the rows of all tables in a text."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@cache
def strings() -> frozenset[str]:
    """Returns every string in the source of builder and runtime; f-strings without their values."""
    packages = ("mlcbuild", "runtime/mlcbuild_format", "runtime/mlcbuild_runtime")
    files = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return frozenset(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_recipe_of_the_targets_guide(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "recipes" / "models" / "tiny")
    with shell(tmp_path) as terminal:
        tour = Tour(terminal, tmp_path, free_port())
        taken = [block for block in blocks("targets/README.md") if block.mark or block.language == "console"]
        for block in taken:
            tour.take(block)
    assert [block.language for block in taken] == ["yaml", "console"]


@pytest.mark.xdist_group("strings")  # one process reads the source
def test_messages_of_the_troubleshooting_table_are_those_of_the_program() -> None:
    messages = first_columns(section("mlcbuild/README.md", "Troubleshooting"))
    assert len(messages) >= 15
    assert [message for message in messages if not any(message in text for text in strings())] == []


@pytest.mark.xdist_group("strings")
def test_formats_of_the_upgrading_table_are_those_of_the_program() -> None:
    text = section("mlcbuild/README.md", "Upgrading")
    stated = re.findall(r"^\|[^|]*\| `([a-z-]+/\d+)` \|", text, re.MULTILINE)
    assert len(stated) == 7
    assert set(stated) <= strings()
    assert f"| `version: {lock.VERSION}` |" in text


def rows(text: str) -> dict[str, str]:
    """Returns, for each row of the tables in a text, name in its first column -> text of its second
    column."""
    return dict(re.findall(r"^\| `(\w+)`[^|]* \| (.*) \|$", text, re.MULTILINE))


BLOCKS = (
    layers.LayerSpec,
    layers.Attention,
    LatentAttention,
    layers.Dense,
    Experts,
    Router,
    layers.Norms,
    layers.RmsNorm,
    layers.LayerNorm,
    ModelConfig,
)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_guide_lists_the_fields_of_each_block(block: Any) -> None:
    required, optional = list[str](), list[str]()
    for field in dataclasses.fields(block):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        (required if is_required else optional).append(field.name)
    text = rows(section("mlcbuild/README.md", "Extend: a model family"))[block.__name__]
    listed = [re.findall(r"\w+", part) for part in f"{text} \\|".split("\\|")[:2]]
    assert listed == [required, optional]


def test_the_guide_lists_the_values_of_fields_with_few() -> None:
    text = section("mlcbuild/README.md", "Extend: a model family")
    stated = dict(re.findall(r"^\| (\w+) \| (`.*) \|$", text, re.M))
    values = {
        "residual": layers.Residual,
        "activation": Activation,
        "qk_norm_span": layers.HeadNorm,
        "alibi": layers.Alibi,
        "scores": get_type_hints(Router)["scores"],
    }
    assert {name: re.findall(r"`(\w+)`", text) for name, text in stated.items()} == {
        name: [*get_args(value)] for name, value in values.items()
    }


def test_the_guide_lists_the_rules_of_families() -> None:
    text = section("mlcbuild/README.md", "Extend: a model family")
    for rules in (ConfigRules, TensorRules):
        table = text.partition(f"| `{rules.__name__}` |")[2].partition("\n\n")[0]
        first_column = "".join(re.findall(r"^\| (`[^|]*) \|", table, re.M))
        assert {*re.findall(r"`(\w+)`", first_column)} == {field.name for field in dataclasses.fields(rules)}


def test_the_guide_lists_the_tensors_of_parameters() -> None:
    text = section("mlcbuild/README.md", "Extend: a model family").partition("| parameter |")[2]
    stated = {}
    for left, right in re.findall(r"^\| ([^|]*`[^|]*) \| ([^|]*) \|$", text, re.M):
        names, sources = re.findall(r"`([\w.]+)`", left), re.split(r"; (?:else )?", right)
        for name, tensors in zip(names, sources, strict=True):
            stated[f"{name}.weight"] = tuple(f"{tensor}.weight" for tensor in tensors.split(", "))
    assert len(stated) == 12
    assert stated == {name: {**LAYER, **WHOLE}[name] for name in stated}


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "targets").glob("*.yaml")))
def test_every_preset_is_in_the_guide(preset: str) -> None:
    assert preset in first_columns((ROOT / "targets" / "README.md").read_text(encoding="utf-8"))
