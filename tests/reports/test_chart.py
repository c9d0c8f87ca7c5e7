"""Tests of charts as SVG: timelines, scatter plots and curves."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild.reports import chart
from mlcbuild.reports.chart import Bar, Curve, Panel, Point

SVG = "{http://www.w3.org/2000/svg}"
times = st.floats(0, 1000, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(times, st.floats(0.001, 100)), max_size=30))
def test_lanes_hold_each_bar_once_and_none_overlaps(actual: list[tuple[float, float]]) -> None:
    bars = [Bar(f"weights/{i}", start, seconds) for i, (start, seconds) in enumerate(actual)]
    rows = chart.lanes(bars)
    assert sorted(bar.name for row in rows for bar in row) == sorted(bar.name for bar in bars)
    for row in rows:
        for first, second in pairwise(row):
            assert first.start + first.seconds <= second.start
    most = max((sum(b.start <= bar.start < b.start + b.seconds for b in bars) for bar in bars), default=0)
    assert len(rows) == most, "as few rows as steps that ran at once"


@settings(deadline=None)
@given(st.floats(0.001, 1e7))
def test_ticks_are_few_and_within(total: float) -> None:
    actual = chart.ticks(total)
    assert actual[0] == 0
    assert 1 <= len(actual) <= 10
    assert actual[-1] <= total * (1 + 1e-6)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", min_codepoint=32)), st.integers(1, 10**12), st.floats(0, 20)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_plot_is_svg_with_every_point_inside(actual: list[tuple[str, int, float]]) -> None:
    root = ElementTree.fromstring(chart.scatter([Point(*item, item[0]) for item in actual]))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    dots = root.findall(f".//{SVG}circle")
    assert len(dots) == len(actual)
    for dot in dots:
        assert 0 < float(dot.get("cx", -1)) < width
        assert 0 < float(dot.get("cy", -1)) < height


def test_larger_is_right_and_worse_is_up() -> None:
    points = [Point("a", 100, 0.5, "a"), Point("b", 200, 0.01, "b"), Point("exact", 400, 1e-13, "c")]
    dots = ElementTree.fromstring(chart.scatter(points)).findall(f".//{SVG}circle")
    places = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in dots]
    assert places == sorted(places), "from worst to best: to the right and down"


def test_exact_points_are_below_the_axis_and_labels_do_not_overlap() -> None:
    """Checks a chart with three exact schemes of equal size and several nearly equal schemes: exact ones are
    below the axis, and labels do not overlap."""
    points = [Point(f"exact-{i}", 400, 6e-13, "m") for i in range(3)]
    points += [Point(f"q4-{i}", 100 + i, 0.01, "m") for i in range(4)]
    root = ElementTree.fromstring(chart.scatter(points))
    lines = [float(line.get("y1", 0)) for line in root.findall(f".//{SVG}line")]
    places = {
        title.text.partition(":")[0]: float(group.findall(f"{SVG}circle")[0].get("cy", 0))
        for group in root.findall(f"{SVG}g")
        if (title := group.find(f"{SVG}title")) is not None and title.text
    }
    assert {places[f"exact-{i}"] for i in range(3)} == {max(lines)}
    assert max(places[f"q4-{i}"] for i in range(4)) <= sorted(lines)[-2], "0.01 is not exact"
    assert "exact" in [text.text for text in root.findall(f"{SVG}text")]
    boxes = []
    for group in root.findall(f"{SVG}g"):
        (text,) = group.findall(f"{SVG}text")
        (dot,) = group.findall(f"{SVG}circle")
        x, y, length = float(text.get("x", 0)), float(text.get("y", 0)), len(text.text or "") * 6.4
        is_left = x < float(dot.get("cx", 0))
        assert abs(x - float(dot.get("cx", 0))) > 8.5, "whatever the font's width"
        assert text.get("text-anchor") == ("end" if is_left else "start")
        boxes.append((x - length, y, x) if is_left else (x, y, x + length))
    assert any(float(text.get("x", 0)) < 64 + 250 for text in root.findall(f"{SVG}g/{SVG}text"))
    for i, (left, y, right) in enumerate(boxes):
        for other_left, other_y, other_right in boxes[:i]:
            assert abs(y - other_y) >= 12 or right <= other_left or other_right <= left


def test_each_machine_of_a_cluster_has_rows_of_its_own() -> None:
    bars = [Bar("a", 0, 1, worker="two"), Bar("b", 2, 1, worker="one"), Bar("c", 2, 1, worker="two")]
    assert [[bar.name for bar in row] for row in chart.lanes(bars)] == [["b"], ["a", "c"]]


def test_points_are_on_the_lines_of_their_marks() -> None:
    panel = Panel("a", "n", "tokens/s", [Curve("one", [(0, 0), (2, 10)]), Curve("two", [(0, 0), (4, 20)])])
    root = ElementTree.fromstring(chart.panels([panel, panel]))
    first = root.findall(f"{SVG}g")[0]
    marks = {text.text: text for text in first.findall(f"{SVG}text")}
    curves = [line.get("points", "").split() for line in first.findall(f"{SVG}polyline")]
    for line, (x, y) in zip(curves, (("2", "10"), ("4", "20")), strict=True):
        for (mark_x, mark_y), point in zip((("0", "0"), (x, y)), line, strict=True):
            at_x, at_y = (float(number) for number in point.split(","))
            assert at_y == float(marks[mark_y].get("y", 0)) - 4 or mark_y == "0"
            assert at_x == float(marks[mark_x].get("x", 0)) or mark_x == "0"
    grid = [float(line.get("y1", 0)) for line in first.findall(f"{SVG}line")]
    assert float(curves[0][0].split(",")[1]) == max(grid), "0 is at the bottom"
    colours = [line.get("stroke") for line in root.findall(f".//{SVG}polyline")]
    assert colours[:2] == colours[2:] and len(set(colours)) == 2, "one colour in all diagrams"
