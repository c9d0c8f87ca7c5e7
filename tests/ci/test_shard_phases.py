"""Tests of the two phases in which a CI shard is executed: which steps run in each, and which are left out
after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlcbuild.build.events import RunResult
from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Graph, Input, Node, Step
from mlcbuild.ci import shard_phases
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.store import Store


def step(name: str, *needs: str) -> Step:
    return Step(name, "tests.actions:text", {"text": name}, {f"in{i}": Input(n) for i, n in enumerate(needs)})


def failing() -> Iterator[Node]:
    yield step("a")
    yield Step("b", "tests.actions:fail", {"how": "own error"}, {"x": Input("a")})
    yield step("c", "b")
    yield step("d", "a")


def turned(tmp_path: Path, *names: tuple[str, ...] | None, keep_going: bool = False) -> dict[str, str]:
    options = Options(jobs=1, executor="inline", keep_going=keep_going, force=("a",))
    result = run(tmp_path, options, names)
    return {step.name: step.status for step in result.steps}


def run(tmp_path: Path, options: Options, names: tuple[tuple[str, ...] | None, ...]) -> RunResult:
    output: list[object] = []
    result = shard_phases.run(
        Graph(failing()), options, names, lambda: Sharing(Store(tmp_path)), output.append
    )
    started = [event for event in output if type(event).__name__ == "StepStarted"]
    assert len(started) == len({getattr(event, "name", "") for event in started}), "nothing runs twice"
    assert len({step.name for step in result.steps}) == len(result.steps)
    return result


def test_a_second_turn_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    assert turned(tmp_path, ("a",), ("a", "d")) == {"a": "built", "d": "built"}


def test_after_a_failure_the_next_turn_is_left_out(tmp_path: Path) -> None:
    assert turned(tmp_path, ("b",), ("d",)) == {"a": "built", "b": "failed"}


def test_keep_going_does_what_does_not_need_the_failed_step(tmp_path: Path) -> None:
    actual = turned(tmp_path, ("b",), ("b", "c", "d"), keep_going=True)
    assert actual == {"a": "built", "b": "failed", "c": "skipped", "d": "built"}


def test_no_names_mean_everything(tmp_path: Path) -> None:
    assert turned(tmp_path, None, keep_going=True) == {
        "a": "built",
        "b": "failed",
        "c": "skipped",
        "d": "built",
    }
