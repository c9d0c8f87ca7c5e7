"""Defines the command-line options of a chat."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from mlcbuild_runtime.option_values import positive

KEY_VARIABLE = "MLCBUILD_API_KEY"
HOTTEST = 2
"""Maximum temperature that requests may state, as in OpenAI's API."""


@dataclass(frozen=True)
class ChatOptions:
    """The options with which a chat begins: its only message or system message, sampling parameters, access
    to a server, and the form of the output."""

    prompt: str | None = None
    """The only message of the chat; "-" means that it is read from standard input. None: the chat is a
    conversation.
    """
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    api_key: str | None = None
    """The API key that is sent to a server; None: none is sent."""
    model: str | None = None
    """Name of the model of the server; None for the first model that the server lists."""
    plain: bool = False
    """True if answers are written as plain text, not rendered as Markdown."""
    program: str = "mlcbuild-chat"
    """Name of the command that the user has started, with which error messages begin."""


def add(parser: argparse.ArgumentParser, names: str) -> None:
    """Adds the arguments of a chat to a command-line parser: the model, an optional message, and all options
    but --threads. names: text for the help that describes the accepted models."""
    parser.set_defaults(program=parser.prog)
    parser.add_argument("bundle", metavar="NAME", help=f"{names}; or the URL of a server")
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="one message; '-': all of standard input is one message"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--temperature", type=temperature, metavar="T", help="0: the likeliest token (default: the model's)"
    )
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="maximum tokens of an answer")
    parser.add_argument("--api-key", metavar="KEY", help=f"a server's key (default: ${KEY_VARIABLE})")
    parser.add_argument("--model", metavar="NAME", help="a server's model (default: the first it lists)")
    parser.add_argument("--plain", action="store_true", help="do not render answers as Markdown")


def options(arguments: argparse.Namespace) -> ChatOptions:
    """Returns the settings of a chat from parsed command-line arguments; without an API key among them, that
    of $MLCBUILD_API_KEY is used."""
    return ChatOptions(
        arguments.prompt,
        arguments.system,
        arguments.temperature,
        arguments.max_tokens,
        arguments.api_key or os.environ.get(KEY_VARIABLE),
        arguments.model,
        arguments.plain,
        arguments.program,
    )


def temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number <= HOTTEST:
        raise argparse.ArgumentTypeError(f"must be from 0 to {HOTTEST}, found {text}")
    return number
