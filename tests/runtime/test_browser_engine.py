"""Tests that compare the browser's engine with the Python runtime and with libraries: digests, random
numbers, sampling, tokens, texts, templates, weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
import numpy as np
import pytest
from mlcbuild_format import abi
from mlcbuild_format.errors import BundleError
from mlcbuild_format.limits import Limits
from mlcbuild_runtime.devices import gpu, host_sampling
from mlcbuild_runtime.executor.sampling_params import Sampling, adjusted, generator, logprobs
from numpy.typing import NDArray

from .browser_engine import call, calls


def test_digests_equal_those_of_blake3() -> None:
    sizes = [0, 1, 64, 65, 1023, 1024, 1025, 2048, 3073, 7168, 102_401]
    results = calls(*(("digest", {"size": size, "step": 777}) for size in sizes))
    expected = [blake3.blake3(bytes(i % 251 for i in range(size))).hexdigest() for size in sizes]
    assert [result["value"] for result in results] == [[digest, digest] for digest in expected]


LIMITS = Limits(context_window=256, prefill_chunk=64, max_batch=8)
OTHER_LIMITS = [
    {},
    {"page_size": 8},
    {"context_window": 255},
    {"context_window": 128},
    {"prefill_chunk": 128},
    {"max_batch": 16},
    {"max_batch": 24, "context_window": 128},
]


def test_programs_of_other_limits_are_refused_as_in_python() -> None:
    """Checks that the browser's engine refuses a GPU program for the same limits, with the same message, as
    the Python runtime. The limits vary for a program with 16 rows in a decoding step; another program has
    fewer rows in a decoding step than a batch may have."""
    asked, expected = [], list[str | None]()
    for decode_rows, changes in [*((16, each) for each in OTHER_LIMITS), (4, {})]:
        limits: Any = replace(LIMITS, **changes)
        rows = max(LIMITS.rows, decode_rows)
        program: Any = SimpleNamespace(
            sizes={"n": rows, "pages": LIMITS.pages},
            functions={"decode": [SimpleNamespace(sizes={"n": decode_rows})]},
            ropes={"rope": SimpleNamespace(rows=LIMITS.context_window)},
        )
        try:
            gpu._check_limits(Path("program.json"), program, limits)
            expected.append(None)
        except BundleError as error:
            (figure,) = re.findall(r"the program has (.*)", str(error))
            expected.append(f"program.json has {figure.replace('; build', ': build')}")
        shown = {
            "context": limits.context_window,
            "pageSize": limits.page_size,
            "maxBatch": limits.max_batch,
            "prefillChunk": limits.prefill_chunk,
        }
        asked.append(
            {
                "sizes": program.sizes,
                "decodeRows": decode_rows,
                "ropes": [LIMITS.context_window],
                "limits": shown,
            }
        )
    results = calls(*(("limits", each) for each in asked))
    assert [str(result.get("error")).removeprefix("EngineError: ") for result in results] == [
        str(message) for message in expected
    ]
    assert expected[0] is None and None not in expected[1:]
    assert "4 rows in a decoding step, and the limits in bundle.json are for 8" in str(expected[-1])


@pytest.mark.parametrize("seed", [0, 3, 2**32, 2**64 - 1, 12345678901234567])
def test_a_seed_gives_the_numbers_of_numpy(seed: int) -> None:
    expected = generator(Sampling(seed=seed)).random(70).tolist()
    assert call("random", {"seed": str(seed), "count": 70}) == expected


SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1, top_k=5),
    Sampling(temperature=1, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.5, top_k=40),
    Sampling(temperature=1, min_p=0.05),
    Sampling(temperature=0),
    Sampling(temperature=1, top_k=1),
]


def options(sampling: Sampling) -> dict[str, float]:
    return {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "topK": sampling.top_k,
        "minP": sampling.min_p,
    }


def logits_of(seed: int, count: int = 300) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, count).astype(np.float32)


def top_of(logits: NDArray[np.float32]) -> list[int]:
    """Returns the output of the GPU kernel `top` for a row of logits: the largest logit, the sum of
    exponentials, and the 64 largest logits with their tokens."""
    order = np.argsort(-logits, kind="stable")[:64]
    words = np.empty(2 + 2 * 64, np.float32)
    words[0], words[1] = logits.max(), np.exp(logits - logits.max()).sum()
    words[2::2] = logits[order]
    bits = words.view(np.int32)
    bits[3::2] = order
    actual: list[int] = bits.tolist()
    return actual


@pytest.mark.parametrize("index", range(len(SAMPLINGS)))
def test_tokens_are_drawn_as_the_runtime_draws_them(index: int) -> None:
    sampling, logits = SAMPLINGS[index], logits_of(index)
    logits[[7, 9]] = logits[7]
    randoms = np.random.default_rng(1).random(50).tolist()
    rows = [(*sampling.columns, number) for number in randoms]
    asked = {"params": options(sampling), "randoms": randoms}
    whole, top = calls(
        ("draws", {**asked, "logits": logits.tolist()}), ("top", {**asked, "words": top_of(logits)})
    )
    assert whole["value"] == [host_sampling.draw(logits, row) for row in rows]
    if sampling.temperature and not sampling.greedy:
        words = np.array(top_of(logits), np.int32)
        assert top["value"] == [host_sampling.draw_from_top(words, row) for row in rows]


def test_logits_that_are_not_numbers_give_no_token() -> None:
    asked = {"params": options(Sampling()), "randoms": [0.5]}
    for largest, total in ((np.nan, 1), (np.inf, 1), (-np.inf, 1), (3, np.nan)):
        bits = np.array([largest, total] + [-np.inf] * 128, np.float32).view(np.int32).tolist()
        assert call("top", {**asked, "words": bits}) == [abi.INVALID_TOKEN]
    for logits in ([np.nan, 1], [1, np.inf], [-np.inf] * 2):
        bits = np.array(logits, np.float32).view(np.int32).tolist()
        assert call("draws", {**asked, "bits": bits}) == [abi.INVALID_TOKEN]


def test_penalties_and_log_probabilities_equal_the_runtimes() -> None:
    logits, counts = logits_of(3, 40), {5: 2, 7: 1}
    sampling = Sampling(
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.3,
        bias=((1, 4.5), (7, -3.0)),
    )
    penalties = {"repetition": 1.3, "frequency": 0.5, "presence": -0.25, "bias": [[1, 4.5], [7, -3.0]]}
    asked = {
        "logits": logits.tolist(),
        "options": penalties,
        "prompt": [0, 5],
        "counts": list(counts.items()),
    }
    expected = adjusted(logits, sampling, [0, 5], counts)
    assert call("adjust", asked) == expected.tolist()
    own, others = logprobs(logits, 3, 4)
    actual = call("logprobs", {"logits": logits.tolist(), "token": 3, "count": 4})
    assert [token for token, _ in actual] == [own.token, *(other.token for other in others)]
    values = [own.logprob, *(other.logprob for other in others)]
    np.testing.assert_allclose([value for _, value in actual], values, atol=1e-6)


def test_an_engine_in_a_worker_refuses_calls_once_it_is_unloaded() -> None:
    refused = "unloaded: the model was unloaded: load it again"
    before, *unloads, during, forgotten, after = call("unloaded", None)
    assert (before, unloads) == ("create", ["unload", "unload"])
    assert [during, forgotten, after] == [refused] * 3


def test_the_page_frees_and_deletes_nothing_before_a_model_is_loaded() -> None:
    texts = call("clicks", {"buttons": ["unload", "forget"]})
    assert texts == ["No model is loaded: wait until it is, or reload the page."] * 2
