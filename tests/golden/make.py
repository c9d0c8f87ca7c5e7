"""Makes the tiny checkpoints of this directory and, with transformers, the logits they must give.

    python tests/golden/make.py [variant ... | rope | spellings]

Needs torch and transformers, which neither mlcbuild nor its tests need. Each variant is a directory:

    config.json          as a hub would serve it, in one of the spellings that exist
    model.safetensors    random weights under transformers' names
    golden.safetensors   tokens int64 [n]; logits float32 [n, vocab] of one pass over all tokens (eager
                         attention, float32, no cache); header metadata: versions of torch and
                         transformers, and the context window that the run stands for

rope.json holds rotary embeddings alone, in the shapes of published models: inverse frequencies as float32
bits and attention factors as transformers computes them.

spellings.json holds each variant's config as transformers writes it back: only what is not default, and all.

Weights and tokens come from NumPy generators seeded by name, so they are the same everywhere; logits may
differ in the last bits between versions of torch and between machines.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

HERE = Path(__file__).parent
TOKENS = 61
"""Number of tokens for which each test model's logits are stored. It is longer than every attention window,
and not a multiple of a KV cache page, of a tile or of a power of two."""

COMMON: dict[str, object] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.41.2",
    "use_cache": True,
}


def sizes(hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


LLAMA: dict[str, object] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
}
QWEN2: dict[str, object] = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 1,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": 11,
    "use_sliding_window": False,
}
GEMMA2: dict[str, object] = COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 2.5,
    "final_logit_softcapping": 6.0,
    "head_dim": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 7,
    "rope_theta": 10000.0,
    "sliding_window": 9,
    "tie_word_embeddings": True,
}
PHI3: dict[str, object] = COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 128,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rope_theta": 10000.0,
}
LONGROPE: dict[str, object] = {
    "type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.35, 1.6],
    "long_factor": [1.1, 1.5, 2.2, 3.0, 4.5, 7.0],
}

VARIANTS: dict[str, dict[str, object]] = {
    "llama-mha-tied": LLAMA
    | sizes(36, 72, 6, 6, 203)
    | {"rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True},
    "llama-llama3-gqa": LLAMA
    | sizes(36, 72, 6, 3, 203)
    | {
        "head_dim": 10,
        "eos_token_id": [2, 7, 9],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
    },
    "llama-linear-bias": LLAMA
    | sizes(36, 56, 6, 3, 203)
    | {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama-yarn": LLAMA
    | sizes(36, 56, 6, 3, 149)
    | {
        "head_dim": 16,
        "rope_parameters": {
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
            "rope_type": "yarn",
        },
    },
    "mistral-window": COMMON
    | sizes(36, 72, 6, 3, 203)
    | {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 8,
        "model_type": "mistral",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 13,
    },
    "qwen2-bias": QWEN2 | sizes(36, 72, 6, 3, 203) | {"tie_word_embeddings": True},
    "qwen2-window": QWEN2 | sizes(36, 52, 6, 3, 149) | {"num_hidden_layers": 3, "use_sliding_window": True},
    "qwen3": COMMON
    | sizes(36, 52, 6, 3, 203)
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": 20,
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gemma2": GEMMA2 | sizes(42, 40, 6, 3, 149),
    "gemma2-bf16": GEMMA2 | sizes(42, 40, 6, 3, 149) | {"torch_dtype": "bfloat16"},
    "phi3-window": PHI3 | sizes(48, 56, 6, 6, 149) | {"rope_scaling": None, "sliding_window": 17},
    "phi3-longrope-short": PHI3
    | sizes(48, 56, 3, 1, 149)
    | {
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "sliding_window": 100,
    },
    "phi3-longrope-long": PHI3
    | sizes(48, 56, 3, 1, 149)
    | {
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}
CONTEXT_WINDOW = {"phi3-longrope-short": 64}
"""Name of a test model -> context window in tokens for which its logits are computed, where that is not the
config's max_position_embeddings: with LongRoPE the short factors apply up to the original window only."""

FULL = {"num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
ROPES: dict[str, dict[str, object]] = {
    "llama-2": LLAMA | FULL | {"max_position_embeddings": 4096},
    "llama-3.1": LLAMA
    | FULL
    | {
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "linear": LLAMA | FULL | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "qwen2.5-yarn": QWEN2
    | FULL
    | {
        "max_position_embeddings": 32768,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "yarn-options": LLAMA
    | FULL
    | {
        "max_position_embeddings": 40960,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000,
            "factor": 32.0,
            "beta_fast": 24.0,
            "beta_slow": 1.5,
            "mscale": 0.8,
            "mscale_all_dim": 0.6,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "phi-3-128k": PHI3
    | FULL
    | {
        "hidden_size": 3072,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(48)],
            "long_factor": [1.03 * 1.089**i for i in range(48)],
        },
    },
}


@dataclass(frozen=True)
class Golden:
    """The random weights (tensor name -> float32 array) and token ids of one test model."""

    weights: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]
    tokens: np.ndarray[Any, np.dtype[np.int64]]


def contents(variant: str, shapes: Mapping[str, tuple[int, ...]]) -> Golden:
    """Returns the random weights and token ids of a test model, the same in each call. Weights are scaled so
    that activations stay near 1 through the layers and attention is far from uniform. shapes: tensor name ->
    shape."""
    rng = np.random.default_rng(crc32(variant.encode()))
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        value = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            # Gemma 2 adds 1 to what is stored.
            value = value * 0.2 + (0.0 if variant.startswith("gemma2") else 1.0)
        elif "embed_tokens" in name:
            # A tied matrix is also the output's.
            value = value * (0.2 if VARIANTS[variant]["tie_word_embeddings"] else 0.7)
        elif len(shape) == 1:
            value = value * 0.3
        else:
            value = value * 1.4 / np.sqrt(shape[1])
        weights[name] = value.astype(np.float32)
    vocab = VARIANTS[variant]["vocab_size"]
    assert isinstance(vocab, int)
    return Golden(weights, rng.integers(0, vocab, TOKENS))


def make(variant: str) -> None:
    """Writes the directory of one test model: config, random weights, and the logits that transformers
    computes. They are computed from the written files, as a user would read them."""
    # Imported by name: type checks must not need these packages.
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    save_file = importlib.import_module("safetensors.torch").save_file
    torch.set_num_threads(1)
    folder = HERE / variant
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VARIANTS[variant], indent=2, sort_keys=True) + "\n")

    skeleton = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    tied = bool(VARIANTS[variant]["tie_word_embeddings"])
    shapes = {
        name: tuple(value.shape)
        for name, value in skeleton.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    golden = contents(variant, shapes)
    stored = getattr(torch, str(VARIANTS[variant]["torch_dtype"]))
    tensors = {name: torch.from_numpy(value).to(stored) for name, value in golden.weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if variant == "gemma2-bf16":
        # transformers rounds this factor to the dtype the model runs in; running the checkpoint in its own
        # dtype rounds it to bfloat16, which is the model as it was trained.
        embed = model.model.embed_tokens
        embed.embed_scale = embed.embed_scale.to(stored).to(torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(golden.tokens)[None], use_cache=False).logits[0]
    window = CONTEXT_WINDOW.get(variant, VARIANTS[variant]["max_position_embeddings"])
    save_file(
        {"tokens": torch.from_numpy(golden.tokens), "logits": logits.contiguous()},
        folder / "golden.safetensors",
        metadata={
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "context_window": str(window),
        },
    )


def make_ropes() -> None:
    torch = importlib.import_module("torch")
    auto = importlib.import_module("transformers").AutoConfig
    rope_types = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    llama = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding

    by_name = {}
    for name, values in ROPES.items():
        config = auto.for_model(**values)
        kind = config.rope_parameters["rope_type"]
        compute = llama.compute_default_rope_parameters if kind == "default" else rope_types[kind]
        entry: dict[str, object] = {"config": values}
        for key, length in (("short", None), ("long", 1 << 20)):
            inv_freq, factor = compute(config, seq_len=length)
            entry[key] = {"bits": inv_freq.view(torch.int32).tolist(), "attention_factor": factor}
        by_name[name] = entry
    (HERE / "rope.json").write_text(json.dumps(by_name, sort_keys=True) + "\n")


def make_spellings() -> None:
    auto = importlib.import_module("transformers").AutoConfig
    by_name = {}
    for variant in VARIANTS:
        config = auto.from_pretrained(HERE / variant)
        by_name[variant] = [json.loads(config.to_json_string(use_diff=diff)) for diff in (True, False)]
    # transformers notes where it read a config: no path of a machine belongs here.
    text = json.dumps(by_name, sort_keys=True).replace(f"{HERE.parent.parent}/", "")
    (HERE / "spellings.json").write_text(text + "\n")


if __name__ == "__main__":
    for kind in sys.argv[1:] or [*VARIANTS, "rope", "spellings"]:
        if kind == "rope":
            make_ropes()
        elif kind == "spellings":
            make_spellings()
        else:
            make(kind)
