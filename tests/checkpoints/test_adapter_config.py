"""Tests of reading PEFT's adapter_config.json: the scale of each matrix, and the settings that are
refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from mlcbuild.errors import CheckpointError

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def read(tmp_path: Path, **changes: Any) -> AdapterConfig:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))
    return read_adapter_config(tmp_path)


def test_the_scale_is_alpha_by_rank(tmp_path: Path) -> None:
    settings = read(tmp_path)
    assert settings == AdapterConfig(16.0, 8) and settings.scale("layers.0.q_proj") == 2.0
    assert read(tmp_path, use_rslora=True).scale("x") == pytest.approx(16 / math.sqrt(8))
    flags = read(tmp_path, fan_in_fan_out=True, use_dora=True)
    assert (flags.transposed, flags.dora, flags.by_root) == (True, True, False)


def test_patterns_match_the_end_of_a_name(tmp_path: Path) -> None:
    settings = read(tmp_path, rank_pattern={"q_proj": 4, "layers.1.k_proj": 2}, alpha_pattern={"v.proj": 1})
    assert [
        settings.rank_of(f"layers.{i}.{name}") for i, name in ((0, "q_proj"), (1, "k_proj"), (2, "k_proj"))
    ] == [
        4,
        2,
        8,
    ]
    assert (
        settings.rank_of("xq_proj") == 8
        and settings.scale("a.q_proj") == 4.0
        and settings.scale("a.v_proj") == 1 / 8
    )


def test_fields_that_say_nothing_are_ignored(tmp_path: Path) -> None:
    more = {"target_modules": ["q_proj"], "lora_dropout": 0.1, "unknown": None, "other": False, "list": []}
    assert read(tmp_path, **more, init_lora_weights="gaussian") == AdapterConfig(16.0, 8)


def test_null_means_false(tmp_path: Path) -> None:
    """Checks the config of an adapter that axolotl trained: it states null where its own config states
    nothing."""
    flags = {"fan_in_fan_out": None, "use_rslora": None, "use_dora": None}
    assert read(tmp_path, **flags) == AdapterConfig(16.0, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, 'peft_type: must be LORA, found "IA3"'),
        ({"r": 0}, "r: must be an integer from 1 to 65536, found 0"),
        ({"r": 65537}, "r: must be an integer"),
        ({"r": True}, "r: must be an integer"),
        ({"lora_alpha": "16"}, "lora_alpha: must be a finite number"),
        ({"lora_alpha": 1e9}, "lora_alpha: must be a finite number"),
        ({"use_dora": 1}, "use_dora: must be true or false, found 1"),
        ({"rank_pattern": [1]}, "rank_pattern: must be an object"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern: 'q' has the value 0"),
        ({"rank_pattern": {".*" * 10 + "x": 8}}, "is no name of modules"),
        ({"rank_pattern": {"(a*)*": 8}}, "is no name of modules"),
        ({"alpha_pattern": {"q": None}}, "alpha_pattern: 'q' has the value null"),
        ({"rank_pattern": {"(a*)*": 4}}, "is no name of modules"),
        ({"rank_pattern": {"a b": 4}}, "is no name of modules"),
        ({"rank_pattern": {"(a": 4}}, "is no regular expression"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights: "pissa" changes the weights of the base'),
        ({"layer_replication": [[0, 4]]}, "layer_replication: .* is not supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, **changes)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, r=0, lora_alpha=None, use_dora="yes")
    assert len(str(caught.value).splitlines()) == 3
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"must be a JSON object, found \[\]"):
        read_adapter_config(tmp_path)
