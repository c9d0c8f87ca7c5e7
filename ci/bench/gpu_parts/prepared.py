"""GPU programs that are measured without a model's files: compiled on a machine with the compiler, and later
loaded with random weights on a machine with a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlcbuild_format.bundle import Manifest, Memory, Model
from mlcbuild_format.limits import Limits
from mlcbuild_runtime.devices import gpu_adapter, gpu_program
from mlcbuild_runtime.devices.gpu import GpuExecutor
from mlcbuild_runtime.devices.gpu_program import DeviceProgram

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "recipes" / "models" / "tiny"
LIBRARY = "library.json"
WINDOW, BATCH = 1024, 32
CHUNK = 64 << 20
"""Number of random bytes that fill the weights of a GPU program to measure: each parameter begins with the
same bytes, and a larger one repeats them.
"""


def prepare(area: Path, shape: str, config: Mapping[str, Any], scheme: str, window: int) -> None:
    """Compiles the GPU program of a model and writes it below `area`, in a directory `<shape>-<scheme>`.
    shape: any name for the model; config: the model's config.json; scheme: name of a quantization scheme;
    window: context window in tokens. Needs the compiler.
    """
    from mlcbuild import models, quant
    from mlcbuild.compiler.gpu.gpu_action import compile_library
    from mlcbuild.models import parsing
    from mlcbuild.quant.schemes import SCHEMES
    from mlcbuild.targets import presets
    from mlcbuild.targets import target as targets
    from mlcbuild.targets.backends import BACKENDS

    source, out = area / "source" / shape, area / f"{shape}-{scheme}"
    for directory in (source, out):
        directory.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(models.to_json(parsing.parse(dict(config), shape))))
    params: dict[str, Any] = {
        "scheme": quant.to_json(BACKENDS["webgpu"].storage(SCHEMES[scheme])),
        "target": targets.to_json(presets.resolve("webgpu")),
        "limits": {"context_window": window, "prefill_chunk": window // 2, "max_batch": BATCH},
    }
    compile_library(params, {"config": source}, out)


def prepared(area: Path) -> list[Path]:
    """Returns the directories of the GPU programs that an earlier run compiled below `area`: those that
    contain library.json.
    """
    return sorted(path.parent for path in area.glob(f"*/{LIBRARY}"))


def manifest(library: Path) -> Manifest:
    """Returns a bundle manifest for a compiled GPU program that is measured without weights files. library:
    the directory with the program and the description of its model.
    """
    about: Any = json.loads((library / LIBRARY).read_text())
    parts = {key: about["memory"][key] for key in ("weights", "kv_cache", "workspace")}
    return Manifest(
        name=library.name,
        model=Model(library.name, about["config"]["family"], about["config"]),
        scheme=about["scheme"],
        target=about["target"],
        limits=Limits(**about["limits"]),
        library="program.json",
        weights=(),
        signature=about["signature"],
        files={},
        memory=Memory(**parts, total=sum(parts.values())),
    )


class _RandomWeights(DeviceProgram):
    """A GPU program whose parameters are filled with random bytes below 0x40: read as float16, all numbers
    are between 0 and 2."""

    def _upload(self, path: Path, manifest: Manifest) -> None:
        random = np.random.default_rng(0).integers(0, 0x40, CHUNK, np.uint8)
        for name, size in self.program.param_bytes().items():
            for start in range(0, size, CHUNK):
                self.queue.write_buffer(self._buffers[name], start, random[: min(CHUNK, size - start)])


def load(library: Path) -> GpuExecutor:
    """Returns the executor of a GPU program with random weights, on this machine's GPU. library: the
    program's directory. Raises SetupError if there is no GPU adapter or wgpu is not installed."""
    about, adapter = manifest(library), gpu_adapter.choose()
    program = gpu_program.read(library, about).for_device(gpu_adapter.features(adapter))
    pages = gpu_program.cache_pages(program, about.limits.pages, gpu_adapter.limits(adapter))
    return GpuExecutor(library, about, _RandomWeights(library, about, adapter, program, pages))
