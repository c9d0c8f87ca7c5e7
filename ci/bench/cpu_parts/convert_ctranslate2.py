"""Writes an int8 model for CTranslate2 without using transformers. argv: checkpoint, directory in which the
result, int8, is created.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from checkpoint import read
from ctranslate2.specs import common_spec, transformer_spec


def main() -> None:
    root, out = map(Path, sys.argv[1:3])
    config = json.loads((root / "config.json").read_text())
    weights = dict(read(root))
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    decoder.projection.weight = weights.get("lm_head.weight", decoder.embeddings.weight)
    for number, layer in enumerate(decoder.layer):
        own = {
            name.removeprefix(f"model.layers.{number}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{number}.")
        }
        attention, mlp = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = own["input_layernorm.weight"]
        mlp.layer_norm.gamma = own["post_attention_layernorm.weight"]
        attention.linear[0].weight = np.concatenate([own[f"self_attn.{n}_proj.weight"] for n in "qkv"])
        attention.linear[1].weight = own["self_attn.o_proj.weight"]
        mlp.linear_0.weight = own["mlp.gate_proj.weight"]
        mlp.linear_0_noact.weight = own["mlp.up_proj.weight"]
        mlp.linear_1.weight = own["mlp.down_proj.weight"]
    spec.register_vocabulary([f"<{token}>" for token in range(config["vocab_size"])])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<1>", "<2>", "<0>"
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization="int8")
    (out / "int8").mkdir()
    spec.save(str(out / "int8"))


main()
