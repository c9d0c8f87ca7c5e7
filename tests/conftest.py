"""Fixtures of all tests, such as bundles of the embedded model, which are built once for all test
processes."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import buckets, registries
from tests.forkserver import COMMANDS

# Examples of Hypothesis have no deadline, so that a busy machine fails no test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Tests have more processes than cores: BLAS's threads would only wait for each other, for an eighth of the
# CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The runtime's value. TVM's default of 300,000 takes CPU time from the other test processes.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "2000")

# Tests start hundreds of processes. Containers often set this variable, and then each process compiles its
# modules again: 0.7 of the 1.6 CPU seconds that a compiler child takes before it reads its request.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C would reach no test.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "models" / "tiny"


KINDS = (
    ("another processor", r"processor|endian|AVX|AMX|one core|large pages|emulated-aarch64|qemu"),
    ("linkers of other systems", r"linker|Linux library|no nm"),
    ("another system or file system", r"system|/dev/|/proc|Linux|macOS|other users|root"),
    ("a model", r"shared/models|checkpoint|GGUF|real template"),
    ("a quiet machine", r"too busy"),
    ("a GPU adapter", r"GPU adapter|OpenCL"),
    ("MLCBUILD_TEST_EVERY", r"MLCBUILD_TEST_EVERY"),
    ("programs and packages", r"is not installed|pip install|neither oras"),
)
"""List of (what skipped tests lack, such as "a GPU"; regular expression that the reason for skipping
matches). The first match counts."""


def kind(reason: str) -> str:
    """Returns the kind of thing that a skipped test lacks, such as "a GPU", by the reason for skipping."""
    return next((name for name, pattern in KINDS if re.search(pattern, reason)), "something else")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints which tests were skipped on this machine: a line for each kind of reason, with the reasons."""
    reasons: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        _, _, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ").partition("\n")[0]
        reasons.setdefault(kind(reason), Counter())[reason] += 1
    if not reasons:
        return
    terminalreporter.section("not tested on this machine")
    for name, counts in sorted(reasons.items(), key=lambda item: -item[1].total()):
        listed = "; ".join(f"{reason} ({count})" for reason, count in counts.most_common())
        terminalreporter.line(f"{counts.total():4} need {name}: {listed}")


LONG = {
    *("test_crash.py", "test_everyday.py", "test_kills.py", "test_poison.py", "test_run.py", "test_soak.py"),
    *("test_quickstart.py", "test_tour.py", "test_trial.py", "test_types.py", "test_workflows.py"),
}
"""Names of test files that take several seconds each and are therefore started first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests so that the longest come first, and no process works alone at the end. pytest-xdist
    starts with groups of tests, the largest first."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes the objects that exist after imports and collection, 600 MB in each process, from all garbage
    collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Ends the processes that this test process has started, at the end of its session."""
    COMMANDS.close()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def mlcbuild(
    *arguments: str | Path, store: Path, cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a user does, in a separate process without a terminal, and returns the ended
    process. variables: further environment variables."""
    return _command("mlcbuild", arguments, store, cwd, variables)


def fill(*arguments: str | Path, store: Path) -> subprocess.CompletedProcess[str]:
    """Runs `mlcbuild run` with actions that write a few bytes instead of the real ones (see
    tests/product.py), and returns the ended process."""
    return _command("tests.product", ("fill", *arguments), store, ROOT, None)


def _command(
    module: str,
    arguments: Sequence[str | Path],
    store: Path,
    cwd: Path,
    variables: Mapping[str, str] | None,
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")}
    # The key of the user who runs the tests must not be used.
    environment |= {"XDG_CONFIG_HOME": str(store / "no-config"), **(variables or {})}
    environment |= {"MLCBUILD_STORE": str(store), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    return COMMANDS.run(module, [str(argument) for argument in arguments], cwd, environment)


def checked(result: subprocess.CompletedProcess[str]) -> str:
    """Asserts that a command has succeeded, and returns its standard output."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


HALF_COMPILED = shutil.ignore_patterns("*.pyc.*")
"""Argument of shutil.copytree for source files: leaves out the files that other processes write at this
moment. Compiled modules are copied, because compiling them takes the copy's first process 0.7 CPU seconds."""


def copy_source(root: Path) -> None:
    """Copies the source of builder, runtime and target presets into the directory `root`, for tests that edit
    it."""
    for package in ("mlcbuild", "runtime", "targets"):
        shutil.copytree(ROOT / package, root / package, ignore=HALF_COMPILED, symlinks=True)


def copy_store(store: Path, destination: Path, *without: str) -> None:
    """Copies a store to which other test processes write meanwhile. Records are copied first: all files that
    they list are in the store before them. without: names of further parts that are left out."""
    shutil.copytree(store / "ac", destination / "ac")
    busy = shutil.ignore_patterns("ac", "tmp", "locks", "index.sqlite*", *without)

    def ignored(directory: str, names: list[str]) -> set[str]:
        return busy(directory, names) if Path(directory) == store else set()  # there is a cas/ac, too

    shutil.copytree(store, destination, ignore=ignored, dirs_exist_ok=True)


def project(directory: Path, recipe: str, models: Sequence[Path] = (TINY,)) -> Path:
    """Writes a recipe and copies of checkpoints, each in a directory of its name, and returns the recipe's
    path."""
    for model in models:
        shutil.copytree(model, directory / model.name)
    path = directory / "recipe.yaml"
    path.write_text(recipe)
    return path


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[buckets.Server]:
    if buckets.WITHOUT_S3:
        pytest.skip(buckets.WITHOUT_S3)
    with buckets.radosgw(tmp_path_factory.mktemp("s3") / "ceph") as server:
        yield server


@pytest.fixture(scope="session")
def registry_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Server]:
    if registries.REGISTRY is None:
        pytest.skip(registries.WITHOUT_REGISTRY)
    with registries.registry(tmp_path_factory.mktemp("oci") / "registry") as server:
        yield server


@pytest.fixture
def s3_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sets the environment variables with the credentials of the tests' S3 server, and removes those of the
    user who runs the tests."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", buckets.ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", buckets.SECRET)


@pytest.fixture(scope="session")
def common_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of one store that all tests in all processes of a session share, so that each step
    runs only once."""
    base = tmp_path_factory.getbasetemp()
    # The directories of xdist's processes lie in one that is this session's.
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "common-store"


QUICKSTART = """\
version: 1
name: quickstart
models: {tiny: ./tiny}
quantizations: [q0f32, q4f16_1, q4a8_1]
targets: [host]
compile: {context_window: 512, prefill_chunk: 128, max_batch: 8}
verify: {prompts: prompts.txt, max_kl: 0.1, max_perplexity_increase: 0.1}
"""


@pytest.fixture(scope="session")
def tiny_bundles(tmp_path_factory: pytest.TempPathFactory, common_store: Path) -> Path:
    """Returns the directory of a built recipe, `recipe.yaml`, with the bundles dist/tiny-<scheme>-host. Tests
    must not change it."""
    directory = tmp_path_factory.mktemp("quickstart")
    recipe = project(directory, QUICKSTART)
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", directory / "prompts.txt")
    checked(mlcbuild("run", recipe, store=common_store))
    return directory


@pytest.fixture
def bundle_copy(tiny_bundles: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that copies the bundle of a scheme to separate files, without hard links, which a
    test may damage."""

    def copy(scheme: str) -> Path:
        target = tmp_path / f"copy-{scheme}"
        shutil.copytree(tiny_bundles / "dist" / f"tiny-{scheme}-host", target)
        for path in target.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return target

    return copy
