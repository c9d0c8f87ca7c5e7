"""Tests of the step that reads config.json and writes a model's config in canonical form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlcbuild import canon, models
from mlcbuild.errors import CheckpointError
from mlcbuild.models import (
    TensorNames,
    action,
    parsing,
)
from mlcbuild.models.action import read_json
from mlcbuild.models.parsing import parse
from tests.models.cases import GOLDEN, VARIANTS, golden


def test_normalise_writes_canonical_bytes(tmp_path: Path) -> None:
    for variant in VARIANTS:
        out = tmp_path / variant
        action.normalise({}, {"checkpoint": GOLDEN / variant}, out)
        assert {path.name for path in out.iterdir()} == {"config.json", "tensors.json"}
        names = json.loads((out / "tensors.json").read_bytes())
        assert TensorNames.from_json(names) == parsing.tensor_names(parse(golden(variant)))
        data = (out / "config.json").read_bytes()
        assert data == canon.canonical(json.loads(data))
        assert models.from_json(json.loads(data)) == parse(golden(variant))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory. A checkpoint needs a config.json"),
        (b"", "not JSON: Expecting value"),
        (b"{", "not JSON: "),
        (b'{"a": 1, "a": 2}', "not JSON: the key 'a' is there twice"),
        (b'{"a": NaN}', "not JSON: NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"\xff{}", "not UTF-8 text at byte 0"),
        (b" " * (4 << 20) + b"{}", "larger than 4194304 bytes; this is not a model's config.json"),
        (b"[]", r"must be a JSON object, found \[\]"),
    ],
)
def test_normalise_refuses_what_is_no_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        action.normalise({}, {"checkpoint": tmp_path}, tmp_path / "out")
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert not (tmp_path / "out").exists()


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(golden("qwen3")).encode())
    action.normalise({}, {"checkpoint": tmp_path}, tmp_path / "out")
    assert models.from_json(json.loads((tmp_path / "out" / "config.json").read_bytes())) == parse(
        golden("qwen3")
    )


def test_keys_that_are_there_twice_are_found_in_linear_time(tmp_path: Path) -> None:
    """Checks that duplicate keys in a large config.json are detected in linear time; counting each key among
    all others would take hours."""
    keys = ", ".join(f'"{i}": 0' for i in range(300_000))
    (tmp_path / "config.json").write_text("{" + keys + ', "299999": 0}')
    with pytest.raises(CheckpointError, match="the key '299999' is there twice"):
        read_json(tmp_path / "config.json")
