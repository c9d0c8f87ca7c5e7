"""Tests of parsing config.json to a ModelConfig: the sizes of published models, files as transformers 4 and
transformers 5 write them, and files that are refused."""

from __future__ import annotations

import json
import struct

import pytest

from mlcbuild.models import (
    aliases,
    frequencies,
    parameters,
    parsing,
    surplus,
)
from mlcbuild.models.parsing import parse
from tests.models.cases import GOLDEN, VARIANTS, golden


@pytest.mark.parametrize("variant", VARIANTS)
def test_sources_are_exactly_the_tensors_of_a_checkpoint(variant: str) -> None:
    data = (GOLDEN / variant / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    config = parse(golden(variant))
    actual = parsing.tensor_names(config).sources
    shapes = {param.name: param.shape for param in parameters(config)}
    assert list(actual) == list(shapes)
    for name, parts in actual.items():
        piece_shapes = [header[part.tensor]["shape"] for part in parts]
        assert [shape[0] for shape in piece_shapes] == [part.rows for part in parts]
        assert (sum(shape[0] for shape in piece_shapes), *piece_shapes[0][1:]) == shapes[name]
    assert sorted(part.tensor for parts in actual.values() for part in parts) == sorted(header)


def test_surplus_tensors_have_a_reason() -> None:
    tied, untied = parse(golden("llama-mha-tied")), parse(golden("llama-yarn"))
    rotary = "model.layers.3.self_attn.rotary_emb.inv_freq"
    assert "config.json already gives" in (surplus(untied, rotary) or "")
    assert "tie_word_embeddings" in (surplus(tied, "lm_head.weight") or "")
    assert surplus(untied, "lm_head.weight") is None
    assert surplus(untied, "model.layers.0.self_attn.q_proj.lora_A") is None
    assert aliases(tied) == {"model.embed_tokens.weight": "lm_head.weight"}
    assert aliases(untied) == {}


def bits(value: float) -> int:
    actual: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return actual


def test_inverse_frequencies_are_those_of_transformers_to_the_last_bits() -> None:
    for name, case in json.loads((GOLDEN / "rope.json").read_text()).items():
        config = parse({"vocab_size": 16, "intermediate_size": 16} | case["config"])
        for key, window in (("short", 1), ("long", 1 << 20)):
            inv_freq, factor = frequencies(config.ropes[0], window)
            away = [bits(a) - b for a, b in zip(inv_freq, case[key]["bits"], strict=True)]
            assert all(struct.unpack("<f", struct.pack("<f", value))[0] == value for value in inv_freq)
            # torch's powers are not correctly rounded: two units in the last place, for few.
            assert max(map(abs, away)) <= 2, name
            assert sum(map(bool, away)) <= 3, name
            assert bits(factor) == bits(case[key]["attention_factor"]), name


def test_what_transformers_writes_back_means_the_same() -> None:
    for variant, spellings in json.loads((GOLDEN / "spellings.json").read_text()).items():
        for values in spellings:
            assert parse(values) == parse(golden(variant)), variant
