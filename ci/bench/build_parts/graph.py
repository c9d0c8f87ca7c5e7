"""Builds chains of ten steps, each of which copies a file, with mlcbuild's own graph and no recipe, to
compare its speed with other build tools: `graph.py run|plan|push|pull COUNT`, with COUNT steps in all.

The working directory has the file in/source. run builds all steps into the directory store, plan only plans
them, push copies the results from store to a cache in the new directory cache, and pull copies them from
there into another store, the directory fresh. The exit code is 0 only if all COUNT steps are built, planned,
pushed or pulled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

CHAIN = 10


def copy(params: Mapping[str, object], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step in a benchmark: copies its one input file to the file copy in `out`, as `cp`
    does in the builds of the other tools. The parameter "number" is not used; it makes each copy a step of
    its own.
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
