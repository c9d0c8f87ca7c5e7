"""Tests that compare compiled libraries with transformers for every model family, and with the NumPy
reference for every scheme."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from mlcbuild_format.limits import Limits
from tvm import relax

from mlcbuild import models
from mlcbuild.bundles import reference
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder, layer_functions
from mlcbuild.models import Attention, Dense, LayerNorm, LayerSpec, ModelConfig, Norms, RmsNorm
from mlcbuild.targets import presets
from tests import kernelbench
from tests.configs import rope, with_attention, with_windows
from tests.libharness import EVERY, HERE, Floats, Session, compiled, golden, pack, random_weights, unpacked
from tests.schemes import SCHEMES

# These variants differ from others in data only, which tests of the reference cover: they are not compiled.
DATA_ONLY = {"gemma2-bf16", "llama-yarn", "phi3-longrope-short", "qwen2-bias"}
# These variants are compiled with MLCBUILD_TEST_EVERY only, because other tests compile their blocks: SMALL
# and LAYERED have windows, biases and groups of heads in some layers, and mistral has a window in all layers.
# test_types.py counts the options of all variants; its patchwork has the biases, norms and rotary embeddings
# of the last four.
COVERED = {
    *("llama-llama3-gqa", "phi3-window", "qwen2-window"),
    *("llama-linear-bias", "phi3-longrope-long", "qwen3", "llama-mha-tied"),
}
GOLDEN_CONFIGS = (HERE / "golden").glob("*/config.json")
ALL_VARIANTS = {path.parent.name for path in GOLDEN_CONFIGS} - DATA_ONLY
VARIANTS = sorted(ALL_VARIANTS if EVERY else ALL_VARIANTS - COVERED)
TOLERANCE = 4e-5
"""Largest allowed difference between the logits of a compiled library and those of transformers or NumPy,
which are up to about 6. The two sides add float32 numbers in different orders."""

NORM = RmsNorm(1e-6)
SMALL = with_windows(
    ModelConfig(
        family="qwen2",
        vocab_size=205,
        hidden_size=96,
        max_position=128,
        layers=(LayerSpec(Attention(6, 2, 16, 0.25, qkv_bias=True), Dense(176), Norms(NORM)),),
        ropes=(rope(16),),
        norm=NORM,
    ),
    None,
    11,
)
"""Config of a model none of whose sizes is a multiple of a tile or a group."""


def worst(actual: Floats, expected: Floats) -> float:
    return float(np.abs(actual - expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_family_gives_the_logits_of_transformers(
    variant: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = golden(variant)
    scheme = SCHEMES["q0f32"]
    library = compiled(tmp_path_factory, case.config, scheme, context_window=case.context_window)
    session = Session(library / "model.so", pack(case.config, scheme, case.weights))
    tokens, expected = case.tokens, case.logits
    assert worst(session.prefill((0, tokens)), expected) < TOLERANCE
    chunks = [session.prefill((1, tokens[start:end])) for start, end in ((0, 7), (7, 24), (24, len(tokens)))]
    assert worst(np.concatenate(chunks), expected) < TOLERANCE
    steps = [session.decode((2, token)) for token in tokens]
    assert worst(np.concatenate(steps), expected) < TOLERANCE


def test_sequences_of_a_batch_do_not_see_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = golden("mistral-window")
    scheme = SCHEMES["q0f32"]
    session = Session(
        compiled(tmp_path_factory, case.config, scheme, context_window=case.context_window) / "model.so",
        pack(case.config, scheme, case.weights),
    )
    tokens, expected = case.tokens, case.logits
    first = session.prefill((0, tokens[:9]), (1, tokens[:30]))
    assert worst(first, np.concatenate([expected[:9], expected[:30]])) < TOLERANCE
    # One sequence decodes, one goes on with its prompt, one begins; then they decode in another order.
    mixed = session.prefill((0, tokens[9:10]), (1, tokens[30:47]), (2, tokens[:1]))
    assert worst(mixed, np.concatenate([expected[9:10], expected[30:47], expected[:1]])) < TOLERANCE
    later = session.decode((2, tokens[1]), (1, tokens[47]), (0, tokens[10]))
    assert worst(later, expected[[1, 47, 10]]) < TOLERANCE


def test_chosen_rows_come_in_the_order_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = golden("mistral-window")
    scheme = SCHEMES["q0f32"]
    session = Session(
        compiled(tmp_path_factory, case.config, scheme, context_window=case.context_window) / "model.so",
        pack(case.config, scheme, case.weights),
    )
    embedded = session.embed(case.tokens[:5]).copy()
    actual = session.prefill((0, case.tokens), rows=[60, 3, 3])
    assert worst(actual, case.logits[[60, 3, 3]]) < TOLERANCE
    # Results are the caller's: later calls leave them alone, and embeddings are not used up.
    assert np.array_equal(session.embed(case.tokens[:5]), embedded)
    again = session.prefill((1, case.tokens), rows=[60])
    assert worst(again, case.logits[[60]]) < TOLERANCE and worst(actual[:1], again) == 0


@pytest.mark.parametrize("variant", ["mistral-window", *(["qwen3", "llama-mha-tied"] if EVERY else [])])
def test_hidden_states_are_what_the_logits_are_made_of(
    variant: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = golden(variant)
    scheme = SCHEMES["q0f32"]
    library = compiled(tmp_path_factory, case.config, scheme, context_window=case.context_window)
    session = Session(library / "model.so", pack(case.config, scheme, case.weights))
    tokens = case.tokens
    model = reference.Reference(case.config, case.weights, np.float64, case.context_window)
    expected = reference.hidden(model, tokens)[0]
    whole = session.hidden((0, tokens))
    assert worst(whole, expected) < TOLERANCE
    # transformers' logits are products of the same states.
    name = "embed.weight" if case.config.tie_embeddings else "lm_head.weight"
    assert worst(whole @ case.weights[name].astype(np.float32).T, case.logits) < TOLERANCE
    chunks = [session.hidden((1, tokens[start:end])) for start, end in ((0, 9), (9, len(tokens)))]
    assert worst(np.concatenate(chunks), expected) < TOLERANCE
    together = session.hidden((2, tokens[:20]), (3, tokens[:13]))
    assert worst(together, np.concatenate([expected[:20], expected[:13]])) < TOLERANCE
    # They leave keys and values behind, as any prefill does.
    assert worst(session.decode((2, tokens[20])), case.logits[[20]]) < TOLERANCE


# Keys and values are stored as float16 by the f16 schemes; a8 rounds activations to 8 bits as well.
TOLERANCES = {"q0f32": 1e-5, "q4f32_1": 1e-5, "q8f32_1": 1e-5, "q4a8_1": 0.15, "q5a8_1": 0.15, "q8a8_1": 0.15}

CHECKED = list(SCHEMES) if EVERY else ["q4a8_1"]
"""Names of the quantization schemes for which a whole library is compiled and tested. By default this is one;
the others are tested as parts of libraries that mix schemes, and q4f16_1 by test_greedy.py, too. With
MLCBUILD_TEST_EVERY they are all."""


@pytest.mark.parametrize("name", CHECKED)
def test_scheme_gives_the_logits_of_its_unpacked_weights(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scheme = SCHEMES[name]
    stored = pack(SMALL, scheme, random_weights(SMALL))
    session = Session(compiled(tmp_path_factory, SMALL, scheme) / "model.so", stored)
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, 40).tolist()
    expected = reference.logits(SMALL, unpacked(SMALL, scheme, stored), tokens, dtype=np.float64)
    tolerance = TOLERANCES.get(name, 4e-3)
    whole = session.prefill((0, tokens))
    assert worst(whole, expected) < tolerance
    steps = np.concatenate([session.decode((1, token)) for token in tokens])
    assert worst(steps, expected) < tolerance
    together = session.prefill((2, tokens[:20]), (3, tokens[:13]))
    assert worst(together[20:], whole[:13]) < tolerance


CAPPED = with_attention(SMALL, sinks=True, softcap=5.0)
BIASED = with_attention(SMALL, rope=None, alibi="exact")
CACHED = {
    "one of each kind": replace(SMALL, layers=(SMALL.layers[0], CAPPED.layers[1], BIASED.layers[0])),
}
"""Name -> config of a model whose library is compiled with a KV cache of 8-bit numbers: by default one whose
layers have plain attention, attention with sinks and a soft cap, and attention with ALiBi."""
if EVERY:
    CACHED |= {"plain": SMALL, "sinks and a soft cap": CAPPED, "alibi": replace(BIASED, ropes=())}


@pytest.mark.parametrize("name", CACHED)
def test_a_library_keeps_keys_and_values_in_8_bits(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Compares the logits of a compiled library whose KV cache holds 8-bit numbers with a float64 reference.
    Keys and values are off by up to 1/254 of the largest number of a head, so the tolerance is larger than
    for an exact cache."""
    config, scheme = CACHED[name], SCHEMES["q0f32"]
    weights = random_weights(config)
    library = compiled(tmp_path_factory, config, scheme, kv_cache="int8")
    session = Session(library / "model.so", pack(config, scheme, weights))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40).tolist()
    expected = reference.logits(config, weights, tokens, dtype=np.float64)
    whole = session.prefill((0, tokens))
    assert TOLERANCE < worst(whole, expected) < 0.05
    assert worst(np.concatenate([session.decode((1, token)) for token in tokens]), whole) < 1e-3
    metadata = json.loads((library / "library.json").read_text())
    assert metadata["kernels"]["attention"].startswith("paged_attention_int8.")
    assert metadata["memory"]["kv_page"] == 16 * models.cached_bytes(config, "int8", 4)


MIXED = {
    "q4f16_1": ({"layers.1.attn.qkv*": "q8f32_1", "lm_head|embed": "q0f32", "layers.0.mlp*": "q0f16"}, 4e-3),
    "q8a8_1": ({"layers.1.attn.qkv*": "q5a8_1", "lm_head|embed": "q8f16_1", "layers.0.mlp*": "q4a8_1"}, 0.15),
}
"""Name of a library's quantization scheme -> (overrides: pattern of parameter names -> name of the scheme
that these parameters have instead; largest allowed difference of logits, as a fraction of their range)."""


WITHOUT_TILES = next(
    (name for name in ("x86-64-v4-vnni", "x86-64-v3") if kernelbench.runs_here(presets.resolve(name))), "host"
)
"""A target that this machine runs, without AMX if it is an x86: kernels for prompts on tile registers take as
long to compile as all others, and test_shapes.py executes them."""


@pytest.mark.parametrize("name", MIXED)
def test_overrides_mix_schemes_within_a_layer_and_between_layers(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    others, tolerance = MIXED[name]
    overrides = tuple((match, SCHEMES[other]) for match, other in others.items())
    scheme = replace(SCHEMES[name], name="mixed", overrides=overrides)
    stored = pack(SMALL, scheme, random_weights(SMALL))
    library = compiled(tmp_path_factory, SMALL, scheme, WITHOUT_TILES)
    session = Session(library / "model.so", stored)
    tokens = np.random.default_rng(2).integers(0, SMALL.vocab_size, 33).tolist()
    expected = reference.logits(SMALL, unpacked(SMALL, scheme, stored), tokens, dtype=np.float64)
    assert worst(session.prefill((0, tokens)), expected) < tolerance
    steps = np.concatenate([session.decode((1, token)) for token in tokens])
    assert worst(steps, expected) < tolerance
    kernels = json.loads((library / "library.json").read_text())["kernels"]
    short = {name: kernel.partition(".")[0] for name, kernel in kernels.items()}
    expected_kernels = {
        "q4f16_1": ("f16", "w4f16", "w4f16", "w8f32", "f32"),
        "q8a8_1": ("w4a8", "w8a8", "w8a8", "w5a8", "w8f16"),
    }
    places = ("mlp.down", "layers.1.mlp.down", "attn.qkv", "layers.1.attn.qkv", "lm_head")
    assert tuple(short[f"{place}.weight"] for place in places) == expected_kernels[name]
    assert "layers.1.attn.o.weight" not in short


@pytest.mark.parametrize(
    ("target", "ends"),
    [("x86-64-v4-vnni", {"step_prefill"}), ("x86-64-v4-amx", set())],
)
def test_the_last_layer_computes_chosen_rows_of_prompts(target: str, ends: set[str]) -> None:
    """Checks that the prefill function of a compiled model computes its last layer only for the rows whose
    logits are needed, and all other layers for all rows. With AMX, where rows of prompts are stored as tiles,
    it computes all layers for all rows."""
    decoder = Decoder(CpuOps(SMALL, SCHEMES["q4a8_1"], presets.resolve(target)), Limits(64, 32, 2))
    created = {
        name.name_hint: function
        for name, function in functions.build(decoder).functions.items()
        if isinstance(function, relax.Function)
    }
    called = {
        name: {
            binding.value.op.name_hint
            for block in function.body.blocks
            for binding in block.bindings
            if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, relax.GlobalVar)
        }
        for name, function in created.items()
    }
    assert {name for name in created if "trunk_to_rows" in called[name]} == ends
    assert str(created["trunk"].ret_ty.shape[0]) == "n"
    if ends:
        assert called["trunk_to_rows"] >= {"layer", "last_layer"}
        assert str(created["last_layer"].ret_ty.shape[0]) == "q"


BASE = LayerSpec(Attention(6, 2, 32, 0.2, qk_norm=NORM), Dense(384), Norms(NORM))
WIDER = LayerSpec(Attention(4, 2, 32, 0.2, rope=1, window=9), Dense(512, "gelu_tanh"), Norms(NORM, NORM))
NARROW = LayerSpec(
    Attention(2, 2, 32, 0.2, output_bias=True, softcap=9.0),
    Dense(192, "relu", gated=False),
    Norms(LayerNorm(1e-5)),
)
LAYERED = ModelConfig(
    family="llama",
    vocab_size=101,
    hidden_size=96,
    max_position=128,
    layers=(
        BASE,
        WIDER,
        replace(BASE, mixer=replace(BASE.mixer, window=5)),
        NARROW,
        replace(BASE, mixer=replace(BASE.mixer, rope=2)),
    ),
    ropes=(rope(32), rope(8, 500.0), rope(32, 1e6)),
    norm=NORM,
)
"""Config whose layers differ in heads, sizes, rotary embeddings, windows, activations and norms. The first,
third and last layers differ in window and rotary embeddings only."""


@pytest.mark.parametrize(("name", "tolerance"), [("q0f32", 1e-5), ("q4a8_1", 0.25)][: 1 + EVERY])
def test_layers_may_differ(name: str, tolerance: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compares the logits of a compiled model whose five layers differ in their kind with a NumPy reference
    in float64. The tolerances are larger than those for the other tests' model of two layers, because
    activations are rounded more often."""
    scheme = SCHEMES[name]
    stored = pack(LAYERED, scheme, random_weights(LAYERED))
    session = Session(compiled(tmp_path_factory, LAYERED, scheme) / "model.so", stored)
    tokens = np.random.default_rng(3).integers(0, LAYERED.vocab_size, 40).tolist()
    expected = reference.logits(LAYERED, unpacked(LAYERED, scheme, stored), tokens, dtype=np.float64)
    assert worst(session.prefill((0, tokens)), expected) < tolerance
    assert worst(session.prefill((1, tokens), rows=[39, 4]), expected[[39, 4]]) < tolerance
    steps = np.concatenate([session.decode((2, token)) for token in tokens])
    assert worst(steps, expected) < tolerance


def test_layers_that_are_alike_share_a_function() -> None:
    target = presets.resolve("x86-64-v4-vnni")
    decoder = Decoder(CpuOps(LAYERED, SCHEMES["q4a8_1"], target), Limits(64, 32, 2))
    layers = [function.name_hint for function in layer_functions(decoder)]
    assert layers == ["layer", "layer_1", "layer", "layer_2", "layer"]
