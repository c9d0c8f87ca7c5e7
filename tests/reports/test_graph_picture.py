"""Tests of the drawings of a plan: they are complete, well-formed and without overlaps."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.build.plan import Plan, plan
from mlcbuild.reports.graph_edges import HEIGHT
from mlcbuild.reports.graph_lanes import SHARED, lanes
from mlcbuild.reports.graph_picture import _spread, dot, html, layout, mermaid, svg
from mlcbuild.store.store import Store

NAMESPACE = "{http://www.w3.org/2000/svg}"


def step(name: str, *needs: str) -> Step:
    return Step(name, "tests.actions:text", {"text": name}, {need: Input(need) for need in needs})


def diamond(root: Path) -> Graph:
    nodes: list[Node] = [
        Source("s", root, ()),
        step('weights/"a" <&>', "s"),
        step("library/a"),
        step("bundle/a", 'weights/"a" <&>', "library/a", "s"),
        step("verify/a", "bundle/a"),
    ]
    return Graph(nodes)


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Graph, Plan]:
    """Returns (a graph of build steps, a plan of it) in which steps have every state: one is stored, others
    have never been built or wait for them."""
    graph = diamond(tmp_path)
    store = Store(tmp_path / "store")
    execute(graph, store, Options(executor="inline", only=("library/a",)))
    return graph, plan(graph, store)


def test_svg_shows_every_node_with_its_state_and_reason(planned: tuple[Graph, Plan]) -> None:
    root = ElementTree.fromstring(svg(*planned))
    boxes = root.findall(f"{NAMESPACE}g/{NAMESPACE}g")
    output = {box.findtext(f"{NAMESPACE}text"): box.findtext(f"{NAMESPACE}title") for box in boxes}
    assert output == {
        "s": "s: source",
        'weights/"a" <&>': 'weights/"a" <&>: runs, never built',
        "library/a": "library/a: stored",
        "bundle/a": 'bundle/a: waits, waits for weights/"a" <&>',
        "verify/a": "verify/a: waits, waits for bundle/a",
    }
    fills = {rect.get("fill") for rect in root.iterfind(f"{NAMESPACE}g/{NAMESPACE}g/{NAMESPACE}rect")}
    assert fills == {"#eef1f5", "#fdeed6", "#e3f4e6", "#fdf8e4"}


def test_svg_leaves_out_edges_that_follow_from_others(planned: tuple[Graph, Plan]) -> None:
    root = ElementTree.fromstring(svg(*planned))
    # s -> weights, weights -> bundle, library -> bundle, bundle -> verify; not s -> bundle.
    assert len(root.findall(f"{NAMESPACE}g/{NAMESPACE}path")) == 4


def test_svg_without_a_plan_has_no_legend(tmp_path: Path) -> None:
    text = svg(diamond(tmp_path))
    assert "stored" not in text and "library/a" in text
    assert ElementTree.fromstring(svg(Graph([]))).tag == f"{NAMESPACE}svg"


def test_html_is_one_file_and_lists_what_is_not_stored(planned: tuple[Graph, Plan]) -> None:
    text = html(*planned, title="a <plan>")
    assert "<title>a &lt;plan&gt;</title>" in text
    assert text.count("<tr>") == 1 + 3
    assert "<td>weights/&quot;a&quot; &lt;&amp;&gt;</td><td>runs</td><td>never built</td>" in text
    assert text.count("<script") == 1 and not re.search(r"src=|href=|url\(", text)


def test_mermaid_and_dot_hold_every_node_edge_and_state(planned: tuple[Graph, Plan]) -> None:
    assert (
        mermaid(*planned)
        == """\
flowchart LR
  n0["s"]
  n1["library/a"]
  n2["weights/#quot;a#quot; <&>"]
  n3["bundle/a"]
  n4["verify/a"]
  n0 --> n2
  n0 --> n3
  n1 --> n3
  n2 --> n3
  n3 --> n4
  classDef hit fill:#e3f4e6,stroke:#3d9a50,color:#1c2330
  class n1 hit
  classDef pending fill:#fdf8e4,stroke:#c9b458,color:#1c2330
  class n3,n4 pending
  classDef run fill:#fdeed6,stroke:#d08718,color:#1c2330
  class n2 run
  classDef source fill:#eef1f5,stroke:#8a94a3,color:#1c2330
  class n0 source
"""
    )
    text = dot(*planned)
    assert text.startswith("digraph plan {\n") and text.endswith("}\n")
    assert '  "weights/\\"a\\" <&>" [fillcolor="#fdeed6", color="#d08718"];\n' in text
    assert text.count(" -> ") == 5


def test_each_model_has_a_lane_below_what_models_share() -> None:
    nodes: list[Node] = [step("library/x"), step("prompts")]
    for model in ("b", "a"):
        nodes += [
            step(f"config/{model}"),
            step(f"weights/{model}/q4", f"config/{model}"),
            step(f"reference/{model}", f"config/{model}", "prompts"),
            step(f"bundle/{model}-q4-host", f"weights/{model}/q4", "library/x"),
            step(f"verify/{model}-q4-host", f"bundle/{model}-q4-host", f"reference/{model}"),
        ]
    nodes[0] = step("library/x", "config/a")
    graph = Graph(nodes)
    lane_of = lanes(graph)
    assert {name for name, lane in lane_of.items() if lane == SHARED} == {"library/x", "prompts"}
    assert all(name.split("/")[1].startswith(lane) for name, lane in lane_of.items() if lane != SHARED)
    boxes = layout(graph)
    rows = [[box.y for name, box in boxes.items() if lane_of[name] == lane] for lane in (SHARED, "a", "b")]
    assert all(max(upper) + HEIGHT < min(lower) for upper, lower in pairwise(rows))
    root = ElementTree.fromstring(svg(graph))
    assert [title.text for title in root.iterfind(f"{NAMESPACE}g/{NAMESPACE}text")] == ["a", "b", SHARED]
    bands = root.findall(f"{NAMESPACE}g/{NAMESPACE}rect")
    assert len(bands) == 3
    for one, other in combinations(bands, 2):
        (top, height), (below, _) = sorted(
            (float(r.get("y", 0)), float(r.get("height", 0))) for r in (one, other)
        )
        assert top + height <= below, "bands do not overlap"


def test_a_step_of_equal_models_is_shared() -> None:
    nodes: list[Node] = [step("tokenizer/a")]
    for model in "ab":
        nodes.append(step(f"weights/{model}/q4"))
        nodes.append(step(f"bundle/{model}", f"weights/{model}/q4", "tokenizer/a"))
    lane_of = lanes(Graph(nodes))
    assert lane_of["tokenizer/a"] == SHARED
    assert (lane_of["bundle/a"], lane_of["weights/b/q4"]) == ("a", "b")


@given(st.integers(1, 40), st.floats(0.02, 0.4), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_boxes_never_overlap_and_edges_go_to_the_right(count: int, density: float, random: Random) -> None:
    nodes = [
        step(f"n{index}", *(f"n{other}" for other in range(index) if random.random() < density))
        for index in range(count)
    ]
    graph = Graph(nodes)
    boxes = layout(graph)
    assert boxes.keys() == graph.nodes.keys()
    for one, other in combinations(boxes.values(), 2):
        beside = one.x + one.width < other.x or other.x + other.width < one.x
        assert beside or abs(one.y - other.y) >= HEIGHT
    for name, users in graph.users.items():
        assert all(boxes[name].x + boxes[name].width < boxes[user].x for user in users)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.floats(1, 20))
def test_spreading_keeps_order_and_distance_and_moves_no_more_than_needed(
    wish: list[float], pitch: float
) -> None:
    actual = _spread(wish, pitch)
    assert all(b - a >= pitch - 1e-9 for a, b in pairwise(actual))
    if all(b - a >= pitch for a, b in pairwise(wish)):
        assert actual == pytest.approx(wish)
    assert sum(actual) == pytest.approx(sum(wish), abs=1e-6)  # least squares leaves the mean where it is
