"""Tests that run bundles for aarch64 under qemu-aarch64 and compare them with bundles for this machine.

They are skipped where ci/emulated-aarch64 has not prepared its directory.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import QUICKSTART, ROOT, checked, mlcbuild, project
from tests.libharness import EVERY

PLACE = Path(os.environ.get("MLCBUILD_AARCH64") or Path.home() / ".cache" / "mlcbuild-aarch64")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = [
    pytest.mark.xdist_group("aarch64"),  # one process builds the bundles
    pytest.mark.skipif(not (PLACE / "ready").is_file(), reason=f"{PLACE} is not there: ci/emulated-aarch64"),
    pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not there: apt-get install qemu-user"),
]

CPUS = {"i8mm": "max", "neon": "neoverse-n1", "portable": "cortex-a72"}
"""Name of a target's instruction set -> name of the Arm processor that qemu emulates to execute its code: one
with int8 matrix products, one with dot products only, and one with neither."""
TOLERANCES = {"q0f32": 2e-4, "q4f16_1": 1e-2, "q4a8_1": 0.15, "q5a8_1": 0.2, "q8a8_1": 0.15}
"""Quantization scheme -> largest allowed difference of a logit between two processors; the largest logits are
about 10. The KV cache is float16 except with q0f32, and with 8-bit activations small differences change the
rounding of some values."""
if not EVERY:
    TOLERANCES = {scheme: TOLERANCES[scheme] for scheme in ("q0f32", "q4a8_1")}
TOKENS = [int(token) for token in np.random.default_rng(0).integers(7, 432, 41)]
SCORE = """
import sys
from pathlib import Path
import numpy as np
from mlcbuild_format.errors import ServingError
from mlcbuild_runtime.devices.cpu import CpuExecutor
tokens = [int(token) for token in sys.argv[2].split(",")]
for path in map(Path, sys.argv[3:]):
    try:
        model = CpuExecutor.load(path, threads=1)
    except ServingError as error:
        sys.exit(str(error))
    np.save(Path(sys.argv[1], path.name), np.stack([model.score(tokens), model.score(tokens, chunk=1)]))
"""
"""Program that writes the logits of a few tokens to files, computed all at once and one by one. Its arguments
are the directory of the results, the tokens, and the bundles."""


def emulated(cpu: str, out: Path, *bundles: Path) -> subprocess.CompletedProcess[str]:
    assert QEMU is not None
    system = PLACE / "system"
    variables = {
        "MLCBUILD_TVM_RUNTIME": str(PLACE / "site" / "libtvm_runtime.so"),
        "PYTHONHOME": str(system / "usr"),
        "PYTHONPATH": os.pathsep.join([str(PLACE / "site"), str(ROOT / "runtime")]),
        "PYTHONPYCACHEPREFIX": str(PLACE / "cache"),
    }
    python = [QEMU, "-cpu", cpu, "-L", str(system), str(system / "usr" / "bin" / "python3.11")]
    return run([*python, "-c", SCORE, str(out), ",".join(map(str, TOKENS)), *map(str, bundles)], variables)


def run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, common_store: Path) -> Path:
    """Returns the directory with bundles of every scheme, for this machine and for the emulated
    processors."""
    directory = tmp_path_factory.mktemp("aarch64")
    # With tile registers prompts are not rounded to 8 bits: those are left out.
    here = "x86-64-v3" if platform.machine() == "x86_64" else "host"
    plain = "{triple: aarch64-unknown-linux-gnu, cpu: cortex-a72}"
    targets = f"{{here: {here}, i8mm: aarch64-linux-i8mm, neon: aarch64-linux, portable: {plain}}}"
    text = QUICKSTART.replace("[q0f32, q4f16_1, q4a8_1]", f"[{', '.join(TOLERANCES)}]")
    recipe = project(directory, text.replace("[host]", targets).replace("verify:", "#"))
    path = os.pathsep.join([str(PLACE / "bin"), os.environ["PATH"]])
    checked(mlcbuild("run", recipe, store=common_store, variables={"PATH": path}))
    return directory / "dist"


@pytest.fixture(scope="module")
def native(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the logits that the native bundles compute on this machine: for each
    quantization scheme one NumPy file, with which emulated processors are compared."""
    out = tmp_path_factory.mktemp("native")
    bundles = [str(dist / f"tiny-{scheme}-here") for scheme in TOLERANCES]
    result = run([sys.executable, "-c", SCORE, str(out), ",".join(map(str, TOKENS)), *bundles], {})
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize("target", CPUS)
def test_logits_are_those_of_this_machine(target: str, dist: Path, native: Path, tmp_path: Path) -> None:
    result = emulated(CPUS[target], tmp_path, *(dist / f"tiny-{scheme}-{target}" for scheme in TOLERANCES))
    assert result.returncode == 0, result.stderr
    for scheme, tolerance in TOLERANCES.items():
        loaded: NDArray[np.float32] = np.load(tmp_path / f"tiny-{scheme}-{target}.npy")
        expected: NDArray[np.float32] = np.load(native / f"tiny-{scheme}-here.npy")
        assert np.abs(loaded - expected).max() < tolerance, scheme
        assert float(np.sqrt(((loaded - expected) ** 2).mean())) < tolerance / 8, scheme


@pytest.mark.parametrize(
    ("target", "cpu", "missing"), [("neon", "portable", "dotprod"), ("i8mm", "neon", "i8mm")]
)
def test_missing_instructions_are_named(
    target: str, cpu: str, missing: str, dist: Path, tmp_path: Path
) -> None:
    """Checks that a bundle which needs missing instructions is refused with their names, instead of ending by
    an illegal instruction."""
    result = emulated(CPUS[cpu], tmp_path, dist / f"tiny-q4a8_1-{target}")
    assert result.returncode == 1
    assert missing in result.stderr
