"""Tests of cache keys: which source files are in the key of each action, and which steps an edit of a file
makes run again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from mlcbuild.build.plan import step_modules
from mlcbuild.canon import code_files
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.models.parsing import family_module, family_names
from mlcbuild.pipeline import build
from mlcbuild.quant.format import format_module, format_names
from mlcbuild.recipe import load
from tests.conftest import ROOT, copy_source, project
from tests.forkserver import ForkServer

GOLDEN = ROOT / "tests" / "golden" / "closures.json"
"""JSON file that lists, for each kind of build step, the source files that are hashed into its cache key;
entries "family/NAME" and "format/NAME" list the files that only one model family or weight format adds.
Review each change of the file: every key in which a listed file is changes with it.

`python -m tests.test_keys` writes the file.
"""

RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q4f16_1]
targets: [x86-64-v3]
bench: {prompt_tokens: 16, generate_tokens: 8}
"""
GPU = "webgpu"
ALL_KINDS = RECIPE.replace("targets: [", f"targets: [{GPU}, ").replace(
    "[q4f16_1]",
    "{q4f16_1: q4f16_1, small: {target_bits: 8, candidates: [q4f16_1, q8f16_1]}, "
    "fine: {scheme: q4a8_2, calibrate: [copy abc]}}",
)
"""A recipe (YAML text) that leads to every kind of build step. Its three quantizations are a named scheme,
one that is chosen within a size budget, and one that is calibrated on a prompt."""


def closures(recipe: Path) -> dict[str, list[str]]:
    """Returns kind of step -> relative paths of the source files in the keys of such steps, for a recipe that
    may name CPUs and the target GPU."""
    kinds: dict[str, set[str]] = {}
    for step in build(load(recipe), Lock({})).graph.steps():
        kind = step.name.partition("/")[0]
        if step.name.endswith(GPU) and kind != "library":
            continue  # steps that run a GPU bundle exist only on machines that can
        name = f"{kind}/{GPU}" if step.name.endswith(GPU) else kind
        files = {file for module in step_modules(step) for file in code_files(module)}
        kinds.setdefault(name, files)
    kinds |= added("family", family_names(), family_module) | added("format", format_names(), format_module)
    return {kind: sorted(files) for kind, files in kinds.items()}


def added(kind: str, names: Iterable[str], module: Callable[[str], str]) -> dict[str, set[str]]:
    """Returns `kind` -> the source files that the modules of all `names` import, and "kind/NAME" -> the
    source files that only the module of NAME imports besides these. module: function that returns the dotted
    name of a name's module."""
    closures = {name: set(code_files(module(name))) for name in names}
    shared = set.intersection(*closures.values())
    return {kind: shared} | {f"{kind}/{name}": files - shared for name, files in closures.items()}


def test_the_source_files_in_each_key_are_known(tmp_path: Path) -> None:
    """Checks which source files are in each key. A longer list means that more edits rebuild a step: a late
    import once added an HTTP server to it."""
    recipe = project(tmp_path, ALL_KINDS)
    assert closures(recipe) == json.loads(GOLDEN.read_text())


def test_no_backend_is_in_the_keys_of_another() -> None:
    """Checks that the source files that only one backend (CPU or GPU) uses are in no cache key of the other.
    Both share some files at the top of `mlcbuild/compiler`; only the CPU's keys contain Relax passes and
    `program/`."""
    entries = cast("dict[str, list[str]]", json.loads(GOLDEN.read_text()))

    def rooms(kind: str) -> set[str]:
        return {name.split("/")[2] for name in entries[kind] if name.startswith("mlcbuild/compiler/")}

    shared = {"__init__.py", "action.py", "child.py", "versions.py"}
    shared |= {"compile_request.py", "library_metadata.py"}
    assert rooms(f"library/{GPU}") == shared | {"gpu"}
    assert rooms("library") == shared | {"cpu", "library.py", "passes", "phases.py", "program"}


@pytest.mark.parametrize("kind", ["fetch", "config", "tokenizer", "weights", "library", "bundle"])
def test_no_key_of_a_build_holds_the_runtime(kind: str) -> None:
    entries = cast("dict[str, list[str]]", json.loads(GOLDEN.read_text()))
    assert not [name for name in entries.get(kind, []) if name.startswith("mlcbuild_runtime/")]


SCHEMES = """\
version: 1
models: {tiny: ./tiny}
quantizations:
  q0f16: q0f16
  q4f16_1: q4f16_1
  q4a8_1: q4a8_1
  mixed: {scheme: q8f16_1, overrides: [{match: embed, scheme: q4a8_1}, {match: "*.o", scheme: q0f32}]}
targets: [x86-64-v3]
"""


def test_a_format_is_in_the_keys_of_its_weights_and_libraries_only(tmp_path: Path) -> None:
    """Checks that the file of a format is in the keys of weights and libraries that use this format, even if
    only an override does, and in no other keys."""
    holders: dict[str, set[str]] = {name: set() for name in format_names()}
    for step in build(load(project(tmp_path, SCHEMES)), Lock({})).graph.steps():
        files = {name for module in step_modules(step) for name in code_files(module)}
        parts = step.name.split("/")
        for name in format_names():
            if f"mlcbuild/quant/formats/{name}.py" in files:
                holders[name].add(f"{parts[0]}/{parts[2]}")

    def steps_of(*schemes: str) -> set[str]:
        return {f"{kind}/{scheme}" for kind in ("weights", "library") for scheme in schemes}

    used = {"f16": ["q0f16"], "q4f16": ["q4f16_1"], "q4s": ["q4a8_1", "mixed"], "q8f16": ["mixed"]}
    used["f32"] = ["mixed"]
    assert holders == {name: steps_of(*used.get(name, [])) for name in format_names()}


FIRST = {"config", "tokenizer"}
"""Kinds of steps whose inputs are source files only. All other steps wait for their results, and run again
only if these change."""
RUNS: Mapping[str, set[str]] = {
    "mlcbuild/bench/speed.py": {"bench"},
    "mlcbuild/bundles/assemble.py": {"tokenizer"},
    "mlcbuild/bundles/reference.py": {"reference"},
    "mlcbuild/bundles/reference_blocks.py": {"reference"},
    "mlcbuild/quant/choice.py": {"weights", "library"},
    "mlcbuild/canon.py": FIRST,
    "mlcbuild/checkpoints/conversion.py": {"weights"},
    "mlcbuild/checkpoints/exact_weights.py": {"weights", "reference"},
    "mlcbuild/compiler/cpu/formats/q4f16_kernel.py": {"library"},
    "mlcbuild/compiler/action.py": {"library"},
    "mlcbuild/compiler/cpu/kernels/norm.py": {"library"},
    "mlcbuild/compiler/cpu/toolchain.py": {"library"},
    "mlcbuild/compiler/passes/ordered_shapes.py": {"library"},
    "mlcbuild/compiler/program/decoder.py": {"library"},
    "mlcbuild/errors.py": FIRST,
    "mlcbuild/models/families/llama.py": {"config"},
    "mlcbuild/models/family.py": {"config"},
    "mlcbuild/child_progress.py": {"library"},
    "mlcbuild/progress.py": {"weights", "reference", "library"},
    "mlcbuild/quant/formats/q4f16.py": {"weights", "library"},
    "mlcbuild/quant/search.py": {"weights", "library"},
    "mlcbuild/targets/target.py": {"library"},
    "runtime/mlcbuild_format/abi.py": {"tokenizer", "library"},
    "runtime/mlcbuild_format/binary.py": {"tokenizer"},
    "runtime/mlcbuild_format/bundle.py": {"tokenizer"},
    "runtime/mlcbuild_format/control_groups.py": {"verify", "bench"},
    "runtime/mlcbuild_format/elf_image.py": {"tokenizer"},
    "runtime/mlcbuild_format/errors.py": {"tokenizer"},
    "runtime/mlcbuild_format/fields.py": {"tokenizer", "weights"},
    "runtime/mlcbuild_format/files.py": {"tokenizer"},
    "runtime/mlcbuild_format/library.py": {"verify", "bench"},
    "runtime/mlcbuild_format/limits.py": {"tokenizer", "library"},
    "runtime/mlcbuild_format/manifest.py": {"tokenizer"},
    "runtime/mlcbuild_format/processors.py": {"library"},
    "runtime/mlcbuild_format/regular.py": FIRST,
    "runtime/mlcbuild_format/safetensors.py": {"tokenizer", "weights"},
    "runtime/mlcbuild_format/signature.py": {"tokenizer", "weights", "library"},
    "runtime/mlcbuild_format/sizes.py": {"verify", "bench"},
    "runtime/mlcbuild_format/strict_json.py": FIRST,
    "runtime/mlcbuild_format/versions.py": {"tokenizer", "weights", "library"},
    "runtime/mlcbuild_format/weights.py": {"tokenizer"},
    "runtime/mlcbuild_runtime/devices/cpu.py": {"verify", "bench"},
    "runtime/mlcbuild_runtime/executor/batch.py": {"verify", "bench"},
    "runtime/mlcbuild_runtime/text/tokenizer.py": {"reference"},
}
"""Source file -> kinds of build steps that must run again after an edit of this file. Steps that depend on
them run only if the results of these steps change."""
RUNS_NOTHING = (
    "mlcbuild/bench/exchange.py",
    "mlcbuild/build/cluster/client.py",
    "mlcbuild/build/execute.py",
    "mlcbuild/bundles/budget.py",
    "mlcbuild/bundles/publish/repository.py",
    "mlcbuild/bundles/sensitivity.py",
    "mlcbuild/checkpoints/quantized/gptq_reader.py",
    "mlcbuild/ci/job_matrix.py",
    "mlcbuild/check_steps.py",
    "mlcbuild/cli/build.py",
    "mlcbuild/compiler/cpu/formats/q8f16_kernel.py",
    "mlcbuild/compiler/gpu/gpu_action.py",
    "mlcbuild/compiler/gpu/kernels/product.py",
    "mlcbuild/documents/document.py",
    "mlcbuild/documents/schema.py",
    "mlcbuild/doctor.py",
    "mlcbuild/durations.py",
    "mlcbuild/emit.py",
    "mlcbuild/execution.py",
    "mlcbuild/installed/install.py",
    "mlcbuild/keyfile.py",
    "mlcbuild/locking.py",
    "mlcbuild/machine.py",
    "mlcbuild/models/families/gemma2.py",
    "mlcbuild/outcomes.py",
    "mlcbuild/serving_memory.py",
    "mlcbuild/pipeline.py",
    "mlcbuild/prospect.py",
    "mlcbuild/quant/formats/q8f16.py",
    "mlcbuild/quant/plain.py",
    "mlcbuild/quant/schemes.py",
    "mlcbuild/recipe/axes.py",
    "mlcbuild/remotes/oci.py",
    "mlcbuild/replication.py",
    "mlcbuild/quant/budget_limits.py",
    "mlcbuild/recipe/budgets.py",
    "mlcbuild/scheme_fit.py",
    "mlcbuild/weight_steps.py",
    "mlcbuild/reports/report.py",
    "mlcbuild/selection.py",
    "mlcbuild/session.py",
    "mlcbuild/signals.py",
    "mlcbuild/store/store.py",
    "mlcbuild/targets/backends.py",
    "mlcbuild/targets/presets.py",
    "runtime/mlcbuild_format/memory.py",
    "runtime/mlcbuild_format/program.py",
    "runtime/mlcbuild_format/program_json.py",
    "runtime/mlcbuild_runtime/browser/page.js",
    "runtime/mlcbuild_runtime/chat/conversation.py",
    "runtime/mlcbuild_runtime/constraints/grammar.py",
    "runtime/mlcbuild_runtime/engine/engine.py",
    "runtime/mlcbuild_runtime/http/page.html",
    "runtime/mlcbuild_runtime/http/server.py",
    "runtime/mlcbuild_runtime/local.py",
    "runtime/mlcbuild_runtime/locations.py",
    "runtime/mlcbuild_runtime/openai/service.py",
    "runtime/mlcbuild_runtime/option_values.py",
    "runtime/mlcbuild_runtime/release.py",
    "runtime/mlcbuild_runtime/untrusted.py",
)
"""Source files (paths in the checkout) whose content enters no cache key of the tests' recipe, so that an
edit of them makes no step run again."""


@dataclass(frozen=True)
class Source:
    """A copy of the source of builder and runtime that tests may edit, with a recipe and the store into which
    it was built."""

    root: Path
    server: ForkServer
    """Fork server that runs the command line of the copied packages. Tests edit only comments, so the modules
    that it has imported stay valid."""

    def run(self) -> list[tuple[str, str]]:
        """Runs the recipe with actions that write a few bytes (see tests/product.py), and returns (kind,
        status) of every step. Keys do not depend on these actions."""
        return self._steps("tests.product", "fill", "recipe.yaml", "--json")

    def plan(self) -> list[tuple[str, str]]:
        return self._steps("mlcbuild", "plan", "recipe.yaml", "--json")

    def _steps(self, module: str, *arguments: str) -> list[tuple[str, str]]:
        """Runs a module of the copied packages, and returns (kind, status) of every step in the JSON that it
        prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root), str(self.root / "runtime"), str(ROOT)])
        environment["MLCBUILD_STORE"] = str(self.root / "store")
        result = self.server.run(module, arguments, self.root / "work", environment)
        assert result.returncode == 0, result.stderr
        steps = json.loads(result.stdout)["steps"]
        return [(step["name"].partition("/")[0], step["status"]) for step in steps]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """Yields a copy of the source of builder and runtime, with a recipe that was built once by this copy."""
    root = tmp_path_factory.mktemp("source")
    copy_source(root)
    (root / "work").mkdir()
    text = RECIPE.replace("x86-64-v3", "host")
    project(root / "work", text + "verify: {prompts: [The quick brown fox.]}\n")
    with closing(ForkServer(root)) as server:
        actual = Source(root, server)
        assert {status for _, status in actual.run()} == {"built"}
        yield actual


def runs_after_edits(source: Source, *names: str) -> set[str]:
    """Returns the kinds of steps that would run after a comment is added to each of these files. The files
    are restored afterwards."""
    texts = {source.root / name: (source.root / name).read_bytes() for name in names}
    for path, text in texts.items():
        path.write_bytes(text + b"\n# edited\n")
    # A step that waits for a result which may stay the same is `pending`, and does not count.
    kinds = {kind for kind, status in source.plan() if status == "run"}
    for path, text in texts.items():
        path.write_bytes(text)
    return kinds


@pytest.mark.xdist_group("keys")  # one process builds the copy
@pytest.mark.parametrize("name", RUNS)
def test_an_edit_runs_the_steps_whose_keys_hold_the_file(source: Source, name: str) -> None:
    assert runs_after_edits(source, name) == RUNS[name]


@pytest.mark.xdist_group("keys")  # one process builds the copy
def test_an_edit_of_what_no_key_holds_runs_nothing(source: Source) -> None:
    """Checks that edits of files which are in no key rebuild nothing. All files are edited at once; if a step
    runs, each is edited alone to find the file."""
    wrong = {}
    if runs_after_edits(source, *RUNS_NOTHING):
        wrong = {name: kinds for name in RUNS_NOTHING if (kinds := runs_after_edits(source, name))}
    assert not wrong


def test_a_file_of_every_room_is_edited() -> None:
    """Checks that these tests edit a file of every room: of every directory with modules, and every module at
    the top of a package."""
    packages = [ROOT / name for name in ("mlcbuild", "runtime/mlcbuild_format", "runtime/mlcbuild_runtime")]
    rooms = {path for package in packages for path in package.glob("*.py") if not path.name.startswith("__")}
    for package in packages:
        rooms |= {path.parent for path in package.rglob("[!_]*.py")} - {package}
    edited = {path for name in (*RUNS, *RUNS_NOTHING) for path in (ROOT / name, (ROOT / name).parent)}
    assert not {path.relative_to(ROOT).as_posix() for path in rooms - edited}


@pytest.mark.xdist_group("keys")  # one process builds the copy
def test_an_edit_without_effect_stops_at_its_step(source: Source) -> None:
    """Checks that an edit of a family's file without effect runs its config step again, which gives the same
    bytes, so that all later steps are reused."""
    path = source.root / "mlcbuild" / "models" / "families" / "llama.py"
    text = path.read_bytes()
    path.write_bytes(text + b"\n# edited\n")
    built = {kind for kind, status in source.run() if status == "built"}
    path.write_bytes(text)
    assert built == {"config"}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as area:
        golden = closures(project(Path(area), ALL_KINDS))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
