"""Writes tests/golden/gguf-experts.safetensors: transformers' logits of the models of tests/gguf_experts.py.

    python -m tests.golden.make_gguf

Needs torch and transformers beside the packages of the tests.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path

from tests.checkpoint_files import entry, save
from tests.gguf_experts import CHANGES, checkpoint, tokens
from tests.golden.make_types import add_format
from tests.typegoldens import HERE


def make() -> None:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(1)
    logits = {}
    for name in CHANGES:
        config, tensors = checkpoint(name)
        with tempfile.TemporaryDirectory() as area:
            folder = Path(area)
            (folder / "config.json").write_text(json.dumps(config))
            save(
                folder / "model.safetensors",
                {tensor_name: entry(value, "F32") for tensor_name, value in tensors.items()},
            )
            add_format(folder / "model.safetensors")
            how = {"attn_implementation": "eager", "experts_implementation": "eager"}
            kind = transformers.AutoModelForCausalLM
            model = kind.from_pretrained(folder, dtype=torch.float32, **how).eval()
            with torch.no_grad():
                logits[name] = (
                    model(torch.from_numpy(tokens(name))[None], use_cache=False).logits[0].contiguous()
                )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    importlib.import_module("safetensors.torch").save_file(
        logits, HERE / "gguf-experts.safetensors", versions
    )


if __name__ == "__main__":
    make()
