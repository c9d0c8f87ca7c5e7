"""Names of a checkpoint's tensors: which make up each parameter, and which may be left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mlcbuild.canon import Json
from mlcbuild.models.config import ModelConfig, Param

WHOLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    }
)
"""Parameter outside the layers -> names that transformers gives its tensors, in every family."""


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a checkpoint that make up each parameter of a model.

    The `config` step writes them beside the config, so that steps which read weights need no family's code.
    An edit of a family that changes no name rebuilds nothing behind its `config` step.
    """

    sources: Mapping[str, tuple[str, ...]]
    """Parameter, in the order of `parameters` -> tensors to stack along axis 0."""

    def to_json(self) -> dict[str, Json]:
        return {"sources": {name: list(tensors) for name, tensors in self.sources.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Mapping[str, Sequence[str]]]) -> TensorNames:
        """The inverse of to_json."""
        return cls({name: tuple(tensors) for name, tensors in value["sources"].items()})


def aliases(config: ModelConfig) -> Mapping[str, str]:
    """Tensors that a checkpoint may store under another name instead: name in `sources` -> other name.

    A tied matrix is stored once, under either of its two names, whichever the writer kept.
    """
    if not config.tie_embeddings:
        return MappingProxyType({})
    return MappingProxyType(dict(zip(WHOLE["embed.weight"], WHOLE["lm_head.weight"], strict=True)))


_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def surplus(config: ModelConfig, tensor: str) -> str | None:
    """The reason why a checkpoint's tensor that no source names may be left out, or None where it may not."""
    if _ROTARY_TABLE.fullmatch(tensor):
        return "old checkpoints store the rotary frequencies, which config.json already gives"
    if config.tie_embeddings and tensor in WHOLE["lm_head.weight"]:
        return "the output matrix is the embedding (tie_word_embeddings)"
    return None


def piece_rows(config: ModelConfig, param: Param, count: int) -> list[int]:
    """Rows of each of the `count` tensors that are stacked into a parameter."""
    if ".attn.qkv." in param.name:
        kv = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, kv, kv] if count == 3 else [param.shape[0]]
    return [param.shape[0] // count] * count
