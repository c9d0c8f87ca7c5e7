"""Reads the `compile`, `verify` and `bench` sections of a recipe, with the values that `include` entries of
its matrix state in their place for some combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from mlcbuild_format import regular

from mlcbuild.documents.document import Place, Where
from mlcbuild.errors import closest_name
from mlcbuild.recipe.reading import Reading

LARGEST_PROMPTS = 1 << 20
"""Maximum size in bytes of a text file of prompts. The reference computation of each line takes seconds."""

_PREFILL_CHUNK = 512
_MAX_BATCH = 8
_AUTO = "auto"
_BENCH_PROMPT, _BENCH_ANSWER = 128, 64

_FIGURES = ("max_kl", "min_top1", "max_perplexity_increase")


@dataclass(frozen=True)
class RequestedLimits:
    """The limits of a compiled library that a recipe states: tokens of a sequence, prompt tokens of one call,
    and sequences of one call. A missing context window is not yet replaced by the model's own."""

    context_window: int | None = None
    """Number of tokens of one sequence, prompt and answer together. None: the maximum of the model, but not
    more than 4096 tokens (models.LARGEST_DEFAULT)."""
    prefill_chunk: int = _PREFILL_CHUNK
    """Maximum number of prompt tokens that one call of the library processes, at most context_window."""
    max_batch: int = _MAX_BATCH
    """Maximum number of sequences that one call of the library processes."""


@dataclass(frozen=True)
class Verify:
    """Limits on a bundle's deviation from the original model in float32; None means no limit."""

    prompts: Path | tuple[str, ...]
    """The prompts on which the bundle is compared with the original model: absolute path of a text file with
    one on each line, or the prompts themselves; () if the recipe's are missing or invalid, which is one of
    its problems."""
    max_kl: float | None = None
    """Maximum mean Kullback-Leibler divergence KL(original model || bundle) of the next-token distributions,
    in nats."""
    min_top1: float | None = None
    """Minimum share of tokens, 0 to 1, for which bundle and original model agree on the most likely next
    token.
    """
    max_perplexity_increase: float | None = None
    """Maximum relative increase of the perplexity over that of the original model: 0.02 allows 2 %."""
    place: Place | None = None
    """File, line and column of the `verify` section in the recipe (of several that apply, the last), for
    messages."""


@dataclass(frozen=True)
class Bench:
    """The workload with which the speed of every bundle is measured: numbers of prompt and answer tokens."""

    prompt_tokens: int
    generate_tokens: int
    place: Place


@dataclass(frozen=True)
class Settings:
    """The settings for one combination of model, quantization and target: limits of the compiled library,
    limits on the loss of accuracy, and the form of the KV cache."""

    limits: RequestedLimits
    verify: Verify | None
    kv_cache: str = _AUTO
    """How the KV cache stores keys and values: "auto" for the floating point type of the quantization scheme,
    "int8" for 8-bit integers with scales."""


_Value: TypeAlias = int | float | str | Path | tuple[str, ...]
_Written: TypeAlias = Mapping[str, tuple[_Value, Where]]
"""The settings that one section of the recipe states, such as `compile`: key -> (value, its path in the
recipe)."""


@dataclass(frozen=True)
class _Layer:
    """The settings under `compile` and `verify` that one place in a recipe states: either its top level, or
    one `include` entry of the matrix."""

    where: Where
    compile: _Written
    verify: _Written | None
    """The settings in the `verify` section of the recipe or of an `include` entry; None if it has no such
    section."""


def read_settings(reading: Reading, uses: set[tuple[int, ...]]) -> dict[tuple[int, ...], Settings]:
    """Returns the settings of a recipe for combinations to which certain `include` entries of its matrix
    apply: indices of the entries, in order -> settings. A value of an entry replaces those of the entries
    before it and of the top-level sections. uses: the tuples of indices to compute; () means that no entry
    applies. For invalid settings, problems are added to the recipe's list; those that the JSON schema rejects
    count as absent."""
    look = cache(prompts_fault)  # Many entries may name the same file.
    base = _read_layer(reading, (), look)
    count = len(reading.items("matrix", "include"))
    entries = [_read_layer(reading, ("matrix", "include", index), look) for index in range(count)]
    settings: dict[tuple[int, ...], Settings] = {}
    for use in sorted(uses):
        layers = [base, *(entries[index] for index in use)]
        limits, verify = _limits(reading, layers), _verify(reading, layers)
        caches = [layer.compile["kv_cache"][0] for layer in layers if "kv_cache" in layer.compile]
        settings[use] = Settings(limits, verify, str([_AUTO, *caches][-1]))
    return settings


def read_bench(reading: Reading) -> Bench | None:
    """Returns the numbers of prompt and answer tokens in a recipe's `bench` section, with which speed is
    measured, 128 and 64 where it states none or an invalid one; None if there is no such section."""
    if not isinstance(reading.get("bench"), dict):
        return None
    values = {key: reading.get("bench", key) for key in ("prompt_tokens", "generate_tokens")}
    prompt, answer = (value if isinstance(value, int) else None for value in values.values())
    return Bench(prompt or _BENCH_PROMPT, answer or _BENCH_ANSWER, reading.document.place(("bench",)))


def _read_layer(reading: Reading, where: Where, look: Callable[[Path], str]) -> _Layer:
    limits = {
        key: (value, (*where, "compile", key))
        for key in reading.mapping(*where, "compile")
        if isinstance(value := reading.get(*where, "compile", key), int | str)
    }
    section: Where = (*where, "verify")
    if not isinstance(reading.get(*section), dict):
        return _Layer(where, limits, None)
    verify: dict[str, tuple[_Value, Where]] = {
        key: (value, (*section, key))
        for key in _FIGURES
        if isinstance(value := reading.get(*section, key), int | float)
    }
    prompts = read_prompts(reading, (*section, "prompts"), look)
    if prompts is not None:
        verify["prompts"] = prompts, (*section, "prompts")
    return _Layer(where, limits, verify)


def read_prompts(
    reading: Reading, where: Where, look: Callable[[Path], str]
) -> Path | tuple[str, ...] | None:
    """Returns the prompts at the path `where` of a recipe: the absolute path of their text file, or the
    texts; None if there are none. Invalid ones give (), with a problem added to the recipe's list. look:
    function from the path of such a file to the reason why it is invalid, or ""."""
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


def prompts_fault(path: Path) -> str:
    """Returns the reason why a text file of prompts is invalid, such as "it does not exist"; "" for a regular
    file of at most 1 MiB of UTF-8 with some text."""
    try:
        data = regular.read(path, LARGEST_PROMPTS)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {error.strerror}" if error.filename else str(error.strerror)
    try:
        text = data.decode("utf-8-sig")  # decoded as reference_logits does
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        return f"line {line} is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8"
    return "" if text.strip() else "it holds no prompt; write one on each line"


def _limits(reading: Reading, layers: list[_Layer]) -> RequestedLimits:
    written: dict[str, tuple[_Value, Where]] = {}
    for layer in layers:
        written |= layer.compile
    numbers = {key: value for key, (value, _) in written.items() if isinstance(value, int)}
    context = numbers.get("context_window")
    chunk = numbers.get("prefill_chunk", _PREFILL_CHUNK if context is None else min(_PREFILL_CHUNK, context))
    pair = ("context_window", "prefill_chunk")
    unsure = any((*layer.where, "compile", key) in reading.bad for layer in layers for key in pair)
    if context is not None and chunk > context and not unsure:
        # The setting that was stated last caused the conflict.
        order = [layer.where for layer in layers]
        spots = [written[key][1] for key in pair if key in written]
        where = max(spots, key=lambda spot: (order.index(spot[:-2]), spot))
        reading.report(
            where, f"prefill_chunk is {chunk} and must be at most context_window, which is {context}"
        )
    return RequestedLimits(context, chunk, numbers.get("max_batch", _MAX_BATCH))


def _verify(reading: Reading, layers: list[_Layer]) -> Verify | None:
    sections = [layer for layer in layers if layer.verify is not None]
    if not sections:
        return None
    written: dict[str, tuple[_Value, Where]] = {}
    for layer in sections:
        written |= layer.verify or {}
    where: Where = (*sections[-1].where, "verify")
    places = [(*layer.where, "verify") for layer in sections]
    unknown = [str(bad[-1]) for bad in reading.bad if bad[:-1] in places and bad[-1] not in written]
    if "prompts" not in written and not any(closest_name(key, ["prompts"]) for key in unknown):
        reading.report(
            where, "'verify' lacks the key 'prompts': a text file, or a list of prompts", on_key=True
        )
    prompts = written["prompts"][0] if "prompts" in written else ()
    figures = {
        key: float(value)
        for key in _FIGURES
        if isinstance(value := written.get(key, (None,))[0], int | float)
    }
    return Verify(
        prompts if isinstance(prompts, Path | tuple) else (),
        figures.get("max_kl"),
        figures.get("min_top1"),
        figures.get("max_perplexity_increase"),
        reading.document.place(where),
    )
