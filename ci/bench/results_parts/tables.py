"""Stores results of benchmarks as JSON files, and renders them as the tables of the project's README."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OURS, BEST_KNOWN = "mlcbuild", "llama.cpp"
TOOLS = {
    "ours": OURS,
    "llama": "llama.cpp",
    "ik": "ik_llama.cpp",
    "ctranslate2": "CTranslate2",
    "onnxruntime": "onnxruntime-genai",
    "openvino": "OpenVINO",
    "vllm": "vLLM",
}
"""First word of a compared engine's name in the measurements, such as "ik" -> the tool's name in the tables,
where it is another one.
"""
RATES = ("tokens/s",)
"""Units of figures of which a larger value is better. A figure in any other unit, such as seconds, is better
when it is smaller.
"""


@dataclass(frozen=True)
class Row:
    """One row of a table of results: a figure, such as decoding speed, with the values of every compared
    engine."""

    figure: str
    unit: str
    samples: Mapping[str, Sequence[float]]
    """Name of a compared engine -> the value of this figure in each round. The first word of the name is the
    tool, the rest the variant, such as the quantization.
    """
    limit: float | None = None
    """The best value of a measured figure that the machine's hardware allows, in the unit of the figure; None
    if it is not known.
    """


@dataclass(frozen=True)
class Results:
    """The measurements of one benchmark command on one machine, with all that the table of results shows:
    heading, command, processor, date, commit and rows.
    """

    title: str
    command: str
    machine: str
    date: str
    commit: str
    rows: tuple[Row, ...]


def here(title: str, command: str, machine: str, rows: Sequence[Row]) -> Results:
    """Returns the results `rows` with today's date and the short hash of the commit that is checked out.
    title: heading of the table; command: the command that reproduces it; machine: description of the
    processor. Raises CalledProcessError outside of a Git repository."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Results(title, command, machine, datetime.date.today().isoformat(), commit, tuple(rows))


def write(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")


def read(path: Path) -> Results:
    document = json.loads(path.read_text())
    return Results(**{**document, "rows": tuple(Row(**row) for row in document["rows"])})


def render(results: Results) -> str:
    """Returns Markdown: a line with the title, machine, date, commit and command, and a table with a row for
    each figure and a column for each tool, which shows the median of the tool's best variant. The column
    "ratio" shows how many times better mlcbuild's value is than that of the best other tool (below 1: worse),
    and a last one mlcbuild's share of the hardware's limit, if one is known. A cell without a value is empty.
    Where several other tools are compared, a line above the table states, for each figure in tokens/s, how
    many times as fast as llama.cpp mlcbuild is."""
    tools = list(dict.fromkeys(_tool(name) for row in results.rows for name in row.samples))
    tools.sort(key=lambda tool: tool != OURS)
    limited = any(row.limit for row in results.rows)
    head = ["", *tools, "ratio", *(["of the limit"] if limited else [])]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    alone = []
    for row in results.rows:
        best = {tool: value for tool in tools if (value := _best(row, tool)) is not None}
        if row.unit in RATES and len(tools) > 2 and {OURS, BEST_KNOWN} <= best.keys():
            alone.append(f"{row.figure} {best[OURS] / best[BEST_KNOWN]:.1f}")
        cells = [_number(best[tool]) if tool in best else "" for tool in tools]
        lines.append(f"| {' | '.join([f'{row.figure}, {row.unit}', *cells, *_judged(row, best, limited)])} |")
    about = (
        f"{results.title}. {results.machine}, {results.date}, commit {results.commit}: `{results.command}`"
    )
    if alone:
        about += f"\n\nTimes as fast as {BEST_KNOWN}: {'; '.join(alone)}."
    return "\n".join([about, "", *lines])


def _tool(name: str) -> str:
    first = name.split(maxsplit=1)[0]
    return TOOLS.get(first, first)


def _best(row: Row, tool: str) -> float | None:
    medians = [statistics.median(values) for name, values in row.samples.items() if _tool(name) == tool]
    return (max if row.unit in RATES else min)(medians, default=None)


def _judged(row: Row, best: Mapping[str, float], limited: bool) -> list[str]:
    ours, others = best.get(OURS), [value for tool, value in best.items() if tool != OURS]
    ratio = part = ""
    if ours and others:
        more = row.unit in RATES
        ratio = f"{ours / max(others) if more else min(others) / ours:.2f}"
    if ours and row.limit:
        part = f"{ours / row.limit:.0%}"
    return [ratio, part] if limited else [ratio]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def loss_rows(measured: Sequence[tuple[str, float, float]], sizes: Sequence[float] = (5, 6, 9)) -> list[Row]:
    """Returns table rows with the losses of models up to a size: a row for each size in `sizes`, with every
    model that has at most so many bits per weight. A size that no model meets has no row.

    measured: (name of tool and variant, bits per weight, KL divergence in nats) of each model; sizes: in bits
    per weight."""
    rows = []
    for size in sizes:
        fitting = {name: [loss] for name, bits, loss in measured if bits <= size}
        if fitting:
            rows.append(Row(f"KL at up to {size:g} bits a weight", "nats", fitting))
    return rows


def load_rows(samples: Mapping[tuple[str, str, str], Sequence[float]]) -> list[Row]:
    """Returns the rows of a table of load test results: for each load, output tokens per second and the
    median time to the first token, with the values of each server. samples: (load, server, name of the
    figure) -> its value in each round; the names are "output tok/s" and "ttft p50, s", and other figures are
    ignored."""
    units = {"output tok/s": ("output", "tokens/s"), "ttft p50, s": ("first token, median", "s")}
    rows: dict[tuple[str, str], Row] = {}
    for (load, server, figure), values in samples.items():
        if figure in units:
            words, unit = units[figure]
            row = rows.setdefault((load, figure), Row(f"{load}: {words}", unit, {}))
            rows[load, figure] = Row(row.figure, unit, {**row.samples, server: values})
    return list(rows.values())
