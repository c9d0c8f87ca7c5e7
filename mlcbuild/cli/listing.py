"""Verbs that list targets, families, schemes and schemas, and that check this machine."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild import machine
from mlcbuild.errors import MlcbuildError, StoreError, safe_lines


def show(as_json: bool, document: object, lines: Sequence[str]) -> None:
    """Prints one JSON document, or lines of text. Control characters are escaped in both."""
    if not as_json:
        print(safe_lines("\n".join(lines)))
        return
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print("\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n")))


def _escaped(line: str) -> str:
    """Returns a line of JSON with unprintable characters escaped, which can only occur in strings."""
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the columns of rows; the last column is not padded."""
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


@dataclass(frozen=True)
class Check:
    """The result of one check of `doctor`."""

    name: str
    ok: bool
    message: str


def doctor(arguments: argparse.Namespace) -> int:
    """Checks this machine; the exit code is 3 when a requirement is missing."""
    checks = [_attempt(name, function, arguments) for name, function in CHECKS.items()]
    document = [{"name": check.name, "ok": check.ok, "found": check.message} for check in checks]
    rows = [("ok  " if check.ok else "FAIL", check.name, check.message) for check in checks]
    show(arguments.json, document, table(rows))
    return 0 if all(check.ok for check in checks) else 3


def _attempt(name: str, check: Callable[[argparse.Namespace], str], arguments: argparse.Namespace) -> Check:
    try:
        return Check(name, True, check(arguments))
    except (MlcbuildError, OSError, PackageNotFoundError) as error:
        return Check(name, False, str(error))


def _python(_: argparse.Namespace) -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _machine(_: argparse.Namespace) -> str:
    return f"{machine.cores()} cores, {sizes.show(machine.memory())} to share among steps"


def _host(_: argparse.Namespace) -> str:
    from mlcbuild.targets.presets import HOST, resolve

    host = resolve(HOST)
    return f"{host.triple} {host.cpu} {' '.join(host.features)}".rstrip()


def _compiler(_: argparse.Namespace) -> str:
    return f"apache-tvm {version('apache-tvm')}"


def _linker(_: argparse.Namespace) -> str:
    from mlcbuild.compiler.cpu.toolchain import linker_identity
    from mlcbuild.targets.presets import HOST, resolve

    return linker_identity(resolve(HOST))


def _crosses(_: argparse.Namespace) -> str:
    """Returns a description of the presets for which this machine can link code; none of them is required."""
    from mlcbuild.compiler.cpu.toolchain import linker_identity
    from mlcbuild.errors import SetupError
    from mlcbuild.targets.presets import presets

    def linkable(name: str) -> bool:
        try:
            linker_identity(presets()[name])
        except SetupError:
            return False
        return True

    names: Mapping[bool, list[str]] = {True: [], False: []}
    for name in presets():
        names[linkable(name)].append(name)
    without = f"; no linker for {', '.join(names[False])}" if names[False] else ""
    return f"can link {', '.join(names[True])}{without}"


def _store(arguments: argparse.Namespace) -> str:
    from mlcbuild.store.store import default_root

    root = Path(arguments.store).absolute() if arguments.store else default_root()
    place = root
    while not place.exists():
        place = place.parent
    try:
        # Checking permissions does not suffice: a filesystem may still refuse to write.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = f"{root}: cannot be written ({error.strerror})"
        raise StoreError(f"{why}; set MLCBUILD_STORE to a directory of yours") from None
    return f"{root} ({sizes.show(shutil.disk_usage(place).free)} free)"


CHECKS: Mapping[str, Callable[[argparse.Namespace], str]] = {
    "python": _python,
    "machine": _machine,
    "host target": _host,
    "compiler": _compiler,
    "linker": _linker,
    "presets": _crosses,
    "store": _store,
}
