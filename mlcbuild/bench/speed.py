"""Measures the speed of one bundle without a server: prefill, and decoding of one sequence and of a full
batch.

The bundle is loaded in a separate process; every speed is the median of several rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from mlcbuild.bundles import fresh_process
from mlcbuild.canon import Json
from mlcbuild.errors import UsageError

if TYPE_CHECKING:
    from mlcbuild_runtime.executor.executor import Executor


SPEED = "speed.json"


@dataclass(frozen=True)
class SpeedPlan:
    """The workload of a speed measurement: tokens of prompt and answer, number of rounds, and number of
    threads (None: the runtime's default)."""

    prompt_tokens: int = 128
    answer_tokens: int = 32
    rounds: int = 5
    threads: int | None = None


def bench(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action: measures load time and tokens per second of the bundle inputs["bundle"], and writes to
    speed.json in `out` the JSON object that `measure` returns, with `machine` added.

    params: `prompt_tokens` and `generate_tokens`, numbers of tokens; `machine`, the kind of machine for which
    the figures hold. Raises UsageError if the tokens do not fit the bundle's context window, BundleError for
    a damaged bundle, and VerificationError when it cannot be run."""
    prompt, answer = (int(str(params[name])) for name in ("prompt_tokens", "generate_tokens"))
    figures = measure(inputs["bundle"], SpeedPlan(prompt, answer))
    (out / SPEED).write_text(json.dumps({"machine": params["machine"], **figures}, indent=2) + "\n")


def measure(bundle: Path, plan: SpeedPlan) -> dict[str, object]:
    """Measures the speed of a bundle with the workload `plan`, and returns a JSON object: `threads` (or
    `device`, its name, if that is not a CPU), `load_seconds`, and for `prefill` and for each `decode N` with
    N sequences (1 and a full batch) {"tokens": number computed in a round, "tokens_per_second": of the median
    round, "slowest" and "fastest": tokens per second of these rounds}.

    Raises UsageError if prompt and answer do not fit the bundle's context window, BundleError for a damaged
    bundle, and VerificationError with the runtime's message when it cannot be run.
    """
    from mlcbuild_format import bundle as form

    limits = form.read(bundle).limits
    if plan.prompt_tokens + plan.answer_tokens > limits.context_window:
        raise UsageError(
            f"mlcbuild bench: {plan.prompt_tokens} tokens of prompt and {plan.answer_tokens} of answer do"
            f" not fit the bundle's context of {limits.context_window}: change --prompt-tokens or --tokens"
        )
    figures: dict[str, object] = fresh_process.run(
        "mlcbuild.bench.speed", str(bundle), json.dumps(vars(plan))
    )
    return figures


def _work(path: str, plan_json: str) -> dict[str, object]:
    from mlcbuild_runtime.executor import loading

    plan = SpeedPlan(**json.loads(plan_json))
    start = time.perf_counter()
    model = loading.load(path, plan.threads)
    loaded = time.perf_counter() - start
    batch = model.manifest.limits.max_batch
    _decode(model, plan, 1, steps=1)  # The first call allocates the cache.
    figures: dict[str, object] = {
        **_device(model),
        "load_seconds": round(loaded, 3),
        "prefill": _figure(plan.prompt_tokens, plan.rounds, lambda: _prefill(model, plan, 0)),
    }
    for count in dict.fromkeys((1, batch)):
        tokens = count * plan.answer_tokens
        figures[f"decode {count}"] = _figure(tokens, plan.rounds, partial(_decode, model, plan, count))
    return figures


def _device(model: Executor) -> dict[str, object]:
    """Returns a field for a speed report: {"threads": their number} on a CPU, {"device": its name} on another
    device."""
    threads: int | None = getattr(model, "threads", None)
    return {"device": model.description} if threads is None else {"threads": threads}


def _figure(tokens: int, rounds: int, work: Callable[[], float]) -> dict[str, float]:
    seconds = sorted(work() for _ in range(rounds))
    return {
        "tokens": tokens,
        "tokens_per_second": round(tokens / median(seconds), 2),
        "slowest": round(tokens / seconds[-1], 2),
        "fastest": round(tokens / seconds[0], 2),
    }


def _pages(model: Executor, plan: SpeedPlan, number: int) -> range:
    """Returns the numbers of the KV cache pages of the sequence `number` in a speed measurement, in which
    each sequence has equally many successive pages, enough for prompt and answer."""
    each = -(-(plan.prompt_tokens + plan.answer_tokens) // model.manifest.limits.page_size)
    return range(number * each, (number + 1) * each)


def _prefill(model: Executor, plan: SpeedPlan, number: int) -> float:
    """Computes the prompt of one sequence from its first token on, in chunks, and returns the seconds that
    all of them take together. number: index of the sequence."""
    from mlcbuild_runtime.executor.batch import ModelStep
    from mlcbuild_runtime.executor.executor import forward

    size, pages = model.manifest.limits.page_size, _pages(model, plan, number)
    tokens = [(number + 31 * i) % model.manifest.vocab_size for i in range(plan.prompt_tokens)]
    begun = time.perf_counter()
    for first in range(0, len(tokens), model.manifest.limits.prefill_chunk):
        chunk = tokens[first : first + model.manifest.limits.prefill_chunk]
        end = first + len(chunk)
        forward(model, ModelStep.of([(chunk, end, pages[: -(-end // size)])]))
    return time.perf_counter() - begun


def _decode(model: Executor, plan: SpeedPlan, count: int, steps: int | None = None) -> float:
    """Returns the seconds that all decode steps together take for `count` sequences, each step for all of
    them, after their prompts were prefilled, which is not counted. steps: number of decode steps; None:
    plan.answer_tokens.
    """
    from mlcbuild_runtime.executor.batch import ModelStep
    from mlcbuild_runtime.executor.executor import forward

    size = model.manifest.limits.page_size
    for number in range(count):
        _prefill(model, plan, number)
    begun = time.perf_counter()
    for step in range(plan.answer_tokens if steps is None else steps):
        end = plan.prompt_tokens + step + 1
        used = -(-end // size)
        forward(
            model, ModelStep.of([([7], end, _pages(model, plan, number)[:used]) for number in range(count)])
        )
    return time.perf_counter() - begun


if __name__ == "__main__":
    fresh_process.main(_work)
