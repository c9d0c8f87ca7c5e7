"""Builds a bundle of the small model in the repository (recipes/models/tiny) with the real compiler: `real.py
SCHEME DIRECTORY CHANGES [TARGET]` writes it to DIRECTORY.

CHANGES is a JSON object with fields of config.json to replace; TARGET is this machine's CPU if it is left
out. It is a separate program, because the runtime's tests do not import the builder.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import numpy

from mlcbuild import quant
from mlcbuild.bundles import assemble
from mlcbuild.canon import Json
from mlcbuild.checkpoints import conversion
from mlcbuild.compiler.cpu import action as cpu_action
from mlcbuild.compiler.gpu import gpu_action
from mlcbuild.models.action import normalise
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from tests.schemes import SCHEMES

CHECKPOINT = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tiny"
LIMITS: dict[str, Json] = {"context_window": 256, "prefill_chunk": 64, "max_batch": 8}


def changed(checkpoint: Path, changes: dict[str, Json], out: Path) -> None:
    """Writes a checkpoint with some fields of config.json replaced. With fewer layers it is a smaller model,
    whose answers are partly the same; with a smaller vocabulary, the last tokens are left out."""
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_bytes()) | changes
    (out / "config.json").write_text(json.dumps(config))
    layers, tensors = config["num_hidden_layers"], numpy.load_file(checkpoint / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if (match := re.search(r"layers\.(\d+)\.", name)) is None or int(match[1]) < layers
    }
    embedding = "model.embed_tokens.weight"
    kept[embedding] = kept[embedding][: config["vocab_size"]]
    numpy.save_file(kept, out / "model.safetensors")


def build(
    scheme: str,
    out: Path,
    changes: dict[str, Json],
    target_name: str = presets.HOST,
    limits: Mapping[str, Json] = LIMITS,
) -> None:
    """Builds a bundle of the small model in recipes/models by running the action of every build step, one
    after the other. scheme: name of the quantization; out: directory of the bundle; changes: fields of
    config.json to replace; target_name: a preset; limits: limits of the library, such as the context."""
    scheme_json = quant.to_json(SCHEMES[scheme])
    target = targets.to_json(presets.resolve(target_name))
    compile_library = gpu_action.compile_library if target_name == "webgpu" else cpu_action.compile_library
    compiled: dict[str, Json] = {"scheme": scheme_json, "target": target, "limits": dict(limits)}
    shown: dict[str, Json] = {
        "name": f"tiny-{scheme}",
        "model": "tiny",
        "scheme": quant.describe(SCHEMES[scheme]),
        "target": target,
    }
    with tempfile.TemporaryDirectory() as area:
        parts = {name: Path(area, name) for name in ("config", "weights", "library", "tokenizer", "runtime")}
        for part in (*parts.values(), out):
            part.mkdir()
        runtime = assemble.tvm_runtime()
        assert runtime is not None
        (parts["runtime"] / runtime.name).symlink_to(runtime)
        checkpoint = CHECKPOINT
        if changes:
            checkpoint = Path(area, "checkpoint")
            changed(CHECKPOINT, changes, checkpoint)
        inputs = {"config": parts["config"], "checkpoint": checkpoint}
        normalise({}, inputs, parts["config"])
        conversion.convert({"scheme": scheme_json}, inputs, parts["weights"])
        compile_library(compiled, inputs, parts["library"])
        assemble.tokenizer({}, inputs, parts["tokenizer"])
        assemble.assemble(shown, parts, out)


if __name__ == "__main__":
    target = sys.argv[4] if len(sys.argv) > 4 else presets.HOST
    build(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), target)
