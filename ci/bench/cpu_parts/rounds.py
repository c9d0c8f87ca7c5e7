"""Measures the compared engines on the CPU one after the other, in several rounds, so that slow changes of
the machine's speed affect all of them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from child import CONTEXT
from engines import HERE, OURS, Entry, Prepared, environment

FIRST = 16
"""Number of tokens in the prompt with which the time to the first token is measured."""
FIGURES = ("prefill 128", "prefill 512", "decode 1", "decode 4", "decode 8")
SETTLE = 0.3
"""Seconds of pause between two engines: threads of some engines spin for 0.2 s and would slow down the next
engine.
"""
SCORED = 128
"""Number of tokens of the prompt with which the logits of the compared engines are compared with a float32
reference.
"""


@dataclass(frozen=True)
class Plan:
    threads: int
    rounds: int
    steps: int
    small: bool
    """True for a small model, whose prefill takes much less than a second and is therefore measured twice in
    each round instead of once."""
    target: str = "host"
    """Name of the build target (processor) whose hardware limits, such as memory bandwidth, are measured on
    this machine beside the engines.
    """


@dataclass
class Samples:
    """The measurements of one engine with one model, over all rounds."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    """Name of a measured figure, such as "first token" -> its values in all rounds, of which a round may give
    several, by wall time: seconds for "first token", else tokens per second.
    """
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Name of a measured figure, such as "first token" -> its values in all rounds, of which a round may give
    several, by CPU time of all threads: CPU seconds for "first token", else tokens per CPU second.
    """
    threads: set[int] = field(default_factory=set)
    """The different numbers of threads of the engine's process that worked, each in at least one
    measurement."""
    resident: float = 0.0
    """Resident memory of a measured engine's process in MB (10^6 bytes), read after its last measurement."""

    def add(self, figure: str, wall: float, cpu: float) -> None:
        self.wall.setdefault(figure, []).append(wall)
        self.cpu.setdefault(figure, []).append(cpu)


@dataclass(frozen=True)
class Measured:
    limits: list[Mapping[str, float]]
    samples: Mapping[str, Samples]
    prepared: Prepared
    """The compared engines with their models, without the engines whose process ended unexpectedly during the
    measurement.
    """


class EndedError(Exception):
    """The error for an engine whose process ended instead of answering."""


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, entry: Entry, threads: int, first: int, vocabulary: int) -> Child:
        variables = environment(entry.path) | {"OMP_NUM_THREADS": str(threads), **dict(entry.variables)}
        command = [*entry.command, str(threads), str(first), str(vocabulary)]
        return cls(_popen(command, variables))

    def hear(self) -> dict[str, object]:
        line = cast("IO[str]", self.process.stdout).readline()
        if not line:
            raise EndedError(f"its process ended with {self.process.wait()}")
        return cast("dict[str, object]", json.loads(line))

    def ask(self, **command: object) -> dict[str, object]:
        inputs = cast("IO[str]", self.process.stdin)
        inputs.write(json.dumps(command) + "\n")
        inputs.flush()
        return self.hear()

    def close(self) -> None:
        cast("IO[str]", self.process.stdin).close()
        self.process.wait()


def _popen(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def measure(actual: Prepared, plan: Plan) -> Measured:
    vocabulary = actual.config["vocab_size"]
    samples = {entry.name: Samples() for entry in actual.entries}
    limits: list[Mapping[str, float]] = []

    @contextmanager
    def as_long_as_it_runs(name: str) -> Iterator[None]:
        try:
            yield
        except EndedError as error:
            print(f"{name} is left out: {error}", flush=True)
            del samples[name]

    for _ in range(plan.rounds):
        for entry in actual.entries:
            if entry.name in samples:
                with as_long_as_it_runs(entry.name):
                    samples[entry.name].add("first token", *_first(entry, plan.threads, vocabulary))
    with ExitStack() as stack:
        children = {}
        for entry in actual.entries:
            if entry.name in samples:
                children[entry.name] = child = Child.start(entry, plan.threads, CONTEXT, vocabulary)
                stack.callback(child.close)
                with as_long_as_it_runs(entry.name):
                    child.hear()
        limiter = [sys.executable, str(HERE / "limits.py"), str(plan.threads), plan.target]
        gauge = Child(_popen(limiter, environment(OURS)))
        stack.callback(gauge.close)
        gauge.hear()
        for _ in range(plan.rounds):
            limits.append(cast("Mapping[str, float]", gauge.ask()))
            for figure in FIGURES:
                for name, child in children.items():
                    if name in samples:
                        time.sleep(SETTLE)
                        with as_long_as_it_runs(name):
                            _sample(child, figure, plan, samples[name])
    left = tuple(entry for entry in actual.entries if entry.name in samples)
    return Measured(limits, samples, replace(actual, entries=left))


def _first(entry: Entry, threads: int, vocabulary: int) -> tuple[float, float]:
    """Starts a measured engine, and returns (wall seconds, CPU seconds) from the start of its process until
    it has computed its first token; the process is then ended. entry: the engine with its model; threads:
    number of threads; vocabulary: number of tokens. Raises EndedError if the process ends before."""
    start = time.perf_counter()
    child = Child.start(entry, threads, FIRST, vocabulary)
    said = child.hear()
    wall = time.perf_counter() - start
    child.close()
    return wall, cast(float, said["cpu"])


def _sample(child: Child, figure: str, plan: Plan, into: Samples) -> None:
    kind, _, number = figure.partition(" ")
    count = int(number)
    for _ in range(2 if plan.small and kind == "prefill" else 1):
        if kind == "prefill":
            answer = child.ask(do="prefill", tokens=count)
        else:
            answer = child.ask(do="decode", batch=count, steps=plan.steps)
        for wall, cpu in cast("list[tuple[float, float]]", answer["samples"]):
            into.add(figure, count / wall, count / cpu)
        if answer["threads"]:
            into.threads.add(cast(int, answer["threads"]))
        into.resident = cast(float, answer["resident"])


def logits(actual: Prepared, area: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (name of an engine with its model, figures) for each compared engine. The figures compare its
    logits for one prompt with those of the float32 reference: "kl", the KL divergence in nats, "agree", the
    share of equal most likely tokens, and "error", the relative root mean square error. area: directory of
    the logits files; a reference that is there is reused. Raises CalledProcessError if the comparison fails,
    and EndedError if an engine's process ends."""
    vocabulary = actual.config["vocab_size"]
    variables = environment(OURS)
    expected = area / "reference.f32"
    script = str(HERE / "compare.py")
    if not expected.is_file():
        created = [sys.executable, script, str(actual.checkpoint), str(SCORED), str(expected)]
        subprocess.run(created, env=variables, check=True)
    for entry in actual.entries:
        child = Child.start(entry, os.cpu_count() or 1, FIRST, vocabulary)
        child.hear()
        path = area / "logits.f32"
        child.ask(do="logits", tokens=SCORED, path=str(path))
        child.close()
        compared = [sys.executable, script, "compare", str(expected), str(path), str(vocabulary)]
        done = subprocess.run(compared, env=variables, check=True, capture_output=True, text=True)
        yield entry.name, json.loads(done.stdout)
