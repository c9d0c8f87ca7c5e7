"""Tests of the reason for which a model type is refused: its name, or a field that requires something which
cannot be computed."""

from __future__ import annotations

import pytest

from mlcbuild.models.parsing import family_names
from mlcbuild.models.refusals import CODE_ALONE, NEEDED, SIGNS, refusal

FAMILIES = ("llama", "qwen3")


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("mamba2", {}, "it needs recurrent state (a state-space or linear-attention layer), which mlcbuild"),
        ("internlm2", {"conv": 1}, "only code in its checkpoints defines it"),
        (
            "new",
            {"conv_L_cache": 3},
            "'conv_L_cache' says that the model needs short convolutions over positions",
        ),
        (
            "new",
            {"layer_types": ["full_attention", "mamba"]},
            "'mamba' says that the model needs recurrent state",
        ),
        (
            "new",
            {"text_config": {"index_topk": 8}},
            "'index_topk' says that the model needs a sparse indexer",
        ),
        ("new", {"index_topk": 8, "text_config": {"conv": 1}}, "'index_topk' says"),
        ("new", {"text_config": 7, "layer_types": "mamba"}, "supported: llama, qwen3"),
        ("new", {"layer_types": [["mamba"], 3]}, "supported: llama, qwen3"),
        ("lama", {}, "supported: llama, qwen3"),
    ],
)
def test_reasons(name: str, values: dict[str, object], words: str) -> None:
    assert refusal(name, values, FAMILIES).startswith(words)


def test_no_family_is_refused() -> None:
    refused = {*NEEDED, *CODE_ALONE}
    assert not refused & set(family_names())
    assert all(SIGNS.values()) and all(NEEDED.values())
