"""The verb bench: measures a server under load, or the speed of a bundle."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcbuild.bench.exchange import Server
from mlcbuild.bench.figures import SLO_METRICS, LoadResult, rows
from mlcbuild.bench.generator import Style, measure
from mlcbuild.bench.workload import Lengths, Load, Workload
from mlcbuild.cli.listing import show, table
from mlcbuild.errors import UsageError

KEY_VARIABLE = "MLCBUILD_API_KEY"
PER_CLIENT, OPEN_REQUESTS = 8, 100
"""Default numbers of requests in a load test without a stated number or duration: PER_CLIENT of each client
in a closed loop, where a client sends a request after the answer to the one before, and OPEN_REQUESTS in all
in an open loop, where nobody waits for answers."""

_OF_LOADS = (
    "clients",
    "rate",
    "arrivals",
    "requests",
    "seconds",
    "chat",
    "model",
    "token_ids",
    "no_ignore_eos",
    "api_key",
    "slo",
    "plot",
    "warmup",
    "timeout",
    "seed",
)
"""Names of parsed options that only `bench serve`, the load test of a server, accepts: when a bundle is
measured, they are refused."""
_DEFAULTS: Mapping[str, float] = {"warmup": 2, "timeout": 300.0, "seed": 0}
"""Name of a parsed option of `bench serve` -> the value that it has if the user does not state one: requests
before each load, seconds for one request, and the seed of all random choices."""


def bench(arguments: argparse.Namespace) -> int:
    if arguments.what == "serve":
        return _serve(arguments)
    if arguments.url is not None:
        raise UsageError("mlcbuild bench: write mlcbuild bench serve URL, or mlcbuild bench BUNDLE")
    return _bundle(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.url is None:
        raise UsageError("mlcbuild bench serve: the server's URL is missing, such as http://127.0.0.1:8000")
    if arguments.threads is not None:
        raise UsageError(
            "mlcbuild bench serve: --threads applies to a bundle: set it where the server starts"
        )
    if arguments.chat and arguments.token_ids is not None:
        raise UsageError(
            "mlcbuild bench serve: messages of --chat are text, --token-ids are none: choose one of them"
        )
    vars(arguments).update({name: _DEFAULTS[name] for name in _DEFAULTS if getattr(arguments, name) is None})
    server = Server.of(arguments.url, arguments.api_key or os.environ.get(KEY_VARIABLE))
    slo, loads = _slo(arguments.slo), _loads(arguments)
    _writable(arguments.plot)
    style = Style(arguments.model, arguments.chat, arguments.token_ids, not arguments.no_ignore_eos)
    runs = [(load, _workload(arguments, load)) for load in loads]
    on_load = None if arguments.json else _starting
    outcomes = asyncio.run(measure(server, style, runs, arguments.timeout, arguments.warmup, on_load))
    documents = [outcome.to_json(slo) for outcome in outcomes]
    if arguments.plot is not None:
        from mlcbuild.bench.plot import plot

        Path(arguments.plot).write_text(plot(outcomes), encoding="utf-8")
    shown = {"url": arguments.url, "seed": arguments.seed, "slo": slo, "loads": documents}
    show(arguments.json, shown, table(rows(documents)))
    for outcome in outcomes:
        _print_errors(outcome)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _starting(load: Load) -> None:
    print(f"{load.name} ...", file=sys.stderr, flush=True)


def _workload(arguments: argparse.Namespace, load: Load) -> Workload:
    requests = arguments.requests
    if requests is None and arguments.seconds is None:
        requests = OPEN_REQUESTS if load.clients is None else PER_CLIENT * load.clients
    prompts, answers = Lengths.of(arguments.prompt_tokens), Lengths.of(arguments.tokens)
    return Workload(prompts, answers, requests, arguments.seconds, arguments.seed)


def _loads(arguments: argparse.Namespace) -> list[Load]:
    """Returns the loads that the options of `bench serve` name, one for each number of --clients or --rate;
    one client without these options. Raises UsageError if both are used, for --arrivals without --rate, and
    for texts that are no numbers in their range."""
    if arguments.rate is not None and arguments.clients is not None:
        raise UsageError(
            "mlcbuild bench serve: --clients is a closed loop, --rate an open one: choose one of them"
        )
    if arguments.rate is not None:
        even = arguments.arrivals == "constant"
        return [Load(rate=rate, even=even) for rate in _numbers("--rate", arguments.rate, 1e-3, 1e5)]
    if arguments.arrivals is not None:
        raise UsageError(
            "mlcbuild bench serve: --arrivals applies to --rate only: add --rate, or leave --arrivals out"
        )
    clients = _numbers("--clients", arguments.clients or "1", 1, 10_000)
    return [Load(clients=int(count)) for count in clients]


def _numbers(option: str, text: str, low: float, high: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    are_integers = low < 1 or all(number == int(number) for number in numbers if low <= number <= high)
    if not numbers or not are_integers or not all(low <= number <= high for number in numbers):
        kind = "numbers" if low < 1 else "whole numbers"
        raise UsageError(
            f"mlcbuild bench serve: {option} takes {kind} from {low:g} to {high:g}, such as 1,4,16"
        )
    return numbers


def _slo(listed: Sequence[str]) -> dict[str, float]:
    """Parses the --slo options, such as "ttft=0.5", into metric ("ttft", "tpot" or "e2e") -> limit in
    seconds; of several for a metric the last counts. Raises UsageError for any other text, an unknown metric,
    and a limit that is not above 0 and below 1e9."""
    limits = {}
    for text in listed:
        name, _, value = text.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if name not in SLO_METRICS or not 0 < seconds < 1e9:
            metrics = ", ".join(SLO_METRICS)
            raise UsageError(f"mlcbuild bench serve: --slo {text}: write NAME=SECONDS, with one of {metrics}")
        limits[name] = seconds
    return limits


def _writable(name: str | None) -> None:
    """Raises UsageError if an output file cannot be written, so that no work is done in vain. Otherwise the
    file exists afterwards, empty if it is new, else unchanged. name: its path; None: there is no output
    file."""
    if name is not None:
        try:
            with Path(name).open("a"):
                pass
        except OSError as error:
            raise UsageError(f"{name}: cannot be written: {error.strerror}") from None


def _print_errors(outcome: LoadResult) -> None:
    """Prints to stderr each kind of error that requests of a load test had, with the number of these requests
    and the server's first message."""
    for kind, count in outcome.errors().items():
        message = next((s.message for s in outcome.samples if s.error == kind and s.message), "")
        suffix = f": {message}" if message else ""
        print(f"{outcome.load}: {count} x {kind}{suffix}", file=sys.stderr)


def _bundle(arguments: argparse.Namespace) -> int:
    from mlcbuild.bench.speed import SpeedPlan, measure

    values = [(name, getattr(arguments, name)) for name in _OF_LOADS]
    if used := [name for name, value in values if value is not False and value not in (None, [])]:
        option = f"--{used[0].replace('_', '-')}"
        raise UsageError(f"mlcbuild bench: {option} applies to bench serve: leave it out to measure a bundle")
    lengths = [Lengths.of(text) for text in (arguments.prompt_tokens, arguments.tokens)]
    if any(length.kind != "constant" for length in lengths):
        raise UsageError(
            "mlcbuild bench: --prompt-tokens and --tokens must be single numbers when a bundle is measured"
        )
    prompt, answer = (int(length.a) for length in lengths)
    figures = measure(Path(arguments.what), SpeedPlan(prompt, answer, threads=arguments.threads))
    lines: list[tuple[str, ...]] = [("", "tok/s", "slowest", "fastest")]
    for name, figure in figures.items():
        if isinstance(figure, dict):
            each = (f"{figure[key]:.1f}" for key in ("tokens_per_second", "slowest", "fastest"))
            lines.append((name, *each))
    computes = figures.get("device") or f"{figures['threads']} threads"
    head = f"{arguments.what}: {computes}, loaded in {figures['load_seconds']} s"
    show(arguments.json, {"bundle": arguments.what, **figures}, [head, *table(lines)])
    return 0
