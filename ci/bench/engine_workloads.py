"""Compares values of the runtime's tuned constants by the time of requests to an engine, or, for the lengths
of drafts, by the simulated tokens per decode step of texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue

from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine import drafts
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.text.tokenizer import Tokenizer
from set_constants import replaced

ENGINE = "mlcbuild_runtime.engine"
ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("README.md", "mlcbuild/README.md", "runtime/mlcbuild_runtime/engine/loop.py")
"""Files of this repository on which speculative decoding is simulated, to count the tokens per step with
other draft lengths: prose, tables, and a program.
"""
PROMPT, ANSWER = 256, 64
CONSTANTS = {
    "loop.BURST_SECONDS": (0.01, 0.02, 0.08, 0.16),
    "scheduler.SCORED": (16, 32, 128, 256),
    "prompt_turns.SMALLEST": (16, 32, 128),
    "drafts.SIZES": ((2,), (3, 2), (5, 4, 3, 2), (4, 3)),
}
"""Tuned constant of the runtime, as "module.NAME" below mlcbuild_runtime/engine -> the values that a
benchmark compares with the constant's own value."""
Value = int | float | tuple[int, ...]


def request(name: str, value: Value) -> tuple[str, Request]:
    """Returns (label, request) for timing a tuned constant of the runtime: a request on whose time the
    constant has an effect. name: the constant as "module.NAME", such as "scheduler.SCORED"; value: the
    constant's value, used only for "prompt_turns.SMALLEST": the prompt then has as many tokens, so that it is
    computed in one chunk."""
    plain = Sampling(0.0)
    if name == "scheduler.SCORED":
        return "256 prompt tokens with log-probabilities", Request(
            tuple(range(3, 3 + PROMPT)), 1, plain, prompt_logprobs=True, logprobs=0
        )
    if name == "prompt_turns.SMALLEST":
        assert isinstance(value, int)
        return "a prompt token", Request(tuple(range(3, 3 + value)), 1, plain)
    return f"{ANSWER} tokens of an answer", Request(tuple(range(3, 35)), ANSWER, plain, ignore_eos=True)


def seconds(engine: Engine, asked: Request, clock: Callable[[], float]) -> float:
    """Returns the seconds until the engine has answered a request, measured with `clock`. For a request with
    an answer of one token, returns the seconds per prompt token. Raises the error that the engine reports.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    begun = clock()
    engine.submit(asked, events.put)
    while True:
        event = events.get()
        if event.error is not None:
            raise event.error
        if event.last:
            return (clock() - begun) / (len(asked.prompt) if asked.max_tokens == 1 else 1)


def compare(
    bundle: Path, name: str, values: Sequence[Value], timing: tuple[Callable[[], float], int], threads: int
) -> Iterator[tuple[str, float, list[float]]]:
    """Compares the speed of the runtime's engine with other values of one tuned constant. Yields one tuple:
    (label of the timed request, seconds with the constant's own value, list of ratios: for each of `values`,
    its time divided by these seconds, so that more than 1 is slower).

    name: the constant as "module.NAME", such as "loop.BURST_SECONDS"; timing: (function that reads the clock,
    number of rounds, of which the fastest counts; one more round before them does not count).
    """
    module, _, attribute = name.rpartition(".")
    model = CpuExecutor.load(bundle, threads=threads)
    engine = Engine(model, Tokenizer.load(bundle, model.manifest.serving)).start()
    present: Value = vars(import_module(f"{ENGINE}.{module}"))[attribute]
    least = [float("inf")] * (1 + len(values))
    for turn in range(timing[1] + 1):
        for index, value in enumerate((present, *values)):
            label, asked = request(name, value)
            # A prompt that begins with other tokens is in no cache. Small vocabularies have 400 tokens.
            high, low = divmod(turn * 20 + index, 100)
            asked = replace(asked, prompt=(100 + low, 200 + high, *asked.prompt[2:]))
            with replaced(f"{ENGINE}.{module}", attribute, value):
                spent = seconds(engine, asked, timing[0])
            least[index] = min(least[index], spent) if turn else least[index]
    engine.close()
    yield label, least[0], [item / least[0] for item in least[1:]]


def count_drafts(bundle: Path, values: Sequence[Value]) -> Iterator[tuple[str, list[float]]]:
    """Simulates speculative decoding of texts with other draft lengths, without a model: the runtime's prompt
    lookup proposes drafts from the earlier text. Yields (name of a text, list with the tokens per decode step
    for each of `values`). A decode step accepts the draft tokens up to the first that differs from the text,
    and one more; the first 100 tokens are the prompt. values: alternatives for the constant drafts.SIZES."""
    tokenizer = Tokenizer.load(bundle)
    for name in TEXTS:
        tokens = tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))
        counts = list[float]()
        for sizes in values:
            with replaced(f"{ENGINE}.drafts", "SIZES", sizes):
                lookup, place, steps = drafts.Lookup(), 100, 0
                written = tokens[:place]
                while place < len(tokens):
                    draft = lookup.propose(written, drafts.TOKENS)
                    wrong = (
                        i for i, token in enumerate(draft) if tokens[place + i : place + i + 1] != [token]
                    )
                    place, steps = place + next(wrong, len(draft)) + 1, steps + 1
                    written += tokens[len(written) : place]
            counts.append((len(tokens) - 100) / steps)
        yield name, counts


def clock_of(threads: int) -> Callable[[], float]:
    """Returns the function that reads the clock of a measurement, in seconds: CPU time of the process if
    `threads` is 1, else wall time.
    """
    return time.process_time if threads == 1 else time.perf_counter
