"""Names of a checkpoint's tensors: which make up each parameter, and which may be left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mlcbuild.canon import Json
from mlcbuild.models.config import ModelConfig

WHOLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    }
)
"""Parameter outside the layers -> names that transformers gives its tensors, in every family."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint that holds consecutive rows of a parameter."""

    tensor: str
    rows: int


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a checkpoint that make up each parameter of a model.

    The `config` step writes them beside the config, so that steps which read weights need no family's code.
    An edit of a family that changes no name rebuilds nothing behind its `config` step.
    """

    sources: Mapping[str, tuple[Piece, ...]]
    """Parameter, in the order of `parameters` -> pieces to stack along axis 0."""

    def to_json(self) -> dict[str, Json]:
        """Returns {"sources": {parameter: [[tensor, rows], ...]}}."""
        return {
            "sources": {
                name: [[part.tensor, part.rows] for part in own] for name, own in self.sources.items()
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Mapping[str, Sequence[tuple[str, int]]]]) -> TensorNames:
        """Reads what to_json returned."""
        return cls({name: tuple(Piece(*part) for part in own) for name, own in value["sources"].items()})


def aliases(config: ModelConfig) -> Mapping[str, str]:
    """Returns name of a tensor in `sources` -> another name under which a checkpoint may store it.

    A tied matrix is stored once, under either of its two names, whichever the writer kept.
    """
    if not config.tie_embeddings:
        return MappingProxyType({})
    return MappingProxyType(dict(zip(WHOLE["embed.weight"], WHOLE["lm_head.weight"], strict=True)))


_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def surplus(config: ModelConfig, tensor: str) -> str | None:
    """Returns why a tensor that no source names may be left out, or None where it may not."""
    if _ROTARY_TABLE.fullmatch(tensor):
        return "old checkpoints store the rotary frequencies, which config.json already gives"
    if config.tie_embeddings and tensor in WHOLE["lm_head.weight"]:
        return "the output matrix is the embedding (tie_word_embeddings)"
    return None
