"""Tests that compare compiled libraries with transformers for each model type: whole prompts, prompts in
chunks, and decoding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.bundles import reference
from tests import experts_golden, typegoldens
from tests.compiler import test_experts
from tests.compiler.test_decoder import LAYERED, SMALL, VARIANTS
from tests.libharness import EVERY, PAGE, Session, compiled, golden, pack, unpacked
from tests.patchwork import options, patchwork, random_weights
from tests.schemes import SCHEMES
from tests.typegoldens import WINDOW

BATCH = 4
OWN_OPTIONS = ("deepseek_v3",)
"""Model types that have an option, or a form of layer, which no other model that tests compile has."""
CHECKED = typegoldens.NAMES if EVERY else OWN_OPTIONS
"""Model types whose models these tests compile and compare with NumPy. By default they are those with options
that no other test compiles; with MLCBUILD_TEST_EVERY they are all."""
RARE = {
    *(("layers.mixer.query_latent", "default"), ("layers.mixer.bias", "False")),
    *(("norm.weight", "False"), ("layers.mixer.qk_norm.bias", "False")),
    ("layers.feed_forward.router.group_by_largest", "True"),
    ("norm.bias", "False"),
    ("form", "sequential", "LayerNorm", "NoneType", "Dense", "True"),
    ("form", "sequential", "RmsNorm", "NoneType", "Dense", "False"),
    ("form", "sequential", "NoneType", "RmsNorm", "Dense", "True"),
    ("form", "parallel_shared", "LayerNorm", "NoneType", "Dense", "True"),
}
"""Options of model types that are compiled only if the environment variable MLCBUILD_TEST_EVERY is set,
because other options cover the code that they use. A tuple is (path of a config field, its value), or
("form", the blocks of a layer)."""


def test_every_option_of_a_type_is_compiled(tmp_path: Path) -> None:
    def of_types(names: Iterable[str]) -> set[tuple[str, ...]]:
        return set().union(*(options(typegoldens.load(name, tmp_path / name).config) for name in names))

    for name in typegoldens.NAMES:
        (tmp_path / name).mkdir()
    compiled_here = options(patchwork(every=True)) | of_types(OWN_OPTIONS)
    goldens = [golden(variant).config for variant in VARIANTS]
    with_experts = [experts_golden.golden(name).config for name in test_experts.CHECKED_VARIANTS]
    for config in (SMALL, LAYERED, *goldens, *with_experts):
        compiled_here |= options(config)
    assert of_types(typegoldens.NAMES) - compiled_here == RARE


def test_layers_of_every_block_give_what_the_reference_gives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config, scheme = patchwork(every=True), SCHEMES["q0f32"]
    library = compiled(tmp_path_factory, config, scheme, context_window=WINDOW, max_batch=BATCH)
    stored = pack(config, scheme, random_weights(config))
    session = Session(library / "model.so", stored)
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, config.vocab_size, 40)]
    expected = reference.logits(config, unpacked(config, scheme, stored), tokens, dtype=np.float64)
    compare(session, tokens, expected)


@pytest.mark.parametrize("name", CHECKED)
def test_type_gives_the_logits_of_transformers(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case, scheme = typegoldens.load(name, tmp_path), SCHEMES["q0f32"]
    library = compiled(tmp_path_factory, case.config, scheme, context_window=WINDOW, max_batch=BATCH)
    session = Session(library / "model.so", pack(case.config, scheme, case.weights))
    memory = json.loads((library / "library.json").read_bytes())["memory"]
    assert memory["weights"] == sum(array.nbytes for array in session.stored.values())
    pages = BATCH * WINDOW // PAGE
    assert memory["kv_cache"] * session.num_pages == pages * np.from_dlpack(session.cache).nbytes
    compare(session, case.tokens, case.logits)


def compare(session: Session, tokens: Sequence[int], expected: NDArray[Any]) -> None:
    """Asserts that a prompt gives the logits `expected`: computed at once, in chunks, token by token, and for
    its last rows only."""
    tolerance = 1e-4 * float(np.abs(expected).max())

    def worst(logits: NDArray[Any]) -> float:
        return float(np.abs(logits - expected).max())

    assert worst(session.prefill((0, tokens))) < tolerance
    chunks = [session.prefill((1, tokens[start:end])) for start, end in ((0, 7), (7, 24), (24, len(tokens)))]
    assert worst(np.concatenate(chunks)) < tolerance
    steps = [session.decode((2, token)) for token in tokens]
    assert worst(np.concatenate(steps)) < tolerance
    last = session.prefill((3, tokens), rows=[len(tokens) - 1])
    assert np.abs(last - expected[-1:]).max() < tolerance
