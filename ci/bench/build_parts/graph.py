"""Builds chains of ten steps, each a copy of the previous file, with mlcbuild's graph and no recipe:
`graph.py plan|run|push|pull COUNT`, in the directory of the chains. push fills a cache in a directory from
the store; pull takes every result from it into another store.
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
    from mlcbuild.remotes import Remote
    from mlcbuild.remotes.link import Link
    from mlcbuild.remotes.sharing import Sharing
    from mlcbuild.replication import pull, push, stored
    from mlcbuild.store.store import Store

    nodes: list[Node] = [Source("source", Path("in").absolute(), ("source",))]
    for number in range(int(count)):
        before = "source" if number % CHAIN == 0 else str(number - 1)
        nodes.append(Step(str(number), "graph:copy", {"number": number}, {"before": Input(before)}))
    graph, cache = Graph(nodes), Remote(Path("cache").absolute().as_uri())
    if verb == "plan":
        return 0 if len(plan(graph, Store(Path("store"))).steps) == int(count) else 1
    if verb == "push":
        Path("cache").mkdir()
        store = Store(Path("store"))
        return 0 if push(store, stored(store), [cache], None).ok else 1
    if verb == "pull":
        store = Store(Path("fresh"))
        actual = plan(graph, store, sharing=Sharing(store, [Link(cache)]))
        return 0 if pull(store, actual, [cache]).fetched == int(count) else 1
    return execute(graph, Store(Path("store")), Options(jobs=2)).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
