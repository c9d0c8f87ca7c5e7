"""Makes goldens of models with experts: with transformers, the logits of tiny random checkpoints.

    python tests/make_experts.py [variant ...]

Needs torch and transformers, which neither mlcbuild nor its tests need. Each variant is one file,
experts-<variant>.safetensors: tokens int64 [n] and logits float32 [n, vocab] of one pass over all tokens
(eager, float32, no cache). Its metadata holds config.json and the shapes of the checkpoint's tensors as JSON.
`contents` computes the weights from these, so that no file holds them.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

HERE = Path(__file__).parent / "golden"
TOKENS = 45
"""Number of tokens for which each test model's logits are stored. It is not a multiple of a KV cache page, of
a tile or of a power of two."""

COMMON: dict[str, object] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 36,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}
QWEN3: dict[str, object] = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "model_type": "qwen3_moe",
    "rope_theta": 1000000.0,
}
MIXTRAL: dict[str, object] = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 5,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
GROUPED: dict[str, object] = COMMON | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.7,
    "topk_group": 2,
}
GRANITE: dict[str, object] = COMMON | {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "num_experts_per_tok": 2,
    "num_local_experts": 6,
    "residual_multiplier": 0.4,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, dict[str, object]] = {
    "qwen3_moe-1-of-3": QWEN3
    | {
        "mlp_only_layers": [1],
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
    },
    "qwen3_moe-8-of-257": QWEN3
    | {
        "attention_bias": True,
        "decoder_sparse_step": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "num_experts": 257,
        "num_experts_per_tok": 8,
    },
    "qwen2_moe": COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "max_window_layers": 2,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
        "shared_expert_intermediate_size": 28,
        "sliding_window": 7,
        "use_sliding_window": True,
    },
    "mixtral": MIXTRAL | {"sliding_window": 11},
    "olmoe": COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "rope_theta": 10000.0,
    },
    "olmoe-clip": COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "clip_qkv": 0.9,
        "model_type": "olmoe",
        "norm_topk_prob": True,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "rope_theta": 10000.0,
    },
    "dots1": GROUPED
    | {
        "architectures": ["Dots1ForCausalLM"],
        "max_window_layers": 2,
        "model_type": "dots1",
        "sliding_window": 9,
    },
    "glm4_moe": GROUPED
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 12,
        "model_type": "glm4_moe",
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "granitemoe": GRANITE | {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
    "granitemoeshared": GRANITE
    | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": 20,
        "tie_word_embeddings": True,
    },
    "mixtral-ties": MIXTRAL,
}


def contents(variant: str, shapes: Mapping[str, Any]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Returns random weights, scaled so that activations stay near 1 and that attention and routers are far
    from uniform."""
    rng = np.random.default_rng(crc32(variant.encode()))
    weights = {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        value: np.ndarray[Any, np.dtype[Any]] = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            value = value * 0.2 + 1.0
        elif "embed_tokens" in name:
            value = value * 0.7
        elif len(shape) == 1 or name.endswith("bias"):
            value = value * 0.3
        else:
            value = value * 1.4 / np.sqrt(shape[-1])
        weights[name] = value.astype(np.float32)
    if variant.endswith("-ties"):
        # Twins: torch.topk chooses any one of equal scores, so that they must compute the same.
        for name, value in weights.items():
            if name.endswith("gate.weight"):
                value[1], value[4] = value[3], value[0]
            for first, second in ((".experts.1.", ".experts.3."), (".experts.4.", ".experts.0.")):
                if first in name:
                    value[...] = weights[name.replace(first, second)]
    return weights


def tokens(variant: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    vocab = VARIANTS[variant]["vocab_size"]
    assert isinstance(vocab, int)
    return np.random.default_rng(len(variant)).integers(0, vocab, TOKENS)


def make(variant: str) -> None:
    """Writes the file of reference logits of one test model with experts. They are computed by transformers
    from a checkpoint that is saved to disk first and read back, as any user would."""
    # Imported by name: type checks must not need these packages.
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    stored = importlib.import_module("safetensors.torch")
    torch.set_num_threads(1)
    config = {**VARIANTS[variant], "torch_dtype": "float32"}
    with tempfile.TemporaryDirectory() as area:
        folder = Path(area)
        (folder / "config.json").write_text(json.dumps(config))
        skeleton = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
        # Saved for the names that checkpoints have; those of the running model differ.
        skeleton.save_pretrained(folder / "saved")
        saved = stored.load_file(folder / "saved" / "model.safetensors")
        shapes = {name: list(value.shape) for name, value in sorted(saved.items())}
        weights = {name: torch.from_numpy(value) for name, value in contents(variant, shapes).items()}
        stored.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    prompt = torch.from_numpy(tokens(variant))
    with torch.no_grad():
        logits = model(prompt[None], use_cache=False).logits[0]
    metadata = {
        "config": json.dumps(config, sort_keys=True),
        "shapes": json.dumps(shapes),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }

    stored.save_file(
        {"tokens": prompt, "logits": logits.contiguous()}, HERE / f"experts-{variant}.safetensors", metadata
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or VARIANTS:
        make(name)
