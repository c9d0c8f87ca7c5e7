"""Verbs that list targets, families, schemes and schemas, and that check this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mlcbuild.errors import safe_lines


def show(as_json: bool, document: object, lines: Sequence[str]) -> None:
    """Prints a JSON document if `as_json` is True, else lines of text. Unprintable characters are escaped in
    both."""
    if not as_json:
        print(safe_lines("\n".join(lines)))
        return
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print("\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n")))


def _escaped(line: str) -> str:
    """Returns a line of JSON text with each unprintable character, which can only occur inside a string,
    replaced by its JSON escape."""
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as a text table with aligned columns, and returns its lines. The last column is
    not padded. All rows must have the same number of cells, and there must be at least one row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def targets(arguments: argparse.Namespace) -> int:
    from mlcbuild.targets.presets import HOST, presets, resolve
    from mlcbuild.targets.target import to_json

    host = resolve(HOST)
    all_targets = {**presets(), HOST: host}
    rows = [("name", "triple", "cpu", "features")]
    rows += [(name, t.triple, t.cpu, " ".join(t.features)) for name, t in all_targets.items()]
    show(arguments.json, {name: to_json(target) for name, target in all_targets.items()}, table(rows))
    return 0


def models(arguments: argparse.Namespace) -> int:
    from mlcbuild.models.parsing import family_names, load_family

    rows = [(name, load_family(name).architecture) for name in family_names()]
    show(
        arguments.json,
        {name: {"architecture": text} for name, text in rows},
        table([("model_type", "architecture"), *rows]),
    )
    return 0


def schemes(arguments: argparse.Namespace) -> int:
    from mlcbuild.quant.format import layouts
    from mlcbuild.quant.schemes import SCHEMES

    rows = [("name", "format", "bits per weight", "group", "storage", "activations", "layouts")]
    document = {}
    for name, scheme in SCHEMES.items():
        offered = layouts(scheme.format)
        form = next(iter(offered.values()))
        activations = f"int{scheme.activation_bits}" if scheme.activation_bits else "float"
        size, group = f"{form.bits_per_weight:g}", str(form.group_size or "-")
        rows.append((name, scheme.format, size, group, form.dtype, activations, ", ".join(offered)))
        document[name] = {
            "format": scheme.format,
            "bits": form.bits,
            "bits_per_weight": size,
            "group_size": form.group_size,
            "dtype": form.dtype,
            "activation_bits": scheme.activation_bits,
            "layouts": list(offered),
        }
    show(arguments.json, document, table(rows))
    return 0


def schema(arguments: argparse.Namespace) -> int:
    from mlcbuild.documents.schema import schema as published

    print(json.dumps(published(arguments.kind), indent=2, ensure_ascii=False))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Runs the verb `doctor`: prints the result of each check of this machine. The exit code is 3 if a check
    failed, else 0."""
    from mlcbuild.doctor import checks

    results = checks(Path(arguments.store).absolute() if arguments.store else None)
    document = [{"name": check.name, "ok": check.ok, "found": check.message} for check in results]
    rows = [("ok  " if check.ok else "FAIL", check.name, check.message) for check in results]
    show(arguments.json, document, table(rows))
    return 0 if all(check.ok for check in results) else 3
