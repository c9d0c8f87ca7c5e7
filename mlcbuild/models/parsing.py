"""Reads config.json of a checkpoint into a ModelConfig, and names the checkpoint's tensors.

A model family is one file below families/, imported by its model_type. No import statement names it, so the
cache key of a build step contains the source of those families only whose modules its `Step.code` lists.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module

from mlcbuild.errors import CheckpointError
from mlcbuild.models import families
from mlcbuild.models.config import ModelConfig, faults
from mlcbuild.models.family import Common, Family, sources_of
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.known import IRRELEVANT, NEUTRAL, OTHER_PARTS
from mlcbuild.models.layers import Attention, Dense, Rope
from mlcbuild.models.refusals import missing_block, refusal
from mlcbuild.models.rope import ROPE_FIELDS, read_ropes
from mlcbuild.models.tensor_names import TensorNames


@cache
def family_names() -> tuple[str, ...]:
    """Returns every supported model_type, sorted. They are the names of the files below families/."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))


def family_module(name: str) -> str:
    """Returns the dotted name of the module of a model family. name: its model_type."""
    return f"{families.__name__}.{name}"


def load_family(name: str) -> Family:
    """Imports and returns the family of a model_type. If the name is not in `family_names`, raises
    ModuleNotFoundError."""
    family: Family = import_module(family_module(name)).FAMILY
    return family


_STAND_IN = Rope(2, (1.0,))
"""A valid rotary embedding that replaces an invalid one of a config.json, so that the other fields are still
checked. No model is returned then."""


def parse(values: object, place: str = "config.json") -> ModelConfig:
    """Returns the model that a checkpoint's config.json describes. values: the decoded JSON document. place:
    the beginning of each error message, such as the file's path.

    Raises CheckpointError with all problems, one per line; a document that is no object, whose model_type is
    not supported, or that needs a kind of layer which is not implemented, is not read further. A field that
    is neither read, nor in the list of fields without effect on results, nor has a value without effect, is a
    problem.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{place}: must be a JSON object, found {show(values)}")
    fields = Fields(place, values)
    family = _family(fields, values)
    config = _wrapped(fields, family) if family.texts else _model(fields, family)
    fields.check()
    assert config is not None
    if sentences := faults(config):
        raise CheckpointError("\n".join(f"{place}: {fault}" for fault in sentences))
    return config


def _model(fields: Fields, family: Family) -> ModelConfig:
    """Reads the text model that the fields of config.json describe, and returns it. Each wrong field adds a
    problem to `fields`, and the returned model must then not be used."""
    fields = fields.respelled(family.config.spellings, family.config.defaults)
    config = family.read(fields, _common(fields, family))
    fields.ignore(IRRELEVANT)
    fields.ignore_private()
    owner = f"family '{family.name}'"
    fields.neutral(NEUTRAL, owner)
    fields.close(owner)
    return config


def _wrapped(fields: Fields, family: Family) -> ModelConfig | None:
    """Returns the ModelConfig of the text model, under `text_config`, of a config.json that describes a model
    with several parts, such as a vision tower, which are ignored; its family is the outer one. fields: reads
    config.json and collects a problem for each wrong field. Returns None, with a problem added, if there is
    no supported text model."""
    _check_code(fields, family)
    inner_values = fields.get("text_config")
    if not isinstance(inner_values, Mapping):
        detail = f"found {show(inner_values)}" if fields.has("text_config") else "and is missing"
        fields.problem("text_config", f"must be an object, {detail}")
        return None
    values = {**inner_values}
    if fields.has("tie_word_embeddings"):
        values["tie_word_embeddings"] = fields.get("tie_word_embeddings")
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            values.setdefault(name, fields.get(name))
    texts = {text.name: text for text in family.texts}
    kind = values.get("model_type", family.texts[0].name)
    if not isinstance(kind, str) or kind not in texts:
        fields.problem("text_config.model_type", f"must be {' or '.join(texts)}, found {show(kind)}")
        return None
    inner = fields.inner("text_config", {**values, "model_type": kind})
    inner.get("model_type")
    config = _model(inner, texts[kind])
    fields.adopt(inner)
    fields.ignore(OTHER_PARTS)
    fields.ignore(IRRELEVANT)
    fields.ignore_private()
    fields.neutral(NEUTRAL, f"family '{family.name}'")
    fields.close(f"family '{family.name}'")
    return replace(config, family=family.name)


def tensor_names(config: ModelConfig) -> TensorNames:
    """Returns parameter name -> the checkpoint's tensors that make it up, and a regular expression for the
    tensors to ignore, as the model's family, which must exist, defines them. Raises CheckpointError if the
    family names a wrong number of tensors for a parameter."""
    family = load_family(config.family)
    unused = family.tensors.unused.replace("{layers}", str(len(config.layers)))
    return TensorNames(sources_of(family, config), unused)


def _family(fields: Fields, values: Mapping[str, object]) -> Family:
    name = fields.get("model_type")
    if name is None or name is ABSENT:
        raise CheckpointError(
            f"{fields.place}: model_type: missing; it names the family: {', '.join(family_names())}"
        )
    if not isinstance(name, str) or name not in family_names():
        why = refusal(name, values, family_names()) if isinstance(name, str) else "it must be a string"
        raise CheckpointError(f"{fields.place}: model_type: {show(name)} is not a supported family; {why}")
    if block := missing_block(values):
        raise CheckpointError(f"{fields.place}: {block[0]}: {block[1]}")
    return load_family(name)


def _common(fields: Fields, family: Family) -> Common:
    """Reads the config.json fields that all model families have, and returns a Common: descriptions of
    attention, feed-forward and norm, the number of layers, and a ModelConfig without layers. fields: collects
    a problem for each wrong field."""
    _check_code(fields, family)
    rules = family.config
    hidden = fields.integer("hidden_size", high=2**20)
    heads = fields.integer("num_attention_heads", high=2**14)
    kv_heads = _kv_heads(fields, family, heads)
    head_dim = _head_dim(fields, family, hidden, heads)
    count = fields.integer("num_hidden_layers", high=4096)
    max_position = fields.integer("max_position_embeddings", high=2**28)
    if family.rope is None:
        ropes: dict[str, Rope] = {}
    elif fields.sound("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings"):
        ropes = read_ropes(fields, head_dim, max_position, family.rope)
    else:
        fields.ignore(ROPE_FIELDS)
        ropes = {"": _STAND_IN}
    vocab_size = fields.integer("vocab_size", high=2**24)
    inner = fields.integer("intermediate_size", default=4 * hidden if rules.wide else None, high=2**22)
    norm = replace(rules.norm, eps=fields.number("rms_norm_eps", high=1.0))
    activation = fields.choice(rules.activation_field, rules.activations, rules.activation)
    tied = fields.flag("tie_word_embeddings", rules.tied)
    rope = 0 if ropes else None
    unique = tuple(dict.fromkeys(ropes.values()))
    return Common(
        Attention(heads, kv_heads, head_dim, 1 / math.sqrt(head_dim), rope=rope),
        Dense(inner, activation),
        norm,
        count,
        ModelConfig(family.name, vocab_size, hidden, max_position, (), unique, norm, tied),
    )


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    name = "num_key_value_heads"
    # An explicit null means as many as heads; an absent field means this only in the oldest families.
    optional = family.config.kv_heads_optional or fields.get(name) is None
    kv_heads = fields.integer(name, default=heads if optional else None, high=2**14)
    if fields.sound("num_attention_heads", name) and heads % kv_heads:
        fields.problem(name, f"must divide num_attention_heads {heads}, found {kv_heads}")
    return kv_heads


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    # An explicit null means a share of hidden_size, where the size is that of the whole head.
    is_shared = fields.get("head_dim") is None and "head_dim" not in family.config.spellings.values()
    if fields.has("head_dim") or (family.config.head_dim is not None and not is_shared):
        return fields.integer("head_dim", default=family.config.head_dim, high=2**12)
    if fields.sound("hidden_size", "num_attention_heads") and hidden % heads:
        fields.problem(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return max(hidden // heads, 1)


def _check_code(fields: Fields, family: Family) -> None:
    """Adds a problem to `fields`, the reader of config.json, if the field `architectures` names other classes
    than the one of `family`, and another if `auto_map` names code in the checkpoint, unless
    `family.remote_code` allows this."""
    listed = fields.get("architectures")
    if listed not in (None, ABSENT, []) and not _names_class(listed, family.architecture):
        fields.problem("architectures", f'must be ["{family.architecture}"], found {show(listed)}')
    if fields.get("auto_map") not in (None, ABSENT, {}) and not family.remote_code:
        fields.problem(
            "auto_map",
            "the checkpoint carries its own code, which may compute anything; "
            f"remove the field if transformers' own {family.architecture} computes the same",
        )
    fields.ignore(("auto_map",))


def _names_class(listed: object, name: str) -> bool:
    """Returns True if `listed`, the field `architectures` of config.json, is a list with one class name that
    equals `name` up to case and underscores: published checkpoints also have the names of their own code,
    such as PhiMoEForCausalLM and Ernie4_5_ForCausalLM."""
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        return False
    return listed[0].replace("_", "").lower() == name.replace("_", "").lower()
