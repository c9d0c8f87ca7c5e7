"""Tests of graphs of steps: validation with its messages, topological order, merging of equal steps, and
selection by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.build.graph import Graph, Input, Source, Step, StepDisplay, selected
from mlcbuild.canon import Json
from mlcbuild.errors import UsageError


def step(name: str, *needs: str, action: str = "tests.actions:text", **params: Json) -> Step:
    return Step(name, action, {"text": name, **params}, {need: Input(need) for need in needs})


def test_each_node_follows_what_it_needs_whatever_the_order_given() -> None:
    graph = Graph([step("c", "a", "b"), step("b", "a"), step("a", "s"), Source("s", Path("x"), ("f",))])
    assert list(graph.nodes) == ["s", "a", "b", "c"]
    assert graph.users == {"s": ["a"], "a": ["b", "c"], "b": ["c"], "c": []}
    assert graph.needs(graph.step("c")) == ("a", "b")
    assert len(graph) == 4


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_order_of_random_graphs_is_topological(count: int, random: Random) -> None:
    nodes = []
    for index in range(count):
        needs = [f"n{other}" for other in range(index) if random.random() < 0.4]
        nodes.append(step(f"n{index}", *needs))
    random.shuffle(nodes)
    graph = Graph(nodes)
    places = {name: place for place, name in enumerate(graph.nodes)}
    assert len(places) == count
    assert all(places[name] < places[user] for name, users in graph.users.items() for user in users)


def test_all_problems_are_told_at_once_with_suggestions() -> None:
    with pytest.raises(UsageError) as caught:
        Graph([step("a", "sauce"), step("source-1"), step("b"), step("b", x=1), step("c", action="no_colon")])
    assert str(caught.value).splitlines() == [
        "two different steps or sources are called 'b'",
        "step 'c': action 'no_colon' must be written module:function",
        "step 'a': input 'sauce' names 'sauce', which no step or source supplies; did you mean 'source-1'?",
    ]


def test_the_same_node_given_twice_is_no_problem() -> None:
    assert list(Graph([step("a"), step("a")]).nodes) == ["a"]


def test_a_cycle_is_named_with_its_path() -> None:
    with pytest.raises(UsageError) as caught:
        Graph([step("a", "c"), step("b", "a"), step("c", "b"), step("d")])
    message = str(caught.value)
    assert message.startswith("the steps depend on each other in a cycle: ")
    path = message.partition(": ")[2].split(" -> ")
    assert path[0] == path[-1]
    assert " -> ".join([*path[:-1]] * 2).find("a -> c -> b") >= 0


def test_equal_steps_are_one_and_so_are_those_behind_them() -> None:
    one = Step("library/x/a", "m:f", {"p": 1}, {})
    other = Step("library/y/a", "m:f", {"p": 1}, {}, display=StepDisplay({"p": "other words"}), memory=1)
    behind = [Step(f"bundle/{n}", "m:g", {}, {"library": Input(f"library/{n}/a")}) for n in "xy"]
    graph = Graph([one, other, *behind])
    assert list(graph.nodes) == ["library/x/a", "bundle/x"]
    assert graph.resolve("bundle/y") == "bundle/x"
    assert graph["library/y/a"] is one
    assert "bundle/y" in graph and "bundle/z" not in graph


@pytest.mark.parametrize(
    "other",
    [
        Step("b", "m:f", {"p": 2}, {}),
        Step("b", "m:g", {"p": 1}, {}),
        Step("b", "m:f", {"p": 1}, {}, tools={"tvm": "1"}),
        Step("b", "m:f", {"p": 1}, {"x": Input("s")}),
        Step("b", "m:f", {"p": 1}, {"x": Input("s", ("*.json",))}),
    ],
)
def test_steps_that_differ_stay_apart(other: Step) -> None:
    nodes: list[Source | Step] = [Source("s", Path("x"), ()), Step("a", "m:f", {"p": 1}, {}), other]
    assert len(Graph(nodes)) == 3


def test_floats_are_refused_with_the_step_named() -> None:
    with pytest.raises(TypeError, match="step a: canonical JSON cannot hold a float"):
        Graph([Step("a", "m:f", {"p": 0.5}, {})])  # type: ignore[dict-item]  # what is tested


def test_names_and_globs_mean_steps_and_aliases() -> None:
    graph = Graph(
        [step("weights/a"), step("weights/b"), Step("z", "tests.actions:text", {"text": "weights/a"}, {})]
    )
    assert graph.match(["weights/*"]) == {"weights/a", "weights/b"}
    assert graph.match(["z"]) == {"weights/a"}
    with pytest.raises(UsageError, match="no step is called 'weigths/a'; did you mean 'weights/a'"):
        graph.match(["weigths/a", "weights/b"])
    with pytest.raises(UsageError, match="there is no step 'weights/c'; did you mean 'weights/b'"):
        graph.step("weights/c")


def test_the_closure_is_the_named_steps_and_all_they_need() -> None:
    graph = Graph([step("a"), step("b", "a"), step("c", "b"), step("d", "a"), step("e")])
    assert graph.closure(["c", "e"]) == {"a", "b", "c", "e"}


@pytest.mark.parametrize(
    ("path", "globs", "expected"),
    [
        ("model.safetensors", (), True),
        ("model.safetensors", ("*.safetensors",), True),
        ("original/model.safetensors", ("*.safetensors",), False),
        ("original/model.safetensors", ("**/*.safetensors",), True),
        ("model.safetensors", ("**/*.safetensors",), True),
        ("a/b/c.txt", ("a/**",), True),
        ("a/b/c.txt", ("a/*",), False),
        ("tokenizer.json", ("tokenizer*.json", "x"), True),
        ("tokenizer_json", ("tokenizer.json",), False),
        ("a1", ("a?",), True),
        ("a/", ("a?",), False),
        ("[x]", ("[x]",), True),
    ],
)
def test_globs_stay_inside_a_part_of_the_path(path: str, globs: tuple[str, ...], expected: bool) -> None:
    assert selected(path, globs) is expected


def test_a_graph_in_order_needs_no_networkx() -> None:
    code = (
        "import sys; from mlcbuild.build.graph import *\n"
        "import mlcbuild.build.plan, mlcbuild.build.execute, mlcbuild.reports.report\n"
        "Graph([Step('a', 'm:f', {}, {})])\n"
        "print([m for m in ('networkx', 'rich', 'sqlite3', 'multiprocessing') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
