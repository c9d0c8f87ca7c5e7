"""Draws charts as self-contained SVG: the timeline of a run, loss against size, curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mlcbuild_format import sizes

from mlcbuild.durations import duration

COLOURS: Mapping[str, str] = {
    "fetch": "#6b8fd6",
    "config": "#9aa4b2",
    "tokenizer": "#b7a58a",
    "reference": "#8a6fc0",
    "weights": "#d9893b",
    "library": "#3f8f8a",
    "bundle": "#c9a227",
    "verify": "#4f9d5b",
}
"""Kind of step (the first part of a step's name) -> colour of its bar in the timeline of a run. Other kinds
have the colour OTHER, and failed steps of all kinds FAILED."""
OTHER = "#8a94a3"
FAILED = "#c8453b"
_PALETTE = ("#3f6fb5", "#d9893b", "#4f9d5b", "#8a6fc0", "#c8453b", "#3f8f8a", "#a8863a", "#7a8699")
_WIDTH, _ROW, _LEFT, _RIGHT = 1040.0, 24.0, 12.0, 28.0
_CHAR = 6.4
LEAST = 1e-7
"""Mean KL divergence, in nats, up to which a variant's loss counts as a rounding error: the scatter plot
draws the variant in its row for exact ones."""
_DOTS = 12
"""Maximum number of points of a curve whose points are drawn as dots. A curve with more points is only a
line."""
_GREY = 'fill="#5d6877"'


@dataclass(frozen=True)
class Bar:
    """A bar of a run's timeline, which stands for one step."""

    name: str
    start: float
    """Start of the step in seconds after the start of the run."""
    seconds: float
    failed: bool = False
    tip: str = ""
    worker: str = ""
    """Name of the machine that ran the step, "" for this one. Steps of two machines are never drawn in the
    same row of the timeline."""


@dataclass(frozen=True)
class Point:
    """A point of the scatter plot of loss over size, which stands for one variant: a model in one
    quantization for one target."""

    label: str
    bytes: int
    loss: float
    """Mean KL divergence of the variant's next-token distributions from the model's, in nats. Values up to
    1e-7 are rounding errors and are drawn in the chart's separate row for variants that equal the model
    exactly."""
    group: str
    """Name of the group of variants to which this point of a scatter plot belongs; it determines the point's
    colour."""


def lanes(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Assigns the bars of a timeline to as few rows as possible, and returns the rows, those of one machine
    beside each other, the machines by name, this one first. A row shows steps that ran one after the other on
    the same machine."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.seconds, bar.name)):
        free = next((row for row in rows if _follows(row[-1], bar)), None)
        if free is None:
            rows.append([bar])
        else:
            free.append(bar)
    return sorted(rows, key=lambda row: row[0].worker)


def _follows(last: Bar, bar: Bar) -> bool:
    return last.worker == bar.worker and last.start + last.seconds <= bar.start


def timeline(bars: Sequence[Bar], total: float) -> str:
    """Returns an SVG timeline of a run's steps, in as few rows as possible: the steps of a row ran on one
    machine, one after the other. total: seconds of the run; the axis is longer if a bar ends later."""
    rows = lanes(bars)
    total = max([total, *(bar.start + bar.seconds for bar in bars)]) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / total
    height = len(rows) * _ROW
    body = []
    for tick in ticks(total):
        x = _LEFT + tick * scale
        body.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height:.0f}" stroke="#e2e6ec"/>'
            f'<text x="{x:.1f}" y="{height + 16:.0f}" text-anchor="middle" {_GREY}>{_short(tick)}</text>'
        )
    body += [_bar(bar, index, scale) for index, row in enumerate(rows) for bar in row]
    return _svg(_WIDTH, height + 24, body)


def _bar(bar: Bar, row: int, scale: float) -> str:
    kind = bar.name.partition("/")[0]
    fill = FAILED if bar.failed else COLOURS.get(kind, OTHER)
    x, width = _LEFT + bar.start * scale, max(1.5, bar.seconds * scale)
    room = int((width - 10) / _CHAR)
    shown = bar.name if len(bar.name) <= room else bar.name[: room - 1] + "…" if room > 5 else ""
    text = (
        f'<text x="{x + 5:.1f}" y="{row * _ROW + 15:.0f}" fill="#ffffff">{escape(shown)}</text>'
        if shown
        else ""
    )
    tip = f"{bar.name}: {duration(bar.seconds)}, from {_short(bar.start)}" + (
        f"\n{bar.tip}" if bar.tip else ""
    )
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.1f}" y="{row * _ROW + 1:.0f}" width="{width:.1f}" '
        f'height="{_ROW - 3:.0f}" rx="3" fill="{fill}"/>{text}</g>'
    )


def ticks(total: float, most: int = 8) -> list[float]:
    """Returns evenly spaced positions on a time axis, in seconds, for its marks: at most `most` + 1 multiples
    of a round number, from 0 to the last one that is not above `total`. total: length of the axis in seconds,
    above 0."""
    steps = [base * 10.0**power for power in range(-3, 2) for base in (1, 2, 5)]
    steps += [60.0 * n for n in (1, 2, 5, 10, 15, 30)] + [3600.0 * n for n in (1, 2, 4, 8, 24)]
    step = next((step for step in sorted(steps) if total / step <= most), total / most)
    return [i * step for i in range(int(total / step + 1e-9) + 1)]


def _short(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:.3g} s"


def scatter(points: Sequence[Point]) -> str:
    """Returns an SVG scatter plot of loss (mean KL divergence in nats, logarithmic) over size in bytes
    (linear, from 0), with a labelled dot for each point. Points with a loss up to LEAST, a rounding error,
    are in a separate row "exact" below the axis, which has no position for zero. Raises ValueError if there
    is no point."""
    width, height, left, top = 520.0, 300.0, 64.0, 14.0
    exact = any(point.loss <= LEAST for point in points)
    floor = height - (40.0 + _ROW * exact)
    largest = max(point.bytes for point in points) * 1.15
    shown = [point.loss for point in points if point.loss > LEAST]
    low = math.floor(math.log10(min(shown, default=1e-3)) - 0.3)
    high = max(math.ceil(math.log10(max(shown, default=1.0)) + 1e-9), low + 1)

    def place(point: Point) -> tuple[float, float]:
        x = left + point.bytes / largest * (width - left - 16)
        if point.loss <= LEAST:
            return x, floor + _ROW
        return x, top + (high - math.log10(point.loss)) / (high - low) * (floor - top)

    powers = range(low, high + 1, max(1, (high - low) // 6))
    rows = [(f"{10.0**power:g}", top + (high - power) / (high - low) * (floor - top)) for power in powers]
    body = []
    rows += [("exact", floor + _ROW)] * exact
    for label, y in rows:
        body.append(
            f'<line x1="{left:.0f}" y1="{y:.1f}" x2="{width - 16:.0f}" y2="{y:.1f}" stroke="#e2e6ec"/>'
            f'<text x="{left - 8:.0f}" y="{y + 4:.1f}" text-anchor="end" {_GREY}>{label}</text>'
        )
    for tick in _rounds(largest):
        x, y = left + tick / largest * (width - left - 16), height - 22
        body.append(f'<text x="{x:.1f}" y="{y:.0f}" text-anchor="middle" {_GREY}>{sizes.show(tick)}</text>')
    body.append(
        f'<text x="{(left + width) / 2:.0f}" y="{height - 4:.0f}" text-anchor="middle" fill="#5d6877">'
        'size of the weights</text><text x="14" y="'
        f'{height / 2:.0f}" text-anchor="middle" fill="#5d6877" '
        f'transform="rotate(-90 14 {height / 2:.0f})">mean KL, nats</text>'
    )
    groups = {group: index for index, group in enumerate(dict.fromkeys(point.group for point in points))}
    occupied = [_around(place(point), -5, 10) for point in points]
    for point in sorted(points, key=lambda point: (place(point)[1], point.label)):
        fill = _PALETTE[groups[point.group] % len(_PALETTE)]
        body.append(_dot(point, place(point), fill, occupied, (left, 0, width, height - 30)))
    return _svg(width, height, body)


Box = tuple[float, float, float, float]
"""A rectangle as (left, top, right, bottom), in pixels."""


def _around(place: tuple[float, float], start: float, length: float) -> Box:
    """Returns the rectangle (left, top, right, bottom), 13 pixels high, around a dot or a line of text in a
    chart. place: (x, y), a point in the vertical middle of the rectangle; start: offset of the left edge from
    x; length: width of the rectangle; all in pixels."""
    x, y = place
    return x + start, y - 6.5, x + start + length, y + 6.5


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _is_within(box: Box, area: Box) -> bool:
    return area[0] < box[0] and area[1] < box[1] and box[2] < area[2] and box[3] < area[3]


def _dot(point: Point, place: tuple[float, float], fill: str, occupied: list[Box], area: Box) -> str:
    """Returns a labelled dot of a scatter plot as SVG. The label is right or left of the dot, or above or
    below there, at the first position inside `area` where it overlaps nothing in `occupied`. If there is
    none, it overlaps; if no position is inside `area`, it is right of the dot.

    place: x and y of the dot in pixels; fill: its colour; occupied: rectangles of dots and earlier labels, to
    which the label is added; area: rectangle of the chart.
    """
    x, y = place
    long = len(point.label) * _CHAR
    rows = [13.0 * step * sign for step in range(40) for sign in ((-1, 1) if step else (1,))]
    boxes = [_around((x, y + row), start, long) for row in rows for start in (9.0, -9.0 - long)]
    inside = [box for box in boxes if _is_within(box, area)] or boxes[:1]
    box = next((box for box in inside if not any(_overlap(box, other) for other in occupied)), inside[0])
    occupied.append(box)
    # Fonts differ in width, so a label on the left ends at its box's right edge.
    start, anchor = (box[2], "end") if box[0] < x else (box[0], "start")
    tip = f"{point.label}: {sizes.show(point.bytes)}, KL {point.loss:.3g}"
    return (
        f'<g><title>{escape(tip)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" '
        f'stroke="#ffffff"/><text x="{start:.1f}" y="{box[1] + 10.5:.1f}" text-anchor="{anchor}" '
        f'fill="#1c2330" stroke="#ffffff" stroke-width="3" paint-order="stroke">'
        f"{escape(point.label)}</text></g>"
    )


@dataclass(frozen=True)
class Curve:
    """A named line through (x, y) points in a chart."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One diagram of a chart: named lines over two axes that both start at 0. `across` and `up` are the texts
    beside the horizontal and the vertical axis."""

    title: str
    across: str
    up: str
    curves: Sequence[Curve]


def panels(listed: Sequence[Panel]) -> str:
    """Returns an SVG of line diagrams, two per row, with one legend. Curves with the same name have the same
    colour in all diagrams."""
    width, height, columns = 520.0, 300.0, min(2, max(1, len(listed)))
    names = list(dict.fromkeys(curve.name for panel in listed for curve in panel.curves))
    colours = {name: _PALETTE[index % len(_PALETTE)] for index, name in enumerate(names)}
    body, x = [], 64.0
    for name, colour in colours.items():
        body.append(f'<rect x="{x:.0f}" y="10" width="14" height="4" fill="{colour}"/>')
        body.append(f'<text x="{x + 20:.0f}" y="16" fill="#1c2330">{escape(name)}</text>')
        x += 40 + len(name) * _CHAR
    for index, panel in enumerate(listed):
        left, top = index % columns * width, 28 + index // columns * height
        body.append(f'<g transform="translate({left:.0f} {top:.0f})">')
        body += [*_panel(panel, (width, height), colours), "</g>"]
    return _svg(max(columns * width, x), 28 + -(-len(listed) // columns) * height, body)


def _panel(panel: Panel, extent: tuple[float, float], colours: Mapping[str, str]) -> Iterable[str]:
    left, right, top, bottom = 64.0, 16.0, 26.0, 44.0
    width, height = extent[0] - left - right, extent[1] - top - bottom
    points = [point for curve in panel.curves for point in curve.points]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = 1.05 * (max((y for _, y in points), default=0.0) or 1.0)
    yield f'<text x="{left:.0f}" y="14" fill="#1c2330" font-weight="600">{escape(panel.title)}</text>'
    for tick in _rounds(most_x):
        x = left + tick / most_x * width
        yield f'<text x="{x:.1f}" y="{top + height + 17:.0f}" text-anchor="middle" {_GREY}>{tick:g}</text>'
    for tick in _rounds(most_y):
        y = top + (1 - tick / most_y) * height
        yield f'<line x1="{left:.0f}" y1="{y:.1f}" x2="{left + width:.0f}" y2="{y:.1f}" stroke="#e2e6ec"/>'
        yield f'<text x="{left - 8:.0f}" y="{y + 4:.1f}" text-anchor="end" {_GREY}>{tick:g}</text>'
    middle = left + width / 2
    below = f'x="{middle:.0f}" y="{extent[1] - 8:.0f}" text-anchor="middle" {_GREY}'
    yield f"<text {below}>{escape(panel.across)}</text>"
    turned = f'transform="rotate(-90 14 {top + height / 2:.0f})" x="14" y="{top + height / 2:.0f}"'
    yield f'<text {turned} text-anchor="middle" {_GREY}>{escape(panel.up)}</text>'
    for curve in panel.curves:
        placed = [(left + x / most_x * width, top + (1 - y / most_y) * height) for x, y in curve.points]
        line, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed), colours[curve.name]
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        if len(placed) <= _DOTS:
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed)


def _rounds(largest: float) -> list[float]:
    """Returns the multiples of a round number from 0 to the last one that is not above `largest`, at most
    six, for the marks of an axis. `largest` must be above 0."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(n * power for n in (0.1, 0.2, 0.25, 0.5, 1, 2) if largest / (n * power) <= 5)
    return [i * step for i in range(int(largest / step) + 1)]


def _svg(width: float, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="11.5">\n' + "\n".join(body) + "\n</svg>\n"
    )
