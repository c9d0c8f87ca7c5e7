"""Tests of the tables that describe blocks: the parameters of layers, the shapes of caches, and what cannot
be computed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlcbuild import models
from mlcbuild.bundles import reference_blocks
from mlcbuild.models import (
    Attention,
    Clamp,
    Dense,
    Experts,
    LatentAttention,
    LayerNorm,
    LayerSpec,
    ModelConfig,
    Norms,
    Param,
    RmsNorm,
    Rope,
    Router,
    cached_bytes,
    config,
    frequencies,
    int8_cache_fault,
    layers,
    parameters,
    parsing,
    serial,
)
from mlcbuild.models.family import ATTENTION, DENSE, EXPERTS, LATENT, LAYER, NORMS
from tests.configs import attention_of, with_attention, with_windows

NORM = RmsNorm(1e-6)
LATENT_MIXER = LatentAttention(4, 6, 4, 2, 3, 1.0, 1e-6)
PLAIN = LayerSpec(Attention(4, 2, 8, 0.5), Dense(24), Norms(NORM))
FULL = LayerSpec(
    Attention(4, 2, 8, 0.5, qkv_bias=True, output_bias=True, qk_norm=NORM),
    Dense(20, bias=True),
    Norms(NORM, NORM),
)
MODEL = ModelConfig("llama", 50, 16, 64, (PLAIN, FULL), (Rope(8, (1.0, 0.5, 0.25, 0.125)),), NORM)


def test_a_layer_has_the_parameters_of_its_blocks() -> None:
    """Checks the names and shapes of a layer's parameters. Their order must not change, because libraries
    take them in this order."""
    assert layers.layer_parameters(PLAIN, 16) == (
        Param("attn_norm.weight", (16,)),
        Param("attn.qkv.weight", (64, 16), (32, 16, 16)),
        Param("attn.o.weight", (16, 32)),
        Param("mlp_norm.weight", (16,)),
        Param("mlp.gate_up.weight", (48, 16), (24, 24)),
        Param("mlp.down.weight", (16, 24)),
    )
    assert [(param.name, param.shape) for param in layers.layer_parameters(FULL, 16)] == [
        ("attn_norm.weight", (16,)),
        ("attn.qkv.weight", (64, 16)),
        ("attn.qkv.bias", (64,)),
        ("attn.q_norm.weight", (8,)),
        ("attn.k_norm.weight", (8,)),
        ("attn.o.weight", (16, 32)),
        ("attn.o.bias", (16,)),
        ("attn_post_norm.weight", (16,)),
        ("mlp_norm.weight", (16,)),
        ("mlp.gate_up.weight", (40, 16)),
        ("mlp.gate_up.bias", (40,)),
        ("mlp.down.weight", (16, 20)),
        ("mlp.down.bias", (16,)),
        ("mlp_post_norm.weight", (16,)),
    ]


def test_a_model_has_the_parameters_of_its_layers() -> None:
    params = parameters(MODEL)
    assert [params[0].name, params[-2].name, params[-1].name] == [
        "embed.weight",
        "norm.weight",
        "lm_head.weight",
    ]
    shapes = [
        replace(param, name=f"layers.{index}.{param.name}")
        for index, layer in enumerate(MODEL.layers)
        for param in layers.layer_parameters(layer, 16)
    ]
    assert [*params[1:-2]] == shapes
    assert "lm_head.weight" not in {param.name for param in parameters(replace(MODEL, tie_embeddings=True))}


def test_parts_cover_their_parameter() -> None:
    for param in parameters(MODEL):
        assert not param.parts or sum(param.parts) == param.shape[0], param


def test_caches_hold_keys_and_values_of_every_layer() -> None:
    assert cached_bytes(MODEL, "auto", 1) == 2 * (2 * 2 * 8)
    assert cached_bytes(MODEL, "int8", 4) == 2 * (2 * 2 * (8 + 4)), "a scale for each head of each token"


def test_every_kind_of_block_is_in_every_table() -> None:
    assert layers.MIXERS.keys() == reference_blocks.MIXERS.keys()
    assert layers.FEED_FORWARDS.keys() == reference_blocks.FEED_FORWARDS.keys()
    assert layers.MIXERS.keys() | layers.FEED_FORWARDS.keys() | {RmsNorm, LayerNorm} == serial.KINDS.keys()
    assert len(set(serial.KINDS.values())) == len(serial.KINDS)


def test_every_parameter_of_a_block_has_tensor_names() -> None:
    """Checks that every parameter of a block has tensor names in checkpoints, one for each of its parts."""
    assert {**NORMS, **ATTENTION, **LATENT, **DENSE, **EXPERTS} == LAYER
    post = {"attn_post_norm.weight", "mlp_post_norm.weight"}  # Gemma 2 names these on its own
    latent = [
        replace(FULL, mixer=LatentAttention(2, 6, 4, 2, 3, 1.0, 1e-6, rank, bias=True, output_bias=True))
        for rank in (0, 5)
    ]
    for param in [param for layer in (FULL, *latent) for param in layers.layer_parameters(layer, 16)]:
        if param.name not in post:
            assert len(LAYER[param.name]) == max(1, len(param.parts)), param


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (replace(MODEL, layers=()), "a model needs layers"),
        (replace(MODEL, max_position=0), "max_position must be at least 1"),
        (
            replace(MODEL, layers=(PLAIN, replace(PLAIN, mixer=replace(PLAIN.mixer, heads=3)))),
            "layers.1: 2 key-value heads do not divide 3 heads",
        ),
        (
            replace(MODEL, layers=(PLAIN, replace(PLAIN, mixer=replace(attention_of(PLAIN), kv_heads=4)))),
            "layers.1: all layers share one cache and need the key-value heads and the head size of layer 0",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=LATENT_MIXER),)),
            "layers.0: 8 of 2 rotated dimensions have an angle",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=replace(LATENT_MIXER, rope=None)),)),
            "layers.0: latent attention needs a rope for the key that its heads share",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=replace(LATENT_MIXER, latent=0, rope=3)),)),
            "layers.0: heads, latents, the dimensions of heads and a window must be at least 1",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=replace(LATENT_MIXER, rope=3)),)),
            "layers.0: it uses rope 3, but the model has 1",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=replace(PLAIN.mixer, rope=1)),)),
            "layers.0: it uses rope 1, but the model has 1",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, mixer=replace(attention_of(PLAIN), softcap=-1.0)),)),
            "layers.0: frequencies, scales, caps and the norm's epsilon must be finite and above 0",
        ),
        (
            replace(MODEL, layers=(replace(PLAIN, norms=Norms(NORM, RmsNorm(0.0))),)),
            "layers.0: frequencies, scales, caps and the norm's epsilon must be finite and above 0",
        ),
        (
            with_attention(MODEL, qk_norm=NORM, qk_norm_span="heads", qk_norm_last=True),
            "layers.0: a norm over all heads together must precede the rotation",
        ),
        (replace(MODEL, layers=(replace(PLAIN, feed_forward=Dense(0)),)), "size must be at least 1, found 0"),
        (
            replace(MODEL, layers=(replace(PLAIN, feed_forward=Experts(257, 2, 8)),) * 511),
            "the layers have 131327 experts together, at most 131072 are supported",
        ),
        (replace(MODEL, ropes=(Rope(7, (1.0,)),)), "7 dimensions rotated: must be even and at least 2"),
        (replace(MODEL, ropes=(Rope(10, (1.0,) * 5),)), "layers.0: 10 of 8 dimensions rotated"),
    ],
)
def test_what_cannot_be_computed_is_named(changed: ModelConfig, message: str) -> None:
    assert config.faults(MODEL) == []
    assert any(message in fault for fault in config.faults(changed)), config.faults(changed)


def test_a_latent_and_one_rotated_key_are_cached_for_each_token() -> None:
    layer = replace(PLAIN, mixer=LATENT_MIXER)
    latent = replace(MODEL, layers=(layer, layer))
    assert cached_bytes(latent, "auto", 1) == 2 * (6 + 2)
    assert int8_cache_fault(MODEL) is None
    assert int8_cache_fault(latent) == (
        "compile.kv_cache is int8, but this model caches latents, which are small already: leave it out"
    )
    assert cached_bytes(replace(MODEL, layers=(PLAIN, PLAIN)), "auto", 1) == 2 * (2 * 2 * 8)


def test_long_contexts_have_their_own_frequencies() -> None:
    rope = Rope(2, (1.0,), 1.0, (0.5,), 1.5, 100)
    assert frequencies(rope, 100) == ((1.0,), 1.0)
    assert frequencies(rope, 101) == ((0.5,), 1.5)


def seconds(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of the fastest of three runs of `work`."""
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def test_time_grows_linearly_with_layers() -> None:
    """Checks that the time for a config grows linearly with its layers: eight times the layers of a quadratic
    algorithm would take 64 times as long. Layers alternate, so that none equals the one before it."""

    def work(count: int) -> Callable[[], object]:
        many = with_windows(MODEL, *[None, 7] * (count // 2))

        def run() -> None:
            assert models.from_json(json.loads(json.dumps(models.to_json(many)))) == many
            parsing.tensor_names(many)
            hash(many)

        return run

    assert seconds(work(4096)) < 24 * seconds(work(512))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Experts(4, 2, 0), "an expert's size must be at least 1"),
        (Experts(4, 5, 8), "5 of 4 experts cannot be chosen"),
        (Experts(9, 2, 8, router=Router(groups=2)), "2 groups do not divide 9 experts"),
        (Experts(4, 1, 8, router=Router(groups=4)), "a group needs 2 experts to be scored by, but 4 groups"),
        (Experts(8, 2, 8, router=Router(groups=2, groups_kept=3)), "3 of 2 groups cannot be kept"),
        (
            Experts(8, 3, 8, router=Router(groups=4, groups_kept=1)),
            "1 groups have fewer experts than the 3 to be",
        ),
        (Experts(8, 2, 8, router=Router(jitter=0.1)), "jitter and scores by sparsemixer need each other"),
        (
            Experts(8, 3, 8, router=Router("sparsemixer", jitter=0.1)),
            "sparsemixer chooses 2 experts, without groups and correction",
        ),
        (
            Experts(8, 2, 8, router=Router("sparsemixer", scale=2.0, jitter=0.1)),
            "sparsemixer does not scale the weights of its experts",
        ),
        (Experts(8, 2, 8, shared_gate=True), "shared_gate needs a shared feed-forward"),
        (Experts(8, 2, 8, clamp=Clamp(0.0, 1.0)), "must be finite and above 0"),
    ],
)
def test_experts_that_contradict_themselves_are_named(experts: Experts, message: str) -> None:
    sentences = config.faults(replace(MODEL, layers=(replace(PLAIN, feed_forward=experts),)))
    assert len(sentences) == 1
    assert message in sentences[0]
