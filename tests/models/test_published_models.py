"""Tests of the configs of published models: their sizes, their options, and config.json as both transformers
4 and transformers 5 write it."""

from __future__ import annotations

import pytest

from mlcbuild.models import (
    Norms,
    RmsNorm,
    frequencies,
    parameters,
)
from mlcbuild.models.parsing import parse
from tests.configs import windows_of
from tests.models.cases import Config, attention


def sizes(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


LLAMA_SWITCHES: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rope_scaling": None,
}
PHI3_MINI: Config = sizes(3072, 8192, 32, (32, 32), 32064) | {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN_SWITCHES: Config = {
    "max_window_layers": 24,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


# Name -> (config.json, number of parameters as published, tied ones counted once).
PUBLISHED: dict[str, tuple[Config, int]] = {
    "SmolLM2-135M": (
        sizes(576, 1536, 30, (9, 3), 49152)
        | LLAMA_SWITCHES
        | {
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "TinyLlama-1.1B": (
        sizes(2048, 5632, 22, (32, 4), 32000)
        | LLAMA_SWITCHES
        | {"max_position_embeddings": 2048, "tie_word_embeddings": False},
        1_100_048_384,
    ),
    "Llama-3.2-1B": (
        sizes(2048, 8192, 16, (32, 8), 128256)
        | LLAMA_SWITCHES
        | {
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Qwen2.5-0.5B": (
        sizes(896, 4864, 24, (14, 2), 151936)
        | QWEN_SWITCHES
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "max_position_embeddings": 32768,
            "model_type": "qwen2",
            "sliding_window": 32768,
            "use_mrope": False,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        sizes(1024, 3072, 28, (16, 8), 151936)
        | QWEN_SWITCHES
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "model_type": "qwen3",
            "rope_scaling": None,
            "sliding_window": None,
        },
        596_049_920,
    ),
    "Mistral-7B-v0.1": (
        sizes(4096, 14336, 32, (32, 8), 32000)
        | {
            "architectures": ["MistralForCausalLM"],
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        7_241_732_096,
    ),
    "gemma-2-2b": (
        sizes(2304, 9216, 26, (8, 4), 256000)
        | {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
        2_614_341_888,
    ),
    "Phi-3-mini-4k": (
        PHI3_MINI | {"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
        3_821_079_552,
    ),
    "Phi-3-mini-128k": (
        PHI3_MINI
        | {
            "max_position_embeddings": 131072,
            "rope_scaling": {"type": "su", "short_factor": [1.05] * 48, "long_factor": [1.03] * 48},
            "sliding_window": 262144,
        },
        3_821_079_552,
    ),
    "Phi-4-mini": (
        PHI3_MINI
        | sizes(3072, 8192, 32, (24, 8), 200064)
        | {
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.1] * 48},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        3_836_021_760,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    values, count = PUBLISHED[name]
    config = parse(values)
    total = 0
    for param in parameters(config):
        size = 1
        for extent in param.shape:
            size *= extent
        total += size
    assert total == count


def test_published_models_are_read_in_full() -> None:
    by_name = {name: parse(values) for name, (values, _) in PUBLISHED.items()}
    assert attention(by_name["SmolLM2-135M"]).head_dim == 64
    assert by_name["TinyLlama-1.1B"].ropes[0].inv_freq[1] == pytest.approx(10000 ** (-1 / 32))
    assert by_name["Llama-3.2-1B"].ropes[0].inv_freq[-1] == pytest.approx(500000 ** (-62 / 64) / 32)
    assert windows_of(by_name["Qwen2.5-0.5B"]) == (None,) * 24
    assert attention(by_name["Qwen2.5-0.5B"]).qkv_bias
    assert not attention(by_name["Qwen2.5-0.5B"]).output_bias
    assert attention(by_name["Qwen3-0.6B"]).qk_norm == RmsNorm(1e-5)
    assert windows_of(by_name["Mistral-7B-v0.1"]) == (4096,) * 32
    gemma = by_name["gemma-2-2b"]
    assert windows_of(gemma) == (4096, None) * 13
    assert (attention(gemma).scale, attention(gemma).softcap) == (1 / 16, 50.0)
    assert gemma.layers[0].norms == Norms(gemma.norm, gemma.norm) and gemma.norm.offset == 1.0
    assert (gemma.embedding_scale, gemma.logit_softcap, gemma.tie_embeddings) == (48.0, 30.0, True)
    assert windows_of(by_name["Phi-3-mini-4k"]) == (2047,) * 32
    long = by_name["Phi-3-mini-128k"].ropes[0]
    assert long.attention_factor == pytest.approx(1.1902380714238083, rel=1e-7)
    assert frequencies(long, 4096)[0][0] == pytest.approx(1 / 1.05)
    assert frequencies(long, 4097)[0][0] == pytest.approx(1 / 1.03)
    assert by_name["Phi-4-mini"].ropes[0].dim == 96


def modern(values: Config) -> Config:
    """Returns the fields of a config.json as transformers 5 writes them: those of rotary embeddings are
    joined in `rope_parameters`, and torch_dtype is called dtype. values: the fields as earlier versions write
    them."""
    by_name = {
        key: value
        for key, value in values.items()
        if key not in ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype")
    }
    inner: Config = {"rope_type": "default", **(values.get("rope_scaling") or {})}
    inner["rope_type"] = inner.pop("type", inner["rope_type"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in values:
            inner[key] = values[key]
    return by_name | {"rope_parameters": inner, "dtype": values["torch_dtype"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_spellings_mean_the_same(name: str) -> None:
    values = PUBLISHED[name][0]
    assert parse(modern(values)) == parse(values)
    assert parse(values | modern(values)) == parse(values)
