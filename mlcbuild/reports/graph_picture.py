"""Draws a graph of build steps as Mermaid, Graphviz, or self-contained SVG or HTML.

The layout is the classical one for layered graphs (Sugiyama, Tagawa, Toda 1981): each node is in a later
layer than all its dependencies, repeated barycentre sweeps order the layers to avoid crossings, and positions
are then pulled towards neighbours without overlaps. Layers are columns, read from left to right. Each model
has rows of its own, below those of the steps that models share. Edges pass between the boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from html import escape

from mlcbuild.build.graph import Graph, Source
from mlcbuild.build.plan import Plan
from mlcbuild.reports import graph_edges, graph_view
from mlcbuild.reports.graph_edges import GAP_X, GAP_Y, HEIGHT, Box
from mlcbuild.reports.graph_lanes import SHARED, lanes

_COLOURS = {
    "source": ("#eef1f5", "#8a94a3"),
    "hit": ("#e3f4e6", "#3d9a50"),
    "run": ("#fdeed6", "#d08718"),
    "remote": ("#e4e9fb", "#5a70c8"),
    "pending": ("#fdf8e4", "#c9b458"),
    "built": ("#fdeed6", "#d08718"),
    "reused": ("#e3f4e6", "#3d9a50"),
    "failed": ("#fbe3e1", "#c8453b"),
    "skipped": ("#f1f1f1", "#b0b0b0"),
    "": ("#ffffff", "#8a94a3"),
}
"""State of a step in a plan or a run, "source" for a source, or "" for no state -> (fill colour, border
colour) as #rrggbb."""

_WORDS = {
    "source": "source",
    "hit": "stored",
    "remote": "shared",
    "run": "runs",
    "pending": "waits",
    "built": "built",
    "reused": "reused",
    "failed": "failed",
    "skipped": "skipped",
}
_CHAR, _MARGIN = 7.0, 24.0
_TITLE = 26.0
"""Height in pixels of the title above a lane of a drawing: the steps of one model, or those that models
share."""
_SWEEPS = 12


def mermaid(graph: Graph, plan: Plan | None = None) -> str:
    """Returns a graph of steps as Mermaid text, which GitHub and GitLab show as a diagram, with sources in a
    colour of their own. plan: adds the states of the steps as colours; None: they are not shown."""
    number = {name: f"n{index}" for index, name in enumerate(graph.nodes)}
    states = _states(graph, plan)
    lines = ["flowchart LR"]
    lines += [f'  {number[name]}["{_mermaid_text(name)}"]' for name in graph.nodes]
    lines += [f"  {number[name]} --> {number[user]}" for name, users in graph.users.items() for user in users]
    for state in sorted(set(states.values()) - {""}):
        fill, border = _COLOURS[state]
        members = ",".join(number[name] for name, step_state in states.items() if step_state == state)
        lines += [
            f"  classDef {state} fill:{fill},stroke:{border},color:#1c2330",
            f"  class {members} {state}",
        ]
    return "\n".join(lines) + "\n"


def _mermaid_text(name: str) -> str:
    return name.replace("#", "#35;").replace('"', "#quot;")


def dot(graph: Graph, plan: Plan | None = None) -> str:
    """Returns a graph of steps as text for Graphviz, with sources in a colour of their own. plan: adds the
    states of the steps as colours; None: they are not shown."""
    states = _states(graph, plan)
    lines = [
        "digraph plan {",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fontname="sans-serif"];',
    ]
    for name in graph.nodes:
        fill, border = _COLOURS[states[name]]
        lines.append(f'  "{_dot_text(name)}" [fillcolor="{fill}", color="{border}"];')
    for name, users in graph.users.items():
        lines += [f'  "{_dot_text(name)}" -> "{_dot_text(user)}";' for user in users]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_text(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def svg(graph: Graph, plan: Plan | None = None) -> str:
    """Returns an SVG document that shows a graph of steps. plan: adds the states of the steps as colours with
    a legend, and the reasons for them as tooltips; None: neither is shown.
    """
    reasons = {step.name: step.reason for step in plan.steps} if plan is not None else {}
    return drawing(graph, _states(graph, plan), reasons, legend=plan is not None)


def drawing(
    graph: Graph, states: Mapping[str, str], reasons: Mapping[str, str], *, legend: bool = True
) -> str:
    """Returns an SVG document that shows a graph of steps. states: name of every step and source -> its
    state, "" for none; reasons: name of a step -> the reason for its state, in words, which its tooltip
    shows; legend: True to explain, above the graph, the colours of the states that occur.

    Edges that follow from others are left out, for example fetch -> bundle if there is fetch -> weights ->
    bundle.
    """
    import networkx

    boxes = layout(graph)
    width = max((box.x + box.width for box in boxes.values()), default=0.0) + _MARGIN
    height = max((box.y + HEIGHT for box in boxes.values()), default=0.0) + _MARGIN
    shown = [state for state in _WORDS if state in states.values()]
    keys = "".join(_key(index, state) for index, state in enumerate(shown)) if legend else ""
    top = 36.0 if keys else 0.0
    edges = graph_edges.paths(boxes, networkx.transitive_reduction(graph.network).edges)
    numbers = {name: number for number, name in enumerate(boxes)}
    body = _bands(boxes, lanes(graph), width)
    body += [
        f'<path data-from="{numbers[name]}" data-to="{numbers[user]}" d="{path}" fill="none" '
        'stroke="#a9b3c1" stroke-width="1.1"/>'
        for (name, user), path in sorted(edges.items())
    ]
    for name, box in boxes.items():
        users = [user for user in graph.users[name] if user.startswith("bundle/")]
        shared = f"shared by {len(users)} bundles" if len(users) > 1 else ""
        words = "; ".join(filter(None, (reasons.get(name, ""), shared)))
        body.append(f'<g data-node="{numbers[name]}">{_node(name, box, states[name], words)}')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height + top:.0f}" '
        f'viewBox="0 0 {width:.0f} {height + top:.0f}" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n{keys}'
        f'<g transform="translate(0 {top:.0f})">\n' + "\n".join(body) + "\n</g>\n</svg>\n"
    )


def html(graph: Graph, plan: Plan | None = None, title: str = "mlcbuild plan") -> str:
    """Returns an HTML page with the SVG picture of a graph and, for a plan, a table with the reason for each
    step that is not a cache hit.
    """
    rows = "".join(
        f"<tr><td>{escape(step.name)}</td><td>{_WORDS[step.state]}</td><td>{escape(step.reason)}</td></tr>\n"
        for step in (plan.steps if plan is not None else ())
        if step.state != "hit"
    )
    table = f"<table><tr><th>step</th><th>state</th><th>why</th></tr>\n{rows}</table>" if rows else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{font:14px system-ui,sans-serif;margin:24px;color:#1c2330}"
        "table{border-collapse:collapse;margin-top:16px}td,th{text-align:left;padding:4px 16px 4px 0;"
        "border-bottom:1px solid #e2e6ec;vertical-align:top}"
        f"{graph_view.STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{graph_view.view(svg(graph, plan))}{table}</body></html>\n"
    )


def layout(graph: Graph) -> dict[str, Box]:
    """Returns name of a step or source -> its box (left edge, top, width, in pixels from the upper left
    corner of the picture), such that none overlap and every edge leads to the right. With several models, the
    steps of each form a lane, and lanes lie below each other."""
    layers, lane_of = _layers(graph), lanes(graph)
    rows: dict[str, float] = {}
    top = 0.0
    for lane in sorted(set(lane_of.values()), key=lambda title: (title != SHARED, title)):
        top += _TITLE if lane else 0.0
        part = [[name for name in layer if lane_of[name] == lane] for layer in layers]
        near = _neighbours(graph, {name for layer in part for name in layer})
        _untangle(part, near)
        positions = _straighten(part, near)
        rows.update({name: top + row for name, row in positions.items()})
        top += max(positions.values()) + HEIGHT + GAP_Y
    boxes: dict[str, Box] = {}
    x = _MARGIN
    for layer in layers:
        width = max(len(name) for name in layer) * _CHAR + 20
        for name in layer:
            boxes[name] = Box(x, _MARGIN + rows[name], width)
        x += width + GAP_X
    return boxes


def _bands(boxes: Mapping[str, Box], lane_of: Mapping[str, str], width: float) -> list[str]:
    """Returns SVG elements: the background and the title of each lane; [] without lanes. A lane holds
    the steps of one model, or those that models share. boxes: name of a node -> its place; lane_of: name of a
    node -> title of its lane; width: that of the picture in pixels."""
    bands = []
    for lane in sorted(set(lane_of.values()) - {""}):
        heights = [box.y for name, box in boxes.items() if lane_of[name] == lane]
        top, bottom = min(heights) - _TITLE + 4, max(heights) + HEIGHT + 4
        bands.append(
            f'<rect x="{_MARGIN / 2:.0f}" y="{top:.1f}" width="{width - _MARGIN:.1f}" '
            f'height="{bottom - top:.1f}" rx="8" fill="#f7f8fa"/>'
            f'<text x="{_MARGIN:.0f}" y="{top + 15:.1f}" font-weight="600" fill="#5b6575">'
            f"{escape(lane)}</text>"
        )
    return bands


def _layers(graph: Graph) -> list[list[str]]:
    """Returns the names of a graph's nodes in layers from left to right, each node to the right of all on
    which it depends. A node on which others depend is in the layer just before the first of these, and any
    other in the first layer that is possible."""
    depth: dict[str, int] = {}
    for step in graph.nodes.values():
        needs = [] if isinstance(step, Source) else graph.needs(step)
        depth[step.name] = 1 + max((depth[need] for need in needs), default=-1)
    for name in reversed(list(graph.nodes)):
        if graph.users[name]:
            depth[name] = min(depth[user] for user in graph.users[name]) - 1
    layers: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name, place in depth.items():
        layers[place].append(name)
    return [layer for layer in layers if layer]


def _neighbours(graph: Graph, names: Set[str]) -> dict[str, list[str]]:
    """Returns name of a node -> names of its neighbours in the graph: the nodes that depend on it directly,
    and those on which it depends directly. names: the nodes to consider; all others are absent from keys and
    values."""
    neighbours: dict[str, list[str]] = {name: [] for name in names}
    for name in graph.nodes:
        for user in graph.users[name]:
            if name in names and user in names:
                neighbours[name].append(user)
                neighbours[user].append(name)
    return neighbours


def _untangle(layers: list[list[str]], near: Mapping[str, list[str]]) -> None:
    """Orders the nodes in each layer, in place, by barycentre sweeps in both directions, so that few edges
    cross. layers: names of nodes; near: node -> its neighbours.
    """
    layer_of = {name: index for index, layer in enumerate(layers) for name in layer}
    place = {name: index / len(layer) for layer in layers for index, name in enumerate(layer)}
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for index in range(len(layers)) if forward else reversed(range(len(layers))):
            layer = layers[index]
            middle = {}
            for name in layer:
                side = [place[other] for other in near[name] if (layer_of[other] < index) == forward]
                middle[name] = sum(side) / len(side) if side else place[name]
            layer.sort(key=lambda name: (middle[name], name))
            place.update({name: (spot + 0.5) / len(layer) for spot, name in enumerate(layer)})


def _straighten(layers: list[list[str]], near: Mapping[str, list[str]]) -> dict[str, float]:
    """Returns name of a node -> the vertical position of its top, in pixels below that of the topmost node.
    Each node is placed near the mean position of its neighbours, and nodes of a layer keep their order.
    layers: names of nodes; near: node -> its neighbours.
    """
    pitch = HEIGHT + GAP_Y
    tallest = max((len(layer) for layer in layers), default=0)
    rows = {
        name: (index + (tallest - len(layer)) / 2) * pitch
        for layer in layers
        for index, name in enumerate(layer)
    }
    for _ in range(_SWEEPS):
        for layer in layers:
            wish = [
                sum(rows[o] for o in near[name]) / len(near[name]) if near[name] else rows[name]
                for name in layer
            ]
            rows.update(zip(layer, _spread(wish, pitch), strict=True))
    lowest = min(rows.values(), default=0.0)
    return {name: row - lowest for name, row in rows.items()}


def _spread(wish: list[float], pitch: float) -> list[float]:
    """Spreads nodes of a picture along one axis, in the order in which they are passed, so that neighbours
    are at least `pitch` pixels apart. wish: the position, in pixels, that each node would have without this
    rule. Returns one position for each node, those with the smallest sum of squared distances from `wish`.
    With the pitch subtracted this is isotonic regression, solved by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []  # pairs (mean, count)
    for index, value in enumerate(wish):
        mean, count = value - index * pitch, 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), count + more
        blocks.append((mean, count))
    flat = [mean for mean, count in blocks for _ in range(count)]
    return [value + index * pitch for index, value in enumerate(flat)]


def _states(graph: Graph, plan: Plan | None) -> Mapping[str, str]:
    plan_states = {step.name: step.state for step in plan.steps} if plan is not None else {}
    return {
        name: "source" if isinstance(node, Source) else str(plan_states.get(name, ""))
        for name, node in graph.nodes.items()
    }


def _node(name: str, box: Box, state: str, reason: str) -> str:
    fill, border = _COLOURS[state]
    tip = f"{name}: {_WORDS[state]}" + (f", {reason}" if reason else "") if state else name
    return (
        f'<title>{escape(tip)}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{HEIGHT:.0f}" rx="6" fill="{fill}" stroke="{border}" stroke-width="1.3"/>'
        f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + HEIGHT / 2 + 4:.1f}" text-anchor="middle" '
        f'fill="#1c2330">{escape(name)}</text></g>'
    )


def _key(index: int, state: str) -> str:
    fill, border = _COLOURS[state]
    x = _MARGIN + index * 90
    return (
        f'<rect x="{x:.0f}" y="14" width="14" height="14" rx="3" fill="{fill}" stroke="{border}"/>'
        f'<text x="{x + 20:.0f}" y="25" fill="#1c2330">{_WORDS[state]}</text>\n'
    )
