"""The interface of a model that a chat talks to."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mlcbuild_format.fields import Json

FEWEST = 16
"""Minimum number of tokens of an answer, or computed tokens of a prompt, for which a rate in tokens per
second is shown. One call of the library returns several tokens together, so the rate of a few tokens would
mean nothing."""


@dataclass(frozen=True)
class AnswerPart:
    """The next part of an answer: some of its text, or, if `is_reasoning` is True, some of the reasoning
    before it."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True)
class Speed:
    """The numbers of tokens of one answer and its prompt, and the seconds in which the engine computed them;
    the delivery of tokens does not count."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of tokens of the prompt that were read from the prefix cache."""
    prompt_seconds: float | None = None
    """Seconds of computing from the first step of a request to the first token of its answer; None until it
    is reported, and where a server does not report it."""
    answer_tokens: int = 0
    answer_seconds: float | None = None
    """Seconds of computing from the first token of an answer to its last; None until it is reported, and
    where a server does not report it."""

    def __str__(self) -> str:
        if not self.answer_tokens:
            return "no answer yet"
        text = f"prompt {self.prompt_tokens} tokens"
        if self.cached_tokens:
            text += f" ({self.cached_tokens} cached)"
        computed = self.prompt_tokens - self.cached_tokens
        if self.prompt_seconds is not None:
            text += f", first token after {self.prompt_seconds:.2f} s"
            text += _rate(computed, computed, self.prompt_seconds)
        text += f"; answer {self.answer_tokens} tokens"
        if self.answer_seconds is not None:
            text += _rate(self.answer_tokens, self.answer_tokens - 1, self.answer_seconds)
        return text


def _rate(tokens: int, intervals: int, seconds: float) -> str:
    """Returns a speed, `intervals` / `seconds` in tokens per second, as text such as " (12.3 tok/s)"; "" if
    the time is 0 or there are fewer than 16 tokens, too few for a meaningful speed. tokens: number of tokens;
    intervals: number of them that were computed in these seconds, one fewer for an answer, whose first token
    is not."""
    return f" ({intervals / seconds:.1f} tok/s)" if tokens >= FEWEST and seconds > 0 else ""


class ChatModel(Protocol):
    """The interface of a model that answers the messages of a chat."""

    @property
    def name(self) -> str:
        """Returns the name of the model with which the user chats."""

    @property
    def greeting(self) -> str:
        """Returns a remark on the model that a user should read before the first message; "" if there is
        none.
        """

    @property
    def speed(self) -> Speed:
        """Returns the numbers of tokens, and the seconds of computing, of the model's latest answer and of
        its prompt, as far as they are reported by now; zeros and None before the first answer."""

    def check(self, messages: list[Json], settings: Mapping[str, Json]) -> None:
        """Raises RequestError for settings, or messages, that the model refuses, as far as this can be
        checked without computing an answer."""

    def answer(self, messages: list[Json], settings: Mapping[str, Json]) -> Generator[AnswerPart, None, None]:
        """Yields the answer to a list of chat messages in consecutive parts; closing the generator ends the
        answer. settings: fields of the request. Raises ServingError if the model cannot answer."""

    def metrics(self) -> Mapping[str, object]:
        """Returns the counts of the model's engine since its start: name -> value. Raises ServingError if the
        server refuses or cannot be reached."""
