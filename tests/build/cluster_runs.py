"""Helper class for tests that runs graphs on a cluster and looks at the contents of its stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlcbuild.build.cluster.wire import Order, OrderInput
from mlcbuild.build.events import Event, RunResult, StepPlaced, Warned
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Node
from mlcbuild.canon import Entry, code_files
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.records import BuildInfo, Preimage
from mlcbuild.store.store import Store
from tests.cluster import Cluster

TEXT = "tests.actions:text"


class Run:
    """Runs graphs on a cluster from one store, with a remote through which the stores of the builder and the
    workers exchange results."""

    def __init__(self, cluster: Cluster, place: Path, name: str = "store") -> None:
        (place / "remote").mkdir(exist_ok=True)
        self.store = Store(place / name)
        self.remote = f"file://{place}/remote"
        self.address = cluster.address
        self.events: list[Event] = []

    def __call__(self, nodes: list[Node], *, shared: bool = True, **options: object) -> RunResult:
        sharing = Sharing(self.store, [Link(Remote(self.remote))] if shared else [])
        chosen = replace(Options(executor=self.address), **options)  # type: ignore[arg-type]
        return execute(Graph(nodes), self.store, chosen, self.events.append, sharing)

    def places(self, step: str) -> list[str]:
        return [e.worker for e in list(self.events) if isinstance(e, StepPlaced) and e.name == step]

    def warnings(self) -> str:
        return "\n".join(event.message for event in self.events if isinstance(event, Warned))


def an_order(place: Path) -> Order:
    image = Preimage(TEXT, {"text": "x"}, code_files("tests.actions"), {"tool": "1"}, {})
    argument = OrderInput((Entry("a/b", "0" * 64, 3),), "/no/such/place")
    remotes = (Remote(f"file://{place}", "readwrite", trust=("ed25519:x",)),)
    return Order("run", image.key(), BuildInfo("step", image), {"of": argument}, 2, False, remotes)
