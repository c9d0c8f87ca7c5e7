"""Tests of the allowed directions of imports, which a table states, and of what light commands import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mlcbuild.canon import code_files
from mlcbuild.targets.backends import BACKENDS

pytestmark = pytest.mark.xdist_group("architecture")  # one process parses all modules
ROOT = Path(__file__).resolve().parent.parent
BUILDER = ROOT / "mlcbuild"
FORMAT, RUNTIME = ROOT / "runtime" / "mlcbuild_format", ROOT / "runtime" / "mlcbuild_runtime"
PACKAGES = {package.name: package for package in (BUILDER, FORMAT, RUNTIME)}

# What each room may import of ours: a room is a folder or a single file at the top of a package. The files
# of a room import each other freely, without circles. Everyone may import errors and canon.
BUILDER_TABLE: Mapping[str, str] = {
    "errors": "",
    "canon": "",
    "progress": "",
    "child_progress": "progress",
    "durations": "",
    "signals": "",
    "machine": "",
    "keyfile": "",
    # describing a build
    "documents": "",
    "models": "",
    "quant": "models",
    "targets": "documents models quant",
    "recipe": "bundles checkpoints documents quant remotes targets",
    # running one; knows nothing of models
    "store": "durations",
    "remotes": "checkpoints keyfile store",
    "build": "keyfile machine progress remotes signals store",
    "reports": "build durations store",
    # the work itself; knows nothing of graphs and stores
    "checkpoints": "documents models progress quant",
    "compiler": "child_progress models progress quant targets",
    "bundles": "checkpoints child_progress keyfile models progress quant remotes",
    # both together
    "scheme_fit": "models quant targets",
    "prospect": "build checkpoints models quant recipe scheme_fit targets",
    "weight_steps": "build checkpoints prospect quant recipe targets",
    "check_steps": "build bundles machine prospect recipe scheme_fit targets weight_steps",
    "pipeline": ("build bundles check_steps checkpoints models prospect quant recipe targets weight_steps"),
    "emit": "build bundles keyfile pipeline store",
    "serving_memory": "build bundles models pipeline quant scheme_fit store targets",
    "outcomes": "build emit keyfile pipeline reports store",
    "locking": "checkpoints pipeline prospect recipe",
    "selection": "build ci pipeline",
    "execution": "build",
    "replication": "build keyfile remotes store",
    "session": (
        "build bundles ci execution keyfile locking outcomes pipeline recipe remotes replication reports "
        "selection serving_memory signals store"
    ),
    "doctor": "compiler machine store targets",
    "installed": "build bundles checkpoints locking machine models quant session store targets",
    "bench": "bundles reports",
    "ci": "build checkpoints durations pipeline remotes reports signals store targets",
    "cli": (
        "bench build bundles ci compiler doctor documents durations installed keyfile locking machine models "
        "outcomes pipeline quant recipe remotes replication reports selection session store targets"
    ),
    "__main__": "cli store",
}
FORMAT_TABLE: Mapping[str, str] = {
    "errors": "fields",
    "strict_json": "",
    "fields": "strict_json",
    "signature": "",
    "regular": "",
    "files": "fields regular",
    "elf_image": "",
    "binary": "elf_image files",
    "versions": "",
    "safetensors": "fields regular",
    "weights": "fields files safetensors versions",
    "abi": "",
    "limits": "abi",
    "manifest": "fields limits",
    "program": "fields signature",
    "program_json": "fields program signature",
    "bundle": "binary fields files limits manifest signature weights",
    "library": "bundle fields signature versions",
    "sizes": "",
    "control_groups": "",
    "memory": "control_groups",
    "processors": "",
}
RUNTIME_TABLE: Mapping[str, str] = {
    "text": "",
    "executor": "",
    "constraints": "executor text",
    "devices": "executor",
    "untrusted": "executor text",
    "locations": "",
    "option_values": "",
    "release": "",
    "engine": "constraints executor locations text untrusted",
    "openai": "constraints engine executor text",
    "http": "engine openai option_values release",
    "local": "engine openai untrusted",
    "chat": "engine locations openai option_values release untrusted",
    "__main__": "http release",
}
SHARED = {"errors", "canon"}
"""Modules of the builder that every room (a directory of the package) may import."""
FORMAT_LEAVES = {"control_groups", "memory", "processors", "regular", "sizes", "strict_json"}
"""Modules of mlcbuild_format, the package shared by builder and runtime, that import only each other and do
not depend on bundles. Any room (directory) of the builder may import them."""
FORMAT_USERS = {"bench", "bundles", "checkpoints", "cli", "compiler"}
"""Rooms (directories) of the builder that may import every module of mlcbuild_format, the package shared with
the runtime, because they write or read files that the runtime loads."""
RUNTIME_USERS = {"bench", "bundles", "cli", "installed"}
"""Rooms (directories) of the builder that may import the runtime, because they run bundles. All others must
not."""


def modules(package: Path) -> dict[str, Path]:
    """Returns the Python modules in a package: dotted name below the package, such as "cli.build" -> its
    file."""
    by_name = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns the dotted name of everything that a file imports, at its top or inside functions."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_uses(package: Path, of: str) -> dict[str, set[str]]:
    """Returns which parts of one package import which parts of another. Key and values are the first parts of
    module names, such as "cli": part of `package` -> the parts of the package named `of` that its modules
    import, without itself."""
    names = {name.partition(".")[0] for name in modules(PACKAGES[of])}
    uses: dict[str, set[str]] = {}
    for name, path in modules(package).items():
        first = name.partition(".")[0]
        actual = {item.split(".")[1] for item in imports(path) if item.split(".")[0] == of and "." in item}
        uses.setdefault(first, set()).update(actual & names - {first})
    return uses


@pytest.mark.parametrize(
    ("package", "table"), [(BUILDER, BUILDER_TABLE), (FORMAT, FORMAT_TABLE), (RUNTIME, RUNTIME_TABLE)]
)
def test_imports_follow_the_table(package: Path, table: Mapping[str, str]) -> None:
    allowed = {name: set(text.split()) | SHARED for name, text in table.items()}
    uses = top_level_uses(package, package.name)
    uses.pop("", None)
    assert set(uses) == set(table), "the table lists exactly the modules that exist"
    wrong = {name: actual - allowed[name] for name, actual in uses.items() if actual - allowed[name]}
    assert not wrong
    unused = {name: set(text.split()) - uses[name] for name, text in table.items()}
    assert not {name: extra for name, extra in unused.items() if extra}, (
        "the table allows no more than is used"
    )


@pytest.mark.parametrize("package", PACKAGES.values(), ids=str)
def test_imports_have_no_circles(package: Path) -> None:
    entries = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in entries.items():
        parts = (item.split(".", 1) for item in imports(path))
        names = {rest[0] for top, *rest in parts if top == package.name and rest}
        # `from package import name` names a module, or something inside one.
        edges[name] = {item if item in entries else item.rpartition(".")[0] for item in names} - {name, ""}
    list(TopologicalSorter(edges).static_order())


@pytest.mark.parametrize("package", PACKAGES.values(), ids=str)
def test_rooms_have_no_circles(package: Path) -> None:
    list(TopologicalSorter(top_level_uses(package, package.name)).static_order())


def test_the_builder_uses_the_runtime_where_it_runs_bundles() -> None:
    leaves = {f"mlcbuild_format.{name}" for name in FORMAT_LEAVES}

    def users(of: str) -> set[str]:
        return {
            name
            for name, path in modules(BUILDER).items()
            if any(item.split(".")[0] == of and not leaves & _with_parents(item) for item in imports(path))
        }

    assert {name.partition(".")[0] for name in users("mlcbuild_format")} == FORMAT_USERS
    assert {name.partition(".")[0] for name in users("mlcbuild_runtime")} == RUNTIME_USERS
    assert {name for leaf in FORMAT_LEAVES for name in FORMAT_TABLE[leaf].split()} <= FORMAT_LEAVES


def _with_parents(name: str) -> set[str]:
    """Returns a dotted name and the names of all packages that contain it."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def test_the_format_knows_neither_side() -> None:
    assert (FORMAT / "__init__.py").read_text() == ""
    for path in modules(FORMAT).values():
        ours = {"mlcbuild", "mlcbuild_runtime"}
        assert not ours & {name.split(".")[0] for name in imports(path)}, path


def test_the_runtime_knows_no_builder_and_no_compiler() -> None:
    for package in (FORMAT, RUNTIME):
        for path in modules(package).values():
            assert not {"mlcbuild", "tvm", "torch"} & {name.split(".")[0] for name in imports(path)}, path


def test_tvm_is_imported_only_by_the_compiler() -> None:
    for name, path in modules(BUILDER).items():
        if not name.startswith("compiler"):
            assert not {"tvm", "tvm_ffi"} & {item.split(".")[0] for item in imports(path)}, path


def test_wgpu_is_imported_only_by_the_gpu_device() -> None:
    def users(package: Path) -> set[str]:
        tops = {name: {i.split(".")[0] for i in imports(path)} for name, path in modules(package).items()}
        return {name for name, packages in tops.items() if "wgpu" in packages}

    assert users(RUNTIME) == {"devices.gpu_adapter", "devices.gpu_program"}
    assert users(BUILDER) == set()


def test_tvm_ffi_is_imported_only_by_the_cpu_device() -> None:
    users = [
        name for name, path in modules(RUNTIME).items() if any(i.startswith("tvm_ffi") for i in imports(path))
    ]
    assert users == ["devices.cpu", "devices.cpu_library", "devices.cpu_tensors"]


def test_only_its_table_entry_names_a_device_of_the_runtime() -> None:
    """Checks that no part of the runtime imports a device's module directly: `loading.load` imports it by the
    name in its table when a bundle needs it."""
    for name, path in modules(RUNTIME).items():
        if not name.startswith("devices"):
            assert not any(item.startswith("mlcbuild_runtime.devices") for item in imports(path)), path
    users = [
        name for name, path in modules(RUNTIME).items() if "mlcbuild_runtime.devices" in path.read_text()
    ]
    assert [name for name in users if not name.startswith("devices")] == ["executor.loading"]


def test_a_program_knows_no_device() -> None:
    """Checks that compiler/program does not mention CPUs, and that no part of the compiler outside of
    compiler/cpu imports it."""
    words = re.compile("isa|amx|llvm|cpu")
    for path in (BUILDER / "compiler" / "program").glob("*.py"):
        assert not words.search(path.read_text()), path
    for name, path in modules(BUILDER).items():
        if name.startswith("compiler") and not name.startswith("compiler.cpu"):
            assert not any(item.startswith("mlcbuild.compiler.cpu") for item in imports(path)), path


def test_the_table_of_backends_imports_none() -> None:
    used = set(imports(BUILDER / "targets" / "backends.py"))
    assert not any(item.startswith(("mlcbuild.compiler", "mlcbuild.bundles", "tvm")) for item in used)


def test_the_action_of_a_backend_holds_no_other_backend() -> None:
    """Checks that the import closure of each backend's action, which is part of cache keys, contains no file
    of another backend."""
    for kind, backend in BACKENDS.items():
        files = code_files(backend.action.partition(":")[0])
        folders = {other: entry.action.rpartition(".")[0] for other, entry in BACKENDS.items()}
        others = tuple(f"{folder.replace('.', '/')}/" for other, folder in folders.items() if other != kind)
        assert [file for file in files if file.startswith(folders[kind].replace(".", "/"))]
        assert not [file for file in files if file.startswith(others)]
        assert "mlcbuild/pipeline.py" not in files
        # Programs of GPUs are emitted from the layers, without Relax.
        assert ("mlcbuild/compiler/program/decoder.py" in files) == (kind == "cpu")


def loaded_by(*command: str) -> set[str]:
    """Runs a command line in a new interpreter, and returns the names of the top-level packages that it has
    imported."""
    code = (
        "import json, sys; from mlcbuild.cli import main; code = main(sys.argv[1:]);"
        "print(json.dumps([code, sorted(name for name in sys.modules if '.' not in name)]), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    )
    code_and_names = json.loads(result.stderr.splitlines()[-1])
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


def test_importing_the_session_loads_nothing_heavy() -> None:
    code = "import sys, mlcbuild.session; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
