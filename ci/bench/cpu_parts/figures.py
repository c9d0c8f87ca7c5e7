"""Prints the measurements of the compared CPU engines as Markdown tables, and returns them as rows of the
tables in the README.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from child import CONTEXT
from engines import Entry, Prepared
from rounds import FIGURES, Measured
from tables import Row


def show(shape: str, threads: int, measured: Measured) -> None:
    actual = measured.prepared
    best = _machine_limits(measured)
    print(f"\n## {shape}, {threads} thread{'s' if threads > 1 else ''}\n")
    print(
        f"the machine: reads {best['read']:.1f} GB/s, float32 {best['float32']:.0f} GFlop/s,"
        f" int8 {best['int8']:.0f} Gop/s (the best of {len(measured.limits)})"
    )
    for entry in actual.entries:
        active = measured.samples[entry.name].threads
        if active and active != {threads}:
            print(f"note: {entry.name} worked with {sorted(active)} threads at different times")
    samples = [(entry, measured.samples[entry.name]) for entry in actual.entries]
    wall = {entry.name: sample.wall for entry, sample in samples}
    cpu = {entry.name: sample.cpu for entry, sample in samples}
    _rates("tokens per second", actual, wall, best)
    _rates(
        "tokens per CPU second, all threads: what other work on the machine does not change", actual, cpu, {}
    )
    print("\n| | first token, s | its CPU s | resident MB | weights MB |\n|---|---|---|---|---|")
    for entry, sample in samples:
        first, spent = (_spread(each["first token"], 2) for each in (sample.wall, sample.cpu))
        print(f"| {entry.name} | {first} | {spent} | {sample.resident:.0f} | {entry.size / 1e6:.1f} |")


def rows(measured: Measured) -> list[Row]:
    """Returns the measurements of the compared engines as rows of a result table: tokens per second of
    prefill and decoding, with the limit of the hardware, seconds to the first token, and MB of memory and
    weights.
    """
    actual, best = measured.prepared, _machine_limits(measured)
    samples = {entry.name: measured.samples[entry.name] for entry in actual.entries}
    speeds = []
    for figure in FIGURES:
        rates = {name: sample.wall[figure] for name, sample in samples.items()}
        medians = {entry: statistics.median(rates[entry.name]) for entry in actual.entries if entry.ours}
        limit = (
            _limit(figure, max(medians, key=medians.__getitem__), actual.config, best) if medians else None
        )
        kind, _, number = figure.partition(" ")
        words = f"{kind} of {number} tokens" if kind == "prefill" else f"{kind}, batch of {number}"
        speeds.append(Row(words, "tokens/s", rates, limit))
    first = {name: sample.wall["first token"] for name, sample in samples.items()}
    resident = {name: [sample.resident] for name, sample in samples.items()}
    size = {entry.name: [entry.size / 1e6] for entry in actual.entries}
    units = [("first token after start", "s", first), ("memory", "MB", resident), ("weights", "MB", size)]
    return [*speeds, *(Row(figure, unit, values) for figure, unit, values in units)]


def _machine_limits(measured: Measured) -> dict[str, float]:
    """Returns the speed limits of this machine, each the best value of all rounds: "read" -> GB/s of memory,
    "float32" -> 10^9 operations per second, "int8" -> 10^9 operations per second.
    """
    return {key: max(limit[key] for limit in measured.limits) for key in ("read", "float32", "int8")}


def _rates(
    title: str,
    actual: Prepared,
    rates: Mapping[str, Mapping[str, Sequence[float]]],
    best: Mapping[str, float],
) -> None:
    floors = " | of the limit" if best else ""
    print(f"\n{title}\n\n| | {' | '.join(entry.name for entry in actual.entries)} | ratio{floors} |")
    print("|---" * (len(actual.entries) + 2 + bool(best)) + "|")
    for figure in FIGURES:
        cells = [_spread(rates[entry.name][figure], 1) for entry in actual.entries]
        medians = {entry: statistics.median(rates[entry.name][figure]) for entry in actual.entries}
        ours = max((entry for entry in actual.entries if entry.ours), key=medians.__getitem__)
        others = [medians[entry] for entry in actual.entries if not entry.ours]
        cells.append(f"{medians[ours] / max(others):.2f}" if others else "")
        if best:
            cells.append(f"{medians[ours] / _limit(figure, ours, actual.config, best):.0%}")
        print(f"| {figure} | {' | '.join(cells)} |")


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f} .. {high:.{digits}f}]"


def _limit(figure: str, entry: Entry, config: Mapping[str, int], best: Mapping[str, float]) -> float:
    """Returns an upper bound of the tokens per second of an engine, all sequences together, from the measured
    limits of this machine. For prefill, it counts the time of the matrix products at the int8 rate and of
    attention at the float32 rate; for decoding, the time to read all weights once for the batch, and the KV
    cache.

    figure: "prefill N" or "decode N", with N tokens or sequences; entry: the engine, with the size of its
    weights; config: sizes of the model; best: name of a limit -> GB/s or 10^9 operations per second. Of a
    mixture's experts, those count that N rows choose on average if every row chooses at random.
    """
    kind, _, number = figure.partition(" ")
    count = int(number)
    hidden, layers, heads = (
        config[f"{k}"] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    head = config.get("head_dim", hidden // heads)
    queries, kv = head * heads, head * config["num_key_value_heads"]
    experts, chosen = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)

    def inside(active: float) -> float:
        """Returns the number of weights in all layers, with `active` experts in each."""
        return layers * (2 * hidden * queries + 2 * hidden * kv + active * 3 * hidden * inner)

    if kind == "prefill":
        attention = layers * 2 * 2 * queries * count * count / 2
        seconds = 2 * inside(chosen) * count / best["int8"] + attention / best["float32"]
        return count * 1e9 / seconds
    table = config["vocab_size"] * hidden
    stored = inside(experts) + table * (1 if config["tie_word_embeddings"] else 2)
    needed = experts * (1 - (1 - chosen / experts) ** count)
    weights = entry.size * (inside(needed) + table) / stored
    cache = count * CONTEXT * layers * 2 * kv * 2
    return count * best["read"] * 1e9 / (weights + cache)


def accuracy(shape: str, actual: Prepared, figures: Iterable[tuple[str, Mapping[str, float]]]) -> None:
    size = {entry.name: entry.size for entry in actual.entries}
    print(f"\n{shape}: logits against the float32 reference of the same random weights\n")
    print("| | weights MB | KL, nats | relative error | same first choice |\n|---|---|---|---|---|")
    for name, found_figures in figures:
        kl, error, agree = (found_figures[key] for key in ("kl", "error", "agree"))
        print(f"| {name} | {size[name] / 1e6:.1f} | {kl:.4f} | {error:.4f} | {agree:.1%} |")
