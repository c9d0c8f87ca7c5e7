"""Prepared pieces of models' answers, for tests of the response documents that are made from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from mlcbuild_runtime.openai.call_syntax import AnswerReader, CallPiece
from mlcbuild_runtime.openai.chat_documents import Prompt


class Pieces:
    """A stand-in for the parser of answers. It ignores the text of an answer and yields pieces that a test
    has prepared, one list of them for each event of the engine."""

    def __init__(self, *pieces: list[CallPiece], is_thinking: bool = False) -> None:
        self._pieces, self.is_thinking = list(pieces), is_thinking

    def call_id(self) -> str:
        return "id1"

    def read(self, text: str, last: bool = False) -> Iterator[CallPiece]:
        yield from self._pieces.pop(0)


def prompt(*pieces: list[CallPiece], size: int = 5, is_thinking: bool = False) -> Prompt:
    """Returns the properties of a prompt of `size` tokens that response documents need. pieces: the parsed
    parts of its answer, one list for each event of the engine; without any, the answer is all text.
    is_thinking: constant answer of its parser to the question whether the text is reasoning."""
    reader = (lambda: cast(AnswerReader, Pieces(*pieces, is_thinking=is_thinking))) if pieces else None
    return Prompt(0, size, reader=reader)
