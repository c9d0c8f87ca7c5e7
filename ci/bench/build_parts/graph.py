"""Builds chains of ten steps, each a copy of the previous file, with mlcbuild's graph and no recipe:
`graph.py plan|run COUNT`, in the directory of the chains.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

CHAIN = 10


def copy(params: Mapping[str, object], inputs: Mapping[str, Path], out: Path) -> None:
    """Action: copies a file, as `cp` does for the other tools. params["number"] makes each copy a different
    step.
    """
    (before,) = inputs["before"].iterdir() if inputs["before"].is_dir() else (inputs["before"],)
    (out / "copy").write_bytes(before.read_bytes())


def main(verb: str, count: str) -> int:
    from mlcbuild.build.execute import Options, execute
    from mlcbuild.build.graph import Graph, Input, Node, Source, Step
    from mlcbuild.build.plan import plan
    from mlcbuild.store.store import Store

    nodes: list[Node] = [Source("source", Path("in").absolute(), ("source",))]
    for number in range(int(count)):
        before = "source" if number % CHAIN == 0 else str(number - 1)
        nodes.append(Step(str(number), "graph:copy", {"number": number}, {"before": Input(before)}))
    graph, store = Graph(nodes), Store(Path("store"))
    if verb == "plan":
        return 0 if len(plan(graph, store).steps) == int(count) else 1
    return execute(graph, store, Options(jobs=2)).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
