"""Builds one of several known graphs: `python -m tests.builder STORE GRAPH [NOTE [EXECUTOR [REMOTE]]]`.

Prints the result as one JSON document on standard output, and events as plain lines on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.canon import Json
from mlcbuild.errors import MlcbuildError
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import TIMEOUT
from mlcbuild.reports.report import document, reporting
from mlcbuild.store.store import Store

TEXT = "tests.actions:text"


def chain(note: str) -> list[Node]:
    """Returns twelve short build steps in three layers of four; each depends on all steps of the layer
    before. A step appends a line to the file `note` when it runs."""
    nodes: list[Node] = []
    for layer in range(3):
        for index in range(4):
            needs = {f"in{n}": Input(f"{layer - 1}/{n}") for n in range(4)} if layer else {}
            params: dict[str, Json] = {"text": f"{layer}/{index}", "sleep_ms": 15, "count": note}
            nodes.append(Step(f"{layer}/{index}", TEXT, params, needs))
    return nodes


def shared(note: str) -> list[Node]:
    """Returns two steps that wait until the file `<note>.gate` exists, so that two builders are certain to
    run at the same time, and a step that depends on both."""
    params: dict[str, Json] = {"count": note, "gate": f"{note}.gate"}
    first: list[Node] = [Step(f"a{n}", TEXT, {"text": f"a{n}", **params}, {}) for n in range(2)]
    return [*first, Step("b", TEXT, {"text": "b", "count": note}, {"x": Input("a0"), "y": Input("a1")})]


def holding(note: str) -> list[Node]:
    """Returns a step that ends at once, and one after it that runs until it is killed."""
    return [
        Step("quick", TEXT, {"text": "quick"}, {}),
        Step("held", "tests.actions:hold", {"note": note}, {"x": Input("quick")}),
    ]


def heavy(directory: str) -> list[Node]:
    """Returns the source and nine build steps in three layers. The steps of the first layer read the file
    `data` of `directory`, the others all results of the layer before. They write files so large that sending
    them is slow."""
    nodes: list[Node] = [Source("data", Path(directory), ("data",))]
    for layer in range(3):
        for index in range(3):
            needs = (
                {f"in{n}": Input(f"{layer - 1}/{n}") for n in range(3)} if layer else {"in": Input("data")}
            )
            nodes.append(Step(f"{layer}/{index}", "tests.actions:stir", {"salt": f"{layer}/{index}"}, needs))
    return nodes


def main(place: str, graph: str, note: str = "", executor: str = "pool", remote: str = "") -> int:
    nodes = {"chain": chain, "shared": shared, "holding": holding, "heavy": heavy}[graph](note)
    store = Store(Path(place))
    timeout = float(os.environ.get("MLCBUILD_TEST_TIMEOUT", TIMEOUT))
    sharing = Sharing(store, [Link(Remote(remote), timeout=timeout)] if remote else [])
    options = Options(jobs=2, executor=executor, handle_signals=True)
    with reporting(sys.stderr, plain=True) as report:
        try:
            result = execute(Graph(nodes), store, options, report, sharing)
        except MlcbuildError as error:  # printed as the command line prints it
            sys.stderr.write(f"{error}\n")
            return error.exit_code
    sys.stdout.write(json.dumps(document(result)) + "\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
