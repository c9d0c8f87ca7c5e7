"""Writes GGUF files of checkpoints with the package gguf, in the form that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.blocks import finite_rows

Floats = NDArray[np.float32]

KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
"""Field of config.json -> key of GGUF metadata with an integer value."""
SCALARS = {
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
}
"""Field of Granite's config.json -> key of GGUF metadata."""
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.bias": "output.bias",
}


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    types: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors checkpoint as a GGUF file.

    kind: type of the matrices whose rows are a multiple of its block; metadata: additional keys and values;
    without: keys that are left out; types: end of a tensor's name -> its type in place of `kind`.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(family, family)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {**dict(entries(config, architecture)), **(metadata or {})}.items():
        if key not in without:
            add_key(writer, key, value)
    for name, values in _tensors(checkpoint, config, architecture):
        kinds = [other for ending, other in (types or {}).items() if name.endswith(ending)]
        add_tensor(writer, name, values, kinds[0] if kinds else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def entries(config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of the GGUF metadata that describe a dense model."""
    for field, key in KEYS.items():
        if field in config:
            yield f"{architecture}.{key}", config[field]
    yield f"{architecture}.attention.layer_norm_rms_epsilon", float(config.get("rms_norm_eps", 1e-6))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope["rope_theta"]
    yield f"{architecture}.rope.freq_base", float(theta)
    if "rope_local_base_freq" in config:
        yield f"{architecture}.rope.freq_base_swa", float(config["rope_local_base_freq"])
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    yield f"{architecture}.rope.dimension_count", int(head * config.get("partial_rotary_factor", 1))
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield f"{architecture}.attention.sliding_window", config["sliding_window"]
    for field, key in SCALARS.items() if architecture.startswith("granite") else ():
        yield f"{architecture}.{key}", float(config[field])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in config:
            yield f"{architecture}.{name}", float(config[name])
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("linear", "yarn"):
        yield f"{architecture}.rope.scaling.type", kind
        yield f"{architecture}.rope.scaling.factor", float(rope["factor"])
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            yield f"{architecture}.rope.scaling.original_context_length", original
    if kind == "longrope":
        original, most = config["original_max_position_embeddings"], config["max_position_embeddings"]
        yield f"{architecture}.rope.scaling.original_context_length", original
        factor = math.sqrt(1 + math.log(most / original) / math.log(original))
        yield f"{architecture}.rope.scaling.attn_factor", factor


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key to a GGUF file, with the value type that llama.cpp's converter would use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(checkpoint: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, Floats]]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    names = {**LAYER, **GEMMA} if architecture in ("gemma2", "gemma3", "olmo2") else LAYER
    for name, values in load_file(checkpoint / "model.safetensors").items():
        if name in WHOLE:
            tensor_name = WHOLE[name]
        else:
            _, _, layer, *middle, ending = name.split(".")
            tensor_name = f"blk.{layer}.{names['.'.join(middle)]}.{ending}"
        if architecture in ("llama", "granite", "smollm3") and (
            ".attn_q." in tensor_name or ".attn_k." in tensor_name
        ):
            yield tensor_name, paired(values, heads if ".attn_q." in tensor_name else groups)
        elif architecture in ("gemma", "gemma2", "gemma3") and tensor_name.endswith("norm.weight"):
            yield tensor_name, values + np.float32(1)
        else:
            yield tensor_name, values
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(config, rope)
    if "long_factor" in rope:
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)


def paired(values: Floats, heads: int) -> Floats:
    """Returns a matrix whose rows are in the order of GGUF files: rows i and i + dim/2 of each head become
    neighbours, because llama.cpp's rotary embeddings rotate neighbouring dimensions."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_divisors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Floats:
    """Returns Llama 3.1's frequency scaling as divisors: one for each plain rotary frequency."""
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, divisors = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (i / dim)
        smooth = min(max((original / wave - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Floats, kind: str) -> None:
    """Adds a tensor to a GGUF file. It has the type `kind` if it is a matrix, or a stack of matrices, whose
    rows are a multiple of the type's block; otherwise float32."""
    tensor_type = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[tensor_type]
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim < 2 or values.shape[-1] % block or kind == "F32":
        writer.add_tensor(name, values)
        return
    writer.add_tensor(name, _quantized(values, tensor_type), raw_dtype=tensor_type)


def _quantized(values: Floats, kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """Returns the bytes of quantized values; random blocks for types that the package gguf can read but not
    write."""
    try:
        packed: NDArray[np.uint8] = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name.startswith("IQ"):
            return finite_rows(kind.name, values.size // values.shape[-1], values.shape[-1], 1).reshape(
                *values.shape[:-1], -1
            )
        rng = np.random.default_rng(values.size)
        packed = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // weights, size), np.uint8)
        packed[..., 1:4:2] &= 0x3F  # the two scales of K-quants in float16: neither infinite nor NaN
        packed = packed.reshape(*values.shape[:-1], -1)
    return packed


def tiny_metadata(checkpoint: Path) -> dict[str, Any]:
    """Returns the GGUF metadata of the embedded model's tokenizer, a SentencePiece unigram model: key ->
    value."""
    document = json.loads((checkpoint / "tokenizer.json").read_bytes())
    tokens = [token for token, _ in document["model"]["vocab"]]
    kinds = gguf.TokenType
    types = [kinds.BYTE if re.fullmatch("<0x..>", token) else kinds.NORMAL for token in tokens]
    for added in document["added_tokens"]:
        types[added["id"]] = kinds.CONTROL if added["id"] else kinds.UNKNOWN
    template = json.loads((checkpoint / "tokenizer_config.json").read_bytes())["chat_template"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [score for _, score in document["model"]["vocab"]],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 6,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
