"""Tests of the picture that shows the quantization chosen within a size budget: a row for each layer, a cell
for each matrix, darker for more bits."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from mlcbuild.reports import budget_picture

SVG = "{http://www.w3.org/2000/svg}"


def matrix(name: str, bits: float) -> dict[str, Any]:
    return {"name": name, "bits": bits, "scheme": "q<4>", "bytes": 1000}


MATRICES = [
    matrix("embed.weight", 8.5),
    *(matrix(f"layers.{i}.{kind}.weight", 4.5 + i) for i in range(3) for kind in ("attn", "mlp")),
]


def test_cells_are_in_the_row_of_their_layer_and_darker_for_more_bits() -> None:
    root = ElementTree.fromstring(budget_picture.bits_of_matrices(MATRICES))
    cells = root.findall(f"{SVG}g")
    assert len(cells) == len(MATRICES)
    rows: dict[str, set[str]] = {}
    shades: dict[float, str] = {}
    for cell in cells:
        (title,), (rect,) = cell.findall(f"{SVG}title"), cell.findall(f"{SVG}rect")
        name = (title.text or "").partition(":")[0]
        rows.setdefault(rect.get("y", ""), set()).add(".".join(name.split(".")[:2]))
        bits = next(item["bits"] for item in MATRICES if item["name"] == name)
        shades[bits] = rect.get("fill", "")
    assert sorted(rows.values(), key=sorted) == [{"embed.weight"}, {"layers.0"}, {"layers.1"}, {"layers.2"}]
    darkness = [sum(int(shades[bits][i : i + 2], 16) for i in (1, 3, 5)) for bits in sorted(shades)]
    assert darkness == sorted(darkness, reverse=True) and len(set(darkness)) == len(darkness)


def test_a_large_model_shows_its_first_layers() -> None:
    many = [matrix(f"layers.{i}.mlp.weight", 4.5) for i in range(budget_picture.MOST_ROWS + 50)]
    root = ElementTree.fromstring(budget_picture.bits_of_matrices(many))
    assert len(root.findall(f"{SVG}g")) == budget_picture.MOST_ROWS


def test_the_sentence_states_the_budget_and_its_result() -> None:
    budget = {
        "kind": "max_size", "limit": 2e6, "bits": 4.51, "bytes": 1_500_000, "kl": 0.0125, "tokens": 99,
        "scheme": "q<4>", "curve": [(1e6, 0.5), (2e6, 0.01)], "matrices": MATRICES,
    }  # fmt: skip
    text = budget_picture.picture(budget)
    assert text.startswith("<p>max_size 2.0 MB: 4.51 bits a weight, 1.5 MB, KL 0.0125 nats over 99 tokens")
    assert "q<4>" not in text and "q&lt;4&gt;" in text
    assert budget_picture.picture({**budget, "kind": "target_bits", "limit": 5}).startswith(
        "<p>target_bits 5:"
    )
