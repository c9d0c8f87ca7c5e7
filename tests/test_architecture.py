"""The direction of imports, as a table, and what a light command may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILDER, RUNTIME = ROOT / "mlcbuild", ROOT / "runtime" / "mlcbuild_runtime"

# What each module may import of ours. A package (models, recipe, compiler ...) is one module here; its parts
# import each other freely, without circles. Everyone may import errors and canon.
BUILDER_TABLE: Mapping[str, str] = {
    "errors": "",
    "canon": "",
    "progress": "",
    "machine": "",
    "host": "",
    "hub": "",
    # describing a build
    "models": "",
    "quant": "models",
    "document": "",
    "schema": "document",
    "targets": "document host schema",
    "recipe": "document hub publish quant remotes schema targets",
    # running one; knows nothing of models
    "graph": "",
    "links": "",
    "locks": "",
    "signals": "",
    "staging": "locks",
    "records": "",
    "statcache": "",
    "store": "links locks records staging statcache",
    "upkeep": "links locks records staging store",
    "export": "links locks records staging store",
    "events": "records",
    "keyfile": "",
    "provenance": "keyfile",
    "remotes": "keyfile records store",
    "archive": "keyfile records remotes staging store",
    "publish": "hub provenance remotes",
    "plan": "events graph records remotes store",
    "picture": "graph plan",
    "report": "events",
    "worker": "links progress records staging store",
    "executors": "events graph machine worker",
    "cluster": "events executors graph keyfile links records remotes signals staging store worker",
    "transfer": "events records remotes",
    "schedule": "graph plan",
    "notes": "events graph plan records",
    "capacity": "cluster executors graph locks plan remotes schedule signals staging",
    "demand": "capacity events graph plan remotes staging transfer worker",
    "execute": (
        "capacity demand events graph locks notes plan remotes schedule signals staging store transfer worker"
    ),
    # the work itself; knows nothing of graphs and stores
    "fetch": "hub progress",
    "lock": "document fetch hub",
    "shards": "quant",
    "checkpoint": "models quant shards",
    "weights": "checkpoint models progress quant shards",
    "reference": "models",
    "compiler": "models quant targets",
    "bundle": "",
    "verify": "models reference weights",
    "footprint": "",
    # both together
    "pipeline": "bundle compiler fetch graph hub lock machine models quant recipe targets verify",
    "emit": "export graph keyfile pipeline provenance records store",
    "runlog": "events graph store",
    "chart": "report",
    "bench": "chart",
    "page": "chart graph picture report runlog",
    "ci": "events execute graph hub pipeline plan remotes report runlog store targets",
    "cli": (
        "archive bench bundle ci cluster compiler emit events execute footprint graph keyfile links "
        "lock machine models page picture pipeline plan provenance publish quant receipt recipe records "
        "remotes report runlog schema statcache store targets upkeep"
    ),
    "receipt": "",
    "__main__": "cli receipt",
}
RUNTIME_TABLE: Mapping[str, str] = {
    "errors": "",
    "fields": "",
    "signature": "",
    "binary": "",
    "sampling": "step",
    "weights": "fields",
    "bundle": "binary fields signature weights",
    "library": "bundle fields signature",
    "machine": "bundle",
    "tensors": "signature weights",
    "step": "",
    "vm": "binary bundle library machine sampling step tensors threads",
    "template": "fields",
    "vocabulary": "fields",
    "text": "bundle fields template vocabulary",
    "pages": "",
    "trial": "",
    "expressions": "",
    "places": "expressions",
    "grammar": "places step trial vocabulary",
    "pooling": "bundle",
    "request": "bundle grammar pooling sampling",
    "tree": "",
    "drafts": "tree",
    "choosing": "grammar request sampling step",
    "sequence": "choosing drafts grammar pages pooling request sampling step text tree",
    "bursts": "sampling sequence step vm",
    "speculation": "drafts sequence step text tree vm",
    "admission": "bundle request vm",
    "role": "bundle drafts threads",
    "schedule": "pages sequence tree",
    "trace": "",
    "accesslog": "request",
    "threads": "",
    "modes": "bundle machine",
    "engine": (
        "admission bursts grammar pages request role sampling schedule sequence speculation step text "
        "threads trace vm"
    ),
    "models": "bundle engine fields modes request role text trace vm",
    "body": "fields",
    "intake": "body fields",
    "messages": "body fields template",
    "formats": "body fields grammar",
    "calls": "fields vocabulary",
    "tools": "body calls fields formats grammar template",
    "api": "body bundle fields formats grammar messages sampling template tools",
    "replies": "calls fields request sampling vocabulary",
    "service": "api body calls engine fields messages replies request tools",
    "responses": "api body fields formats tools",
    "outputs": "calls fields replies request",
    "history": "fields outputs responses service",
    "embeddings": "api body engine fields pooling request",
    "openapi": "api body embeddings fields responses service",
    "answers": "engine request service",
    "local": "answers drafts embeddings engine fields history outputs request responses role service text vm",
    "metrics": "request",
    "access": "",
    "keys": "replies",
    "server": (
        "access accesslog answers body embeddings engine fields history intake keys metrics models openapi "
        "outputs replies request responses service"
    ),
    "connection": "",
    "serve": "access bundle connection drafts models modes role server trace",
    "chat": "api engine fields request text vm",
    "arguments": "access bundle drafts modes serve",
    "__main__": "arguments serve",
}
SHARED = {"errors", "canon"}
"""Anyone's."""
FORMAT_USERS = {"bench", "bundle", "compiler", "weights", "verify", "footprint", "cli", "publish"}
"""Modules of the builder that may import the runtime: they write or load what it reads."""


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_uses(package: Path, of: str) -> dict[str, set[str]]:
    """First part of each module's name -> first parts of the modules of package `of` that it imports."""
    known = {name.partition(".")[0] for name in modules(package if package.name == of else RUNTIME)}
    uses: dict[str, set[str]] = {}
    for name, path in modules(package).items():
        first = name.partition(".")[0]
        found = {item.split(".")[1] for item in imports(path) if item.split(".")[0] == of and "." in item}
        uses.setdefault(first, set()).update(found & known - {first})
    return uses


@pytest.mark.parametrize(("package", "table"), [(BUILDER, BUILDER_TABLE), (RUNTIME, RUNTIME_TABLE)])
def test_imports_follow_the_table(package: Path, table: Mapping[str, str]) -> None:
    allowed = {name: set(text.split()) | SHARED for name, text in table.items()}
    uses = top_level_uses(package, package.name)
    uses.pop("", None)
    assert set(uses) == set(table), "the table lists exactly the modules that exist"
    wrong = {name: found - allowed[name] for name, found in uses.items() if found - allowed[name]}
    assert not wrong
    unused = {name: set(text.split()) - uses[name] for name, text in table.items()}
    assert not {name: extra for name, extra in unused.items() if extra}, (
        "the table allows no more than is used"
    )


@pytest.mark.parametrize("package", [BUILDER, RUNTIME])
def test_imports_have_no_circles(package: Path) -> None:
    known = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        parts = (item.split(".", 1) for item in imports(path))
        found = {rest[0] for top, *rest in parts if top == package.name and rest}
        # `from package import name` names a module, or something inside one.
        edges[name] = {item if item in known else item.rpartition(".")[0] for item in found} - {name, ""}
    list(TopologicalSorter(edges).static_order())


def test_only_the_right_modules_know_the_runtime() -> None:
    users = {name for name, found in top_level_uses(BUILDER, "mlcbuild_runtime").items() if found}
    assert users == FORMAT_USERS


def test_the_runtime_knows_no_builder_and_no_compiler() -> None:
    for path in modules(RUNTIME).values():
        assert not {"mlcbuild", "tvm", "torch"} & {name.split(".")[0] for name in imports(path)}, path


def test_tvm_is_imported_only_by_the_compiler() -> None:
    for name, path in modules(BUILDER).items():
        if not name.startswith("compiler"):
            assert not {"tvm", "tvm_ffi"} & {item.split(".")[0] for item in imports(path)}, path


def test_tvm_ffi_is_imported_only_by_vm() -> None:
    users = [
        name for name, path in modules(RUNTIME).items() if any(i.startswith("tvm_ffi") for i in imports(path))
    ]
    assert users == ["vm"]


def loaded_by(*command: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a command line of ours."""
    code = (
        "import json, sys; from mlcbuild.cli import main; code = main(sys.argv[1:]);"
        "print(json.dumps([code, sorted(name for name in sys.modules if '.' not in name)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    code_and_names = json.loads(done.stderr.splitlines()[-1])
    return set(code_and_names[1])


HEAVY = {
    "tvm",
    "tvm_ffi",
    "numpy",
    "networkx",
    "dask",
    "distributed",
    "rich",
    "huggingface_hub",
    "sentencepiece",
    "starlette",
}


@pytest.mark.parametrize("command", [[], ["--help"], ["run", "--help"], ["rnu"], ["publish", "--help"]])
def test_light_commands_load_nothing_heavy(command: list[str]) -> None:
    assert not HEAVY & loaded_by(*command)


def test_a_wrong_recipe_is_answered_without_heavy_packages(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nmodels: {a: ./nowhere}\nquantizations: [q4f61]\ntargets: [host]\n")
    assert not HEAVY & loaded_by("validate", str(recipe))


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in (BUILDER, RUNTIME)
        for path in package.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert set(long) <= {"mlcbuild/store.py"}, "a longer file needs a reason here"
