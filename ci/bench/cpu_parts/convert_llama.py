"""argv: checkpoint, a directory for the results, formats (q4_0 and q8_0 when none is given). Writes f32.gguf,
then <format>.gguf from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np
from checkpoint import read

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FORMATS = {
    "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_0": lib.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q5_k_m": lib.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def rename(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OUTER:
        return OUTER[base] + ".weight"
    layer, inner = base.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order: the two halves of a head take turns."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(root: Path, out: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in read(root):
        values = weight
        if ".q_proj." in name or ".k_proj." in name:
            values = interleaved(weight, heads if ".q_proj." in name else kv)
        writer.add_tensor(rename(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    write(root, out / "f32.gguf")
    for name in sys.argv[3:] or ("q4_0", "q8_0"):
        params = lib.llama_model_quantize_default_params()
        params.ftype = FORMATS[name]
        # Otherwise the output matrix gets more bits than the name says; a k_m is a mixture by definition.
        params.pure = not name.endswith("_k_m")
        if lib.llama_model_quantize(
            str(out / "f32.gguf").encode(), str(out / f"{name}.gguf").encode(), params
        ):
            sys.exit(f"llama.cpp could not quantize to {name}")


main()
