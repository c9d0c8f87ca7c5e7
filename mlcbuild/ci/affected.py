"""Finds the variants whose inputs a range of Git commits changed.

Inputs are the recipe's text, the lock (for models that it pins), the files of local checkpoints and prompts,
the target's preset, and the source of mlcbuild if it is in the same repository. The recipe's text counts as a
whole: a changed recipe affects all of its variants, and the plan says which need work.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import mlcbuild
from mlcbuild.build.graph import Graph, Source, Step, selected
from mlcbuild.build.plan import step_modules
from mlcbuild.canon import code_files, module_path
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.errors import SetupError, UsageError
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets

_DEPENDENCIES = ("pyproject.toml", "runtime/pyproject.toml")
"""Paths, relative to mlcbuild's repository, of files that determine versions of tools; a change of one
affects every variant.
"""


def changed(directory: Path, revisions: str) -> frozenset[Path]:
    """Returns the absolute paths of files that differ between two Git commits, including deleted files; for a
    symbolic link, both its own path and the path to which it points.

    directory: inside the repository. revisions: an argument of `git diff`: `main...HEAD`, `HEAD~3..HEAD`, or
    one commit, which is compared with the working tree. Raises UsageError if it starts with "-" or git fails,
    SetupError if git is not installed."""
    if revisions.startswith("-"):
        raise UsageError(f"--affected-by {revisions}: write a range of commits, for example main...HEAD")
    top = _git(directory, "rev-parse", "--show-toplevel").removesuffix("\n")
    # Without rename detection, both names of a moved file are listed.
    names = _git(directory, "diff", "--name-only", "--no-renames", "-z", revisions, "--")
    paths = [Path(top, name) for name in names.split("\0") if name]
    return frozenset([*paths, *(path.resolve() for path in paths)])  # A link counts as a file itself.


def affected(pipeline: Pipeline, files: frozenset[Path]) -> dict[str, str]:
    """Returns name of a variant -> the first of its inputs that changed, in words such as "recipe.yaml
    changed", for each variant with a changed input. files: absolute paths of changed files.
    """
    reasons_by_variant = {}
    search = _Search(pipeline, files)
    for product in pipeline.products:
        reason = next(search.reasons(product), None)
        if reason is not None:
            reasons_by_variant[product.variant.name] = reason
    return reasons_by_variant


class _Search:
    """The search for those inputs of variants that a range of Git commits changed."""

    def __init__(self, pipeline: Pipeline, files: frozenset[Path]) -> None:
        self.pipeline = pipeline
        self.files = files
        self.changes = {
            node.name: _of_source(node, files)
            for node in pipeline.graph.nodes.values()
            if isinstance(node, Source)
        }
        """Name of the node, in the graph of build steps, of a directory of source files -> its changed files
        and, for a checkpoint, its deleted ones, as paths relative to the directory.
        """
        self.presets = [
            (replace(target, name=""), f"the target preset {path.name} changed")
            for name, target in presets.presets().items()
            if (path := _preset(name)) is not None and path in files
        ]

    def reasons(self, product: Product) -> Iterator[str]:
        recipe, variant = self.pipeline.recipe, product.variant
        if recipe.path.resolve() in self.files:
            yield f"{recipe.path.name} changed"
        is_locked = any(isinstance(source, HubSource) for source in variant.model.sources)
        if is_locked and recipe.lock.resolve() in self.files:
            yield f"{recipe.lock.name} changed"
        bare = replace(variant.target, name="")
        yield from (words for preset, words in self.presets if preset == bare)
        steps = _steps(self.pipeline.graph, product.last)
        for item in (item for step in steps for item in step.inputs.values()):
            paths = (name for name in self.changes.get(item.node, ()) if selected(name, item.select))
            yield from (f"{item.node}/{name} changed" for name in paths)
        root = Path(mlcbuild.__path__[0]).resolve().parent
        yield from (f"{name} changed" for name in _DEPENDENCIES if root / name in self.files)
        for module in dict.fromkeys(module for step in steps for module in step_modules(step)):
            yield from (f"{path.name} of mlcbuild changed" for path in _code(module) if path in self.files)


def _of_source(source: Source, files: frozenset[Path]) -> list[str]:
    """Returns the files of a source directory that changed, as paths relative to the directory. files:
    absolute paths of all changed files, submodules and links. For a checkpoint (a source whose name starts
    with fetch/), whose whole directory is an input, deleted files are included. All files count as changed if
    the directory itself, or one above it, is such a submodule or link."""
    root = source.root.resolve()
    # Git lists a submodule, and a link to a directory, as one path; then every file below may have changed.
    is_replaced = not files.isdisjoint((root, *root.parents))
    # A link is an input in two respects: its target path, and the contents there.
    changed_files = [
        name
        for name in source.files
        if is_replaced or root / name in files or (root / name).resolve() in files
    ]
    # A checkpoint comprises its whole directory; prompts are one file among others.
    gone = (path for path in files if path.is_relative_to(root) and not path.exists())
    is_fetch = source.name.startswith("fetch/")
    return changed_files + sorted(path.relative_to(root).as_posix() for path in gone if is_fetch)


def _preset(name: str) -> Path | None:
    """Returns the path of a target preset's file in a checkout of mlcbuild; None if there is no such file, as
    in an mlcbuild that is installed without a checkout."""
    path = Path(targets.__file__).resolve().parent.parent.parent / "targets" / f"{name}.yaml"
    return path if path.is_file() else None


@lru_cache(maxsize=64)
def _code(module: str) -> tuple[Path, ...]:
    """Returns the absolute paths of the source files of mlcbuild that determine the results of the actions in
    a module.
    """
    paths = []
    for name in code_files(module):
        path = module_path(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if path is not None:
            paths.append(path.resolve())
    return tuple(paths)


def _steps(graph: Graph, last: str) -> list[Step]:
    """Returns a list of the step called `last` and all its direct and indirect dependencies, sources
    excepted, each once; the list starts with `last`."""
    steps: dict[str, Step] = {}
    pending = [graph.resolve(last)]
    while pending:
        node = graph[pending.pop()]
        if isinstance(node, Step) and node.name not in steps:
            steps[node.name] = node
            pending += graph.needs(node)
    return list(steps.values())


def _git(directory: Path, *arguments: str) -> str:
    try:
        process = subprocess.run(
            ["git", "-C", str(directory), "-c", "core.quotePath=false", *arguments],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise SetupError("--affected-by needs git: install it (Debian: apt install git)") from None
    if process.returncode:
        git_message = " ".join(process.stderr.decode(errors="replace").split())
        raise UsageError(
            f"--affected-by: git {arguments[0]} in {directory}: {git_message}\n"
            "the range must name commits of the recipe's repository; a shallow clone of a CI system lacks "
            "older ones (GitHub: fetch-depth: 0, GitLab: GIT_DEPTH: 0)"
        )
    return process.stdout.decode(errors="surrogateescape")
