"""Describes a decoder-only transformer as data.

A ModelConfig holds exactly what changes the numbers of a forward pass: nothing about tokens' meaning, names,
sources or training. Two fine-tunes of one architecture have equal configs and share every library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from mlcbuild.models.experts import Experts
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.layers import (
    LayerSpec,
    Norm,
    Rope,
    cached_shape,
    layer_faults,
    layer_parameters,
    norm_parameters,
    positive,
    rope_faults,
)
from mlcbuild.models.param import Param


@dataclass(frozen=True)
class ModelConfig:
    """The description of a decoder-only transformer, without its weights: its layers, and the embedding, norm
    and output matrix around them."""

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...] = field(hash=False)
    """The layers of the model, in order. The hash of a config leaves them out, because configs with thousands
    of layers are keys of caches."""
    ropes: tuple[Rope, ...]
    """Rotary embeddings of the model, to which layers refer by index."""
    norm: Norm
    """The norm of the residual stream between the last layer and the output matrix."""
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    """Factor by which token embeddings are multiplied; 1: they are not scaled. It does not apply to a tied
    output matrix (Gemma: sqrt(hidden_size), rounded to the checkpoint's dtype as transformers does)."""
    logit_softcap: float | None = None
    """The c in c * tanh(logit / c), which limits the logits of the output matrix; None: they are not limited.
    """
    logit_scale: float = 1.0
    """Factor by which the logits of the output matrix are multiplied, before the soft cap (Cohere); 1: they
    are not scaled."""
    head_bias: bool = False
    """True if the output matrix has a bias."""
    embedding_norm: Norm | None = None
    """The norm of the scaled embedding (BLOOM); None: it is not normalized."""
    learned_positions: int = 0
    """Number of rows of the table of learned positions, whose row position + position_offset is added to the
    embedding (GPT-2); 0: there is no table.
    """
    position_offset: int = 0


def parameters(config: ModelConfig) -> tuple[Param, ...]:
    """Returns every parameter of a model, in the order in which weights are stored and passed to compiled
    functions.
    """
    params = [Param("embed.weight", (config.vocab_size, config.hidden_size))]
    params += norm_parameters(config.embedding_norm, "embed_norm", config.hidden_size)
    if config.learned_positions:
        params.append(Param("position.weight", (config.learned_positions, config.hidden_size)))
    for index, layer in enumerate(config.layers):
        params += [
            replace(param, name=f"layers.{index}.{param.name}")
            for param in layer_parameters(layer, config.hidden_size)
        ]
    params += norm_parameters(config.norm, "norm", config.hidden_size)
    if not config.tie_embeddings:
        params.append(Param("lm_head.weight", (config.vocab_size, config.hidden_size)))
    if config.head_bias:
        params.append(Param("lm_head.bias", (config.vocab_size,)))
    return tuple(params)


LARGEST_MODEL = 10**13
"""Maximum number of parameters of a model. With more, some size in config.json must be a mistake."""

MOST_EXPERTS = 1 << 17
"""Maximum number of experts of all layers together (131,072), each of which has three tensors in a
checkpoint. Published models have up to 23,040 (Kimi K2); listing the tensors of six times as many experts as
this maximum takes 16 CPU seconds."""


def faults(config: ModelConfig) -> list[str]:
    """Returns an error message for each reason why a model with this config cannot be computed; [] if there
    is none. Equal layers are reported once, as the first of them. A model without layers, or with a
    vocab_size, hidden_size or max_position below 1, gets only the message about that."""
    if not config.layers or min(config.vocab_size, config.hidden_size, config.max_position) < 1:
        return ["a model needs layers; vocab_size, hidden_size and max_position must be at least 1"]
    sentences = [fault for rope in config.ropes for fault in rope_faults(rope)]
    first = {layer: index for index, layer in reversed([*enumerate(config.layers)])}
    for layer, index in first.items():
        sentences += [f"layers.{index}: {fault}" for fault in layer_faults(layer, config.ropes)]
        if cached_shape(layer) != cached_shape(config.layers[0]):
            sentences.append(
                f"layers.{index}: all layers share one cache and need the key-value heads and the head size"
                " of layer 0"
            )
    numbers = [config.norm.eps, config.embedding_scale, config.logit_softcap or 1.0, config.logit_scale]
    numbers += [] if config.embedding_norm is None else [config.embedding_norm.eps]
    sentences += positive(numbers)
    if 0 < config.learned_positions < config.max_position + config.position_offset:
        sentences.append(
            f"{config.learned_positions} learned positions are fewer than max_position {config.max_position}"
            f" with an offset of {config.position_offset}"
        )
    if not sentences and (count := _count(config)) > LARGEST_MODEL:
        sentences.append(f"the sizes make {count:.1e} parameters; one of them must be wrong")
    blocks = (layer.feed_forward for layer in config.layers)
    experts = sum(block.count for block in blocks if isinstance(block, Experts))
    if experts > MOST_EXPERTS:
        sentences.append(
            f"the layers have {experts} experts together, at most {MOST_EXPERTS} are supported; one of the"
            " sizes must be wrong"
        )
    return list(dict.fromkeys(sentences))


def _count(config: ModelConfig) -> int:
    return sum(math.prod(param.shape) for param in parameters(config))


def cached_bytes(config: ModelConfig, kv_cache: str, item_bytes: int) -> int:
    """Returns the number of bytes that the KV caches of all layers take for each token of context. kv_cache:
    "auto" for values of `item_bytes` bytes, "int8" for 8-bit integers, with one float32 scale for each head's
    key and one for its value."""
    shapes = [shape for layer in config.layers for shape in cached_shape(layer)]
    if kv_cache == "auto":
        return sum(map(math.prod, shapes)) * item_bytes
    return sum(math.prod(shape[:-1]) * (shape[-1] + 4) for shape in shapes)


def int8_cache_fault(config: ModelConfig) -> str | None:
    """Returns the error message that explains why the model's KV cache cannot be kept in 8 bits; None if it
    can."""
    if any(isinstance(layer.mixer, LatentAttention) for layer in config.layers):
        return (
            "compile.kv_cache is int8, but this model caches latents, which are small already: leave it out"
        )
    return None


LARGEST_DEFAULT = 4096
"""Context window, in tokens, for a recipe that states none, unless the model's maximum is smaller. It is
limited because the KV cache is allocated in full."""


def context_window(config: ModelConfig, requested: int | None) -> int:
    """Returns the context window, in tokens, for which a library is compiled: `requested` unchanged or, if
    that is None, the smaller of the model's max_position and LARGEST_DEFAULT (4096)."""
    return min(config.max_position, LARGEST_DEFAULT) if requested is None else requested
