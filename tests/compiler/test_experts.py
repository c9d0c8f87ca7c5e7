"""Tests that compare libraries of models with experts with transformers' logits, and with the NumPy reference
for each scheme."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.bundles import reference
from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.targets import presets
from tests.experts_golden import VARIANTS, golden
from tests.libharness import EVERY, Session, compiled, pack, unpacked
from tests.schemes import SCHEMES

CHECKED_VARIANTS = VARIANTS if EVERY else ["granitemoeshared"]
"""Names of the golden files of models with experts that are compiled and compared with transformers."""


@pytest.mark.parametrize("variant", CHECKED_VARIANTS)
def test_prompts_chunks_and_steps_give_the_logits_of_transformers(
    variant: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, scheme = golden(variant), SCHEMES["q0f32"]
    library = compiled(tmp_path_factory, model.config, scheme, context_window=128)
    session = Session(library / "model.so", pack(model.config, scheme, model.weights))
    tokens, expected = model.tokens, model.logits
    assert np.abs(session.prefill((0, tokens)) - expected).max() < model.tolerance
    chunks = [session.prefill((1, tokens[start:end])) for start, end in ((0, 7), (7, 24), (24, len(tokens)))]
    assert np.abs(np.concatenate(chunks) - expected).max() < model.tolerance
    steps = [session.decode((2, token)) for token in tokens]
    assert np.abs(np.concatenate(steps) - expected).max() < model.tolerance


CHECKED = [*SCHEMES] if EVERY else ["q4a8_1"]


@pytest.mark.parametrize("name", CHECKED)
def test_a_scheme_gives_the_logits_of_its_unpacked_weights(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, scheme = golden("qwen2_moe"), SCHEMES[name]
    stored = pack(model.config, scheme, model.weights)
    held = unpacked(model.config, scheme, stored)
    expected = reference.logits(model.config, held, model.tokens, dtype=np.float64)
    library = compiled(tmp_path_factory, model.config, scheme, context_window=128)
    session = Session(library / "model.so", stored)
    prompt = session.prefill((0, model.tokens))
    steps = np.concatenate([session.decode((1, token)) for token in model.tokens])
    for logits in (prompt, steps):
        worst = np.abs(logits - expected).max(axis=-1) / np.ptp(expected)
        if scheme.activation_bits:
            # A row whose two last choices are nearly equal takes another one when activations are rounded.
            assert np.median(worst) < 0.02
            assert worst.max() < 0.12
        else:
            assert worst.max() < (1e-5 if scheme.dtype == "float32" else 1e-3)


def test_a_row_does_not_depend_on_the_rows_beside_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    model, scheme = golden("qwen2_moe"), SCHEMES["q4a8_1"]
    library = compiled(tmp_path_factory, model.config, scheme, context_window=128)
    session = Session(library / "model.so", pack(model.config, scheme, model.weights))
    alone = [session.decode((0, token))[0] for token in model.tokens[:8]]
    for sequence in range(1, 8):
        session.prefill((sequence, model.tokens[sequence : 3 * sequence]))
    for place in range(8):
        parts = [(sequence, model.tokens[-sequence - place]) for sequence in range(1, 8)]
        together = session.decode(*parts[:place], (9, model.tokens[place]), *parts[place:])
        assert np.array_equal(together[place], alone[place])
    prompts = session.prefill((10, model.tokens[:8]), (11, model.tokens[3:40]))
    assert np.array_equal(prompts[:8], session.prefill((12, model.tokens[:8])))
    if not isa_for(
        presets.resolve("host")
    ).amx:  # whose prompts do not round activations, but decode steps do
        assert np.array_equal(prompts[:8], alone)
