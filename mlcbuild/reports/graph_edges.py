"""Draws the edges of a graph whose nodes are boxes in columns, such that no edge crosses a box.

An edge over several columns passes each column between two boxes. Edges that leave the same box may share a
line there; others keep apart, so that each line has one origin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HEIGHT, GAP_X, GAP_Y = 34.0, 56.0, 12.0
"""Height of a box, width of the space between two neighbouring columns of boxes, and minimum height of the
space between two boxes of a column, in pixels."""
_CLEAR, _APART = 4.0, 3.0
"""Minimum distance in pixels of a line from a box that it passes, and minimum distance of lines with
different origins that pass between the same two boxes; the latter is less where there is no room."""


@dataclass(frozen=True)
class Box:
    """The place of a node in a picture: the upper left corner of its box, in pixels right of and below that
    of the picture, and the box's width in pixels."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        """Returns the vertical position of the middle of the box, where edges begin and end."""
        return self.y + HEIGHT / 2


@dataclass(frozen=True)
class _Gap:
    """A free range of vertical positions in a column of boxes, from `low` down to `high` in pixels: between
    two boxes, above the first (`low` is -inf) or below the last (`high` is inf)."""

    column: float
    low: float
    high: float


Edge = tuple[str, str]
"""Names of the node where an edge begins, and of the node where it ends, which depends on the first."""


def paths(boxes: Mapping[str, Box], edges: Iterable[Edge]) -> dict[Edge, str]:
    """Returns edge -> its line, as the attribute `d` of an SVG path. boxes: name of a node -> its box; those
    of a column have the same left edge and the same width; every edge leads to the right."""
    gaps, widths = _gaps(boxes.values()), {box.x: box.width for box in boxes.values()}
    crossed = {edge: _crossed(boxes[edge[0]], boxes[edge[1]], gaps) for edge in edges}
    wishes: dict[_Gap, dict[str, float]] = {}
    for (name, _), way in sorted(crossed.items()):
        for gap, wish in way:
            wishes.setdefault(gap, {}).setdefault(name, wish)
    lines = {gap: _apart(by_name, gap) for gap, by_name in wishes.items()}
    drawn = {}
    for (name, user), way in crossed.items():
        x, y = boxes[name].x + boxes[name].width, boxes[name].middle
        path = f"M{x:.1f} {y:.1f}"
        for gap, _ in way:
            path += f"{_curve(x, y, gap.column, lines[gap][name])} h{widths[gap.column]:.1f}"
            x, y = gap.column + widths[gap.column], lines[gap][name]
        drawn[name, user] = path + _curve(x, y, boxes[user].x, boxes[user].middle)
    return drawn


def _gaps(boxes: Iterable[Box]) -> dict[float, list[_Gap]]:
    """Returns left edge of a column, in pixels -> the ranges in it where a line may pass, from top to bottom:
    a few pixels away from its boxes, above the first and below the last one included."""
    columns: dict[float, list[float]] = {}
    for box in boxes:
        columns.setdefault(box.x, []).append(box.y)
    gaps = {}
    for x, tops in sorted(columns.items()):
        tops.sort()
        lows = [float("-inf"), *(top + HEIGHT + _CLEAR for top in tops)]
        highs = [*(top - _CLEAR for top in tops), float("inf")]
        gaps[x] = [_Gap(x, low, high) for low, high in zip(lows, highs, strict=True) if low <= high]
    return gaps


def _crossed(start: Box, end: Box, gaps: Mapping[float, list[_Gap]]) -> list[tuple[_Gap, float]]:
    """Returns, for each column that an edge crosses on its way from the box `start` to the box `end`, from
    left to right, a pair: the free range between boxes through which it passes, and the vertical position in
    pixels, inside that range, at which it would pass if there were no other lines. That is the free position
    nearest to the straight line."""
    columns = list(gaps)
    between = columns[bisect_left(columns, start.x) + 1 : bisect_left(columns, end.x)]
    way, y = list[tuple[_Gap, float]](), start.middle
    for index, column in enumerate(between):
        wish = y + (end.middle - y) / (len(between) - index + 1)
        y, gap = min(
            ((min(max(wish, gap.low), gap.high), gap) for gap in gaps[column]),
            key=lambda place: abs(place[0] - wish),
        )
        way.append((gap, y))
    return way


def _apart(wishes: Mapping[str, float], gap: _Gap) -> dict[str, float]:
    """Returns name of a node -> vertical position in pixels at which the line from it passes through a gap.
    wishes: name of a node -> position that its line would have alone. Lines keep the order of these
    positions, and are 3 pixels apart, or less if the gap is too narrow."""
    names = sorted(wishes, key=lambda name: (wishes[name], name))
    pitch = min(_APART, (gap.high - gap.low) / max(len(names) - 1, 1))
    places = dict[str, float]()
    lowest = gap.low
    for index, name in enumerate(names):
        highest = gap.high - (len(names) - 1 - index) * pitch
        places[name] = min(max(wishes[name], lowest), highest)
        lowest = places[name] + pitch
    return places


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    bend = (to_x - x) / 2
    return f" C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
