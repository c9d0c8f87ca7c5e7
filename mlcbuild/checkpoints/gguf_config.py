"""Translates the metadata of a GGUF file into the config of a model.

Metadata become the fields of a config.json, which the rules of the model's family then check. The metadata
keys are described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
from mlcbuild.checkpoints.gguf_experts import EXPERTS, granite_scalars, mixtral, phi_lengths
from mlcbuild.checkpoints.gguf_file import Gguf, read_gguf
from mlcbuild.checkpoints.gguf_keys import Fields, GgufKeys
from mlcbuild.checkpoints.gguf_names import names_in_file
from mlcbuild.checkpoints.gguf_tensors import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    architecture_of,
)
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig
from mlcbuild.models.action import write_config
from mlcbuild.models.fields import ABSENT
from mlcbuild.models.layers import Rope
from mlcbuild.models.parsing import parse
from mlcbuild.models.rounding import f32

_PAIRED = "Meta AI original pth"
"""The only accepted value of the metadata key tensor_data_layout: GGUF's name for the order of rows of query
and key matrices that all GGUF files of the architecture llama have. Only converters of 2023 state it."""


def normalise(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: translates the GGUF file params["file"] in inputs["checkpoint"] to two files in
    `out`: `config.json`, the normalised config of the model, and `tensors.json`, the names of the tensors
    that make up each parameter. Raises CheckpointError for an unsupported architecture, a damaged file, and
    metadata that are missing, wrong or not understood.
    """
    path = checkpoint_path(params, inputs)
    config = read_config(path)
    write_config(config, out, names_in_file(path, config))


def read_config(path: Path) -> ModelConfig:
    """Returns the config of the model in a GGUF file.

    Raises CheckpointError for a damaged file and an unsupported architecture, otherwise with all metadata
    that are missing, wrong or not understood, one a line, or else with what the model family refuses.
    """
    gguf = read_gguf(path)
    name, _ = architecture_of(gguf, str(path))
    keys = GgufKeys(gguf, str(path))
    fields = {**_common(keys, name), **_EXTEND[name](keys)}
    keys.close()
    config = parse({name: value for name, value in fields.items() if value is not ABSENT}, str(path))
    factors = _floats(gguf, ROPE_FACTORS)
    if factors is None:
        return config
    return replace(config, ropes=tuple(_divided(rope, factors, path) for rope in config.ropes))


def _common(keys: GgufKeys, family: str) -> Fields:
    """Returns those config.json fields that all model families have, read from the metadata of a GGUF file.
    Missing and wrong values are recorded as problems in `keys`, the metadata's reader. family: name of the
    file's architecture.
    """
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    embedding = keys.gguf.tensors.get("token_embd.weight")
    fields: Fields = {
        "model_type": family,
        "vocab_size": embedding.shape[0] if embedding is not None else keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
    }
    rotated = keys.integer("rope.dimension_count", head_dim)
    # GLM-4.5 rotates half of each head unless its config states the share.
    if rotated != head_dim or family == "glm4moe":
        fields["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(keys, family)
    return fields if scaling is None else {**fields, "rope_scaling": scaling}


def _rope_scaling(keys: GgufKeys, architecture: str) -> Fields | None:
    kind = keys.get("rope.scaling.type")
    short, long = (_floats(keys.gguf, name) for name in (SHORT_FACTORS, LONG_FACTORS))
    if short is not None and long is not None:
        scaling: Fields = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if architecture == "phimoe":
            factor = keys.number("rope.scaling.attn_factor", 1.0)
            scaling |= {"short_mscale": factor, "long_mscale": factor}
        elif keys.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    elif kind == "linear":
        _check_attention_factor(keys)
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    elif kind in (None, "", "none"):
        _check_attention_factor(keys)
        if kind == "none":
            # A factor means nothing then; converters write 1.
            keys.get("rope.scaling.factor"), keys.get("rope.scaling.original_context_length")
        return None
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": keys.number("rope.scaling.factor")}
        names = {
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
            "attn_factor": "attention_factor",
        }
        for name, field in names.items():
            if keys.get(f"rope.scaling.{name}") is not None:
                scaling[field] = keys.number(f"rope.scaling.{name}")
        scaling |= _yarn_of(keys, architecture)
    else:
        scaling = {"rope_type": str(kind)}  # the families' own check reports it
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    return scaling


def _check_attention_factor(keys: GgufKeys) -> None:
    """Records a problem in `keys`, the reader of a GGUF file's metadata, if the key rope.scaling.attn_factor,
    the attention factor of YaRN and LongRoPE, is present with another value than 1. The caller passes files
    that use neither; those of the first Llama 3.1 models state 1.
    """
    if keys.get("rope.scaling.attn_factor") not in (None, 1):
        keys.refuse("rope.scaling.attn_factor", "must be 1 without rope.scaling.type yarn or longrope")


def _yarn_of(keys: GgufKeys, architecture: str) -> Fields:
    """Returns those fields of YaRN's rope object in config.json that models of this GGUF architecture need
    and others lack; {} for most architectures.
    """
    if architecture == "gpt-oss":
        return {"truncate": False}
    if architecture != "deepseek2":
        return {}
    if keys.get("rope.scaling.yarn_log_multiplier") is None:
        return {"attention_factor": 1.0}
    # Files state a tenth of the number that is both mscale and mscale_all_dim, in float32.
    weight = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
    return {"mscale": weight, "mscale_all_dim": weight}


def _floats(gguf: Gguf, name: str) -> list[float] | None:
    """Returns the values of a small float32 tensor of a GGUF file; None if the file lacks the tensor. Raises
    CheckpointError if it is not one-dimensional, not float32, or larger than 64 KiB."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.size > 1 << 16:
        raise CheckpointError(
            f"{tensor.path}: tensor '{name}' must be a list of float32, found {tensor.dtype} "
            f"{list(tensor.shape)}; fetch the file again"
        )
    values: list[float] = np.fromfile(tensor.path, "<f4", tensor.shape[0], offset=tensor.start).tolist()
    return values


def _divided(rope: Rope, factors: Sequence[float], path: Path) -> Rope:
    """Returns a copy of `rope` whose frequencies are divided by the factors that a GGUF file stores for Llama
    3's frequency scaling. factors: the divisor of each frequency; path: the file, for messages. Raises
    CheckpointError if their number is wrong, or one is not above 0 and below 1e6.
    """
    if len(factors) != len(rope.inv_freq) or not all(0 < factor < 1e6 for factor in factors):
        raise CheckpointError(
            f"{path}: tensor '{ROPE_FACTORS}' must hold {len(rope.inv_freq)} numbers above 0, found "
            f"{len(factors)}; fetch the file again"
        )
    scaled = (f32(frequency / factor) for frequency, factor in zip(rope.inv_freq, factors, strict=True))
    return replace(rope, inv_freq=tuple(scaled))


def _llama(keys: GgufKeys) -> Fields:
    if keys.get("tensor_data_layout") not in (None, _PAIRED):
        keys.refuse("tensor_data_layout", f"must be '{_PAIRED}'")
    if keys.count("expert_count"):
        return mixtral(keys)
    window = keys.count("attention.sliding_window")
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return {"attention_bias": keys.has_bias("attn_q"), "mlp_bias": keys.has_bias("ffn_up")}


def _qwen2(keys: GgufKeys) -> Fields:
    return {}


def _qwen3(keys: GgufKeys) -> Fields:
    return {"attention_bias": keys.has_bias("attn_q")}


def _gemma(keys: GgufKeys) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _granite(keys: GgufKeys) -> Fields:
    return {**granite_scalars(keys), "mlp_bias": keys.has_bias("ffn_up")}


def _gemma2(keys: GgufKeys) -> Fields:
    """Returns the config.json fields that Gemma 2 has in addition to those of all model families, read from
    the metadata of a GGUF file. The attention scale, which the file does not state, is computed as llama.cpp
    and the original do; missing soft caps and windows get the original's values.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    is_27b = keys.integer("block_count") == 46
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b else keys.integer("attention.key_length", 256),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
    }


def _gemma3(keys: GgufKeys) -> Fields:
    """Returns the config.json fields that Gemma 3 has in addition to those of all model families, read from
    the metadata of a GGUF file. The attention scale, which the file does not state, is computed as llama.cpp
    and the original do. Unless the file states another period, every sixth layer has no window.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    is_27b = keys.integer("block_count") == 62
    cap = keys.get("final_logit_softcapping")
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b else keys.integer("attention.key_length", 256),
        "final_logit_softcapping": None if cap is None else keys.number("final_logit_softcapping"),
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1e4),
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
    }


def _olmo2(keys: GgufKeys) -> Fields:
    if keys.count("attention.sliding_window"):
        keys.refuse("attention.sliding_window", "windows of OLMo 3 are not supported in GGUF files")
    return {}


def _smollm3(keys: GgufKeys) -> Fields:
    return {"attention_bias": keys.has_bias("attn_q"), "mlp_bias": keys.has_bias("ffn_up")}


def _phi3(keys: GgufKeys) -> Fields:
    return phi_lengths(keys)


_EXTEND: Mapping[str, Callable[[GgufKeys], Fields]] = {
    **EXPERTS,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
"""GGUF architecture -> function from the reader of a file's metadata to the config.json fields that only this
architecture's model family has, or that it fills differently from other families. The architecture is also
the model_type where the function returns no other.
"""
