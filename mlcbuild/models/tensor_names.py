"""Defines which tensors of a checkpoint make up each parameter of a model, and which may be ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlcbuild.canon import Json
from mlcbuild.models.config import ModelConfig

WHOLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "norm.bias": ("model.norm.bias",),
        "lm_head.weight": ("lm_head.weight",),
        "lm_head.bias": ("lm_head.bias",),
    }
)
"""Name of a parameter outside the layers -> names of the tensors in transformers' checkpoints that hold it,
in most model families."""
Range = tuple[int, int, int]
"""A range of rows or columns of a tensor as (start, stop, step), without `stop`, as in Python's range()."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, and the ranges of its rows and columns that belong to one parameter of a
    model."""

    tensor: str
    rows: int
    block: int = 0
    """Number of rows in each block of the checkpoint's tensor, if the model's parameter consists of some rows
    of each block, such as the queries of each head; 0: it consists of all rows, in order."""
    take: tuple[Range, ...] = ()
    """Ranges (start, stop, step) of the rows within each block of `block` rows of the checkpoint's tensor
    that belong to the model's parameter, in the parameter's order."""
    columns: tuple[Range, ...] = ()
    """Ranges (start, stop, step) of columns of the checkpoint's tensor, in the order in which the model's
    parameter has them; (): in stored order."""
    transposed: bool = False
    """True if a checkpoint's tensor stores a parameter's matrix transposed, so that its columns are rows of
    the parameter. The tensor then holds one or more whole matrices."""

    @property
    def taken(self) -> list[int]:
        """Returns which rows of each block of a checkpoint's tensor belong to the model's parameter: their
        indices within the block, in the parameter's order; [] if the tensor has no blocks. A block is `block`
        consecutive rows; the indices are the same in every block."""
        return [row for part in self.take for row in range(*part)]

    @property
    def stored_rows(self) -> int:
        """Returns the number of rows of a checkpoint's tensor, computed from its description: the tensor may
        hold rows of several parameters of the model. Must not be called for a tensor that stores a matrix
        transposed."""
        return self.rows // len(self.taken) * self.block if self.block else self.rows

    @property
    def in_order(self) -> bool:
        """Returns True if all rows and columns of a checkpoint's tensor belong to one parameter of the model,
        in the same order, so that the tensor can be used as it is: without selecting rows or columns, and
        without transposing."""
        return not (self.block or self.columns or self.transposed)

    def to_json(self) -> list[Json]:
        """Returns this description of a checkpoint's tensor as the JSON list [tensor, rows, block, take,
        columns, transposed], of which only the first two or four entries are written if the others have their
        defaults (0, [], [], false). tensor: its name; rows: how many rows of a model's parameter it holds;
        block: rows per block of the tensor, or 0; take, columns: lists of ranges [start, stop, step] of the
        parameter's rows in each block, and of its columns; transposed: true if the tensor stores the matrix
        transposed."""
        more: list[Json] = [self.block, _lists(self.take), _lists(self.columns), self.transposed]
        return [
            self.tensor,
            self.rows,
            *more[: 4 if self.columns or self.transposed else 2 * bool(self.block)],
        ]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Piece:
        defaults: tuple[Any, ...] = (0, (), (), False)
        tensor, rows, block, take, columns, transposed = (*value, *defaults[len(value) - 2 :])
        return cls(tensor, rows, block, _ranges(take), _ranges(columns), transposed)


def _lists(ranges: tuple[Range, ...]) -> list[Json]:
    return [[*part] for part in ranges]


def _ranges(value: Sequence[Any]) -> tuple[Range, ...]:
    return tuple((start, stop, step) for start, stop, step in value)


@dataclass(frozen=True)
class TensorNames:
    """The names of the checkpoint tensors that make up each parameter of a model.

    The `config` step writes them beside the config, so that steps which read weights do not depend on the
    family's code. An edit of a family that changes no name rebuilds only its `config` step.
    """

    sources: Mapping[str, tuple[Piece, ...]]
    """Parameter name -> descriptions of the tensors in a checkpoint whose rows, joined along axis 0, are the
    parameter. The order of names is that in which weights are stored."""
    unused: str = ""
    """Regular expression that matches the whole name of those tensors in a checkpoint that no model of the
    family reads; "": there are none."""

    def to_json(self) -> dict[str, Json]:
        """Returns {"sources": parameter name -> list of the checkpoint's tensors that hold it, each the JSON
        list of a Piece, [tensor name, number of rows, ...], "unused": regular expression for names of tensors
        that no parameter needs}; "unused" is absent if it is empty."""
        sources: dict[str, Json] = {
            name: [part.to_json() for part in pieces] for name, pieces in self.sources.items()
        }
        return {"sources": sources, **({"unused": self.unused} if self.unused else {})}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorNames:
        """Returns the TensorNames that a JSON object, as `to_json` returned it, describes."""
        sources = {
            name: tuple(Piece.from_json(part) for part in pieces) for name, pieces in value["sources"].items()
        }
        return cls(sources, value.get("unused", ""))


def aliases(config: ModelConfig) -> Mapping[str, str]:
    """Returns {"model.embed_tokens.weight": "lm_head.weight"} if the output matrix is the embedding,
    otherwise {}. Checkpoints store this matrix once: where the first name is absent, the tensor with the
    second is the same matrix."""
    if not config.tie_embeddings:
        return MappingProxyType({})
    return MappingProxyType(dict(zip(WHOLE["embed.weight"], WHOLE["lm_head.weight"], strict=True)))


_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_OTHER_PARTS = re.compile(
    r"(model\.)?(?P<part>vision_tower|vision_model|visual|vision_encoder|multi_modal_projector|audio_tower"
    r"|vision_projection|patch_merger|embed_vision|embed_audio|mtp)\..*"
)
"""Matches, as a whole (fullmatch), names of a checkpoint's tensors that belong to parts of the model which
compute no text: vision, audio, draft tokens (mtp)."""


def surplus(config: ModelConfig, tensor: str, unused: str = "") -> str | None:
    """Returns the reason why a checkpoint's tensor that no parameter needs may be ignored, or None if it may
    not be.

    tensor: its name. unused: regular expression for the whole names of tensors that no model of the family
    reads; "": there are none.
    """
    if _ROTARY_TABLE.fullmatch(tensor):
        return "old checkpoints store the rotary frequencies, which config.json already gives"
    if config.tie_embeddings and tensor in WHOLE["lm_head.weight"]:
        return "the output matrix is the embedding (tie_word_embeddings)"
    if part := _OTHER_PARTS.fullmatch(tensor):
        return f"{part['part']} takes no part in text"
    if unused and re.fullmatch(unused, tensor):
        return f"models of family '{config.family}' do not read it"
    return None


def other_names(sources: Sequence[str], stored: Sequence[str]) -> Mapping[str, str]:
    """Maps tensor names of a checkpoint that stores the model under another prefix than `sources` expects:
    stored name -> name in `sources`. Such a checkpoint has the text model inside a model of several parts
    ("language_model." is added), or has the model without its output head (the prefix "model." is absent).

    sources: names of the tensors that the model's parameters need, the embedding's first. stored: names in
    the checkpoint. Returns {} if the embedding has its expected name, or none of these other names.
    """
    first, names = sources[0], set(stored)
    if first in names:
        return {}
    root = first.partition(".")[0] + "."
    for prefix, base in ((f"{root}language_model.", root), ("language_model.", ""), ("", root)):
        if prefix + first.removeprefix(base) in names:
            inner = {prefix + name.removeprefix(base): name for name in sources if name.startswith(base)}
            head = {f"language_model.{name}": name for name in sources if not name.startswith(root)}
            return {name: target for name, target in {**head, **inner}.items() if name in names}
    return {}
