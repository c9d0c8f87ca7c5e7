"""Shows an answer while it arrives: as plain text, or on a terminal as Markdown if rich is installed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from mlcbuild_runtime.chat.chat_model import AnswerPart

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.markdown import Markdown

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_PERIOD = 0.1
"""Minimum seconds between two redraws of a Markdown block that still grows; a complete block is printed at
once."""
_LINES = 4
"""Number of rows of the terminal that stay free below the part of an answer that is still redrawn."""

Show = Callable[[AnswerPart], None]
"""Function that shows the next part of an answer, its argument."""
Printer = Callable[[], AbstractContextManager[Show]]
"""Function that returns a context manager for showing one answer; it yields a function that shows the next
part of the answer, an AnswerPart."""


def visible(text: str) -> str:
    """Returns a model's text with its control characters, except line feeds and tabs, replaced by visible
    escapes such as \\x1b."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def plain_printer(out: TextIO, escape: bool) -> Printer:
    """Returns a printer that writes the answers of a chat as plain text, with a line feed after each. escape:
    True for a terminal, where control characters are replaced by visible escapes, and the reasoning before an
    answer is written, too, behind the labels [reasoning] and [answer]; False: only the answers are written,
    unchanged."""

    @contextmanager
    def show_answer() -> Iterator[Show]:
        last: AnswerPart | None = None

        def show(part: AnswerPart) -> None:
            nonlocal last
            if part.is_reasoning and not escape:
                return
            if part.is_reasoning and last is None:
                out.write("[reasoning] ")
            elif last is not None and last.is_reasoning and not part.is_reasoning:
                out.write("\n[answer] ")
            last = part
            out.write(visible(part.text) if escape else part.text)
            out.flush()

        try:
            yield show
        finally:
            out.write("" if last is None else "\n")
            out.flush()

    return show_answer


def printer(out: TextIO) -> Printer:
    """Returns a printer of a chat's answers for a terminal, which renders Markdown if rich is installed, and
    otherwise writes plain text. Control characters are replaced by visible escapes in both cases."""
    try:
        from rich.console import Console
    except ImportError:
        return plain_printer(out, True)
    console = Console(file=out)

    @contextmanager
    def show_answer() -> Iterator[Show]:
        with _markdown(console) as show:
            yield show

    return show_answer


@contextmanager
def _markdown(console: Console) -> Iterator[Show]:
    """Yields a function that prints each block of Markdown when it is complete, and redraws the growing block
    below. Reasoning is shown as dim text.

    Only what fits the terminal can be redrawn, so a complete block is printed once and scrolls away.
    """
    from rich.live import Live

    block, drawn = AnswerPart(""), 0.0
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:

        def finish(complete: AnswerPart) -> None:
            if complete.text.strip():
                live.console.print(_rendered(complete))
                live.console.print()

        def show(part: AnswerPart) -> None:
            nonlocal block, drawn
            if part.is_reasoning != block.is_reasoning:
                finish(block)
                block = AnswerPart("", part.is_reasoning)
            complete, rest = split(block.text + visible(part.text))
            finish(AnswerPart(complete, part.is_reasoning))
            block = AnswerPart(rest, part.is_reasoning)
            now = time.monotonic()
            if complete or now - drawn > _PERIOD:
                live.update(_Tail(block), refresh=True)
                drawn = now

        try:
            yield show
        finally:
            live.update("", refresh=True)
            if block.text.strip():
                live.console.print(_rendered(block))


class _Tail:
    """The last rows of the Markdown block that still grows, as an object that rich prints: as many as fit the
    terminal with four rows left free."""

    def __init__(self, block: AnswerPart) -> None:
        self._block = block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        rows = console.render_lines(_rendered(self._block), options, pad=False)
        for row in rows[-max(console.height - _LINES, 1) :]:
            yield from row
            yield Segment.line()


def _rendered(block: AnswerPart) -> RenderableType:
    """Returns a block of an answer in a form that rich can print: reasoning as dim text, the rest as
    Markdown."""
    from rich.text import Text

    return Text(block.text.strip(), style="dim") if block.is_reasoning else markdown(block.text)


def markdown(text: str) -> Markdown:
    """Returns Markdown text in a form that rich can print. HTML in it is shown as it is written, because rich
    leaves it out: `List<int>` would become `List`, and marks such as <think> would vanish."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    rendered = Markdown("", hyperlinks=False)
    parser = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
    rendered.parsed = parser.parse(text)
    return rendered


def split(text: str) -> tuple[str, str]:
    """Divides Markdown text after its last empty line outside of a fenced code block. Returns the complete
    blocks before that place, and the rest, which may still grow; either may be ""."""
    fence, cut, position = "", 0, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        elif not fence and not line.strip() and line.endswith("\n"):
            cut = position
    return text[:cut], text[cut:]
