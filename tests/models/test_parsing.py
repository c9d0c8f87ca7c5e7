"""Tests of refusals of config.json: each states what is wrong, and all are reported at once."""

from __future__ import annotations

from typing import Any

import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.models.parsing import parse
from tests.configs import windows_of
from tests.models.cases import LLAMA3, LONGROPE, YARN, Config, attention, golden


def test_rope_per_kind_of_layer_must_agree() -> None:
    values = golden("gemma2")
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    nested = values | {"rope_parameters": {"full_attention": plain, "sliding_attention": plain}}
    assert parse(nested) == parse(values)
    nested["rope_parameters"]["full_attention"] = plain | {"rope_theta": 1e6}
    nested.pop("rope_theta")
    with pytest.raises(CheckpointError, match=r"differs from rope_parameters\.full_attention"):
        parse(nested)


def test_no_rope_fields_mean_ten_thousand() -> None:
    values = golden("llama-mha-tied")
    plain = parse(values)
    del values["rope_theta"], values["rope_scaling"]
    assert parse(values) == plain


def change(variant: str, changes: Config) -> Config:
    """Returns the fields of a test model's config.json with `changes` applied: field -> new value, where
    `...` removes the field."""
    actual = golden(variant) | changes
    return {key: value for key, value in actual.items() if value is not ...}


@pytest.mark.parametrize(
    ("variant", "changes", "windows"),
    [
        ("mistral-window", {"sliding_window": None}, (None, None)),
        ("mistral-window", {"sliding_window": ...}, (4096, 4096)),
        ("mistral-window", {"layer_types": ["sliding_attention"] * 2}, (13, 13)),
        ("llama-mha-tied", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("qwen2-window", {"max_window_layers": 0}, (11, 11, 11)),
        ("qwen2-window", {"max_window_layers": 7}, (None, None, None)),
        ("qwen2-window", {"use_sliding_window": ..., "max_window_layers": ...}, (None, None, None)),
        (
            "qwen2-window",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (11, None, None),
        ),
        ("gemma2", {"sliding_window": ...}, (4096, None, 4096)),
        (
            "gemma2",
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            (None, None, 9),
        ),
        ("gemma2", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, (None, None, None)),
    ],
)
def test_windows(variant: str, changes: Config, windows: tuple[int | None, ...]) -> None:
    assert windows_of(parse(change(variant, changes))) == windows


def test_defaults_that_families_give() -> None:
    llama = parse(change("llama-mha-tied", {"num_key_value_heads": ..., "tie_word_embeddings": ...}))
    assert (attention(llama).kv_heads, llama.tie_embeddings) == (6, False)
    assert attention(parse(change("qwen2-bias", {"num_key_value_heads": None}))).kv_heads == 6
    assert attention(parse(change("qwen3", {"head_dim": ...}))).head_dim == 128
    gemma = parse(
        change(
            "gemma2",
            {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": ...,
                "head_dim": ...,
                "hidden_act": "silu",
                "hidden_activation": ...,
                "query_pre_attn_scalar": ...,
                "tie_word_embeddings": ...,
            },
        )
    )
    assert (attention(gemma).softcap, gemma.logit_softcap, attention(gemma).head_dim) == (None, 30.0, 256)
    assert gemma.layers[0].feed_forward.activation == "gelu_tanh"
    assert (attention(gemma).scale, gemma.tie_embeddings) == (1 / 16, True)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        ("float32", 6.480740547180176),
        ("float16", 6.48046875),
        ("bfloat16", 6.46875),
        (..., 6.480740547180176),
    ],
)
def test_gemma_scales_embeddings_in_the_checkpoints_dtype(dtype: Any, scale: float) -> None:
    assert parse(change("gemma2", {"torch_dtype": dtype})).embedding_scale == scale
    assert parse(change("gemma2", {"torch_dtype": ..., "dtype": dtype})).embedding_scale == scale


REFUSED: list[tuple[str, Config, str]] = [
    # Shapes.
    ("llama-yarn", {"hidden_size": ...}, "hidden_size: missing; it is needed to know the shape"),
    ("llama-yarn", {"hidden_size": "36"}, 'hidden_size: must be an integer from 1 to 1048576, found "36"'),
    ("llama-yarn", {"vocab_size": True}, "vocab_size: must be an integer from 1 to 16777216, found true"),
    (
        "llama-yarn",
        {"num_hidden_layers": 2.0},
        "num_hidden_layers: must be an integer from 1 to 4096, found 2.0",
    ),
    ("llama-yarn", {"num_hidden_layers": 10**9}, "must be an integer from 1 to 4096, found 1000000000"),
    ("llama-yarn", {"intermediate_size": 0}, "intermediate_size: must be an integer"),
    ("llama-yarn", {"max_position_embeddings": -1}, "max_position_embeddings: must be an integer"),
    (
        "llama-yarn",
        {"num_key_value_heads": 4},
        "num_key_value_heads: must divide num_attention_heads 6, found 4",
    ),
    ("qwen2-bias", {"num_key_value_heads": ...}, "num_key_value_heads: missing"),
    (
        "llama-mha-tied",
        {"hidden_size": 35},
        "hidden_size: 35 is not a multiple of num_attention_heads 6; give",
    ),
    (
        "llama-yarn",
        {"head_dim": 7},
        "7 of 7 dimensions of a head would be rotated; it must be an even number",
    ),
    ("llama-yarn", {"rms_norm_eps": 0}, "rms_norm_eps: must be a number above 0, at most 1, found 0"),
    ("llama-yarn", {"rms_norm_eps": "x"}, 'rms_norm_eps: must be a number above 0, at most 1, found "x"'),
    ("llama-yarn", {"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a number"),
    ("llama-yarn", {"rms_norm_eps": 10**400}, "rms_norm_eps: must be a number"),
    ("llama-yarn", {"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false, found 1"),
    (
        "llama-yarn",
        {"hidden_act": "mish"},
        'hidden_act: "mish" is not supported; this family supports: gelu, ',
    ),
    ("llama-yarn", {"hidden_act": ["silu"]}, r'hidden_act: \["silu"\] is not supported'),
    (
        "llama-yarn",
        {"num_hidden_layers": 4096, "hidden_size": 2**20, "intermediate_size": 2**22},
        "the sizes make .*e.16 parameters; one of them must be wrong",
    ),
    # Families and code.
    ("llama-yarn", {"model_type": ...}, "model_type: missing; it names the family: .*gemma2, .*llama, "),
    (
        "llama-yarn",
        {"model_type": "lama"},
        '"lama" is not a supported family; supported: .*, llama, ',
    ),
    (
        "llama-yarn",
        {"model_type": "mamba"},
        r'"mamba" is not a supported family; it needs recurrent state \(a state-space or linear-attention '
        r"layer\), which mlcbuild cannot compute$",
    ),
    ("llama-yarn", {"model_type": 3}, "model_type: 3 is not a supported family; it must be a string"),
    (
        "llama-yarn",
        {"architectures": ["LlamaForSequenceClassification"]},
        r'architectures: must be \["LlamaForCausalLM"\], found \["LlamaForSequenceClassification"\]',
    ),
    ("llama-yarn", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map: the checkpoint carries its own code"),
    # Fields that are not understood.
    (
        "llama-yarn",
        {"logit_scale": 0.06},
        r"logit_scale: unknown to family 'llama' .* \(value 0.06\)\. Remove .* no effect$",
    ),
    ("llama-yarn", {"rope_tetha": 1e6}, r"rope_tetha: unknown .* no effect; did you mean 'rope_theta'\?$"),
    ("llama-yarn", {"x": {"y": ["z" * 99]}}, r"x: unknown .*\(value \{\"y\": \[\"zzz.*\.\.\.\)"),
    ("llama-yarn", {"sliding_window": 64}, "sliding_window: family 'llama' supports only null, found 64"),
    (
        "llama-yarn",
        {"rope_interleaved": True},
        "rope_interleaved: family 'llama' supports only false, found true",
    ),
    ("llama-yarn", {"is_encoder_decoder": True}, "is_encoder_decoder: family 'llama' supports only false"),
    (
        "llama-yarn",
        {"is_encoder_decoder": 0},
        "is_encoder_decoder: family 'llama' supports only false, found 0",
    ),
    ("mistral-window", {"attention_bias": True}, "attention_bias: family 'mistral' supports only false"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: .* only null or false"),
    (
        "gemma2",
        {"torch_dtype": "float8"},
        'torch_dtype: "float8" is not supported; .*bfloat16, float16, float32',
    ),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping: must be a number above 0"),
    # Windows.
    ("mistral-window", {"sliding_window": 0}, "sliding_window: must be an integer from 1"),
    (
        "mistral-window",
        {"layer_types": ["full_attention"] * 2},
        "layer_types: every layer must be sliding_attention",
    ),
    (
        "llama-yarn",
        {"layer_types": ["sliding_attention"] * 2},
        "layer_types: every layer must be full_attention",
    ),
    ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types: lists 1 of 3 layers"),
    (
        "qwen2-window",
        {"layer_types": ["a", [], 3]},
        "layer_types: must list full_attention or sliding_attention",
    ),
    (
        "qwen2-window",
        {"layer_types": {}},
        "layer_types: must list full_attention or sliding_attention, found {}",
    ),
    ("qwen2-window", {"sliding_window": None}, "sliding_window: missing"),
    ("qwen2-window", {"max_window_layers": ...}, "max_window_layers: missing"),
    ("qwen2-window", {"use_sliding_window": "no"}, 'use_sliding_window: must be true or false, found "no"'),
    (
        "gemma2",
        {"sliding_window": None},
        "sliding_window: must be the number of tokens of the window, because .*; it is off: write the number",
    ),
    # Rotary embeddings.
    ("llama-yarn", {"rope_scaling": 4}, "rope_scaling: must be an object or null, found 4"),
    (
        "llama-yarn",
        {"rope_scaling": {"type": "linear", "factor": 2}},
        "rope_parameters: differs from rope_scaling",
    ),
    (
        "llama-yarn",
        {"rope_theta": 5},
        "rope_parameters.rope_theta: is 10000, but beside the other fields it is 5",
    ),
    ("llama-mha-tied", {"rope_theta": 1}, "rope_theta: must be a number above 1"),
    ("llama-mha-tied", {"partial_rotary_factor": 0.5}, "this family rotates whole heads .1.0., found 0.5"),
    ("phi3-window", {"partial_rotary_factor": 0.4}, "3 of 8 dimensions of a head would be rotated"),
    ("phi3-window", {"partial_rotary_factor": 0.01}, "0 of 8 dimensions of a head would be rotated"),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"type": "linear"}},
        "type: says linear, but rope_type says yarn",
    ),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"rope_type": 3}},
        "rope_parameters.rope_type: must be a string",
    ),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"rope_type": "yarnn"}},
        "'yarnn' is not supported; did you mean 'yarn'",
    ),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"beta": 1}},
        "rope_parameters.beta: unknown to rope type 'yarn'",
    ),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"factor": 0.5}},
        "rope_parameters.factor: must be at least 1, found 0.5",
    ),
    ("llama-yarn", {"rope_parameters": YARN | {"factor": ...}}, "rope_parameters.factor: must be a number"),
    (
        "llama-yarn",
        {"rope_parameters": YARN | {"beta_fast": 0.5}},
        "beta_fast: must not be below beta_slow 1",
    ),
    ("llama-yarn", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: missing"),
    (
        "llama-yarn",
        {"rope_parameters": {"full_attention": YARN, "other": YARN}},
        "rope_parameters.other: must be an object under one of full_attention, sliding_attention",
    ),
    ("llama-yarn", {"original_max_position_embeddings": 64}, "is 32, but beside the other fields it is 64"),
    (
        "llama-mha-tied",
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        "dynamic scaling changes with the length",
    ),
    (
        "llama-mha-tied",
        {"rope_scaling": {"type": "mrope"}},
        "rope_scaling.type: 'mrope' is not supported; did you mean",
    ),
    (
        "llama-llama3-gqa",
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor: must be above low_freq_factor 1, found 1",
    ),
    (
        "phi3-longrope-long",
        {"rope_scaling": LONGROPE | {"type": "llama3"}},
        "'llama3' is not supported; known: default",
    ),
    (
        "phi3-longrope-long",
        {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 5}},
        "long_factor: must be a list of 6 numbers, one per rotated pair; found 5 items",
    ),
    (
        "phi3-longrope-long",
        {"rope_scaling": LONGROPE | {"long_factor": 2}},
        "must be a list of 6 numbers.*found 2",
    ),
    (
        "phi3-longrope-long",
        {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5 + [0]}},
        r"short_factor\[5\]: must be a number from 1e-06 to 1e\+06, found 0",
    ),
    ("phi3-longrope-long", {"rope_scaling": {"type": "su"}}, "rope_scaling.long_factor: missing"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), REFUSED)
def test_refusals_say_what_is_wrong(variant: str, changes: Config, message: str) -> None:
    parse(golden(variant))
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(change(variant, changes), "some/config.json")
    assert all(line.startswith("some/config.json: ") for line in str(caught.value).splitlines())


@pytest.mark.parametrize("values", [None, [], "llama", 3, [{}]])
def test_only_an_object_is_a_config(values: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: must be a JSON object, found"):
        parse(values)


def test_all_problems_come_at_once_and_none_twice() -> None:
    values = change(
        "llama-llama3-gqa",
        {
            "hidden_act": "tanh",
            "num_hidden_layers": "2",
            "num_key_value_heads": 4,
            "rope_scaling": LLAMA3 | {"factor": "8", "extra": 1},
            "vocab_size": ...,
            "zeta": 1,
        },
    )
    with pytest.raises(CheckpointError) as caught:
        parse(values, "c")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "num_key_value_heads",
        "num_hidden_layers",
        "rope_scaling.factor",
        "rope_scaling.extra",
        "vocab_size",
        "hidden_act",
        "zeta",
    ]
