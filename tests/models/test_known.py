"""Tests of the lists of known config fields and model types: fields that are ignored, and those that require
a block which nothing computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.models import (
    parsing,
    refusals,
)
from mlcbuild.models.known import IRRELEVANT
from mlcbuild.models.parsing import parse
from tests.models.cases import golden


def test_bookkeeping_may_hold_anything() -> None:
    odd = {name: {"odd": [1.5]} for name in IRRELEVANT}
    assert parse(golden("llama-yarn") | odd) == parse(golden("llama-yarn"))


DEFAULTS = json.loads(Path(__file__).with_name("transformers_defaults.json").read_text())
"""Default values that transformers writes: version -> those of its PretrainedConfig and GenerationConfig, and
the fields that each model family adds or changes."""


PRIVATE = (
    *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
    *("_commit_hash", "_experts_implementation_internal", "_flash_attn_2_enabled", "_frame_rate"),
    *("_has_decoder", "_has_encoder", "_heterogeneity_spec", "_label_trainable_num_channels"),
    *("_moe_implementation", "_name_or_path", "_out_features", "_out_indices", "_output_attentions"),
    *("_pad_token_id", "_post_init_done", "_remove_final_layer_norm", "_sliding_window_pattern", "_", "__"),
)
"""Names of config.json fields with a leading underscore that the 820 config classes of transformers 5.24 have
as attributes or write to files."""

ODD: dict[str, object] = {
    **{name: {"deep": [1.5, None]} for name in PRIVATE},
    "chunk_size_feed_forward": 3,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "is_encoder_decoder": False,
    "label2id": {"a": 0, "b": 1, "c": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
    "transformers_version": "9.9",
}
"""Field of config.json that transformers writes for every model -> a value that is not its default."""

NO_MODEL = {"deepseek_v2", "dots1", "glm4_moe"}
"""Model types whose default config describes no valid model: for example it has experts without a number, or
a head size that is not an integer."""


@pytest.mark.parametrize("version", DEFAULTS)
@pytest.mark.parametrize("family", parsing.family_names())
def test_what_transformers_writes_for_every_model_refuses_none(version: str, family: str) -> None:
    if version != max(DEFAULTS) and family not in DEFAULTS[version]:
        return  # no release of that time had it
    if family in NO_MODEL:
        return
    assert family in DEFAULTS[version], (
        f"transformers_defaults.json lacks {family}: add to {version} what to_dict() of its config class has"
        " beyond that of PreTrainedConfig"
    )
    written = DEFAULTS[version]["base"] | DEFAULTS[version][family]
    config = parse(written)
    assert config.family == family
    # Old versions wrote generation settings beside the model's; any program may add notes of its own.
    notes = {"_model_name_or_path": "x", "_sdpa": {"deep": [1]}, "_moe_implementation": None}
    assert parse(DEFAULTS[version]["generation"] | notes | written) == config
    read = {"_remove_final_layer_norm"} if family == "opt" else set()
    assert parse(written | {name: value for name, value in ODD.items() if name not in read}) == config
    if isinstance(inner := written.get("text_config"), dict):
        assert parse(written | {"text_config": inner | ODD}) == config
    attributes = {"base_model_tp_plan": {"layers.*.mlp": "x"}, "sub_configs": {}, "use_return_dict": True}
    assert parse(attributes | {"auto_map": {}, "transformers_weights": None} | written) == config


@pytest.mark.parametrize("name", ["sdpa_scale", "name_or_path_", "residual_multiplier", "logits_scaling"])
def test_what_nobody_knows_still_refuses_a_model(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: unknown to family 'llama'"):
        parse(DEFAULTS["4.51.3"]["base"] | DEFAULTS["4.51.3"]["llama"] | {name: 1.5})


def test_many_unknown_fields_are_counted() -> None:
    fields = {f"field{i:06}": i for i in range(100_000)}
    with pytest.raises(CheckpointError) as caught:
        parse(DEFAULTS["4.51.3"]["base"] | DEFAULTS["4.51.3"]["llama"] | fields)
    lines = str(caught.value).splitlines()
    assert len(lines) == 51
    assert lines[-1] == "config.json: field000050: unknown, like 99949 more fields"


def test_types_that_need_another_block_are_refused_by_its_name() -> None:
    assert not set(refusals.NEEDED) & set(parsing.family_names())
    for name, block in refusals.NEEDED.items():
        with pytest.raises(CheckpointError) as caught:
            parse({"model_type": name})
        assert f"it needs {block}, which" in str(caught.value) and "\n" not in str(caught.value)


def test_types_that_only_code_in_checkpoints_defines_are_refused() -> None:
    for name in refusals.CODE_ALONE:
        with pytest.raises(CheckpointError, match=r"transformers ships no model of this name$"):
            parse({"model_type": name})


@pytest.mark.parametrize(
    ("fields", "block"),
    [
        (
            {"index_topk": 2048, "kv_lora_rank": 512},
            "'index_topk' says that the model needs a sparse indexer",
        ),
        ({"text_config": {"conv_L_cache": 3}}, "'conv_L_cache' says that the model needs short convolutions"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "'linear_attention' says that the model needs recurrent state",
        ),
        (
            {"text_config": {"global_head_dim": 512}},
            "'global_head_dim' says that the model needs heads whose size",
        ),
        (
            {"num_kv_shared_layers": 4},
            "'num_kv_shared_layers' says that the model needs embeddings for each layer",
        ),
        ({"layer_types": [["conv"], 3], "text_config": []}, "supported: apertus, "),
    ],
)
def test_unknown_types_are_refused_by_the_block_that_their_fields_name(
    fields: dict[str, object], block: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse({"model_type": "llama9", **fields})
    assert block in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3"])
def test_supported_types_with_fields_of_another_block_are_refused_by_it(name: str) -> None:
    fields = {"model_type": name, "text_config": {"layer_types": ["full_attention", "mamba"]}}
    with pytest.raises(CheckpointError) as caught:
        parse({"num_kv_shared_layers": 0, **fields})
    assert str(caught.value) == (
        "config.json: layer_types: 'mamba' says that the model needs recurrent state (a state-space or"
        " linear-attention layer), which mlcbuild cannot compute"
    )
    with pytest.raises(
        CheckpointError, match=r"^config\.json: index_topk: 'index_topk' says that the model needs a s"
    ):
        parse({"model_type": name, "index_topk": 4})


def test_no_supported_family_has_the_fields_of_blocks_that_nothing_computes() -> None:
    for version in DEFAULTS.values():
        for family in version.keys() & set(parsing.family_names()):
            assert not version[family].keys() & refusals.SIGNS.keys(), family
