"""Writes f32.gguf, then <format>.gguf from it. argv: a checkpoint's directory or a GGUF file, directory of
the results, formats (default: q4_0 and q8_0). For a checkpoint with experts, the default is q4_0 alone, and
f32.gguf is removed at the end, whichever formats are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"llama": "llama", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FORMATS = {
    "f32": "LLAMA_FTYPE_ALL_F32",
    "q2_k": "LLAMA_FTYPE_MOSTLY_Q2_K",
    "q3_k_m": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "q5_0": "LLAMA_FTYPE_MOSTLY_Q5_0",
    "q5_k_m": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "q6_k": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
}


def rename(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OUTER:
        return OUTER[base] + ".weight"
    layer, inner = base.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the weights [rows, columns] of a query or key projection with the rows of each head in the
    order in which llama.cpp rotates them: rows of the head's first and second half alternate. heads: number
    of heads in the matrix.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def joined(tensors: Iterable[tuple[str, np.ndarray]], experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (tensor name in llama.cpp, weights) for `tensors`, the pairs (name, weights) of a transformers
    checkpoint. The matrices of one kind of a layer's experts become one stacked float16 tensor; they must
    follow one another in the order of the experts, which is not checked. experts: number of experts in a
    layer."""
    waiting: list[np.ndarray] = []
    for name, weight in tensors:
        base, expert, kind = name.partition(".experts.")
        if not expert:
            yield rename(name), weight
            continue
        waiting.append(weight.astype(np.float16))
        if len(waiting) == experts:
            kind = kind.split(".")[1].removesuffix("_proj")
            layer = base.removeprefix("model.layers.").split(".")[0]
            yield f"blk.{layer}.ffn_{kind}_exps.weight", np.stack(waiting)
            waiting = []


def write(root: Path, out: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    experts, head = config.get("num_experts", 0), config.get("head_dim", config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[config["model_type"]])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(inner)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in joined(read(root), experts):
        values = weight
        if not experts and ("attn_q." in name or "attn_k." in name):
            values = interleaved(weight, heads if "attn_q." in name else kv)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, name: str) -> None:
    import llama_cpp as lib  # convert_ik.py uses `write`, and has no llama-cpp-python

    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, FORMATS[name])
    params.allow_requantize = True
    # Otherwise the output matrix gets more bits than the format's name says; a k_m format is a mixture by
    # definition.
    params.pure = "_k" not in name
    if lib.llama_model_quantize(str(source).encode(), str(out / f"{name}.gguf").encode(), params):
        sys.exit(f"llama.cpp could not quantize to {name}")


def main() -> None:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    has_experts = root.is_dir() and "num_experts" in json.loads((root / "config.json").read_text())
    if root.is_dir():
        write(root, out / "f32.gguf")
    else:
        quantize(root, out, "f32")
    # Models with experts are large: one format is converted, and intermediate files are removed.
    for name in sys.argv[3:] or (("q4_0",) if has_experts else ("q4_0", "q8_0")):
        quantize(out / "f32.gguf", out, name)
    if has_experts:
        (out / "f32.gguf").unlink()


if __name__ == "__main__":
    main()
