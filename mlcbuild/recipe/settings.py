"""The `compile` and `verify` sections, with what include entries replace in them, and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from mlcbuild_format import regular

from mlcbuild.documents.document import Place, Where
from mlcbuild.recipe.reading import Reading

LARGEST_PROMPTS = 1 << 20
"""Bytes of a file of prompts: the reference computes each of its lines in float64, which takes seconds."""

_PREFILL_CHUNK = 512
_MAX_BATCH = 8
_BENCH_PROMPT, _BENCH_ANSWER = 128, 64

_FIGURES = ("max_kl", "min_top1", "max_perplexity_increase")


@dataclass(frozen=True)
class RequestedLimits:
    """The `compile` section: the limits of libraries, before a model completes them."""

    context_window: int | None = None
    """Tokens of one sequence, prompt and answer together; None: what the model was made for, at most
    models.LARGEST_DEFAULT."""
    prefill_chunk: int = _PREFILL_CHUNK
    """Prompt tokens of one call, at most context_window."""
    max_batch: int = _MAX_BATCH
    """Sequences processed together."""


@dataclass(frozen=True)
class Verify:
    """How far a bundle may be from the float32 model; None: any distance."""

    prompts: Path | tuple[str, ...]
    """A text file, absolute, with one prompt on each line; or the prompts."""
    max_kl: float | None = None
    """Mean Kullback-Leibler divergence per token, in nats."""
    min_top1: float | None = None
    """Share of tokens, 0 to 1, with the same most likely successor."""
    max_perplexity_increase: float | None = None
    """Relative: 0.02 allows 2 %."""
    place: Place | None = None
    """Where the recipe asks for it."""


@dataclass(frozen=True)
class Bench:
    """What the speed of every bundle is measured with."""

    prompt_tokens: int
    generate_tokens: int
    place: Place


@dataclass(frozen=True)
class Settings:
    limits: RequestedLimits
    verify: Verify | None


_Value: TypeAlias = int | float | Path | tuple[str, ...]
_Given: TypeAlias = Mapping[str, tuple[_Value, Where]]
"""Settings as written: the value of each key and where it stands."""


@dataclass(frozen=True)
class _Layer:
    """The settings of the recipe, or those of one include entry."""

    where: Where
    compile: _Given
    verify: _Given | None
    """None: it has no such section."""


def read_settings(reading: Reading, uses: set[tuple[int, ...]]) -> dict[tuple[int, ...], Settings]:
    """The settings for each way in which combinations use include entries; wrong ones are reported.

    `uses` holds indices of include entries, in order; () is the recipe's own settings.
    """
    look = cache(_prompts_fault)  # many entries may name one file
    base = _read_layer(reading, (), look)
    count = len(reading.items("matrix", "include"))
    entries = [_read_layer(reading, ("matrix", "include", index), look) for index in range(count)]
    found: dict[tuple[int, ...], Settings] = {}
    for use in sorted(uses):
        layers = [base, *(entries[index] for index in use)]
        limits, verify = _limits(reading, layers), _verify(reading, layers)
        found[use] = Settings(limits, verify)
    return found


def read_bench(reading: Reading) -> Bench | None:
    """The `bench` section; None without one."""
    if not isinstance(reading.get("bench"), dict):
        return None
    given = {key: reading.get("bench", key) for key in ("prompt_tokens", "generate_tokens")}
    prompt, answer = (value if isinstance(value, int) else None for value in given.values())
    return Bench(prompt or _BENCH_PROMPT, answer or _BENCH_ANSWER, reading.document.place(("bench",)))


def _read_layer(reading: Reading, where: Where, look: Callable[[Path], str]) -> _Layer:
    limits = {
        key: (value, (*where, "compile", key))
        for key in reading.mapping(*where, "compile")
        if isinstance(value := reading.get(*where, "compile", key), int)
    }
    section: Where = (*where, "verify")
    if not isinstance(reading.get(*section), dict):
        return _Layer(where, limits, None)
    verify: dict[str, tuple[_Value, Where]] = {
        key: (value, (*section, key))
        for key in _FIGURES
        if isinstance(value := reading.get(*section, key), int | float)
    }
    prompts = _prompts(reading, (*section, "prompts"), look)
    if prompts is not None:
        verify["prompts"] = prompts, (*section, "prompts")
    return _Layer(where, limits, verify)


def _prompts(reading: Reading, where: Where, look: Callable[[Path], str]) -> Path | tuple[str, ...] | None:
    """The prompts of a section. An empty tuple stands for ones that are reported as wrong."""
    if where in reading.bad:
        return ()
    listed = tuple(item for item in reading.items(*where) if isinstance(item, str))
    if listed and not "".join(listed).strip():
        reading.report(where, "the prompts hold spaces only; write at least one line of text")
        return ()
    text = reading.text(*where)
    if text is None:
        return listed or None
    path = reading.path(where, text)
    if path is None:
        return ()
    if fault := look(path):
        reading.report(where, f"the prompts '{text}' must be a text file: {fault}")
        return ()
    return path


def _prompts_fault(path: Path) -> str:
    """What is wrong with a file of prompts, to end a sentence with; "" if nothing."""
    try:
        data = regular.read(path, LARGEST_PROMPTS)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {error.strerror}" if error.filename else str(error.strerror)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        return f"line {line} is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8"
    return "" if text.strip() else "it holds no prompt; write one on each line"


def _limits(reading: Reading, layers: list[_Layer]) -> RequestedLimits:
    given: dict[str, tuple[_Value, Where]] = {}
    for layer in layers:
        given |= layer.compile
    numbers = {key: value for key, (value, _) in given.items() if isinstance(value, int)}
    context = numbers.get("context_window")
    chunk = numbers.get("prefill_chunk", _PREFILL_CHUNK if context is None else min(_PREFILL_CHUNK, context))
    pair = ("context_window", "prefill_chunk")
    unsure = any((*layer.where, "compile", key) in reading.bad for layer in layers for key in pair)
    if context is not None and chunk > context and not unsure:
        # The one that came last is the one that broke it.
        order = [layer.where for layer in layers]
        spots = [given[key][1] for key in pair if key in given]
        where = max(spots, key=lambda spot: (order.index(spot[:-2]), spot))
        reading.report(
            where, f"prefill_chunk is {chunk} and must be at most context_window, which is {context}"
        )
    return RequestedLimits(context, chunk, numbers.get("max_batch", _MAX_BATCH))


def _verify(reading: Reading, layers: list[_Layer]) -> Verify | None:
    sections = [layer for layer in layers if layer.verify is not None]
    if not sections:
        return None
    given: dict[str, tuple[_Value, Where]] = {}
    for layer in sections:
        given |= layer.verify or {}
    where: Where = (*sections[-1].where, "verify")
    if "prompts" not in given:
        reading.report(
            where, "'verify' lacks the key 'prompts': a text file, or a list of prompts", on_key=True
        )
    prompts = given["prompts"][0] if "prompts" in given else ()
    figures = {
        key: float(value) for key in _FIGURES if isinstance(value := given.get(key, (None,))[0], int | float)
    }
    return Verify(
        prompts if isinstance(prompts, Path | tuple) else (),
        figures.get("max_kl"),
        figures.get("min_top1"),
        figures.get("max_perplexity_increase"),
        reading.document.place(where),
    )
