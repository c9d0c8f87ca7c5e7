"""Tests of the JSON form of a ModelConfig, which must not change: its digests are part of cache keys."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlcbuild import canon, models
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Attention, Dense, LayerSpec, ModelConfig, Norms, RmsNorm, Rope
from mlcbuild.models.parsing import parse
from tests.configs import attention_of, with_windows

GOLDEN = Path(__file__).parent.parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
Config = dict[str, Any]


def golden(variant: str) -> Config:
    values: Config = json.loads((GOLDEN / variant / "config.json").read_text())
    return values


def ours(variant: str = "phi3-longrope-long") -> Config:
    values: Config = json.loads(canon.canonical(models.to_json(parse(golden(variant)))))
    return values


def test_the_json_form_is_a_contract() -> None:
    """Checks the digests of two configs, which are part of the keys of libraries: if they changed, every
    library of every user would be built again."""
    assert models.config_digest(parse(golden("gemma2"))) == GOLDEN_DIGESTS["gemma2"]
    assert models.config_digest(parse(golden("phi3-longrope-long"))) == GOLDEN_DIGESTS["phi3-longrope-long"]


GOLDEN_DIGESTS = {
    "gemma2": "c0bcdc1f22ae5b0b3164f588ba52709f708cd79ccc07c24b20c739c91710be77",
    "phi3-longrope-long": "09f473eabe32f6840ad1362dcf06809e0ee404a82c9f383d20cfd819546651f7",
}
MINIMAL = ModelConfig(
    "llama",
    50,
    8,
    64,
    (LayerSpec(Attention(2, 1, 4, 0.5), Dense(12), Norms(RmsNorm(1e-6))),) * 2,
    (Rope(4, (1.0, 0.5)),),
    RmsNorm(1e-6),
)


def test_defaults_stay_out() -> None:
    """Checks that default values are left out of the JSON form, so that a new field with a default changes no
    digest, and that every block states its kind."""
    norm = {"kind": "rms", "eps": "1e-06"}
    assert models.to_json(MINIMAL) == {
        "family": "llama",
        "vocab_size": 50,
        "hidden_size": 8,
        "max_position": 64,
        "layer_specs": [
            {
                "mixer": {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": "0.5"},
                "feed_forward": {"kind": "dense", "size": 12},
                "norms": {"before": norm},
            }
        ],
        "layers": [0, 0],
        "ropes": [{"dim": 4, "inv_freq": ["1.0", "0.5"]}],
        "norm": norm,
    }


def test_equal_layers_are_written_once() -> None:
    config = with_windows(MINIMAL, None, 7, 7, None)
    document = models.to_json(config)
    assert document["layers"] == [0, 1, 1, 0]
    assert [spec["mixer"].get("window") for spec in document["layer_specs"]] == [None, 7]  # type: ignore[union-attr,call-overload,index]
    many = with_windows(MINIMAL, *[None, 7] * 2048)
    assert len(canon.canonical(models.to_json(many))) - len(canon.canonical(document)) < 2 * 4096
    assert models.from_json(models.to_json(many)) == many


@pytest.mark.parametrize("variant", VARIANTS)
def test_json_round_trip(variant: str) -> None:
    config = parse(golden(variant))
    assert models.from_json(ours(variant)) == config
    assert models.config_digest(models.from_json(ours(variant))) == models.config_digest(config)


def test_names_and_bookkeeping_do_not_enter_the_digest() -> None:
    values = golden("llama-yarn")
    other = values | {
        "_name_or_path": "x",
        "torch_dtype": "float16",
        "eos_token_id": [5, 6],
        "use_cache": False,
    }
    assert models.config_digest(parse(other)) == models.config_digest(parse(values))
    assert models.config_digest(parse(values | {"vocab_size": 150})) != models.config_digest(parse(values))


def test_every_field_enters_the_digest() -> None:
    layer, norm = MINIMAL.layers[0], RmsNorm(1e-5)
    attention = attention_of(layer)
    changed = [
        replace(layer, mixer=replace(attention, window=5)),
        replace(layer, mixer=replace(attention, qkv_bias=True)),
        replace(layer, mixer=replace(attention, output_bias=True)),
        replace(layer, mixer=replace(attention, qk_norm=norm)),
        replace(layer, mixer=replace(attention, softcap=5.0)),
        replace(layer, feed_forward=Dense(12, "gelu_tanh")),
        replace(layer, feed_forward=Dense(12, bias=True)),
        replace(layer, norms=Norms(norm)),
        replace(layer, norms=Norms(layer.norms.before, norm)),
        replace(layer, norms=Norms(RmsNorm(1e-6, 1.0))),
    ]
    digests = {
        models.config_digest(replace(MINIMAL, layers=(variant, variant))) for variant in [layer, *changed]
    }
    assert len(digests) == len(changed) + 1


MIXER = "layer_specs.0.mixer"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("", [], r"m: not a model config of mlcbuild: config must be an object, found \[\]"),
        ("family", "no name", r"config.family: must be the name of a family, found \"no name\""),
        ("family", 3, "config.family: must be a string, found 3"),
        ("hidden_size", ..., "config has no 'hidden_size'"),
        ("extra", 1, "config has an unknown 'extra'"),
        ("vocab_size", 0, "m: a model needs layers; vocab_size, hidden_size and max_position must be"),
        ("vocab_size", -1, "config.vocab_size: must be an integer from 0 to 2147483647, found -1"),
        ("vocab_size", True, "config.vocab_size: must be an integer from 0 to 2147483647, found true"),
        (
            "norm.eps",
            1e-6,
            "config.norm.eps: must be a number written as Python's repr in a string, found 1e-06",
        ),
        ("norm.eps", "1.0e-6", "config.norm.eps: must be a number written as"),
        ("norm.eps", "x", "config.norm.eps: must be a number written as"),
        ("norm.eps", "nan", "scales, caps and the norm's epsilon must be finite"),
        ("norm.kind", "batch", 'config.norm.kind: must be rms or layer, found "batch"'),
        ("norm.kind", ..., "config.norm.kind: must be rms or layer, found null"),
        ("layers", None, "config.layers: must be a list, found null"),
        ("layers", [], "m: a model needs layers"),
        ("layers", [0, 1], "config.layers has an index beyond the 1 layer_specs"),
        ("layers.1", "0", r'config.layers\[1\]: must be an integer from 0 to 2147483647, found "0"'),
        ("layer_specs", {}, "config.layer_specs: must be a list, found {}"),
        (
            MIXER,
            [],
            "mixer.kind: must be attention or latent_attention, found null",
        ),
        (f"{MIXER}.kind", "mamba", r'mixer.kind: must be attention or latent_attention, found "mamba"'),
        (f"{MIXER}.head_dim", ..., r"config.layer_specs\[0\].mixer has no 'head_dim'"),
        (f"{MIXER}.heads", 0, "m: layers.0: heads, kv_heads, head_dim and a window must be at least 1"),
        (f"{MIXER}.window", 0, "m: layers.0: heads, kv_heads, head_dim and a window must be at least 1"),
        (f"{MIXER}.kv_heads", 2, "m: layers.0: 2 key-value heads do not divide 3 heads"),
        (f"{MIXER}.rope", 1, "m: layers.0: it uses rope 1, but the model has 1"),
        (f"{MIXER}.qkv_bias", "no", r"mixer.qkv_bias: must be true or false"),
        (f"{MIXER}.qkv_bias", False, "fields with their default, and layer_specs that are equal"),
        (f"{MIXER}.window", None, "fields with their default, and layer_specs that are equal"),
        ("layer_specs.0.feed_forward.activation", "tanh", "activation: must be silu or gelu_tanh or"),
        ("layer_specs.0.feed_forward.size", 0, "m: layers.0: the feed-forward's size must be at least 1"),
        ("ropes", [None], r"config.ropes\[0\] must be an object, found null"),
        ("ropes.0.dim", 18, "m: layers.0: 18 of 16 dimensions rotated: must be even and fit"),
        ("ropes.0.dim", 14, "m: rope needs 7 frequencies of each kind"),
        (
            "ropes.0.long_factor",
            ...,
            "m: rope needs inv_freq_long, long_factor and original_max_position together",
        ),
        ("ropes.0.inv_freq", ["0.5", 1], r"config.ropes\[0\].inv_freq\[1\]: must be a number written as"),
    ],
)
def test_other_json_is_refused(path: str, value: Any, message: str) -> None:
    values: Any = copy.deepcopy(ours())
    *outer, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inner = values
    for key in outer:
        inner = inner[key]
    if not path:
        values = value
    elif value is ...:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(CheckpointError, match=message):
        models.from_json(values, "m")


def test_specs_must_be_in_the_order_of_their_layers() -> None:
    document = models.to_json(with_windows(MINIMAL, None, 7))
    specs = document["layer_specs"]
    assert isinstance(specs, list)
    for changed in ({"layers": [1, 0]}, {"layers": [0, 0]}, {"layer_specs": [specs[0], specs[0]]}):
        with pytest.raises(CheckpointError, match="equal, unused or out of order"):
            models.from_json({**document, **changed})
