"""Compiled libraries against transformers for each model type: prompts whole and in chunks, and decoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import typegoldens
from tests.libharness import EVERY, PAGE, Session, compiled, pack
from tests.schemes import SCHEMES
from tests.typegoldens import WINDOW

BATCH = 4
SAME_PROGRAM = {
    *(
        "arcee",
        "cohere",
        "deepseek_v2",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "internlm3",
        "minimax_m2",
        "ernie4_5",
        "glm4_moe_lite",
        "minicpm3",
        "exaone4",
        "falcon",
        "falcon-new",
        "gemma",
        "gemma3",
        "glm",
        "glm4",
    ),
    *(
        "gpt2",
        "gpt_neox-sequential",
        "gptj",
        "ministral",
        "mistral3",
        "olmo",
        "olmo3",
        "phi",
        "qwen3_vl",
        "seed_oss",
    ),
    *("stablelm", "stablelm-parallel", "starcoder2"),
}
"""Types whose layers are made of blocks that others here have: tests of the reference cover them, and these
where MLCBUILD_TEST_EVERY is set."""
CHECKED = [name for name in typegoldens.NAMES if EVERY or name not in SAME_PROGRAM]


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
    tokens, expected = case.tokens, case.logits
    tolerance = 1e-4 * float(np.abs(expected).max())

    def worst(logits: typegoldens.Values) -> float:
        return float(np.abs(logits - expected).max())

    assert worst(session.prefill((0, tokens))) < tolerance
    chunks = [session.prefill((1, tokens[start:end])) for start, end in ((0, 7), (7, 24), (24, len(tokens)))]
    assert worst(np.concatenate(chunks)) < tolerance
    steps = [session.decode((2, token)) for token in tokens]
    assert worst(np.concatenate(steps)) < tolerance
    last = session.prefill((3, tokens), rows=[len(tokens) - 1])
    assert np.abs(last - expected[-1:]).max() < tolerance
