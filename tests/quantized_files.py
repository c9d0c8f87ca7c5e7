"""Writes checkpoints whose matrices are quantized as other tools do it, by the definitions of their
formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild import models, pipeline, quant, recipe
from mlcbuild.build.graph import Step
from mlcbuild.checkpoints import conversion, exact_weights
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from mlcbuild.models.action import normalise
from tests.checkpoint_files import HF, Entry, Tensors, single, tensors
from tests.schemes import SCHEMES

Floats = NDArray[np.float32]
Parts = Mapping[str, Entry]
Quantizer = Callable[[np.random.Generator, int, int], tuple[Parts, Floats]]
"""A function of (generator of random numbers, rows, columns) that returns a random quantized matrix: (the
tensors that store it, its exact values)."""
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
"""Names of the quantized modules in each layer. Of the attention inputs only q_proj is quantized, not those
of keys and values."""
SMALL = {**HF, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "attention_bias": False}
ODD = {**HF, "hidden_size": 136, "intermediate_size": 264, "num_attention_heads": 2, "attention_bias": False}
"""Fields of a config.json whose sizes are multiples neither of a block of 128 nor of a group of 32."""


def quantized(
    root: Path, settings: Mapping[str, Any], quantize: Quantizer, fields: Mapping[str, Any] = SMALL
) -> dict[str, Floats]:
    """Writes a quantized checkpoint. Returns name of a quantized matrix -> its exact values."""
    root.mkdir(exist_ok=True)
    config = parsing.parse(fields)
    content: Tensors = _named(tensors("F32", config), fields)
    random, values = np.random.default_rng(7), {}
    for layer in range(2):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            rows, columns = content.pop(f"{name}.weight")[1].shape
            parts, values[f"{name}.weight"] = quantize(random, rows, columns)
            content |= {f"{name}.{part}": entry for part, entry in parts.items()}
    single(root, content)
    (root / "config.json").write_text(json.dumps({**fields, "quantization_config": settings}))
    (root / "tokenizer.json").write_text("{}")
    return values


def _named(content: Tensors, fields: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of a checkpoint with the query, key, value, gate and up matrices in the sizes that
    `fields` of config.json give."""
    dim = fields["hidden_size"] // fields["num_attention_heads"]
    random = np.random.default_rng(1)
    sizes = {"q": fields["hidden_size"], "k": dim, "v": dim, "gate": fields["intermediate_size"]}
    sizes["up"] = sizes["gate"]
    for name in list(content):
        kind = name.split(".")[-2].removesuffix("_proj")
        if kind in sizes:
            shape = (sizes[kind], fields["hidden_size"])
            content[name] = ("F32", random.standard_normal(shape, np.float32))
    return content


def read(root: Path, settings: Mapping[str, Any]) -> tuple[models.ModelConfig, Mapping[str, Any]]:
    """Reads a checkpoint. Returns (its config, parameter name -> exact values)."""
    config = parsing.parse(json.loads((root / "config.json").read_text()))
    return config, exact_weights.checkpoint(root, config, parsing.tensor_names(config), views_for(settings))


def check(root: Path, settings: Mapping[str, Any], values: Mapping[str, Floats]) -> None:
    """Asserts that the quantized matrices of a checkpoint are read with exactly the expected values. values:
    tensor name of a matrix -> its dequantized values."""
    config, weights = read(root, settings)
    names = parsing.tensor_names(config).sources
    for param in weights:
        whole, first = np.asarray(weights[param]), 0
        for piece in names[param]:
            if piece.tensor in values:
                rows = whole[first : first + piece.rows]
                np.testing.assert_array_equal(rows, values[piece.tensor], err_msg=piece.tensor)
            first += piece.rows


def check_converted(
    root: Path, settings: Mapping[str, Any], values: Mapping[str, Floats], fields: Mapping[str, Any]
) -> None:
    """Converts a quantized checkpoint to float32 and asserts that the matrix down_proj of the second layer
    has exactly the expected values. root: directory of the checkpoint; settings: its quantization_config;
    values: tensor name -> expected matrix; fields: its config.json."""
    config = parsing.parse(fields)
    sources = locate(root, config, parsing.tensor_names(config), views_for(settings))
    conversion.write(sources, SCHEMES["q0f32"], root / "out", 2)
    unpacked = conversion.unpacked(root / "out", config, SCHEMES["q0f32"])
    down = values["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(unpacked["layers.1.mlp.down.weight"], down)


RECIPE = """\
version: 1
models: {m: ./m}
quantizations: {same: as-is}
targets: [x86-64-v3]
"""


def kept(directory: Path) -> dict[str, str]:
    """Converts the checkpoint directory/m with the scheme `as-is`, which keeps the values of a quantized
    checkpoint. Asserts that every value is kept, and returns parameter name -> name of the format in which it
    is stored."""
    (directory / "recipe.yaml").write_text(RECIPE)
    graph = pipeline.build(recipe.load(directory / "recipe.yaml"), Lock({})).graph
    (step,) = (node for node in graph.nodes.values() if node.name.startswith("weights/"))
    assert isinstance(step, Step)
    scheme = quant.from_json(step.params["scheme"])
    inputs = {"checkpoint": directory / "m", "config": directory / "config"}
    normalise({}, inputs, directory / "config")
    conversion.convert({"scheme": quant.to_json(scheme)}, inputs, directory / "out")
    config, exact = read(
        directory / "m", json.loads((directory / "config" / "quantization.json").read_text())
    )
    unpacked = conversion.unpacked(directory / "out", config, scheme)
    for name in exact:
        np.testing.assert_array_equal(np.asarray(unpacked[name]), np.asarray(exact[name]), err_msg=name)
    return {name: quant.scheme_for(scheme, name).format for name in exact}


def floats(random: np.random.Generator, dtype: str, *shape: int) -> NDArray[np.uint8]:
    """Returns the bits of random 8-bit floats; all values except NaN and infinity occur."""
    from mlcbuild.checkpoints.number_types import SMALL_FLOATS

    codes = np.flatnonzero(np.isfinite(SMALL_FLOATS[dtype]))
    return random.choice(codes, shape).astype(np.uint8)


def check_refused(
    root: Path,
    settings: dict[str, Any],
    quantize: Quantizer,
    message: str,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Asserts that a quantized checkpoint is refused with an error that matches the regular expression
    `message`. fields: config.json of the model, if it is not that of the checkpoint."""
    quantized(root, settings, quantize)
    config = parsing.parse(fields or json.loads((root / "config.json").read_text()))
    with pytest.raises(CheckpointError, match=message):
        locate(root, config, parsing.tensor_names(config), views_for(settings))
