"""Tests of targets: systems and architectures, their JSON form, and that LLVM knows every name in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.canon import canonical
from mlcbuild.targets import host as this_machine
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target
from tests.targets.machines import ARM, ARMS, LINUX, ROOT, X86


def test_systems_and_architectures() -> None:
    by_name = {name: (target.architecture, target.system) for name, target in presets.presets().items()}
    assert by_name["x86-64-v3"] == ("x86_64", "linux")
    assert by_name["aarch64-linux"] == ("aarch64", "linux")
    assert by_name["macos-arm64"] == ("arm64", "macos")
    assert Target("", "x86_64-pc-windows-msvc", "generic").system == "windows"
    assert Target("", "aarch64-unknown-none-elf", "generic").system == "none"


def test_json_is_canonical_and_has_no_name() -> None:
    target = presets.resolve("x86-64-v4-vnni")
    data = targets.to_json(target)
    assert canonical(data) == (
        b'{"cpu":"x86-64-v4","device":"cpu","features":["+avx512vnni"],"output":"shared",'
        b'"triple":"x86_64-unknown-linux-gnu"}'
    )
    assert targets.from_json(json.loads(canonical(data)), "x86-64-v4-vnni") == target
    with pytest.raises(TypeError, match="features must be a list"):
        targets.from_json({**data, "features": "+x"})
    with pytest.raises(KeyError):
        targets.from_json({"cpu": "generic"})


_NAMES = st.text("abc-+", max_size=5)


@given(st.builds(Target, _NAMES, _NAMES, _NAMES, st.lists(_NAMES).map(tuple)))
def test_json_round_trip(target: Target) -> None:
    assert targets.from_json(targets.to_json(target), target.name) == target


def test_reading_targets_loads_no_compiler() -> None:
    code = (
        "import sys, mlcbuild.targets.presets as t; t.resolve('host'); t.presets();"
        "print([name for name in ('tvm', 'numpy', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_llvm_accepts_every_name() -> None:
    """Checks that the table of processors, cpus.json, is what tests/llvm_table.py writes with the installed
    LLVM, and that this LLVM accepts every name of a processor or feature in the target presets and of this
    machine."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "llvm_table.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout == (ROOT / "runtime" / "mlcbuild_format" / "cpus.json").read_text()
    machines = [(LINUX, cpu, features) for _, cpu, features in X86.values()]
    machines += [(ARM, "generic", features) for _, features in ARMS.values()]
    cpus = [target for target in presets.presets().values() if target.device == "cpu"]
    machines += [(item.triple, item.cpu, item.features) for item in cpus]
    machines.append(this_machine.host())
    code = (
        "import json, sys, tvm, tvm_ffi\n"
        "features = tvm_ffi.get_global_func('target.llvm_get_cpu_features')\n"
        "for triple, cpu, given in json.loads(sys.argv[1]):\n"
        "    options = {'kind': 'llvm', 'mtriple': triple, 'mcpu': cpu, 'mattr': given}\n"
        "    known = set(map(str, features(tvm.target.Target(options))))\n"
        "    assert known >= {name[1:] for name in given if name[0] == '+'}, (cpu, given)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(machines)], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_a_wheel_carries_presets_and_schemas(tmp_path: Path) -> None:
    """Checks that an installed package contains the presets of targets, so that it works without a
    checkout."""
    (tmp_path / "mlcbuild").mkdir()
    for path in (ROOT / "mlcbuild").rglob("*"):
        if path.suffix in (".py", ".json") and "compiler" not in path.parts:
            to = tmp_path / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    code = "import mlcbuild.targets.presets as t; print(t.__file__); print(*t.presets())"

    def run() -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    assert "SetupError: the target presets of mlcbuild are missing: install it again" in run().stderr
    directory = tmp_path / "mlcbuild" / "presets"
    directory.mkdir()
    for path in (ROOT / "targets").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    where, names = run().stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert names.split() == list(presets.presets())
