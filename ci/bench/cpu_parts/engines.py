"""Prepares the engines that are compared: environments, converted models, and the command that starts each
engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OURS = os.pathsep.join([str(HERE), str(ROOT), str(ROOT / "runtime")])


@dataclass(frozen=True)
class Peer:
    packages: tuple[str, ...]
    models: tuple[str, ...]
    """Names of the files or directories, each with a model in one format, that a compared engine's converter
    writes.
    """
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> value, for the variables that are set while pip installs a compared engine."""


def _compilers() -> dict[str, str]:
    """Returns environment variables that select clang, if there is one: llama.cpp's code for AMX crashes when
    GCC 12 has compiled it. Returns {} without clang, and if CC or CXX is set already.
    """
    if os.environ.get("CC") or os.environ.get("CXX"):
        return {}
    names = ["clang", *(f"clang-{version}" for version in range(22, 13, -1))]
    actual = next((name for name in names if shutil.which(name)), None)
    return {"CC": actual, "CXX": actual.replace("clang", "clang++")} if actual else {}


CONVERTER = ("torch==2.13.0", "transformers")
"""Python packages (pip requirements) that the model converters of onnxruntime-genai and OpenVINO need to read
a checkpoint. The engines themselves do not import them.
"""

WEIGHTS = (".gguf", ".bin", ".data")
"""Suffixes of the names of weights files in the formats of the other engines."""

PEERS: Mapping[str, Peer] = {
    "llama": Peer(
        ("llama-cpp-python", "gguf"),
        ("q4_0.gguf", "q8_0.gguf"),
        ("--no-binary", "llama-cpp-python"),
        {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_BUILD_TYPE=Release",
            **_compilers(),
        },
    ),
    "ctranslate2": Peer(("ctranslate2",), ("int8",)),
    "onnxruntime": Peer((*CONVERTER, "onnx", "onnx-ir", "onnxruntime-genai"), ("int4",)),
    "openvino": Peer((*CONVERTER, "optimum-intel", "openvino-genai", "nncf"), ("int4", "int8")),
}
V3 = "x86-64-v3"
V3_CMAKE = ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON")
"""CMake options with which llama.cpp and ik_llama.cpp are built to use AVX2 and nothing newer."""
V3_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "ik": {},
    "ctranslate2": {
        "CT2_FORCE_CPU_ISA": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "openvino": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""Name of a compared engine -> environment variables with which it uses AVX2 and nothing newer; {} if the
limit is set when the engine is built (V3_CMAKE). An engine without an entry has no such setting and is not
measured under this limit. CTranslate2 and OpenVINO multiply by oneDNN, and CTranslate2 by MKL on Intel's
processors, which need variables of their own."""
IK = "ik"
"""Name of the compared engine ik_llama.cpp. It is built from a source directory by ik_library.py, because no
package index has it.
"""


@dataclass(frozen=True)
class Entry:
    """One model, converted for one engine, with the command that starts the engine."""

    name: str
    bits: int
    ours: bool
    command: tuple[str, ...]
    """Command (program and arguments) that starts a measured engine. Three numbers are appended to it: of
    threads, of tokens in the first prompt, and of tokens in the vocabulary.
    """
    path: str
    """Value of the environment variable PYTHONPATH in the process of a measured engine."""
    size: int
    """Total size in bytes of the weights files that a measured engine loads."""
    variables: tuple[tuple[str, str], ...] = ()
    """Pairs (name, value) of environment variables that a measured engine's process gets in addition to those
    of this process, such as a limit of its instruction set."""


@dataclass(frozen=True)
class Prepared:
    checkpoint: Path
    config: Mapping[str, int]
    entries: tuple[Entry, ...]


def prepare(
    directory: Path, shape: str, schemes: Iterable[str], peers: Iterable[str], target: str = "host"
) -> Prepared:
    """Installs the compared engines and converts the model for them, where that was not done before. Returns
    the engines with their models. An engine that cannot be installed or converted, or not be limited to
    `target`, is left out with a printed line. Raises CalledProcessError if a bundle of mlcbuild cannot be
    built.

    directory: where everything is kept; shape: name of the model's size; schemes: quantization schemes of
    mlcbuild's bundles; peers: names of the other engines; target: "host", or "x86-64-v3" for engines that use
    AVX2 and nothing newer.
    """
    area = directory / shape
    checkpoint = area / "checkpoint"
    if not checkpoint.is_dir():
        print(f"making a random checkpoint of {shape} ...", flush=True)
        _in_process_of_its_own(checkpoint, shape)
    config = json.loads((checkpoint / "config.json").read_text())
    entries = [*_ours(area, list(schemes), target)]
    for peer in peers:
        if target == V3 and peer not in V3_VARIABLES:
            print(f"{peer} is left out: it cannot be held to {target}", flush=True)
            continue
        entries += _peer(directory, area, peer, target)
    return Prepared(checkpoint, config, tuple(entries))


def _in_process_of_its_own(root: Path, shape: str) -> None:
    """Creates a random checkpoint in the directory `root`, which must not exist, in a separate process:
    otherwise, the memory that NumPy needs would count as peak memory of each engine that this process starts
    later. shape: name of the model's size. Raises CalledProcessError, and leaves `root` missing, if it fails.
    """
    part = root.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    code = (
        "import sys, pathlib, checkpoint;"
        f"checkpoint.make(pathlib.Path(sys.argv[1]), checkpoint.config({shape!r}))"
    )
    subprocess.run([sys.executable, "-c", code, str(part)], check=True, env=environment(OURS))
    part.rename(root)


def environment(path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _ours(area: Path, schemes: list[str], target: str) -> Iterator[Entry]:
    """Builds a bundle of the random checkpoint `area`/checkpoint for each quantization scheme, by one
    `mlcbuild run` with a recipe, and yields the description (`Entry`) of each as an engine to compare.
    Results in the store beside `area` are reused. Raises CalledProcessError if the build fails."""
    recipe = area / "recipe.yaml"
    recipe.write_text(
        "version: 1\n"
        "models: {random: ./checkpoint}\n"
        f"quantizations: [{', '.join(schemes)}]\n"
        f"targets: [{target}]\n"
        "compile: {context_window: 2048, prefill_chunk: 512, max_batch: 8}\n"
        'verify: {prompts: ["0123456789 abcdefghijkl"]}\n'
    )
    command = [sys.executable, "-m", "mlcbuild", "run", str(recipe), "--store", str(area.parent / "store")]
    subprocess.run(command, check=True, env=environment(OURS), stdout=subprocess.DEVNULL)
    for scheme in schemes:
        bundle = area / "dist" / f"random-{scheme}-{target}"
        size = sum(path.stat().st_size for path in bundle.glob("*.safetensors"))
        started = (sys.executable, str(HERE / "engine_ours.py"), str(bundle))
        yield Entry(f"ours {scheme}", int(scheme[1]), True, started, OURS, size)


def _peer(directory: Path, area: Path, name: str, target: str) -> Iterator[Entry]:
    peer = Peer(("gguf",), ("q4_0.gguf", "q8_0.gguf")) if name == IK else PEERS[name]
    place, out = name, area / name
    if target == V3 and peer.environment:
        place = f"{name}-{target}"
        arguments = peer.environment["CMAKE_ARGS"].replace("-DGGML_NATIVE=ON", " ".join(V3_CMAKE))
        peer = replace(peer, environment={**peer.environment, "CMAKE_ARGS": arguments})
    variables = V3_VARIABLES[name] if target == V3 else {}
    try:
        python = installed(directory / "environments" / place, peer)
        if not out.is_dir():
            print(f"converting for {name} ...", flush=True)
            part = out.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            command = [python, str(HERE / f"convert_{name}.py"), str(area / "checkpoint"), str(part)]
            quietly(command, environment(str(HERE)), area / f"{name}.log")
            part.rename(out)
    except subprocess.CalledProcessError as error:
        print(f"{name} is left out: {error.cmd[0]} failed; see {error.output}", flush=True)
        return
    for model in peer.models:
        path = out / model
        if not path.exists():
            continue
        size = sum(file.stat().st_size for file in [path, *path.glob("*")] if file.suffix in WEIGHTS)
        started = (python, str(HERE / f"engine_{name}.py"), str(path))
        bits = 4 if "4" in path.stem else 8
        yield Entry(f"{name} {path.stem}", bits, False, started, str(HERE), size, tuple(variables.items()))


def installed(place: Path, peer: Peer) -> str:
    """Returns the path of the Python interpreter in a compared engine's virtual environment `place`. If the
    environment is missing or incomplete, it is created and the engine's packages are installed. Raises
    CalledProcessError if that fails."""
    python = place / "bin" / "python"
    if not (place / "done").is_file():
        print(f"installing {', '.join(peer.packages)} ...", flush=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *peer.options, *peer.packages, "numpy"]
        quietly(install, {**os.environ, **peer.environment}, place / "install.log")
        (place / "done").touch()
    return str(python)


def quietly(command: list[str], variables: Mapping[str, str], log: Path) -> None:
    """Runs a command and replaces the file `log` by its standard output and standard error. variables: the
    whole environment of the command. Raises CalledProcessError, whose `output` is the path of the log, if the
    command fails."""
    with log.open("wb") as file:
        done = subprocess.run(command, env=variables, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, output=str(log))
