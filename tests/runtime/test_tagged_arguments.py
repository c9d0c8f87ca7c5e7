"""Tests of arguments of tool calls between tags: they are read as JSON, whole and in parts."""

from __future__ import annotations

import json

import pytest
from mlcbuild_runtime.openai.tagged_arguments import TaggedReader, Tags

TAGS, TAIL = Tags("<parameter=", ">\n", "\n</parameter>\n"), "</function>"


def read(text: str, size: int) -> str:
    """Reads arguments that arrive in parts of `size` characters, and returns their JSON text."""
    reader, held, written = TaggedReader(TAGS, TAIL, {"note"}), "", ""
    for at in range(0, len(text), size):
        held += text[at : at + size]
        part, read = reader.read(held)
        held, written = held[read:], written + part
    assert reader.is_complete and held == TAIL
    return written


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("<parameter=count>\n1\n</parameter>\n", {"count": 1}),
        ("<parameter=note>\n1\n</parameter>\n", {"note": "1"}),
        ("<parameter=note>x</parameter>", {"note": "x"}),
        ("<parameter=note>\nx</parameter><parameter=count>2</parameter>", {"note": "x", "count": 2}),
        ("<parameter=note>\n\n\nx\n\n\n</parameter>\n", {"note": "\n\nx\n\n"}),
        ("<parameter=note>\n</parameter></parameter>\n", {"note": "</parameter>"}),
    ],
)
def test_arguments_become_one_object(text: str, expected: dict[str, object], size: int) -> None:
    assert json.loads(read(text + TAIL, size)) == expected
