"""Reads the fields of config.json that families with experts share, and puts the experts into their
layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mlcbuild.models.experts import Experts, Router
from mlcbuild.models.family import Common
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.layers import Dense, LayerSpec

TRAINING = ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_z_loss_coef")
"""Fields of config.json about the training loss of routers, which change no results."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that config.json files use for the number of experts. transformers writes some configs under another
name than it reads.
"""


def read_experts(
    fields: Fields,
    common: Common,
    router: Router,
    *,
    size: str = "moe_intermediate_size",
    defaults: tuple[int | None, int | None, int | None] = (None, None, None),
) -> Experts:
    """Reads the experts of a model from fields of its config.json, and returns their description: their
    number, the number that a token uses, and the number of hidden units of one expert.

    fields: the reader of config.json, which collects an error message for each missing or wrong field; the
    result must not be used if there is one. router: rule by which experts are chosen. size: name of the field
    with the number of hidden units. defaults: these three numbers for absent fields, in the same order; a
    None among them: its field is required.
    """
    fields.ignore(TRAINING)
    name = next((name for name in COUNTS if fields.has(name)), COUNTS[0])
    count = fields.integer(name, defaults[0], high=4096)
    for other in COUNTS:
        if fields.has(other) and fields.get(other) != fields.get(name):
            fields.problem(other, f"must be {name} {count}, found {show(fields.get(other))}")
    fields.ignore(COUNTS)
    chosen = fields.integer("num_experts_per_tok", defaults[1], high=4096)
    if fields.sound(name, "num_experts_per_tok") and chosen > count:
        fields.problem("num_experts_per_tok", f"must be at most {name} {count}, found {chosen}")
        chosen = count
    inner = fields.integer(size, defaults[2], high=2**22)
    return Experts(count, chosen, inner, common.feed_forward.activation, router)


def grouped_router(fields: Fields, normalized: bool) -> Router:
    """Reads config.json and returns a router that scores experts by sigmoids plus a correction and chooses
    them within groups. normalized: value of norm_topk_prob, which divides the experts' weights by their sum,
    if the field is absent. n_group, topk_group and routed_scaling_factor are 1 if absent. A wrong field adds
    an error message to `fields`, the reader of config.json, and the router must not be used."""
    return Router(
        "sigmoid",
        normalized=fields.flag("norm_topk_prob", normalized),
        correction=True,
        groups=fields.integer("n_group", 1, high=4096),
        groups_kept=fields.integer("topk_group", 1, high=4096),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def layers_by_step(fields: Fields, count: int) -> tuple[bool, ...]:
    """Returns, for each of `count` layers, True if it has experts and False if its feed-forward is dense.
    Experts are in each layer whose number, counted from 1, is a multiple of decoder_sparse_step in
    config.json (1 if absent), except in those whose indices, counted from 0, mlp_only_layers lists. A wrong
    field adds an error message to `fields`, the reader of config.json, and counts as absent."""
    step = fields.integer("decoder_sparse_step", 1, high=4096)
    listed = fields.get("mlp_only_layers")
    dense: list[int] = []
    if isinstance(listed, list) and all(type(index) is int and 0 <= index < count for index in listed):
        dense = listed
    elif listed not in (None, ABSENT):
        fields.problem("mlp_only_layers", f"must list layers from 0 to {count - 1}, found {show(listed)}")
    return tuple((index + 1) % step == 0 and index not in dense for index in range(count))


def layers_after(fields: Fields, count: int, default: int) -> tuple[bool, ...]:
    """Returns, for each of `count` layers, True if it has experts: all layers from the index
    first_k_dense_replace in config.json on, counted from 0. default: the index if config.json lacks this
    field. A wrong value adds an error message to `fields`, the reader of config.json, and counts as 0."""
    first = fields.integer("first_k_dense_replace", default, low=0, high=4096)
    return tuple(index >= first for index in range(count))


def mixed(
    layers: Sequence[LayerSpec], sparse: Iterable[bool], experts: Experts, dense: Dense
) -> tuple[LayerSpec, ...]:
    """Returns copies of `layers` whose feed-forward is `experts` where the layer's entry in `sparse` is True,
    and `dense` where it is False. sparse: as many entries as there are layers."""
    return tuple(
        replace(layer, feed_forward=experts if is_sparse else dense)
        for layer, is_sparse in zip(layers, sparse, strict=True)
    )
