"""Tests of reading the metadata of GGUF files: every faulty key is reported, and every key that is never
read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcbuild.checkpoints.gguf_file import Gguf
from mlcbuild.checkpoints.gguf_keys import GgufKeys
from mlcbuild.errors import CheckpointError
from mlcbuild.models.fields import MOST_UNKNOWN


def keys(*tensors: str, **metadata: Any) -> GgufKeys:
    named = {f"toy.{name}": value for name, value in metadata.items()}
    held: Any = dict.fromkeys(tensors)
    gguf = Gguf({"general.architecture": "toy", "tokenizer.x": 1, **named}, held)
    return GgufKeys(gguf, "m.gguf")


def problems(own: GgufKeys) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        own.close()
    return str(caught.value).splitlines()


def test_values_and_defaults() -> None:
    own = keys("blk.0.attn_q.bias", layers=3, zero=0, yes=True, scale=0.1, whole=2)
    assert (own.integer("layers"), own.integer("absent", 7)) == (3, 7)
    assert (own.count("zero"), own.count("absent")) == (0, 0)
    assert (own.flag("yes"), own.flag("absent")) == (True, False)
    assert (own.number("scale"), own.number("whole"), own.number("absent", 0.5)) == (0.1, 2.0, 0.5)
    assert own.has_bias("attn_q") and not own.has_bias("attn_k")
    own.close()


def test_a_float32_is_the_decimal_that_its_writer_meant() -> None:
    assert keys(scale=0.10000000149011612).number("scale") == 0.1


def test_all_problems_come_at_once() -> None:
    own = keys(layers=0, count=-1, flag=1, number="x", odd=True)
    assert (own.integer("layers"), own.integer("absent"), own.integer("odd")) == (1, 1, 1)
    assert (own.count("count"), own.flag("flag"), own.number("number")) == (1, True, 1.0)
    own.refuse("rope.scaling.type", "'warp' is unknown")
    assert problems(own) == [
        "m.gguf: toy.layers must be an integer above 0: found '0'; fetch the file again",
        "m.gguf: toy.absent must be an integer above 0: it is missing; fetch the file again",
        "m.gguf: toy.odd must be an integer above 0: found 'True'; fetch the file again",
        "m.gguf: toy.count must be an integer of at least 0: found '-1'; fetch the file again",
        "m.gguf: toy.flag must be true or false: found '1'; fetch the file again",
        "m.gguf: toy.number must be a number: found 'x'; fetch the file again",
        "m.gguf: toy.rope.scaling.type: 'warp' is unknown; use the original checkpoint",
    ]


def test_keys_that_nobody_read_may_change_results() -> None:
    own = keys(vocab_size=9, warp=1, expert_count=4)
    text = "is not understood, and it may change the model's numbers; use the original checkpoint"
    assert problems(own) == [
        "m.gguf: toy.expert_count: no model of this architecture has experts; use the original checkpoint",
        f"m.gguf: the metadata key toy.warp {text}",
    ]
    for value in (np.zeros(0, np.int32), np.ones(3, np.int32), "4", -1):
        assert problems(keys(expert_count=value))[0].startswith("m.gguf: toy.expert_count must be an integer")
    assert keys(scales=np.ones(2, np.float32)).get("scales") == (1.0, 1.0)
    many = keys(**{f"k{i}": i for i in range(MOST_UNKNOWN + 3)})
    assert problems(many)[-1] == "m.gguf: 3 more keys are not understood"
    assert len(problems(many)) >= MOST_UNKNOWN + 1
