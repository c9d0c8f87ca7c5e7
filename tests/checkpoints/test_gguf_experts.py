"""Tests that GGUF files of models with experts and with latent attention are read as the same models as their
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlcbuild.bundles.reference import logits
from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.gguf_config import read_config
from mlcbuild.checkpoints.gguf_names import names_in_file
from mlcbuild.checkpoints.gguf_tensors import read_tensors
from mlcbuild.errors import CheckpointError
from mlcbuild.models.parsing import parse
from tests.conftest import ROOT
from tests.gguf_experts import CHANGES, checkpoint, tokens, write, write_model

GOLDEN = load_file(ROOT / "tests" / "golden" / "gguf-experts.safetensors")
FORMS = [
    *((name, "") for name in CHANGES),
    ("qwen2_moe", "fused"),
    ("mixtral", "apart"),
    ("deepseek_v3", "mha"),
]
"""(golden, form of its GGUF file) of each case: files as llama.cpp's converter writes them now, may write
them, or wrote them earlier."""


def own_logits(path: Path) -> NDArray[Any]:
    config = read_config(path)
    values = exact_weights.checkpoint(path, config, names_in_file(path, config))
    return np.asarray(logits(config, values, [int(token) for token in tokens(path.stem)]))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_logits_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    write(name, tmp_path / f"{name}.gguf", form=form)
    computed, expected = own_logits(tmp_path / f"{name}.gguf"), GOLDEN[name]
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize("name", CHANGES)
def test_the_config_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "m.gguf")
    assert read_config(tmp_path / "m.gguf") == parse(checkpoint(name)[0])


def test_what_files_leave_out(tmp_path: Path) -> None:
    """Checks that missing metadata are derived from the tensors: the sigmoid of routers whose scores are
    corrected, and the number of dense layers."""
    left_out = {"expert_gating_func": None, "leading_dense_block_count": None, "expert_group_count": 3}
    write_model(*checkpoint("deepseek_v3"), tmp_path / "m.gguf", changes=left_out)
    assert read_config(tmp_path / "m.gguf") == parse(checkpoint("deepseek_v3")[0])


def test_the_rope_of_hunyuan_is_scaled_by_the_converter(tmp_path: Path) -> None:
    """Checks that a file with the increased base that replaces `alpha` is the model with `alpha`."""
    config, tensors = checkpoint("hunyuan_v1_moe")
    alpha = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    original = parse({**config, "rope_theta": 10000.0, "rope_scaling": alpha})
    changes = {"rope.freq_base": 10000.0 * 1000.0 ** (10 / 8), "rope.scaling.original_context_length": 262144}
    write_model(config, tensors, tmp_path / "m.gguf", changes=changes)
    (rope,), (expected,) = read_config(tmp_path / "m.gguf").ropes, original.ropes
    np.testing.assert_allclose(rope.inv_freq, expected.inv_freq, rtol=3e-7)


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    """Checks that layers for draft tokens, which GGUF files count among the model's layers, are left out."""
    config, tensors = checkpoint("glm4_moe")
    draft = {"blk.3.nextn.enorm.weight": np.ones(36, np.float32)}
    changes = {"block_count": 4, "nextn_predict_layers": 1}
    write_model(config, tensors, tmp_path / "glm4_moe.gguf", changes=changes, more=draft)
    expected = GOLDEN["glm4_moe"]
    computed = own_logits(tmp_path / "glm4_moe.gguf")
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.ptp(expected))


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "count": (
        "olmoe",
        {"expert_count": 8},
        "olmoe.expert_count: is 8, but tensor 'blk.0.ffn_down_exps.weight' holds 7 experts; use",
    ),
    "chosen": (
        "olmoe",
        {"expert_used_count": 8},
        "num_experts_per_tok: must be at most num_experts 7, found 8",
    ),
    "negative": (
        "glm4_moe",
        {"nextn_predict_layers": -1},
        "glm4moe.nextn_predict_layers must be an integer of at least 0: found '-1'; fetch the file again",
    ),
    "flag": (
        "dots1",
        {"expert_weights_norm": 3},
        "dots1.expert_weights_norm must be true or false: found '3'; fetch the file again",
    ),
    "softmax": (
        "dots1",
        {"expert_gating_func": 1},
        "dots1.expert_gating_func: must be 2 (sigmoid) for this architecture, not 1; use the original check",
    ),
    "other": (
        "deepseek_v3",
        {"expert_gating_func": 3},
        "deepseek2.expert_gating_func: must be 1 (softmax) or 2 (sigmoid), not 3; use the original chec",
    ),
    "shared": (
        "ernie4_5_moe",
        {"expert_shared_count": 3},
        "ernie4_5-moe.expert_shared_count: must be 2, as the tensors have it; use the original checkpoint",
    ),
    "shared size": (
        "hunyuan_v1_moe",
        {"expert_shared_feed_forward_length": 41},
        "hunyuan-moe.expert_shared_feed_forward_length: must be 40, like feed_forward_length; use the orig",
    ),
    "latent": (
        "deepseek_v2",
        {"attention.kv_lora_rank": None},
        "deepseek2.attention.kv_lora_rank must be an integer above 0: it is missing; fetch the file again",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_metadata_that_describe_no_model(case: str, tmp_path: Path) -> None:
    name, changes, sentence = FAULTS[case]
    write_model(*checkpoint(name), tmp_path / "m.gguf", changes=changes)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path / "m.gguf")
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: {sentence}")
    assert "\n" not in str(caught.value)


def test_a_stack_that_is_none(tmp_path: Path) -> None:
    flat = {"blk.9.ffn_up_exps.weight": np.ones((4, 6), np.float32)}
    write_model(*checkpoint("olmoe"), tmp_path / "m.gguf", more=flat)
    with pytest.raises(CheckpointError) as caught:
        read_tensors(tmp_path / "m.gguf")
    assert str(caught.value) == (
        f"{tmp_path / 'm.gguf'}: tensor 'blk.9.ffn_up_exps.weight' must be a stack of at most 4096 matrices, "
        "found the shape [4, 6]; fetch the file again"
    )
