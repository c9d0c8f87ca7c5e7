"""Chats with a model in the terminal, or from piped input: a bundle in this process, or a server's model.

chat_options.py    the command line
conversation.py    messages, commands and settings of one chat
local_model.py     a bundle in this process
server_model.py    a model behind an OpenAI-compatible server
line_input.py      reads lines: with a prompt, a history and completion on a terminal, or piped
rendering.py       shows an answer as it arrives
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.chat import chat_options
from mlcbuild_runtime.chat.chat_options import ChatOptions

URLS = ("http://", "https://")


def run(arguments: argparse.Namespace, resolve: Callable[[str], Path]) -> int:
    """Runs a chat with the options of a parsed command line, and returns the exit code of `chat`. resolve:
    function that returns the directory of the bundle that a name means; it is not called for a URL, and its
    exceptions are passed on."""
    name: str = arguments.bundle
    path = name if name.startswith(URLS) else resolve(name)
    return chat(path, arguments.threads, chat_options.options(arguments))


def chat(path: Path | str, threads: int | None = None, options: ChatOptions | None = None) -> int:
    """Chats with the bundle in directory `path`, or with the server at the URL `path`; returns the exit code.
    threads: computing threads for a bundle; None: as many as compute fastest, at most one per physical core.

    On a terminal there is a prompt; otherwise every line of input is a message or a command, and only answers
    and the results of commands are written. With `options.prompt`, that is the only message. The exit code is
    1 if a message or command of an input that is no terminal failed, or if the reader of the output closed
    it; 2 if the only message is to be read from an empty standard input; 130 after Ctrl-C, except in a
    conversation on a terminal, where it only ends the answer or drops the line that is being typed; else 0.
    If the model cannot be loaded, refuses the options, or cannot answer the only message, the error is
    printed and its exit code returned.
    """
    from mlcbuild_runtime.chat.conversation import converse

    options = options or ChatOptions()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the encoding of the output lacks are written as escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if str(path).startswith(URLS):
            from mlcbuild_runtime.chat.server_model import ServerModel

            with ServerModel.connect(str(path), options.api_key, options.model) as server:
                return converse(server, options)
        from mlcbuild_runtime.chat.local_model import LocalModel

        with LocalModel(path, threads) as bundle:
            return converse(bundle, options)
    except ServingError as error:
        sys.stderr.write(f"{options.program}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone; buffered text must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
