"""Groups the steps of a drawn graph into lanes: one for each model, one for the steps that models share."""

from __future__ import annotations

from collections.abc import Mapping

from mlcbuild.build.graph import Graph, Source

SHARED = "shared by models"
"""Title, in a drawing of a recipe's steps, of the group of those steps that several models share or that no
model needs."""


def lanes(graph: Graph) -> dict[str, str]:
    """Returns name of a step or source -> title of the group (lane) in which it is drawn: the model that
    alone needs it, or SHARED; with fewer than two models, "" for all. Compiling a library from a model's
    config does not count as need, since models may share the library."""
    models = {name.split("/")[1] for name in graph.nodes if name.startswith("weights/")}
    if len(models) < 2:
        return dict.fromkeys(graph.nodes, "")
    products = _products(graph)
    owners: dict[str, set[str]] = {}
    for name in reversed(graph.nodes):
        if name in products:
            owners[name] = {products[name]}
            continue
        named_models = {part for part in name.split("/")[1:2] if part in models}
        # A config is also read to compile the library, which models share; the config is not shared by that.
        users = [user for user in graph.users[name] if not (named_models and user.startswith("library/"))]
        owners[name] = named_models.union(*(owners[user] for user in users))
    return {name: min(owners[name]) if len(owners[name]) == 1 else SHARED for name in graph.nodes}


def _products(graph: Graph) -> Mapping[str, str]:
    """Returns name of each step that builds a bundle, or depends on such a step directly or indirectly ->
    name of the model whose weights the bundle has. If there are several models, the first in the order of the
    step's dependencies counts."""
    products: dict[str, str] = {}
    for name, node in graph.nodes.items():
        for need in () if isinstance(node, Source) else graph.needs(node):
            if need in products:
                products.setdefault(name, products[need])
            elif need.startswith("weights/") and name.startswith("bundle/"):
                products.setdefault(name, need.split("/")[1])
    return products
