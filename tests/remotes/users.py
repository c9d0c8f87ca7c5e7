"""Simulated users, each with a separate store, who build small graphs of steps and share the results through
remotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.build.events import Event, Noted, RunResult, StepFetching, StepResult, Warned
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.canon import Json
from mlcbuild.remotes import Mode, Remote
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.store import Store
from tests.caches import NGINX, WITHOUT_NGINX

needs_nginx = pytest.mark.skipif(NGINX is None, reason=WITHOUT_NGINX)


def step(name: str, function: str = "text", *needs: str, shared: bool = True, **params: Json) -> Step:
    inputs = {need: Input(need) for need in needs}
    return Step(name, f"tests.actions:{function}", params, inputs, memory=1, shared=shared)


CHAIN = Graph([step("a", text="A"), step("b", "text", "a", text="B"), step("c", "text", "b", text="C")])
BIG = Graph([step("big", "big", bytes=3_000_000)])


class User:
    """A simulated user who builds with the store `root` and with remotes at the addresses `urls`, as a recipe
    would list them. mode: whether remotes are read, written or both."""

    def __init__(self, root: Path, *urls: str, mode: Mode = "readwrite", **options: object) -> None:
        self.store = Store(root)
        self.remotes = [Remote(url, mode, **options) for url in urls]  # type: ignore[arg-type]
        self.events: list[Event] = []
        self.timeout = 60.0  # a loaded machine is no fault of a cache

    def sharing(self) -> Sharing:
        return Sharing(self.store, [Link(remote, timeout=self.timeout) for remote in self.remotes])

    def run(self, graph: Graph = CHAIN, options: Options | None = None) -> RunResult:
        self.events = []
        chosen = options or Options(executor="inline")
        return execute(graph, Store(self.store.root), chosen, self.events.append, self.sharing())

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]

    def notes(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Noted)]

    def fetched(self) -> list[str]:
        return [event.name for event in self.events if isinstance(event, StepFetching)]

    def text(self, result: RunResult, name: str) -> str:
        record = by_name(result)[name].record
        assert record is not None
        (entry,) = record.files
        return self.store.blob(entry.digest).read_text()


def by_name(result: RunResult) -> dict[str, StepResult]:
    return {actual.name: actual for actual in result.steps}


def statuses(result: RunResult) -> dict[str, str]:
    return {actual.name: actual.status for actual in result.steps}


BUILT = {"a": "built", "b": "built", "c": "built"}
REUSED = {"a": "reused", "b": "reused", "c": "reused"}
