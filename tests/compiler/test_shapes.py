"""Tests of whole libraries on every instruction set of x86: sizes that are not multiples of tiles, groups or
vectors, batches of odd sizes, and contexts around every boundary up to 8192 tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mlcbuild.bundles import reference
from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import embedding
from mlcbuild.compiler.cpu.kernels.linear import kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.models import Attention, Dense, LayerSpec, ModelConfig, Norms, RmsNorm
from mlcbuild.targets import presets, requirements
from tests import kernelbench
from tests.configs import rope, with_attention
from tests.libharness import EVERY, Floats, Session, compiled, pack, random_weights, unpacked
from tests.schemes import SCHEMES

X86 = ("x86-64-v4-amx", "x86-64-v4-vnni", *(["x86-64-v4"] if EVERY else []), "x86-64-v3", "x86-64-v2")
"""Targets for which whole libraries are compiled. x86-64-v4 differs from x86-64-v4-vnni in the instruction
that multiplies bytes only, which test_kernels.py executes."""
RUNNABLE = [
    name for name in X86 if requirements.why_not(presets.resolve(name), presets.resolve("host")) is None
]
ONLY_KERNELS = f"whole libraries of {X86[0]} need a processor that runs them; their kernels are emulated"

NORM = RmsNorm(1e-5)
ODD = ModelConfig(
    family="llama",
    vocab_size=487,
    hidden_size=100,
    max_position=8192,
    layers=(LayerSpec(Attention(9, 3, 12, 12**-0.5), Dense(172), Norms(NORM)),),
    ropes=(rope(12),),
    norm=NORM,
    tie_embeddings=True,
)
MIXED = replace(
    SCHEMES["q4a8_1"],
    name="mixed",
    overrides=(
        ("embed", SCHEMES["q8a8_1"]),
        ("*.attn.o", SCHEMES["q8f16_1"]),
        ("*.mlp.gate_up", SCHEMES["q4f16_1"]),
    ),
)
"""A quantization scheme whose overrides make one library use four kinds of matrix products. It is used for a
model in which one matrix holds the token embeddings and computes the logits."""
TOKENS = np.random.default_rng(3).integers(0, ODD.vocab_size, 52).tolist()


def logits(session: Session) -> Floats:
    """Returns the logits of several sequences, computed by the library in `session`, one row for each token:
    of prompts with 1 to 37 tokens, one alone and the others together, then of decode steps with 3, 5, 7 and 1
    sequences."""
    results = [session.prefill((0, TOKENS[:37]))]
    lengths = {1: 1, 2: 5, 3: 12, 4: 16, 5: 17, 6: 12}
    results.append(session.prefill(*((s, TOKENS[:n]) for s, n in lengths.items())))
    for batch in ((0, 1, 2), (4, 0, 2, 6, 5), (6, 5, 4, 3, 2, 1, 0), (3,)):
        results.append(session.decode(*((s, TOKENS[session.lengths[s]]) for s in batch)))
    return np.concatenate(results)


def rows() -> list[int]:
    """Returns the position in its sequence, counted from 0, of each token for which the tests of several
    sequences compute logits: those of all prompts, then those of the decode steps."""
    lengths = [37, 1, 5, 12, 16, 17, 12]
    results = [position for length in lengths for position in range(length)]
    for batch in ((0, 1, 2), (4, 0, 2, 6, 5), (6, 5, 4, 3, 2, 1, 0), (3,)):
        for sequence in batch:
            results.append(lengths[sequence])
            lengths[sequence] += 1
    return results


@cache
def stored() -> dict[str, Floats]:
    return pack(ODD, MIXED, random_weights(ODD))


@pytest.mark.parametrize("target", X86)
def test_instruction_sets_give_equal_logits(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if target not in RUNNABLE:
        pytest.skip(
            f"whole libraries of {target} need a processor that runs them; their kernels are emulated"
        )
    expected = reference.logits(ODD, unpacked(ODD, MIXED, stored()), TOKENS, dtype=np.float64)[rows()]
    spread = float(expected.std())

    def found(name: str) -> Floats:
        library = compiled(tmp_path_factory, ODD, MIXED, name, context_window=8192, max_batch=7)
        return logits(Session(library / "model.so", stored()))

    isa = found(target)
    error = isa - expected
    # Activations of 8 bits: the mean error is 1%, single logits are off by up to 5%.
    assert np.sqrt((error**2).mean()) < 0.02 * spread
    assert np.abs(error).max() < 0.1 * spread
    if not isa_for(presets.resolve(target)).amx:  # whose products of many rows do not round activations
        # One activation that falls to the other side of a rounding moves a logit by a thousandth.
        assert np.sqrt(((isa - found(RUNNABLE[-1])) ** 2).mean()) < 0.005 * spread


WHOLE = replace(
    ODD,
    hidden_size=96,
    layers=(LayerSpec(Attention(9, 3, 32, 32**-0.5), Dense(384), Norms(NORM)),),
    ropes=(rope(32),),
)
"""Config of a model whose prompts use tile registers in all kernels: attention, and the gated products of the
feed-forward."""


@pytest.mark.skipif(
    X86[0] not in RUNNABLE,
    reason=ONLY_KERNELS,
)
def test_prompts_of_whole_tiles(tmp_path_factory: pytest.TempPathFactory) -> None:
    scheme = SCHEMES["q4a8_1"]
    tensors = pack(WHOLE, scheme, random_weights(WHOLE))
    library = compiled(tmp_path_factory, WHOLE, scheme, X86[0], context_window=8192, max_batch=7)
    expected = reference.logits(WHOLE, unpacked(WHOLE, scheme, tensors), TOKENS, dtype=np.float64)[rows()]
    error = (logits(Session(library / "model.so", tensors)) - expected) / expected.std()
    prompts, decode = error[:-16], error[-16:]
    assert np.sqrt((prompts**2).mean()) < 0.015 and np.abs(prompts).max() < 0.07
    # Decode steps round activations to 8 bits on every processor; without AMX, prompts do too (0.025, 0.12).
    assert np.sqrt((decode**2).mean()) < 0.035 and np.abs(decode).max() < 0.2


BOUNDARIES = (1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2047, 2048, 2049, 4097, 8191, 8192)
"""Context lengths in tokens, from 1 to the longest, 8192. They lie just before, at and after the boundaries
of cache pages, prefill chunks and blocks of attention scores."""


def test_contexts_of_every_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compares the logits of a compiled model with a float32 reference for contexts of 1 to 8192 tokens, just
    before, at and after internal boundaries. All tokens but the last are prefilled in chunks, and the last
    one is decoded."""
    config = with_attention(ODD, heads=3)
    scheme = SCHEMES["q0f32"]
    weights = random_weights(config)
    library = compiled(tmp_path_factory, config, scheme, context_window=8192)
    session = Session(library / "model.so", pack(config, scheme, weights), num_pages=512)
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, BOUNDARIES[-1]).tolist()
    model = reference.Reference(config, weights, np.float32)
    states = reference.hidden(model, tokens)[0]
    expected = reference.head(model, states[[length - 1 for length in BOUNDARIES]])
    results = []
    for length in BOUNDARIES:
        computed_count = session.lengths.get(0, 0)
        for start in range(computed_count, length - 1, 64):
            session.prefill((0, tokens[start : min(start + 64, length - 1)]), rows=[0])
        results.append(session.decode((0, tokens[length - 1])))
    assert np.abs(np.concatenate(results) - expected).max() < 1e-4


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_tables_of_large_vocabularies(vocab: int) -> None:
    """Compares embeddings and logits of vocabularies with 49,152 and 151,936 tokens with NumPy. One quantized
    matrix serves for both, and logits are computed for one row and for seven."""
    target = kernelbench.TARGETS["avx2"]
    kernelbench.need(target)
    isa, scheme, width = isa_for(target), SCHEMES["q8a8_1"], 72
    rng = np.random.default_rng(5)
    arrays, matrix = kernelbench.weights(rng, scheme, vocab, width)
    product = kernel(linear(isa, scheme, vocab, width), Fusion())
    table = embedding.kernel(embedding.embedding(isa, scheme, vocab, width))
    module = kernelbench.compiled(target, [product, table])
    tokens = np.array([0, 1, vocab // 2, vocab - 17, vocab - 1], np.int32)
    np.testing.assert_allclose(module.run(table, (5, width), tokens, *arrays), matrix[tokens], rtol=1e-6)
    for m in (1, 7):
        x = kernelbench.rows(rng, m, width)
        result = module.run(product, (m, vocab), x, *arrays)
        expected = kernelbench.activations(x, scheme) @ matrix.T
        np.testing.assert_allclose(result, expected, rtol=0, atol=8e-6 * np.sqrt(width))
