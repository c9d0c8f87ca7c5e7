"""Tests of the edges of a drawn graph: no edge crosses a box, and lines of different origins keep apart."""

from __future__ import annotations

import re
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild.reports.graph_edges import GAP_X, GAP_Y, HEIGHT, Box, paths

WIDTH = 80.0


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Box]:
    """Draws boxes in columns, which do not overlap. Returns name -> box; a name begins with the number of
    its column."""
    boxes = {}
    for column in range(draw(st.integers(2, 5))):
        y = 0.0
        for row in range(draw(st.integers(1, 4))):
            y += draw(st.floats(0, 60))
            boxes[f"{column}{row}"] = Box(column * (WIDTH + GAP_X), y, WIDTH)
            y += HEIGHT + GAP_Y
    return boxes


def points(path: str) -> list[tuple[float, float]]:
    """Returns points on an SVG path of curves and horizontal lines, from its beginning to its end."""
    x, y = map(float, re.findall(r"[-\d.]+", path.partition("C")[0]))
    on_path = [(x, y)]
    for kind, text in re.findall(r"([Ch])([^Ch]+)", path):
        numbers = [float(number) for number in text.split()]
        if kind == "h":
            on_path += [(x + numbers[0] * part / 8, y) for part in range(1, 9)]
            x += numbers[0]
            continue
        xs, ys = [x, *numbers[0::2]], [y, *numbers[1::2]]
        for part in range(1, 17):
            t = part / 16
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            at = [sum(w * v for w, v in zip(weights, values, strict=True)) for values in (xs, ys)]
            on_path.append((at[0], at[1]))
        x, y = numbers[4:]
    return on_path


def edges_of(boxes: dict[str, Box]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in combinations(boxes, 2) if one[0] < other[0]]


@given(columns())
@settings(max_examples=60, deadline=None)
def test_no_edge_crosses_a_box(boxes: dict[str, Box]) -> None:
    for (name, user), path in paths(boxes, edges_of(boxes)).items():
        start, end = boxes[name], boxes[user]
        line = points(path)
        assert line[0] == (start.x + WIDTH, round(start.middle, 1)) and line[-1][0] == end.x
        for x, y in line[1:-1]:
            assert not any(
                box.x - 0.1 < x < box.x + WIDTH + 0.1 and box.y - 0.1 < y < box.y + HEIGHT + 0.1
                for other, box in boxes.items()
                if other not in (name, user)
            ), (name, user)


@given(columns())
@settings(max_examples=60, deadline=None)
def test_lines_through_a_column_have_one_origin(boxes: dict[str, Box]) -> None:
    origins: dict[tuple[float, float], set[str]] = {}
    for (name, _), path in paths(boxes, edges_of(boxes)).items():
        for x, y in re.findall(r"([-\d.]+) ([-\d.]+) h", path):
            origins.setdefault((float(x), float(y)), set()).add(name)
    assert all(len(names) == 1 for names in origins.values())


def test_an_edge_over_an_empty_row_is_straight() -> None:
    boxes = {"a": Box(0, 0, WIDTH), "b": Box(136, 100, WIDTH), "c": Box(272, 0, WIDTH)}
    assert {y for _, y in points(paths(boxes, [("a", "c")])["a", "c"])} == {17.0}


def test_an_edge_takes_the_nearest_gap() -> None:
    boxes = {
        "a": Box(0, 0, WIDTH),
        "b": Box(136, -10, WIDTH),
        "c": Box(136, 60, WIDTH),
        "d": Box(272, 0, WIDTH),
    }
    assert " 28.0 h80.0" in paths(boxes, [("a", "d")])["a", "d"], "4 pixels below the box b"


def test_an_edge_over_two_columns_descends_evenly() -> None:
    places = {"a": (0, 0), "b": (136, 1000), "c": (272, 1000), "d": (408, 300)}
    boxes = {name: Box(x, y, WIDTH) for name, (x, y) in places.items()}
    assert re.findall(r"([-\d.]+) h", paths(boxes, [("a", "d")])["a", "d"]) == ["117.0", "217.0"]
