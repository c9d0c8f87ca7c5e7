"""Draws the results of a load test as an SVG chart."""

from __future__ import annotations

from collections.abc import Sequence

from mlcbuild.bench.figures import LoadResult, percentile
from mlcbuild.reports.chart import Curve, Panel, panels

_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2e": "Whole request",
}
_STEPS = 100


def plot(outcomes: Sequence[LoadResult]) -> str:
    """Returns an SVG chart of load test results: for each of ttft, tpot, itl and e2e the distribution
    (seconds and percentile, with a curve for each load) and, for several loads, ttft and tpot over
    throughput. A metric without values has no panel."""
    listed = [_distribution(metric, title, outcomes) for metric, title in _TITLES.items()]
    listed = [panel for panel in listed if panel.curves]
    if len(outcomes) > 1:
        listed += _by_load(outcomes)
    return panels(listed)


def _distribution(metric: str, title: str, outcomes: Sequence[LoadResult]) -> Panel:
    curves = []
    for outcome in outcomes:
        if values := outcome.values(metric):
            points = [(percentile(values, part), part) for part in range(_STEPS + 1)]
            curves.append(Curve(outcome.load, points))
    return Panel(title, "seconds", "percentile", curves)


def _by_load(outcomes: Sequence[LoadResult]) -> list[Panel]:
    """Returns chart panels, one for ttft and one for tpot, each only if it has values. A panel has two curves
    (the 50th and the 99th percentile) and on each a point for each load: throughput in output tokens per
    second on the horizontal axis, latency in seconds on the vertical one."""
    panels = []
    for metric in ("ttft", "tpot"):
        curves = []
        for part in (50, 99):
            points = [
                (outcome.rate(sum(sample.tokens for sample in outcome.good)), percentile(values, part))
                for outcome in outcomes
                if (values := outcome.values(metric))
            ]
            curves.append(Curve(f"p{part}", points))
        if curves[0].points:
            title = f"{_TITLES[metric]} against throughput"
            panels.append(Panel(title, "output tokens per second", "seconds", curves))
    return panels
