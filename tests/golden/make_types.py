"""Writes the goldens of tests/typegoldens.py: tests/golden/<name>.safetensors, with transformers.

    python -m tests.golden.make_types [name ...]

Needs torch and transformers beside mlcbuild's own packages. The checkpoint that transformers reads has the
names under which transformers itself saves a model of the type.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.checkpoint_files import entry, save
from tests.typegoldens import CONFIGS, HERE, tokens, weights


def make(name: str) -> None:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as area:
        folder = Path(area)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        kind = model_class(transformers, name)
        config = transformers.AutoConfig.from_pretrained(folder)
        kind.from_config(config, attn_implementation="eager").save_pretrained(folder / "saved")
        shapes = header(folder / "saved" / "model.safetensors")
        stored = {tensor: entry(value, "F32") for tensor, value in weights(name, shapes).items()}
        save(folder / "model.safetensors", stored)
        add_format(folder / "model.safetensors")
        # Its eager attention adds the biases of ALiBi twice in Falcon (5.23.0); its default does not.
        attention = "sdpa" if CONFIGS[name].get("alibi") else "eager"
        how = {"attn_implementation": attention, "experts_implementation": "eager"}
        model = kind.from_pretrained(folder, dtype=torch.float32, **how).eval()
        ids = torch.from_numpy(tokens(name))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0]
        importlib.import_module("safetensors.torch").save_file(
            {"logits": logits.contiguous()},
            HERE / f"{name}.safetensors",
            metadata={
                "shapes": json.dumps(shapes),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )


def model_class(transformers: Any, name: str) -> Any:
    if "text_config" in CONFIGS[name]:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def header(path: Path) -> dict[str, list[int]]:
    """Returns name -> shape of the tensors in a safetensors file."""
    data = path.read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tensor_entry["shape"] for name, tensor_entry in entries.items() if name != "__metadata__"}


def add_format(path: Path) -> None:
    """Adds the metadata entry {"format": "pt"} to a safetensors file, without which transformers does not
    read it."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps({"__metadata__": {"format": "pt"}, **json.loads(data[8 : 8 + size])}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


if __name__ == "__main__":
    for golden in sys.argv[1:] or CONFIGS:
        make(golden)
