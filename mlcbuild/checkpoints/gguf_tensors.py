"""Reads the tensors of a GGUF file under the names, and in the row order, that transformers uses.

llama.cpp's converter renames tensors, stores the rows of some query and key matrices in pairs, and adds 1 to
Gemma's norms. Each difference is a field of an `Architecture`, and is undone when rows are read. Names:
gguf-py's constants, https://github.com/ggml-org/llama.cpp/tree/master/gguf-py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.gguf_blocks import dequantize, unpack
from mlcbuild.checkpoints.gguf_file import Gguf, Value, read_gguf, shown
from mlcbuild.checkpoints.gguf_types import TYPES, BlockType
from mlcbuild.checkpoints.shards import ONLY_FLOAT32, ComputedTensor, PackedTensor, RowReader
from mlcbuild.errors import CheckpointError, did_you_mean
from mlcbuild.quant.codebooks import CODEBOOKS


@dataclass(frozen=True)
class Architecture:
    """The differences between the tensors of one `general.architecture` in GGUF and those of a transformers
    checkpoint."""

    layer: Mapping[str, str]
    """Tensor name within a layer in GGUF files -> name within the layer in transformers, both without .weight
    or .bias."""
    interleaved: bool = False
    """True if the file stores rows i and i + dim/2 of each query and key head side by side, as rotary
    embeddings that rotate neighbouring elements need them.
    """
    norm_shift: float = 0.0
    """Number that is added to each weight of a norm when it is read: -1 for Gemma, whose GGUF files store 1
    more than transformers; 0 for others."""


KEYS, VALUES = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
"""Names within a layer, in transformers' spelling, of the two matrices of latent attention (for keys, for
values) that newer GGUF files store as one stack each, with a matrix for each head; transformers has one
matrix with the rows of both."""
MOST_EXPERTS = 4096
"""Largest number of experts of a layer in a GGUF file; more are an error. The configs of all families have
the same limit."""
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
_EXPERTS = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = {
    **_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": KEYS.removesuffix(".weight"),
    "attn_v_b": VALUES.removesuffix(".weight"),
}
_PHI = {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(_LATENT),
    "dots1": Architecture(_EXPERTS),
    "ernie4_5-moe": Architecture(_EXPERTS),
    "gemma": Architecture(_LAYER, norm_shift=-1.0),
    "gemma2": Architecture(_GEMMA, norm_shift=-1.0),
    "gemma3": Architecture(_GEMMA, norm_shift=-1.0),
    "glm4moe": Architecture(_EXPERTS),
    "gpt-oss": Architecture(_EXPERTS),
    "granite": Architecture(_LAYER, interleaved=True),
    "granitemoe": Architecture(_EXPERTS, interleaved=True),
    "hunyuan-moe": Architecture(_EXPERTS),
    "llama": Architecture(_EXPERTS, interleaved=True),
    "minimax-m2": Architecture(_EXPERTS),
    "olmo2": Architecture(_GEMMA),
    "olmoe": Architecture(_EXPERTS),
    "phi3": Architecture(_PHI),
    "phimoe": Architecture(_EXPERTS),
    "qwen2": Architecture(_LAYER),
    "qwen2moe": Architecture(_EXPERTS),
    "qwen3": Architecture(_LAYER),
    "qwen3moe": Architecture(_EXPERTS),
    "smollm3": Architecture(_LAYER, interleaved=True),
}
"""Value of `general.architecture` in a GGUF file -> the description of its tensors. Mistral's files have
the architecture llama, too, and so have Mixtral's.
"""
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
"""Names of GGUF tensors with factors of rotary frequencies: for any, for short and for long contexts. They
belong to a model's config, so they are not read as weights."""
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
"""Matches the GGUF name of an expert's matrix in old files of Mixtral, which have one tensor for each expert;
groups: layer, kind (gate, up, down), expert."""
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
"""Matches the GGUF name of a tensor that stacks the matrices of all experts of a layer; groups: layer, kind
(gate, up, down, gate_up)."""
_STACK_BIAS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.bias")
_DRAFT = re.compile(r"blk\.(\d+)\.(nextn\..+)")
"""Matches the GGUF name of a tensor of a layer that computes draft tokens (multi-token prediction), which the
model itself does not use; groups: layer, name within the layer."""
_SPECIAL = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.weight": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
}
"""Tensor name within a layer in GGUF files, with its suffix (.weight or .bias) -> complete name within the
layer in transformers, which may have no such suffix."""


def architecture_of(gguf: Gguf, place: str) -> tuple[str, Architecture]:
    """Returns the name and the description of the architecture that a GGUF file states. place: the beginning
    of error messages. Raises CheckpointError for a missing or unknown architecture.
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


def read_tensors(path: Path) -> dict[str, PackedTensor | ComputedTensor]:
    """Returns transformers' tensor name -> tensor, for every tensor of a GGUF file that holds weights. A
    tensor without a known translation has the name that it has in the file. Each matrix of an expert is a
    tensor of its own, since parameters join the rows of one expert's matrices; biases have a row for each
    expert.

    Raises CheckpointError for a damaged file, an unsupported architecture, a type that only the package gguf
    decodes if that is missing, and a tensor whose shape does not fit the number of heads or of experts.
    """
    gguf = read_gguf(path)
    _check_decoders(gguf, path)
    name, architecture = architecture_of(gguf, str(path))
    counts = _head_counts(gguf, name, str(path)) if architecture.interleaved else {}
    tensors: dict[str, PackedTensor | ComputedTensor] = {}
    biases: dict[str, PackedTensor] = {}
    scales = _matrix_scales(gguf.tensors)
    for gguf_name, tensor in gguf.tensors.items():
        if gguf_name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS) or gguf_name in scales:
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
        packed = _packed(tensor, _hub_name(architecture, gguf_name), shift, heads)
        scale = scales.get(gguf_name.removesuffix("weight") + "scale")
        if stack := _STACK.fullmatch(gguf_name):
            parts = [*_experts(packed, stack[1], stack[2])]
            tensors |= {part.name: part for part in _scaled(parts, scale)}
        elif bias := _STACK_BIAS.fullmatch(gguf_name):
            biases[f"model.layers.{bias[1]}.mlp.experts.{bias[2]}_proj.bias"] = packed
        elif packed.name.endswith("shared_expert_gate.weight"):
            tensors[packed.name] = replace(packed, shape=(1, math.prod(packed.shape)))
        else:
            (tensors[packed.name],) = _scaled([packed], scale)
    return tensors | _joined_biases(biases)


def _matrix_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name in a GGUF file -> tensor, for the tensors that scale whole matrices of the type NVFP4
    (`scale`: a number for the matrix, or one for each expert) or their activations (`input_scale`)."""
    names = [name.removesuffix("weight") for name, tensor in tensors.items() if tensor.dtype == "NVFP4"]
    places = [f"{name}{part}" for name in names for part in ("scale", "input_scale")]
    return {name: tensors[name] for name in places if name in tensors}


def _scaled(parts: Sequence[PackedTensor], scale: Tensor | None) -> Sequence[PackedTensor | ComputedTensor]:
    """Returns the matrices `parts` multiplied by numbers of the tensor `scale`, which has one for all of them
    or one for each equal share of them, in order; unchanged if `scale` is None. Raises CheckpointError if the
    tensor has another type than float32 or another size."""
    if scale is None:
        return parts
    count = math.prod(scale.shape)
    if scale.dtype != "F32" or len(parts) % count:
        raise CheckpointError(
            f"{scale.path}: tensor '{shown(scale.name)}' must have one F32 number for each matrix, found "
            f"{scale.dtype} {list(scale.shape)}; fetch the file again"
        )
    flat = replace(scale, shape=(count,))
    return [
        ComputedTensor(
            *(part.name, "F32", part.shape, part.path, part.start, part.size),
            partial(_times, part, flat, index * count // len(parts)),
            note=f"NVFP4 with a scale of the whole matrix; {ONLY_FLOAT32}",
        )
        for index, part in enumerate(parts)
    ]


def _times(
    part: PackedTensor, scale: Tensor, index: int, reader: RowReader, first: int, count: int
) -> NDArray[np.float32]:
    """Returns `count` rows from row `first` on of a matrix, times the element `index` of a vector."""
    factor: NDArray[np.float32] = reader.elements(scale, (index, index + 1))
    return reader.values(part, first, count) * factor


def _check_decoders(gguf: Gguf, path: Path) -> None:
    """Raises CheckpointError if a tensor of a GGUF file has a type that only the package gguf decodes, and
    this package is not installed."""
    types = sorted({tensor.dtype for tensor in gguf.tensors.values()} & CODEBOOKS)
    if types and find_spec("gguf") is None:
        raise CheckpointError(
            f"{path}: the package gguf, which decodes its tensors of the types {', '.join(types)}, is not "
            "installed; pip install 'mlcbuild[gguf]', or use a file of another quantization, such as Q4_K_M"
        )


def _packed(tensor: Tensor, name: str, shift: float, heads: int) -> PackedTensor:
    """Returns a tensor of a GGUF file with the functions that decode its blocks. name: its name in
    transformers; shift: the number that is added to each weight; heads: number of heads whose rows are stored
    in pairs, 0 if rows are in order. Raises CheckpointError for a quantized vector, which llama.cpp cannot
    compute with either, except for the gate of shared experts, which is read as a matrix with one row."""
    block = next(item for item in TYPES.values() if item.name == tensor.dtype)
    if block.weights > 1 and len(tensor.shape) == 1 and not name.endswith("shared_expert_gate.weight"):
        raise CheckpointError(
            f"{tensor.path}: tensor '{shown(tensor.name)}' is a vector of the type {tensor.dtype}; vectors "
            "must not be quantized: use another file, or convert the model again"
        )
    decode = partial(_decode, block, shift)
    has_codes = block.weights > 1 and block.name not in CODEBOOKS
    own_blocks = partial(unpack, kind=block) if has_codes and not shift else None
    place = (tensor.path, tensor.start, tensor.size)
    return PackedTensor(name, tensor.dtype, tensor.shape, *place, decode, heads, own_blocks)


def _experts(stack: PackedTensor, layer: str, kind: str) -> Iterator[PackedTensor]:
    """Yields the matrices of the experts of a layer, which a GGUF file stores one after the other, as tensors
    with a name and a place of their own, expert by expert. kind: "gate", "up" or "down"; or "gate_up", where
    the rows of each expert are those of its gate, then those of up. Raises CheckpointError for a tensor that
    is no stack of at most 4,096 matrices."""
    kinds = kind.split("_")
    if len(stack.shape) != 3 or stack.shape[1] % len(kinds) or stack.shape[0] > MOST_EXPERTS:
        raise CheckpointError(
            f"{stack.path}: tensor 'blk.{layer}.ffn_{kind}_exps.weight' must be a stack of at most "
            f"{MOST_EXPERTS} matrices, found the shape {list(stack.shape)}; fetch the file again"
        )
    count, rows, columns = stack.shape
    size = stack.size // (count * len(kinds))
    for index in range(count * len(kinds)):
        expert, part = divmod(index, len(kinds))
        yield replace(
            stack,
            name=f"model.layers.{layer}.mlp.experts.{expert}.{kinds[part]}_proj.weight",
            shape=(rows // len(kinds), columns),
            start=stack.start + index * size,
            size=size,
        )


def _joined_biases(biases: Mapping[str, PackedTensor]) -> dict[str, PackedTensor | ComputedTensor]:
    """Returns transformers' tensor name -> biases of experts, one row for each expert. The biases of gate and
    up are joined side by side under the name of gate_up; both are left out if their shapes differ, they are
    no matrices, or one of them is missing."""
    joined: dict[str, PackedTensor | ComputedTensor] = {}
    for name, gate in biases.items():
        up = biases.get(name.replace(".gate_proj.", ".up_proj."))
        if ".gate_proj." in name and up is not None and gate.shape == up.shape and len(gate.shape) == 2:
            shape = (gate.shape[0], 2 * gate.shape[1])
            both = name.replace(".gate_proj.", ".gate_up_proj.")
            place = (gate.path, gate.start, gate.size + up.size)
            joined[both] = ComputedTensor(both, "F32", shape, *place, partial(_side_by_side, gate, up))
        elif ".down_proj." in name:
            joined[name] = gate
    return joined


def _side_by_side(
    left: PackedTensor, right: PackedTensor, reader: RowReader, first: int, count: int
) -> NDArray[np.float32]:
    """Returns `count` rows from row `first` on of two tensors side by side: in each row the values of `left`,
    then those of `right`."""
    return np.hstack([reader.values(left, first, count), reader.values(right, first, count)])


def _head_counts(gguf: Gguf, name: str, place: str) -> dict[str, int]:
    """Returns {"attn_q": number of query heads, "attn_k": number of key-value heads}, the kinds of tensors in
    which rows i and i + dim / 2 of a head are stored side by side. Raises CheckpointError if the GGUF
    metadata lacks the first number or one is no positive integer. Without the second one, both are the same.
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
    """Returns the name in transformers of a tensor in a GGUF file; the name in the file if there is none."""
    if expert := _ONE_EXPERT.fullmatch(name):
        return f"model.layers.{expert[1]}.mlp.experts.{expert[3]}.{expert[2]}_proj.weight"
    if draft := _DRAFT.fullmatch(name):
        return f"model.layers.{draft[1]}.{draft[2]}"
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _WHOLE.get(name, name)
    layer, kind, ending = match.groups()
    hub = _SPECIAL.get(f"{kind}.{ending}")
    if hub is None and kind in architecture.layer:
        hub = f"{architecture.layer[kind]}.{ending}"
    return name if hub is None else f"model.layers.{layer}.{hub}"
