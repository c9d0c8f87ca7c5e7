"""Writes an HTML page about a run: results, times, sizes, accuracy, and changes since the last run.

The page is self-contained: it loads no script, no font and no other file. It is generated from logs of runs
alone, so it shows what happened even if the recipe has changed since.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.durations import duration
from mlcbuild.reports import budget_picture, chart, graph_picture, graph_view, runlog
from mlcbuild.reports.chart import Bar, Point
from mlcbuild.reports.runlog import LoggedStep, LoggedVariant, RunLog

MOST_DRAWN = 300
"""Maximum number of steps and sources in the drawing of a recipe's graph in the HTML report of a run. The
report has no drawing of a larger graph."""
MOST_ROWS = 500
"""Maximum number of rows of a table in the report of a run, and of failed steps that it lists. The report
states how many are left out."""
MOST_PLOTS = 30
MOST_BARS = 1500
"""Maximum number of steps in the timeline of a run; of more steps, the longest are shown."""

_STYLE = """
:root{color-scheme:light}
body{font:14px/1.45 ui-sans-serif,system-ui,sans-serif;margin:0;color:#1c2330;background:#f5f6f8}
main{max-width:1120px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:16px;margin:0 0 12px}h3{font-size:14px;margin:0 0 6px}
.meta{color:#5d6877;margin-bottom:20px}
section{background:#fff;border:1px solid #e2e6ec;border-radius:10px;padding:18px 20px;margin-top:18px}
.tiles{display:flex;gap:12px;flex-wrap:wrap}
.tile{background:#fff;border:1px solid #e2e6ec;border-radius:10px;padding:12px 18px;min-width:92px}
.tile b{display:block;font-size:22px;font-weight:600}.tile span{color:#5d6877;font-size:12px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid #eceff3;vertical-align:top}
th{color:#5d6877;font-weight:500;font-size:12px}td.n,th.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}
td.why{color:#5d6877;overflow-wrap:anywhere}
.built{color:#2c7a3d}.reused{color:#5d6877}.failed{color:#c8453b;font-weight:600}.skipped{color:#96700f}
.up{color:#c8453b}.down{color:#2c7a3d}
.plots{display:flex;flex-wrap:wrap;gap:24px}.plots>*{max-width:100%}.plots svg{max-width:100%;height:auto}
pre{background:#f5f6f8;border-radius:6px;padding:10px;white-space:pre-wrap;
overflow-wrap:anywhere;margin:6px 0}
.key{display:inline-block;margin:0 14px 10px 0;color:#5d6877}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;vertical-align:-1px}
"""


def html(log: RunLog, before: RunLog | None) -> str:
    """Returns an HTML page about the run whose log is `log`. before: log of the run with which it is
    compared; None: the page shows no changes."""
    title = f"mlcbuild: {log.recipe}"
    parts = [
        f"<h1>{escape(title)}</h1>\n<div class=meta>{escape(_meta(log))}</div>",
        _tiles(log),
        _failures(log),
        _variants(log, before),
        _plots(log),
        _budgets(log),
        _changes(log, before),
        _times(log),
        _drawing(log),
        _steps(log),
    ]
    style = _STYLE + graph_view.STYLE
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{style}</style></head>\n'
        "<body><main>\n" + "\n".join(part for part in parts if part) + "\n</main></body></html>\n"
    )


def _meta(log: RunLog) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(log.time))
    shard = f" · shard {log.shard}" if log.shard else ""
    end = f" · interrupted by {log.interrupted}" if log.interrupted else ""
    return f"{log.path} · {when} · {log.machine}{shard}{end}"


def _tiles(log: RunLog) -> str:
    tiles = [(duration(log.seconds), "in all")]
    tiles += [(str(log.count(status)), status) for status in ("built", "reused")]
    tiles += [(str(n), status) for status in ("failed", "skipped") if (n := log.count(status))]
    finished_steps = log.count("built") + log.count("reused")
    if finished_steps:
        tiles.append((f"{log.count('reused') / finished_steps:.0%}", "cache hits"))
    written_bytes = sum(step.bytes or 0 for step in log.steps if step.status == "built")
    tiles.append((sizes.show(written_bytes), "written"))
    shown = "".join(f"<div class=tile><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f"<div class=tiles>{shown}</div>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table. head: titles of the columns as plain text; one that ends in "#", which is not
    shown, aligns numbers to the right. rows: cells as HTML. Raises ValueError if a row has more or fewer
    cells than `head`."""
    kinds = [" class=n" if name.endswith("#") else "" for name in head]
    top = "".join(f"<th{kind}>{escape(n.rstrip('#'))}</th>" for n, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{c}</td>" for c, kind in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f"<div class=scroll><table><tr>{top}</tr>\n{body}</table></div>"


def _status(status: str) -> str:
    return f"<span class={escape(status)}>{escape(status)}</span>"


def _failures(log: RunLog) -> str:
    failed = [step for step in log.steps if step.status == "failed"]
    body = "".join(
        f"<h3>{escape(step.name)}</h3><pre>{escape(step.words)}</pre>"
        + (f"<details><summary>the end of its log</summary><pre>{escape(step.tail)}</pre></details>")
        for step in failed[:MOST_ROWS]
    )
    return _section("What failed", body + _more(len(failed))) if failed else ""


def _variants(log: RunLog, before: RunLog | None) -> str:
    if not log.variants:
        return ""
    old = {item.name: item for item in before.variants} if before is not None else {}
    head = ("variant", "", "bundle#", "weights#", "KL mean#", "KL max#", "top-1#", "perplexity#", "exact#")
    speeds = runlog.speeds(log)
    variants = list(log.variants)
    if len(variants) > MOST_ROWS:  # changes come first
        order = ("failed", "skipped", "built", "reused")
        variants.sort(key=lambda item: order.index(item.status))
    rows = [
        [*_row(item, old.get(item.name)), *(_figure(item, name, ".0f") for name in speeds)]
        for item in variants[:MOST_ROWS]
    ]
    table = _table((*head, *(f"{words} tok/s#" for words in speeds.values())), rows)
    return _section("Variants", table + _more(len(variants)))


def _row(item: LoggedVariant, old: LoggedVariant | None) -> list[str]:
    figures = item.figures
    top = f"{figures['top1_agreement']:.1%}" if "top1_agreement" in figures else ""
    note = f"<br><span class=reused>{escape(item.words)}</span>" if item.words else ""
    return [
        escape(item.name) + note,
        _status(item.status),
        _bytes(item.bytes) + _moved(item.bytes, old.bytes if old else None),
        _bytes(item.weights),
        _figure(item, "kl_mean")
        + _moved(figures.get("kl_mean"), old.figures.get("kl_mean") if old else None),
        _figure(item, "kl_max"),
        top,
        _figure(item, "perplexity", ".5g"),
        _figure(item, "reference_perplexity", ".5g"),
    ]


def _bytes(count: int | None) -> str:
    return sizes.show(count) if count is not None else ""


def _figure(item: LoggedVariant, name: str, form: str = ".3g") -> str:
    return format(item.figures[name], form) if name in item.figures else ""


def _moved(now: float | None, before: float | None) -> str:
    """Returns HTML with the relative change of a number, such as "+3.0%", or the ratio from elevenfold on,
    such as "x 12", coloured as worse for an increase and as better for a decrease; "" if the change is below
    0.05 %, or if a number is missing or `before` is 0.
    """
    if now is None or not before or abs(now / before - 1) < 0.0005:
        return ""
    change = now / before - 1
    words = f"{change:+.1%}" if abs(change) < 10 else f"x {now / before:.3g}"
    return f"<br><span class={'up' if change > 0 else 'down'}>{words}</span>"


def _plots(log: RunLog) -> str:
    """Returns HTML with a scatter plot for each model of a run whose variants were compared with it: mean KL
    divergence (nats) over the size of the weights in bytes, for at most MOST_PLOTS models; "" if there is
    none.
    """
    models: dict[str, list[LoggedVariant]] = {}
    for item in log.variants:
        models.setdefault(item.model, []).append(item)
    plots = [(model, points) for model, variants in models.items() if (points := _points(variants))]
    if not plots:
        return ""
    drawn = "".join(
        f"<div><h3>{escape(model)}</h3>{chart.scatter(points)}</div>" for model, points in plots[:MOST_PLOTS]
    )
    return _section("Loss against size", f"<div class=plots>{drawn}</div>{_more(len(plots), MOST_PLOTS)}")


def _budgets(log: RunLog) -> str:
    """Returns HTML that shows, for each model and quantization of a run with a budget (a limit of size, bits
    or loss), which scheme was chosen for each matrix of the model; at most MOST_PLOTS of them, "" without
    budgets.
    """
    drawn: dict[str, str] = {}
    for item in log.variants:
        if item.budget:
            title = f"{item.model}, {item.quantization}"
            drawn.setdefault(title, f"<h3>{escape(title)}</h3>{budget_picture.picture(item.budget)}")
    if not drawn:
        return ""
    return _section("Budgets", "\n".join([*drawn.values()][:MOST_PLOTS]) + _more(len(drawn), MOST_PLOTS))


def _points(variants: Sequence[LoggedVariant]) -> list[Point]:
    points: dict[tuple[str, int, float], Point] = {}
    several = len({item.target for item in variants}) > 1
    for item in variants:
        if item.weights and "kl_mean" in item.figures:
            label = f"{item.quantization} on {item.target}" if several else item.quantization
            loss = item.figures["kl_mean"]
            points[item.name, item.weights, loss] = Point(label, item.weights, loss, item.quantization)
    return list(points.values())


def _changes(log: RunLog, before: RunLog | None) -> str:
    """Returns HTML with the differences from the previous run: both durations, and a row for each step that
    is new, is gone or has another key, at most MOST_ROWS. Except for steps that are gone, a row has the
    reason why the step ran or, if it was not built, its status. Returns "" if there is no previous run."""
    if before is None:
        return ""
    old, new = {step.name: step for step in before.steps}, {step.name: step for step in log.steps}
    rows = [
        (escape(name), "another result is wanted" if new[name].key and old[name].key else "", _why(new[name]))
        for name in new
        if name in old and new[name].key != old[name].key
    ]
    rows += [(escape(name), "is new", _why(new[name])) for name in new if name not in old]
    rows += [(escape(name), "is gone", "") for name in old if name not in new]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(before.time))
    title = f"Since the run of {when}"
    took = f"<p>That run took {duration(before.seconds)}, this one {duration(log.seconds)}.</p>"
    if not rows:
        return _section(title, f"{took}<p>No step has changed.</p>")
    return _section(title, took + _table(("step", "", "why"), rows[:MOST_ROWS]) + _more(len(rows)))


def _why(step: LoggedStep) -> str:
    return (
        f"<span class=reused>{escape(step.words)}</span>" if step.status == "built" else _status(step.status)
    )


def _more(count: int, shown: int = MOST_ROWS) -> str:
    return f"<p>and {count - shown} more</p>" if count > shown else ""


def _times(log: RunLog) -> str:
    bars = [
        Bar(step.name, step.start, step.seconds, step.status == "failed", _tip(step), step.worker)
        for step in log.steps
        if step.start is not None
    ]
    if not bars:
        return ""
    kinds = dict.fromkeys(bar.name.partition("/")[0] for bar in bars)
    colours = {kind: chart.COLOURS.get(kind, chart.OTHER) for kind in kinds}
    keys = "".join(
        f'<span class=key><i style="background:{colour}"></i>{escape(kind)}</span>'
        for kind, colour in colours.items()
    )
    drawn = sorted(bars, key=lambda bar: -bar.seconds)[:MOST_BARS]
    left = f"<p>Shown are the {MOST_BARS} longest of {len(bars)} steps.</p>" if len(bars) > MOST_BARS else ""
    drawn.sort(key=lambda bar: bar.start)
    return _section("Time", f"{keys}{left}<div class=scroll>{chart.timeline(drawn, log.seconds)}</div>")


def _tip(step: LoggedStep) -> str:
    return f"on {step.worker}; {step.words}" if step.worker else step.words


def _drawing(log: RunLog) -> str:
    names = {step.name for step in log.steps}
    sources = {need for step in log.steps for need in step.needs if need not in names}
    if not log.steps or len(names) + len(sources) > MOST_DRAWN:
        return ""
    nodes: list[Node] = [Source(name, Path(), ()) for name in sorted(sources)]
    nodes += [
        Step(step.name, "run:step", {"name": step.name}, {need: Input(need) for need in step.needs})
        for step in log.steps
    ]
    states = {**dict.fromkeys(sources, "source"), **{step.name: step.status for step in log.steps}}
    words = {step.name: step.words for step in log.steps}
    drawn = graph_picture.drawing(Graph(nodes), states, words)
    return _section("Steps and what they need", graph_view.view(drawn))


def _steps(log: RunLog) -> str:
    rows = [
        (
            escape(step.name),
            _status(step.status),
            duration(step.seconds) if step.start is not None else "",
            _bytes(step.bytes),
            f"<span class=reused>{escape(step.words)}</span>",
        )
        for step in sorted(log.steps, key=lambda step: -step.seconds)
    ]
    table = _table(("step", "", "time#", "size#", "why"), rows[:MOST_ROWS])
    return _section(
        "Every step", f"<details><summary>{len(rows)} steps</summary>{table}{_more(len(rows))}</details>"
    )
