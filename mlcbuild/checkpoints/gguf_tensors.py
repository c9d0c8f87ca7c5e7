"""Reads the tensors of a GGUF file under the names, and in the row order, that transformers uses.

llama.cpp's converter renames tensors, stores the rows of some query and key matrices in pairs, and adds 1 to
Gemma's norms. Each difference is a field of an `Architecture`, and is undone when rows are read. Names:
gguf-py's constants, https://github.com/ggml-org/llama.cpp/tree/master/gguf-py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcbuild.checkpoints.gguf_blocks import TYPES, BlockType, dequantize, unpack
from mlcbuild.checkpoints.gguf_file import Gguf, Value, read_gguf, shown
from mlcbuild.checkpoints.shards import PackedTensor
from mlcbuild.errors import CheckpointError, did_you_mean


@dataclass(frozen=True)
class Architecture:
    """The differences between the tensors of one `general.architecture` in GGUF and those of a transformers
    checkpoint."""

    layer: Mapping[str, str]
    """Tensor name within a layer in GGUF files, without its suffix -> name in transformers."""
    interleaved: bool = False
    """True if the file stores rows i and i + dim/2 of each query and key head side by side, as rotary
    embeddings that rotate neighbouring elements need them.
    """
    norm_shift: float = 0.0
    """Number that is added to each weight of a norm when it is read; GGUF files of Gemma store 1 more than
    transformers.
    """


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI = {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture(_LAYER, norm_shift=-1.0),
    "gemma2": Architecture(_GEMMA, norm_shift=-1.0),
    "gemma3": Architecture(_GEMMA, norm_shift=-1.0),
    "granite": Architecture(_LAYER, interleaved=True),
    "llama": Architecture(_LAYER, interleaved=True),
    "olmo2": Architecture(_GEMMA),
    "phi3": Architecture(_PHI),
    "qwen2": Architecture(_LAYER),
    "qwen3": Architecture(_LAYER),
    "smollm3": Architecture(_LAYER, interleaved=True),
}
"""Value of `general.architecture` in a GGUF file -> the description of its tensors. Mistral's files have
the architecture llama, too.
"""
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
"""Names of GGUF tensors that belong to a model's config, not to its weights."""
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def architecture_of(gguf: Gguf, place: str) -> tuple[str, Architecture]:
    """Returns the name and the description of the architecture that a GGUF file states. place: the
    beginning of error messages. Raises CheckpointError for an unknown architecture.
    """
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{place}: general.architecture is missing, so the file holds no model; fetch it again"
        )
    if name not in ARCHITECTURES:
        hint = did_you_mean(name, ARCHITECTURES)
        raise CheckpointError(f"{place}: the GGUF architecture '{shown(name)}' is not supported; {hint}")
    return name, ARCHITECTURES[name]


def read_tensors(path: Path) -> dict[str, PackedTensor]:
    """Returns transformers' tensor name -> tensor, for every tensor of a GGUF file that holds weights. A
    tensor without a known translation has the name that it has in the file. Raises CheckpointError for a
    tensor whose rows do not fit the number of heads.
    """
    gguf = read_gguf(path)
    name, architecture = architecture_of(gguf, str(path))
    counts = _head_counts(gguf, name, str(path)) if architecture.interleaved else {}
    tensors = {}
    for gguf_name, tensor in gguf.tensors.items():
        if gguf_name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
            continue
        match = _LAYER_NAME.fullmatch(gguf_name)
        kind = match[2] if match else gguf_name.partition(".")[0]
        shift = architecture.norm_shift if kind.endswith("norm") else 0.0
        heads = counts.get(kind, 0)
        if heads and tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{tensor.path}: tensor '{shown(gguf_name)}' must have rows for {heads} heads, found "
                f"{tensor.shape[0]}; fetch the file again"
            )
        block = next(item for item in TYPES.values() if item.name == tensor.dtype)
        hub = _hub_name(architecture, gguf_name)
        place = (tensor.path, tensor.start, tensor.size)
        decode = partial(_decode, block, shift)
        own_blocks = partial(unpack, kind=block) if block.weights > 1 and not shift else None
        tensors[hub] = PackedTensor(hub, tensor.dtype, tensor.shape, *place, decode, heads, own_blocks)
    return tensors


def _head_counts(gguf: Gguf, name: str, place: str) -> dict[str, int]:
    """Returns {"attn_q": number of query heads, "attn_k": number of key-value heads}, the kinds of tensors in
    which rows i and i + dim / 2 of a head are stored side by side. Raises CheckpointError if the GGUF
    metadata lacks these numbers.
    """
    queries: Value | None = gguf.metadata.get(f"{name}.attention.head_count")
    keys = gguf.metadata.get(f"{name}.attention.head_count_kv", queries)
    for count in (queries, keys):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise CheckpointError(
                f"{place}: {name}.attention.head_count and head_count_kv must be integers above 0, found "
                f"{str(count)[:40]!r}; fetch the file again"
            )
    assert isinstance(queries, int) and isinstance(keys, int)
    return {"attn_q": queries, "attn_k": keys}


def _decode(block: BlockType, shift: float, raw: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Decodes rows [n, bytes] of GGUF blocks, adds `shift` to each value, and writes them to out, float32 [n,
    columns].
    """
    dequantize(raw, block, out)
    if shift:
        np.add(out, np.float32(shift), out=out)


def _hub_name(architecture: Architecture, name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _WHOLE.get(name, name)
    layer, kind, ending = match.groups()
    hub = architecture.layer.get(kind)
    return name if hub is None else f"model.layers.{layer}.{hub}.{ending}"
