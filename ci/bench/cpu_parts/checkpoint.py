"""Random checkpoints in the form in which models are published: config.json, safetensors, a tokenizer.

Needs NumPy only, so that every engine's environment can read what it makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHAPES: Mapping[str, Mapping[str, object]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b-4": {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b-4": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
"""Name of a model shape -> the fields of its config.json, besides those that all shapes have (COMMON). The
last two have experts and only 4 layers, since all layers are alike."""
COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(shape: str) -> dict[str, object]:
    """Returns the config.json values of a model to measure. shape: one of the names in SHAPES, which
    determines the sizes of the model.
    """
    return {**COMMON, **SHAPES[shape]}


def sized(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, object]:
    """Returns the config.json values of a Llama model with heads of 64 dimensions, and one key-value head for
    four query heads (at least one). hidden: size of the hidden state, a multiple of 64; inner: size of the
    feed-forward; layers: their number; vocabulary: number of tokens."""
    heads = hidden // 64
    return {
        **COMMON,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def tensors(values: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor of a checkpoint of Llama, OLMoE or Qwen3-MoE, in file order.
    values: the fields of its config.json."""
    size = {key: value for key, value in values.items() if isinstance(value, int)}
    hidden, inner = size["hidden_size"], size.get("moe_intermediate_size", size["intermediate_size"])
    head = size.get("head_dim", hidden // size["num_attention_heads"])
    query, kv = head * size["num_attention_heads"], head * size["num_key_value_heads"]
    norms = {"olmoe": (query, kv), "qwen3_moe": (head, head)}.get(str(values.get("model_type")))
    yield "model.embed_tokens.weight", (size["vocab_size"], hidden)
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        for name, width in zip("qk", norms or (), strict=False):
            yield f"{prefix}self_attn.{name}_norm.weight", (width,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        experts = [f"experts.{number}." for number in range(size.get("num_experts", 0))]
        if experts:
            yield f"{prefix}mlp.gate.weight", (size["num_experts"], hidden)
        for name, place in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            for expert in experts or [""]:
                yield f"{prefix}mlp.{expert}{name}_proj.weight", place
    yield "model.norm.weight", (hidden,)
    if not values["tie_word_embeddings"]:
        yield "lm_head.weight", (size["vocab_size"], hidden)


def make(root: Path, values: Mapping[str, object]) -> None:
    """Writes a checkpoint with the config.json `values`, a tokenizer and random bfloat16 weights, which are
    the same in every call, into the new directory `root`. Raises FileExistsError if the directory exists."""
    root.mkdir(parents=True)
    listed = list(tensors(values))
    header: dict[str, object] = {}
    end = 0
    for name, place in listed:
        size = 2 * math.prod(place)
        header[name] = {"dtype": "BF16", "shape": place, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, place in listed:
            file.write(_bfloat16(_random(random, name, place)))
    (root / "config.json").write_text(json.dumps(values))
    (root / "tokenizer.json").write_text(json.dumps(_tokenizer(values)))


def _random(random: np.random.Generator, name: str, place: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns random float32 weights for the tensor `name`. place: the tensor's shape. A vector (a norm) has
    values near 1. A matrix of embeddings, whose name contains "embed", has a standard deviation of 0.05, and
    any other matrix one of 1 / sqrt(columns), so that products with it keep the magnitude of their input."""
    actual = random.standard_normal(place, np.float32)
    if len(place) == 1:
        return 1 + 0.1 * actual
    return actual * np.float32(0.05 if "embed" in name else place[1] ** -0.5)


def _bfloat16(values: NDArray[np.float32]) -> bytes:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _tokenizer(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the content of a tokenizer.json (byte-level BPE without merges): a token for each byte, then a
    token `<id>` for each remaining id of the vocabulary. values: fields of the model's config.json."""
    count = values["vocab_size"]
    assert isinstance(count, int)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(rest))]
    words = [*letters, *(f"<{i}>" for i in range(len(letters), count))]
    spaces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": spaces,
        "post_processor": None,
        "decoder": spaces,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }


def read(root: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields (name, float32 array) of every tensor in a checkpoint's only file, model.safetensors, in the
    order of the file. Raises KeyError for types other than BF16, F16 and F32."""
    with (root / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            data = file.read(size)
            if entry["dtype"] == "BF16":
                actual = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                actual = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype(np.float32)
            yield name, actual.reshape(entry["shape"])
