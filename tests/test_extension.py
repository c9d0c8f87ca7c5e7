"""Tests that add a family, a format with its kernel, and a device to a copy of the source as
mlcbuild/README.md describes it, and that build, verify and serve models with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.conftest import HALF_COMPILED, ROOT, TINY
from tests.guide import example
from tests.outside import copy_package

RECIPE = """\
version: 1
models: {toy: ./toy}
quantizations: [q4m]
targets: [host]
compile: {context_window: 64, prefill_chunk: 32, max_batch: 2}
verify: {prompts: [The quick brown fox jumps over the lazy dog.], max_kl: 0.0001, min_top1: 1.0}
bundle: {output: bundle}
"""
LAYERS = 2
SERVE = """\
import sys
from mlcbuild_runtime import Engine
with Engine(sys.argv[1]) as engine:
    answer = engine.completions.create(prompt="The quick", max_tokens=6, temperature=0)
    print(answer.usage.completion_tokens)
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def extend(root: Path) -> None:
    """Adds the examples of mlcbuild/README.md to the copy of the source in `root`: a model family, a format
    for weights and the CPU kernel that reads it. The last two need one line each in a table."""
    package = root / "mlcbuild"
    (package / "models" / "families" / "toy.py").write_text(example("Extend: a model family"))
    (package / "quant" / "formats" / "toy.py").write_text(example("Extend: a format"))
    (package / "compiler" / "cpu" / "formats" / "toy_kernel.py").write_text(
        example("Extend: a kernel for a format")
    )
    edit(
        package / "quant" / "schemes.py",
        '        Scheme("q0f32"',
        '        Scheme("q4m", "toy"),\n        Scheme("q0f32"',
    )
    edit(
        package / "targets" / "backends.py",
        '    "f32": "plain",\n',
        '    "f32": "plain",\n    "toy": "row",\n',
    )


def write_model(out: Path) -> None:
    """Writes a checkpoint of the example family `toy`, whose matrices the example format stores exactly.

    Every group of 32 weights has values (q - 7) / 32 with q = 0 .. 15, and both ends occur, so that the step
    is 2**-5.
    """
    shutil.copytree(TINY, out)
    (out / "config.json").unlink()
    config = json.loads((TINY / "config.json").read_text())
    changes = {"model_type": "toy", "architectures": ["ToyForCausalLM"], "sliding_window": 8}
    config |= changes | {"num_hidden_layers": LAYERS}
    (out / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)
    tensors = {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= LAYERS:
            continue
        tensors[name] = tensor
        if tensor.ndim == 2:
            codes = random.integers(0, 16, (*tensor.shape[:1], tensor.shape[1] // 32, 32))
            codes[..., 0], codes[..., 31] = 0, 15
            tensors[name] = ((codes - 7) / 32).reshape(tensor.shape).astype(np.float32)
    for layer in range(LAYERS):
        for part in "qk":
            norm = 1 + random.integers(-8, 9, config["head_dim"]) / 64
            tensors[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = norm.astype(np.float32)
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def python(root: Path, *arguments: str) -> str:
    """Runs Python with these arguments in the directory root/work, with the copy of the builder in `root`,
    and returns its standard output."""
    kept: Mapping[str, str] = {
        name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")
    }
    path = os.pathsep.join([str(root), str(ROOT / "runtime"), str(ROOT)])
    environment = {**kept, "PYTHONPATH": path, "MLCBUILD_STORE": str(root / "store")}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=root / "work",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_family_a_format_and_a_kernel_are_built_and_served(tmp_path: Path) -> None:
    root = copy_package(tmp_path)
    extend(root)
    (root / "work").mkdir()
    write_model(root / "work" / "toy")
    (root / "work" / "recipe.yaml").write_text(RECIPE)
    run = json.loads(python(root, "-m", "mlcbuild", "run", "recipe.yaml", "--json"))
    assert {step["status"] for step in run["steps"]} == {"built"}
    assert any(step["name"] == "verify/toy-q4m-host" for step in run["steps"])
    bundle = json.loads((root / "work" / "bundle" / "bundle.json").read_text())
    assert bundle["scheme"]["name"] == "q4m"
    assert 1 <= int(python(root, "-c", SERVE, "bundle")) <= 6


DEVICE_RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q0f32]
targets:
  here: {extends: host, device: numpy, output: program}
compile: {context_window: 64, prefill_chunk: 32, max_batch: 2}
verify: {prompts: [The quick brown fox jumps over the lazy dog.], max_kl: 0.0000001, min_top1: 1.0}
bundle: {output: bundle}
"""
BACKEND = """
BACKENDS["numpy"] = Backend(
    action="tests.compiler.reference_device:compile_library",
    tools="tests.compiler.reference_device:tools",
    layout=_cpu_layout,
    runtime_files=(),
    can_run=lambda target, host: None,
    labels=lambda target: (),
    executor=("tests.compiler.reference_device",),
)
"""


def add_device(root: Path) -> None:
    """Adds the example device of mlcbuild/README.md to the copy of the source in `root`: an entry in the
    tables of backends and of loaders, and the device's name in the JSON schema of targets."""
    for package in ("mlcbuild_format", "mlcbuild_runtime"):
        shutil.copytree(ROOT / "runtime" / package, root / package, ignore=HALF_COMPILED)
    backends = root / "mlcbuild" / "targets" / "backends.py"
    backends.write_text(backends.read_text() + BACKEND)
    loading = root / "mlcbuild_runtime" / "executor" / "loading.py"
    edit(
        loading,
        "LOADERS: dict[str, str] = {\n",
        'LOADERS: dict[str, str] = {\n    "numpy": "tests.compiler.reference_device:load",\n',
    )
    edit(root / "mlcbuild" / "schema" / "target.schema.json", '"enum": ["cpu", ', '"enum": ["cpu", "numpy", ')


def test_a_device_is_built_verified_and_served(tmp_path: Path) -> None:
    root = copy_package(tmp_path)
    add_device(root)
    (root / "work").mkdir()
    shutil.copytree(TINY, root / "work" / "tiny")
    (root / "work" / "recipe.yaml").write_text(DEVICE_RECIPE)
    run = json.loads(python(root, "-m", "mlcbuild", "run", "recipe.yaml", "--json"))
    assert any(step["name"] == "verify/tiny-q0f32-here" for step in run["steps"])
    assert 1 <= int(python(root, "-c", SERVE, "bundle")) <= 6
