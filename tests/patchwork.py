"""Config of a model that has all options of all blocks, for tests of the compilers of all devices."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import numpy as np

from mlcbuild.models import (
    Attention,
    Clamp,
    Dense,
    Experts,
    LayerNorm,
    LayerSpec,
    ModelConfig,
    Norms,
    RmsNorm,
    Rope,
    Router,
    parameters,
)
from mlcbuild.models.layers import QueryScale

HEADS = Attention(heads=6, kv_heads=3, head_dim=12, scale=0.3)
RMS, LAYER = RmsNorm(1e-5, offset=1.0), LayerNorm(1e-5)


def patchwork(*, every: bool) -> ModelConfig:
    """Returns a config whose layers have, together, every option of every block. No size is a multiple of a
    vector. every: False to leave out three of the five layers, each of which takes seconds to compile."""
    layers = (
        LayerSpec(
            replace(HEADS, rope=None, alibi="exact", qkv_bias=True, output_bias=True, clip=0.7),
            Dense(41, "gelu", bias=True, gated=False),
            Norms(LayerNorm(1e-5, offset=1.0)),
            "parallel_shared",
            0.5,
        ),
        LayerSpec(
            replace(HEADS, qk_norm=LAYER, qk_norm_span="own_head", window=9, softcap=2.0),
            Dense(40, "relu2", gated=False),
            Norms(LayerNorm(1e-5, weight=False, bias=False)),
            "parallel",
        ),
        LayerSpec(
            replace(HEADS, rope=1, qk_norm=RmsNorm(1e-6), qk_norm_span="heads", sinks=True, clip=0.9),
            Dense(40, "xielu", gated=False),
            Norms(None, RMS),
        ),
        LayerSpec(
            replace(HEADS, alibi="bfloat16", rope=None),
            Experts(
                *(8, 3, 12),
                router=Router("sigmoid", bias=True, correction=True, groups=4, groups_kept=2, scale=1.5),
                bias=True,
                clamp=Clamp(1.5, 1.7),
                shared_size=20,
                shared_gate=True,
            ),
            Norms(RMS, RMS),
        ),
        LayerSpec(
            replace(HEADS, qk_norm=RMS, qk_norm_last=True, clip=0.8),
            Experts(5, 2, 16, "gelu_tanh", Router("sparsemixer", normalized=False, jitter=0.01)),
            Norms(LayerNorm(1e-5, offset=1.0)),
        ),
    )
    chosen = layers if every else layers[:3:2]
    frequencies = tuple(float(np.float32(10000.0 ** (-index / 4))) for index in range(4))
    long = Rope(8, frequencies, 1.0, tuple(value / 2 for value in frequencies), 1.2, 48)
    turned = Rope(12, (*frequencies, 0.5, 0.25), 1.1, query_scale=QueryScale(0.1, 8))
    return ModelConfig(
        *("llama", 71, 37, 64, chosen, (long, turned), LAYER),
        tie_embeddings=True,
        embedding_scale=1.5,
        logit_softcap=9.0,
        logit_scale=0.7,
        head_bias=True,
        embedding_norm=LAYER,
        learned_positions=70,
        position_offset=2,
    )


def random_weights(config: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    weights = {}
    for param in parameters(config):
        spread = 0.3 if len(param.shape) > 1 else 0.5
        weights[param.name] = (rng.standard_normal(param.shape) * spread).astype(np.float32)
    return weights


def options(block: Any, path: str = "") -> set[tuple[str, ...]]:
    """Returns the options that a config, or a part of it, uses, as (path of the field, value).

    Of a number it only matters whether it is the default. Sizes, which have no default, do not count as
    options. Each form of a layer (residual connections, norms, feed-forward) counts as one more option.
    """
    used: set[tuple[str, ...]] = set()
    for field in fields(block):
        value, name = getattr(block, field.name), path + field.name
        if is_dataclass(value):
            used |= {(name, type(value).__name__)} | options(value, f"{name}.")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            used.update(*(options(item, f"{name}.") for item in value))
        elif isinstance(value, bool | str) or value is None:
            used.add((name, str(value)))
        elif field.default is not MISSING:
            used.add((name, "default" if value == field.default else "another"))
    if isinstance(block, LayerSpec):
        parts = (block.norms.before, block.norms.after, block.feed_forward)
        gated = str(getattr(block.feed_forward, "gated", ""))
        used.add(("form", block.residual, *(type(part).__name__ for part in parts), gated))
    return {option for option in used if option[0] != "family"}
