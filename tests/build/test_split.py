"""Tests of sharding a graph over several machines: each step belongs to exactly one shard, by a rule that all
machines share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.ci import split as splits
from mlcbuild.errors import InputError, UsageError


def step(name: str, *needs: str) -> Step:
    return Step(name, "tests.actions:text", {"text": name}, {f"in{i}": Input(n) for i, n in enumerate(needs)})


def product(models: int, schemes: int) -> list[Node]:
    """Returns the steps of models x schemes. All variants of a model share one expensive step."""
    nodes: list[Node] = []
    for m in range(models):
        nodes += [step(f"config/{m}"), step(f"reference/{m}", f"config/{m}")]
        for s in range(schemes):
            nodes += [
                step(f"weights/{m}/{s}", f"config/{m}"),
                step(f"verify/{m}-{s}", f"weights/{m}/{s}", f"reference/{m}"),
            ]
    return nodes


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(1, 14))
    nodes: list[Node] = [Source("src", Path(), ())]
    for i in range(count):
        kind = draw(st.sampled_from(["fetch", "weights", "library", "config", "odd"]))
        needs = draw(st.lists(st.sampled_from([node.name for node in nodes]), max_size=3, unique=True))
        nodes.append(step(f"{kind}/{i}", *needs))
    return nodes


@settings(deadline=None)
@given(graphs(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_step_is_owned_once_whatever_the_order(
    nodes: list[Node], count: int, rng: random.Random
) -> None:
    graph = Graph(nodes)
    parts = splits.split(graph, (), count, {})
    assert len(parts.shards) == count
    assert sorted(n for shard in parts.shards for n in shard.steps) == sorted(s.name for s in graph.steps())
    assert all(set(shard.first) <= set(shard.steps) for shard in parts.shards)
    shuffled = [nodes[0], *rng.sample(nodes[1:], len(nodes) - 1)]
    again = splits.split(Graph(shuffled), (), count, {})
    assert again.identity == parts.identity
    assert [set(shard.steps) for shard in again.shards] == [set(shard.steps) for shard in parts.shards]


@settings(deadline=None)
@given(graphs(), st.integers(1, 4))
def test_a_shard_s_load_is_the_work_it_needs(nodes: list[Node], count: int) -> None:
    """Checks that the stated cost of a shard covers its steps and all steps before them; networkx computes
    the expected set."""
    graph = Graph(nodes)
    costs = {s.name: splits.WEIGHTS.get(s.name.split("/")[0], splits.OTHER) for s in graph.steps()}
    for shard in splits.split(graph, (), count, {}).shards:
        if shard.steps:
            needed = graph.closure(shard.steps) & costs.keys()
            assert sum(costs[name] for name in needed) <= shard.milliseconds


def test_what_shares_dear_work_stays_together() -> None:
    graph = Graph(product(2, 4))
    for part in splits.split(graph, (), 2, {}).shards:
        models = {name.split("/")[1].split("-")[0] for name in part.steps}
        assert len(models) == 1
        assert part.first == part.steps


def test_one_model_is_split_all_the_same_and_dear_shared_steps_come_last() -> None:
    graph = Graph(product(1, 4))
    shards = splits.split(graph, (), 2, {"reference/0": 90_000}).shards
    assert [sum(name.startswith("weights/") for name in part.steps) for part in shards] == [2, 2]
    (other,) = [part for part in shards if "reference/0" not in part.steps]
    assert not any(name.startswith("verify/") for name in other.first)
    assert any(name.startswith("weights/") for name in other.first), "a cheap shared step is done again"


def test_durations_balance_and_enter_the_identity() -> None:
    nodes: list[Node] = [step(f"weights/{n}") for n in "abcd"]
    slow = splits.split(Graph(nodes), (), 2, {"weights/a": 90_000, "weights/b": 30_000})
    # c and d are taken for the median of the others, 60 s.
    assert {part.steps for part in slow.shards} == {("weights/a", "weights/b"), ("weights/c", "weights/d")}
    assert slow.identity != splits.split(Graph(nodes), (), 2, {}).identity
    kinds = splits.split(Graph([*nodes, step("library/x")]), (), 2, {"library/y": 500_000})
    assert [set(part.steps) for part in kinds.shards if "library/x" in part.steps] == [{"library/x"}]


def test_only_limits_what_is_split() -> None:
    graph = Graph(product(2, 2))
    parts = splits.split(graph, ("verify/0-1",), 3, {})
    assert {n for part in parts.shards for n in part.steps} == {
        "config/0",
        "reference/0",
        "weights/0/1",
        "verify/0-1",
    }


def test_large_graphs_are_split_in_seconds() -> None:
    graph = Graph(product(200, 8))
    parts = splits.split(graph, (), 20, {}).shards
    loads = [part.milliseconds for part in parts]
    assert max(loads) < 1.2 * sum(loads) / len(loads)


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "a/b", "1/3/5", "-1/3", "1/99999"])
def test_wrong_shards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"write i/n with 1 <= i <= n"):
        splits.parse(text)


def test_durations_are_kept_in_a_file(tmp_path: Path) -> None:
    path = splits.place(tmp_path / "recipe.yaml")
    assert path.name == "recipe.durations.json"
    assert splits.read(path) == {}
    splits.write(path, {"b": 2, "a": 10})
    assert splits.read(path) == {"a": 10, "b": 2}
    for text in ("{", "[]", '{"format": "mlcbuild-durations/1"}', '{"format":"x","milliseconds":{}}'):
        path.write_text(text)
        with pytest.raises(InputError, match="--record"):
            splits.read(path)
    path.write_text('{"format": "mlcbuild-durations/1", "milliseconds": {"a": -1}}')
    with pytest.raises(InputError, match="is not a file of durations"):
        splits.read(path)
    with pytest.raises(UsageError, match="cannot be written"):
        splits.write(tmp_path / "nowhere" / "x.json", {})
