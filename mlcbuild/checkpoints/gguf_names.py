"""Lists the names of the tensors in a GGUF file that make up each parameter of a model.

Tensors get the names of transformers' checkpoints, with one exception: the tensors of experts and of latent
attention have names and shapes that are the same for all model families, while transformers' checkpoints have
several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlcbuild.checkpoints.gguf_file import read_gguf
from mlcbuild.checkpoints.gguf_tensors import KEYS, VALUES
from mlcbuild.models import Experts, ModelConfig, Piece, TensorNames
from mlcbuild.models.family import Names, TensorRules, sources_of
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.parsing import load_family, tensor_names

_EXPERTS: Names = {
    "mlp.router.bias": ("mlp.gate.bias",),
    "mlp.experts.gate_up.bias": ("mlp.experts.gate_up_proj.bias",),
    "mlp.experts.down.bias": ("mlp.experts.down_proj.bias",),
    "mlp.shared_gate.weight": ("mlp.shared_expert_gate.weight",),
}
"""Name of a parameter of experts within a layer -> names under which the tensors of a GGUF file that hold it
are read, in transformers' spelling. It adds parameters that the table of tensor names of all model families
(models.family) lacks."""


def names_in_file(path: Path, config: ModelConfig) -> TensorNames:
    """Returns, as a TensorNames: name of each parameter of a model -> the tensors of a GGUF file that hold
    it, under the names that transformers' checkpoints give them; and a regular expression for the tensors
    that no model of the family reads. Raises CheckpointError for a damaged file."""
    names = tensor_names(config)
    if not any(isinstance(layer.feed_forward, Experts) for layer in config.layers):
        return names
    family = load_family(config.family)
    sources: Mapping[str, tuple[Piece, ...]] = sources_of(
        replace(family, tensors=TensorRules(_EXPERTS)), config
    )
    is_latent = isinstance(config.layers[0].mixer, LatentAttention)
    if is_latent and "blk.0.attn_k_b.weight" in read_gguf(path).tensors:
        sources = {name: _apart(name, pieces, config) for name, pieces in sources.items()}
    return TensorNames(sources, names.unused)


def _apart(name: str, pieces: tuple[Piece, ...], config: ModelConfig) -> tuple[Piece, ...]:
    """Returns the tensors of the parameter `name` in a GGUF file that stores each matrix of latent attention
    as a stack with one matrix for each head. pieces: the tensors that hold the parameter in GGUF files
    without such stacks; they are returned for parameters other than these matrices.
    """
    for kind, tensor in (("attn.k_b.weight", KEYS), ("attn.v_b.weight", VALUES)):
        if name.endswith(kind):
            index = name.split(".")[1]
            return (Piece(f"model.layers.{index}.{tensor}", config.layers[int(index)].mixer.heads),)
    return pieces
