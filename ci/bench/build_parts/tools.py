"""Lists the build tools whose speed is compared. For each it has the function that writes a build of COUNT
steps, in chains of copies of a file, and the commands to time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graph import CHAIN

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OURS = os.pathsep.join([str(HERE), str(ROOT), str(ROOT / "runtime")])
PER_MODEL = 243
"""Number of steps in the test recipe of tests.product for each of its models, counted on an x86-64 machine
with AVX-512. A recipe of about N steps therefore gets N / PER_MODEL models."""


@dataclass(frozen=True)
class Tool:
    name: str
    prepare: Callable[[Path, int], object]
    """Function of (directory, number of steps) that creates the directory and writes a compared build tool's
    build files for so many steps into it."""
    cold: tuple[str, ...]
    noop: tuple[str, ...]
    plan: tuple[str, ...]
    clean: tuple[str, ...]
    """Files and directories, relative to the directory of the build, that are removed before each timed run
    of a build tool from scratch."""
    packages: tuple[str, ...] = ()
    note: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    settle: tuple[str, ...] = ()
    """Command (program and arguments) that makes a build tool treat existing result files as up to date. The
    benchmark writes these files itself after the tool's own run took too long. An empty tuple if the tool has
    no such command."""
    fill: tuple[str, ...] = ()
    """Command (program and arguments) that fills a build tool's shared cache with the results of a build; an
    empty tuple if the tool has no such cache.
    """
    shared: tuple[str, ...] = ()
    """Command (program and arguments) with which a build tool fetches all results from the shared cache into
    a directory that has none; an empty tuple if the tool has no such cache."""
    fresh: tuple[str, ...] = ()
    """Files and directories, relative to the directory of the build, that are removed before a timed run in
    which a build tool fetches all results from a shared cache."""


def _before(number: int) -> str:
    return "in/source" if number % CHAIN == 0 else f"out/{number - 1}"


def _start(area: Path) -> Path:
    (area / "in").mkdir(parents=True)
    (area / "in" / "source").write_text("x\n")
    return area


def _ninja(area: Path, count: int) -> None:
    rules = "rule copy\n  command = cp $in $out\n"
    rules += "".join(f"build out/{n}: copy {_before(n)}\n" for n in range(count))
    (_start(area) / "build.ninja").write_text(rules)


def _doit(area: Path, count: int) -> None:
    (_start(area) / "out").mkdir()
    (area / "dodo.py").write_text(
        f"def task_copy():\n    for n in range({count}):\n"
        f"        before = 'in/source' if n % {CHAIN} == 0 else f'out/{{n - 1}}'\n"
        "        yield {'name': str(n), 'actions': [f'cp {before} out/{n}'],\n"
        "               'file_dep': [before], 'targets': [f'out/{n}']}\n"
    )


def _snakemake(area: Path, count: int) -> None:
    (_start(area) / "Snakefile").write_text(
        f"rule all:\n    input: [f'out/{{n}}' for n in range({count - 1}, -1, -{CHAIN})]\n"
        "def before(wildcards):\n    n = int(wildcards.n)\n"
        f"    return 'in/source' if n % {CHAIN} == 0 else f'out/{{n - 1}}'\n"
        "rule copy:\n    input: before\n    output: 'out/{n}'\n"
        "    cache: True\n    shell: 'cp {input} {output}'\n"
    )


def _dvc(area: Path, count: int) -> None:
    (_start(area) / "out").mkdir()
    python = Path(os.environ["BENCH_DVC"])
    subprocess.run([str(python.with_name("dvc")), "init", "--no-scm", "--quiet"], cwd=area, check=True)
    stages = "".join(
        f"  s{n}:\n    cmd: cp {_before(n)} out/{n}\n    deps: [{_before(n)}]\n    outs: [out/{n}]\n"
        for n in range(count)
    )
    (area / "dvc.yaml").write_text("stages:\n" + stages)


def _product(area: Path, count: int) -> None:
    """Writes a recipe with about `count` steps into the directory `area`, and fills a store there with the
    results of all steps, computed by actions that cost almost nothing. Raises CalledProcessError if filling
    the store fails."""
    sys.path.insert(0, str(ROOT))
    from tests import product

    if count < PER_MODEL:
        product.make(area, 1, product.SCHEMES[:1], ("aarch64-linux", "cortex-a72", "neoverse-n1"))
    else:
        product.make(area, round(count / PER_MODEL))
    fill = [sys.executable, "-m", "tests.product", "fill", "recipe.yaml", "--store", "store"]
    subprocess.run(fill, cwd=area, env=environment({}), check=True, stdout=subprocess.DEVNULL)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": OURS, **variables}


def ours() -> list[Tool]:
    python = sys.executable
    recipe = (python, "-m", "mlcbuild")
    where = ("recipe.yaml", "--store", "store")
    graph = (python, str(HERE / "graph.py"))
    return [
        Tool(
            "mlcbuild",
            _product,
            (),
            (*recipe, "run", *where),
            (*recipe, "plan", *where),
            (),
            note="a recipe: models x 8 schemes x 12 targets; no-op with bundles, by its receipt",
        ),
        Tool(
            "mlcbuild, edited",
            _product,
            (),
            # Without its receipt, a run checks everything; nothing else changes.
            ("sh", "-c", 'rm -rf store/receipts; exec "$0" "$@"', *recipe, "run", *where),
            (),
            (),
            note="the same without a receipt: as after an edit that changes no step",
        ),
        Tool(
            "mlcbuild, graph",
            lambda area, _: _start(area),
            (*graph, "run", "{count}"),
            (*graph, "run", "{count}"),
            (*graph, "plan", "{count}"),
            ("store",),
            fill=(*graph, "push", "{count}"),
            shared=(*graph, "pull", "{count}"),
            fresh=("fresh",),
            note="the chains through build.execute, without receipts; two processes; every result synced",
        ),
        Tool("python -c pass", lambda area, _: _start(area), (), (python, "-c", "pass"), (), ()),
    ]


def peers(area: Path) -> dict[str, Callable[[], Tool]]:
    def program(peer: str) -> str:
        return str(area / peer / "bin" / peer)

    cached = 'SNAKEMAKE_OUTPUT_CACHE="$PWD/cache" "$0" -c2 -q all --cache'

    return {
        "ninja": lambda: Tool(
            "ninja",
            _ninja,
            (program("ninja"), "-j2"),
            (program("ninja"), "-j2"),
            (program("ninja"), "-n"),
            ("out", ".ninja_log", ".ninja_deps"),
            ("ninja",),
        ),
        "doit": lambda: Tool(
            "doit",
            _doit,
            (program("doit"), "-v0", "-n2"),
            (program("doit"), "-v0", "-n2"),
            (program("doit"), "list", "--all", "--status"),
            (".doit.db", ".doit.db.db", ".doit.db.dat", ".doit.db.dir", ".doit.db.bak"),
            ("doit",),
        ),
        "snakemake": lambda: Tool(
            "snakemake",
            _snakemake,
            (program("snakemake"), "-c2", "-q", "all"),
            (program("snakemake"), "-c2", "-q", "all"),
            # After a run that was stopped, it refuses to plan without these options.
            (program("snakemake"), "-n", "-q", "all", "--nolock", "--rerun-incomplete"),
            ("out", ".snakemake"),
            ("snakemake",),
            # Only a run that executes its jobs puts their results into the cache.
            fill=("sh", "-c", f"rm -rf out .snakemake; mkdir cache; {cached}", program("snakemake")),
            shared=("sh", "-c", cached, program("snakemake")),
            fresh=("out", ".snakemake"),
            settle=("sh", "-c", '"$0" --unlock -q all; "$0" -c2 -q all --touch --ri', program("snakemake")),
        ),
        "dvc": lambda: Tool(
            "dvc",
            _dvc,
            (program("dvc"), "repro", "--quiet"),
            (program("dvc"), "repro", "--quiet"),
            (program("dvc"), "repro", "--dry", "--quiet"),
            ("dvc.lock", ".dvc/cache", ".dvc/tmp"),
            ("dvc",),
            variables={"DVC_NO_ANALYTICS": "1"},
            fill=("sh", "-c", '"$0" remote add -q -d cache cache; "$0" push -q', program("dvc")),
            shared=(program("dvc"), "pull", "-q"),
            fresh=("out", ".dvc/cache", ".dvc/tmp"),
        ),
    }


def install(place: Path, tool: Tool) -> None:
    """Creates a virtual environment in the directory `place` and installs a build tool's packages into it,
    unless an earlier call has completed that; an incomplete environment is replaced. Raises
    CalledProcessError if it fails."""
    if (place / "done").is_file():
        return
    shutil.rmtree(place, ignore_errors=True)
    print(f"installing {', '.join(tool.packages)} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *tool.packages]
    subprocess.run(command, check=True, capture_output=True)
    (place / "done").touch()
