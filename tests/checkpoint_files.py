"""Writes small checkpoints for tests, by the description of the safetensors format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mlcbuild import models
from mlcbuild.checkpoints import conversion
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.models import parsing
from mlcbuild.quant import Storage

# No size is a multiple of a group or of a tile.
HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 51,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
}
CONFIG = parsing.parse(HF)
TIED = parsing.parse({**HF, "tie_word_embeddings": True})
PIECES = {3: (40, 8, 8), 2: (72, 72)}

Entry = tuple[str, NDArray[np.generic]]
Tensors = dict[str, Entry]
"""A tensor to be written: (dtype as safetensors names it, array). Values of BF16 are the bits as uint16."""


def entry(values: NDArray[np.float32], code: str) -> Entry:
    if code == "BF16":
        return code, (values.view(np.uint32) >> 16).astype(np.uint16)
    return code, values.astype({"F16": np.float16, "F32": np.float32}[code])


def wide(stored: Entry) -> NDArray[np.float32]:
    code, array = stored
    if code == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def tensors(code: str = "BF16", config: models.ModelConfig = CONFIG) -> Tensors:
    """Returns the tensors of a checkpoint, with normally distributed values and with the names and shapes
    that transformers writes."""
    random = np.random.default_rng(0)
    by_name: Tensors = {}
    for param in models.parameters(config):
        names = [piece.tensor for piece in parsing.tensor_names(config).sources[param.name]]
        for name, rows in zip(names, PIECES.get(len(names), param.shape[:1]), strict=True):
            values = random.standard_normal((rows, *param.shape[1:]), np.float32) * np.float32(0.02)
            by_name[name] = entry(values, code)
    return by_name


def save(path: Path, content: Mapping[str, Entry]) -> None:
    """Writes a safetensors file, following the description of the format."""
    header, end = {}, 0
    for name, (code, array) in content.items():
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in content.values():
            file.write(array.tobytes())


def single(root: Path, content: Tensors) -> Path:
    root.mkdir(exist_ok=True)
    save(root / "model.safetensors", content)
    return root


def sharded(root: Path, content: Tensors) -> Path:
    """Writes a checkpoint whose tensors are distributed over three files, with an index."""
    root.mkdir(exist_ok=True)
    place = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(content)}
    for file in set(place.values()):
        save(root / file, {name: content[name] for name in content if place[name] == file})
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


def write(
    checkpoint: Path, out: Path, scheme: Storage, config: models.ModelConfig = CONFIG, cores: int = 1
) -> Path:
    conversion.write(locate(checkpoint, config, parsing.tensor_names(config)), scheme, out, cores)
    return out


def shorten(checkpoint: Path, layers: int) -> None:
    """Removes all layers but the first ones from a checkpoint in one file of safetensors, in place, so that
    it is compiled and measured in less time. layers: number of those that stay."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    assert config["num_hidden_layers"] > layers
    path.unlink()
    path.write_text(json.dumps({**config, "num_hidden_layers": layers}))
    weights = checkpoint / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in load_file(weights).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    weights.unlink()
    save_file(kept, weights, metadata={"format": "pt"})
