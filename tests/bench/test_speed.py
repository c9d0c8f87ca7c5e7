"""Tests of measuring a bundle's speed: the batches that are computed, and the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.limits import Limits
from mlcbuild_runtime.executor import executor as executors
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor

from mlcbuild.bench import speed
from mlcbuild.bench.speed import SPEED, SpeedPlan
from mlcbuild.bundles import fresh_process
from mlcbuild.errors import UsageError

LIMITS = Limits(context_window=64, prefill_chunk=20, max_batch=3)
MODEL = cast(Executor, SimpleNamespace(manifest=SimpleNamespace(limits=LIMITS, vocab_size=10), threads=2))
PLAN = SpeedPlan(prompt_tokens=35, answer_tokens=2, rounds=3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[ModelStep]:
    """Returns the list to which every computed step of the model is appended. Steps are not executed, and the
    clock that measures them advances by one second with each."""
    computed: list[ModelStep] = []
    clock = SimpleNamespace(perf_counter=lambda: float(len(computed)))
    monkeypatch.setattr(speed, "time", clock)
    monkeypatch.setattr(executors, "forward", lambda model, step: computed.append(step))
    monkeypatch.setattr(loading, "load", lambda path, threads: MODEL)
    return computed


def test_a_prompt_is_computed_in_chunks_on_its_own_pages(steps: list[ModelStep]) -> None:
    assert speed._prefill(MODEL, PLAN, 1) == 2.0
    first, second = steps
    # 37 tokens need three pages of 16, which are 3 to 5 for the second sequence.
    assert (first.lengths, first.page_table) == ([20], [3, 4])
    assert (second.lengths, second.page_table) == ([35], [3, 4, 5])
    tokens = [*first.tokens, *second.tokens]
    assert len(tokens) == 35 and min(tokens) >= 0 and max(tokens) < 10 and first.prompt
    speed._prefill(MODEL, PLAN, 0)
    assert [*steps[2].tokens, *steps[3].tokens] != tokens, "equal prompts could share pages"


def test_decoding_counts_steps_of_the_whole_batch_only(steps: list[ModelStep]) -> None:
    assert speed._decode(MODEL, PLAN, 3) == 2.0, "without the six chunks of three prompts"
    assert len(steps) == 8
    for number, step in enumerate(steps[6:]):
        assert (step.lengths, len(step.tokens), step.prompt) == ([36 + number] * 3, 3, False)
        assert step.page_table == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert speed._decode(MODEL, PLAN, 1, steps=1) == 1.0


def test_figures_are_rates_of_the_median_the_slowest_and_the_fastest_round() -> None:
    seconds = [4.0, 1.0, 2.0]
    assert speed._figure(8, 3, lambda: seconds.pop(0)) == {
        "tokens": 8,
        "tokens_per_second": 4.0,
        "slowest": 2.0,
        "fastest": 8.0,
    }


def test_all_measurements_of_a_bundle(steps: list[ModelStep]) -> None:
    figures: Any = speed._work("bundle", json.dumps(vars(PLAN)))
    assert [*figures] == ["threads", "load_seconds", "prefill", "decode 1", "decode 3"]
    assert (figures["threads"], figures["load_seconds"]) == (2, 0.0)
    assert figures["prefill"] == {
        "tokens": 35,
        "tokens_per_second": 17.5,
        "slowest": 17.5,
        "fastest": 17.5,
    }
    assert figures["decode 1"]["tokens_per_second"] == 1.0 and figures["decode 3"]["tokens"] == 6
    assert figures["decode 3"]["tokens_per_second"] == 3.0
    device = cast(Executor, SimpleNamespace(description="a GPU"))
    assert speed._device(device) == {"device": "a GPU"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Replaces the function that runs a module in a fresh process by one that returns {"x": 1}. Returns the
    list to which it appends the arguments of each call."""
    started: list[Sequence[str]] = []

    def run(*arguments: str) -> dict[str, object]:
        started.append(arguments)
        return {"x": 1}

    monkeypatch.setattr(fresh_process, "run", run)
    monkeypatch.setattr(bundle, "read", lambda path: SimpleNamespace(limits=LIMITS))
    return started


def test_a_bundle_is_measured_in_another_process(runs: list[Sequence[str]]) -> None:
    assert speed.measure(Path("a"), SpeedPlan(60, 4, threads=1)) == {"x": 1}
    ((module, path, plan),) = runs
    assert (module, path) == ("mlcbuild.bench.speed", "a")
    assert SpeedPlan(**json.loads(plan)) == SpeedPlan(60, 4, 5, 1)


def test_a_workload_beyond_the_context_is_refused(runs: list[Sequence[str]]) -> None:
    with pytest.raises(UsageError, match="61 tokens of prompt and 4 of answer do not fit the bundle's"):
        speed.measure(Path("a"), SpeedPlan(61, 4))
    assert runs == []


def test_the_step_writes_figures_and_their_machine(runs: list[Sequence[str]], tmp_path: Path) -> None:
    params = {"prompt_tokens": 8, "generate_tokens": "4", "machine": "x86"}
    speed.bench(params, {"bundle": tmp_path}, tmp_path)  # type: ignore[arg-type]
    assert json.loads((tmp_path / SPEED).read_text()) == {"machine": "x86", "x": 1}
    assert SpeedPlan(**json.loads(runs[0][-1])) == SpeedPlan(8, 4)
