"""The loop of a process that runs one of the inference engines that `ci/bench/cpu` compares. Each line of
stdin is a command as a JSON object, whose `do` is "prefill", "decode" or "logits"; each is answered by a JSON
object on a line of stdout. The loop ends with stdin.

Runs in each engine's Python environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

CONTEXT = 512
"""Number of tokens that each sequence holds before the first decode step of a measurement."""
SEQUENCES = 8
"""Maximum number of sequences that a measured engine decodes in one step."""


class Engine(Protocol):
    """The interface of an engine under test, which receives token ids and computes logits or the
    next token.
    """

    def prefill(self, tokens: list[int]) -> None:
        """Computes one prompt as a new sequence, up to the logits of its last token. Returns nothing: the
        caller measures the time. tokens: the prompt's token ids."""
        ...

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        """Decodes `steps` tokens of each of `batch` sequences, one of each in a step. Every call begins with
        sequences of CONTEXT tokens, whose computation is not part of the times. Returns (wall seconds, CPU
        seconds) of each step."""
        ...

    def save_logits(self, tokens: list[int], path: str) -> None:
        """Computes the tokens as one prompt and writes the logits of every position to the file `path`: raw
        float32, [tokens, vocabulary], without a header.
        """
        ...


def clock() -> tuple[float, float]:
    """Returns the current readings of two clocks, in seconds: (wall time, CPU time of all threads of the
    process). Only differences between two calls have a meaning.
    """
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = clock()
    return wall - start[0], cpu - start[1]


def prompt(count: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Returns `count` token ids that depend on nothing but the arguments, so that every engine computes the
    same prompt. The ids are at least 256 and less than `vocabulary`, which must exceed 300; `seed` selects
    one of several prompts."""
    return [(seed * 7919 + i * 104729) % (vocabulary - 300) + 256 for i in range(count)]


def run(load: Callable[[str, int, int], Engine]) -> None:
    """Runs an engine's process for a benchmark. argv: path of the model, number of threads, number of tokens
    in the first prompt, size of the vocabulary. load: function of (path, threads, vocabulary) that loads the
    engine.

    Prints {"cpu": CPU seconds of the process} once the first prompt is computed. It then executes commands
    from stdin, one JSON object a line: "do" is "prefill" with "tokens" (length of the prompt), "decode" with
    "batch" and "steps", or "logits" with "path" (file to write) and either "ids" (token ids) or "tokens"
    (length of a prompt). For each it prints {"samples": list of [wall seconds, CPU seconds], empty for
    "logits", "threads": number that worked or null, "resident" and "peak": MB of memory}. An error ends the
    process.
    """
    threads, first, vocabulary = map(int, sys.argv[2:5])
    engine = load(sys.argv[1], threads, vocabulary)
    engine.prefill(prompt(first, vocabulary))
    _say({"cpu": time.process_time()})
    for line in sys.stdin:
        command = json.loads(line)
        before = _threads()
        start = clock()
        samples: list[tuple[float, float]] = []
        if command["do"] == "prefill":
            tokens = prompt(command["tokens"], vocabulary)
            start = clock()
            engine.prefill(tokens)
            samples = [since(start)]
        elif command["do"] == "decode":
            samples = engine.decode(command["batch"], command["steps"])
        elif command["do"] == "logits":
            tokens = command.get("ids") or prompt(command["tokens"], vocabulary)
            engine.save_logits(tokens, command["path"])
        _say({"samples": samples, "threads": _active(before), **_memory()})


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _threads() -> dict[str, int]:
    """Returns thread id -> CPU time in clock ticks, for the threads of this process; {} without a /proc."""
    by_name = {}
    root = Path("/proc/self/task")
    for task in root.iterdir() if root.is_dir() else ():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        by_name[task.name] = int(fields[11]) + int(fields[12])
    return by_name


def _active(before: dict[str, int]) -> int | None:
    """Returns the number of threads of this process that have worked since an earlier time: those that used
    at least a fifth of the CPU time of the busiest one. None without a /proc, or if none used more than two
    clock ticks. before: thread id -> CPU time in clock ticks at the earlier time.
    """
    spent = [ticks - before.get(name, 0) for name, ticks in _threads().items()]
    return sum(ticks * 5 >= max(spent) for ticks in spent) if spent and max(spent) > 2 else None


def _memory() -> dict[str, float]:
    """Returns this process's memory in MB (10^6 bytes), mapped files included: "resident" now, "peak" at
    most. Systems without /proc know only the peak, which is then returned for both."""
    status = Path("/proc/self/status")
    if not status.is_file():
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        return {"resident": peak, "peak": peak}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {
        name: int(fields[field].split()[0]) * 1024 / 1e6
        for name, field in (("resident", "VmRSS"), ("peak", "VmHWM"))
    }
