"""Draws the quantization schemes that were chosen for the matrices of a model under a budget, a limit of
size, bits or loss: the bits of each matrix, and loss against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mlcbuild_format import sizes

from mlcbuild.reports.chart import Curve, Panel, panels

_CELL, _ROW, _LEFT, _TOP = 92.0, 18.0, 64.0, 22.0
MOST_ROWS = 200
"""Maximum number of rows, one for each layer, in the SVG table that shows how many bits a weight has in each
matrix of a model whose quantization schemes were chosen under a budget. Further rows are left out."""


def picture(budget: Mapping[str, Any]) -> str:
    """Returns HTML about the schemes that were chosen for a model's matrices under a budget: a sentence, an
    SVG chart of loss against size, and an SVG table of the bits of each matrix. budget: the content of
    budget.json."""
    limit = sizes.show(float(budget["limit"])) if budget["kind"] == "max_size" else f"{budget['limit']}"
    words = (
        f"{budget['kind']} {limit}: {budget['bits']:g} bits a weight, {sizes.show(budget['bytes'])}, KL "
        f"{budget['kl']:g} nats over {budget['tokens']} tokens; scheme {budget['scheme']}"
    )
    curve = [(size / 1e6, loss) for size, loss in budget["curve"]]
    chosen = [(budget["bytes"] / 1e6, budget["kl"])]
    lines = (Curve("sum of the losses of all matrices", curve), Curve("chosen, measured as a whole", chosen))
    panel = Panel("KL against size", "MB", "nats", lines)
    return (
        f"<p>{escape(words)}</p>\n<div class=plots><div>{panels([panel])}</div>"
        f"<div>{bits_of_matrices(budget['matrices'])}</div></div>"
    )


def bits_of_matrices(matrices: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG with a row for each layer of a model and one for the matrices outside of layers, and a
    cell for each matrix, which shows the matrix's bits per weight, darker for more bits. Rows after the first
    200 are left out. matrices: entries of budget.json with name, bits, scheme and bytes."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for matrix in matrices:
        first, *rest = matrix["name"].split(".", 2)
        row, kind = (f"layer {rest[0]}", rest[1]) if first == "layers" else ("", matrix["name"])
        rows.setdefault(row, {})[kind] = matrix
    shown = list(rows.items())[:MOST_ROWS]
    kinds = list(dict.fromkeys(kind for row, cells in shown if row for kind in cells))
    outside = list(rows.get("", {}))
    body, y = [], _TOP
    for x, kind in enumerate(kinds):
        body.append(f'<text x="{_LEFT + x * _CELL:.0f}" y="14" fill="#5d6877">{escape(kind)}</text>')
    for row, cells in shown:
        body.append(f'<text x="0" y="{y + 13:.0f}" fill="#5d6877">{escape(row)}</text>')
        for x, kind in enumerate(kinds if row else outside):
            if kind in cells:
                body.append(_cell(cells[kind], _LEFT + x * _CELL, y, kind if not row else ""))
        y += _ROW
    width = _LEFT + max(len(kinds), len(outside), 1) * _CELL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y + 4:.0f}" '
        f'viewBox="0 0 {width:.0f} {y + 4:.0f}" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="11.5">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _cell(matrix: Mapping[str, Any], x: float, y: float, title: str) -> str:
    """Returns the SVG cell of one matrix of a model with its upper left corner at (x, y), in pixels. matrix:
    its name, bits per weight, scheme and bytes; title: text before the number of bits, or ""."""
    bits = float(matrix["bits"])
    share = min(max((bits - 2) / 8, 0.0), 1.0)
    red, green, blue = (round(255 - share * (255 - dark)) for dark in (31, 79, 143))
    ink = "#ffffff" if share > 0.45 else "#1c2330"
    tip = escape(f"{matrix['name']}: {matrix['scheme']}, {sizes.show(matrix['bytes'])}")
    text = f"{title} {bits:.4g}".strip()
    return (
        f'<g><title>{tip}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_CELL - 3:.0f}" '
        f'height="{_ROW - 2:.0f}" rx="3" fill="#{red:02x}{green:02x}{blue:02x}"/>'
        f'<text x="{x + 5:.0f}" y="{y + 12:.0f}" fill="{ink}">{escape(text)}</text></g>'
    )
