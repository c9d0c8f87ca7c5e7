"""Constraints are compiled in a process of their own first, which can be ended when one is too costly.

What a schema or a regular expression of a few bytes costs cannot be seen from outside: `multipleOf: 999983`
takes half a minute and half a gigabyte, and a thread that is at it cannot be stopped. What has passed here is
compiled again by the process that needs it, in about the same time.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from mlcbuild_runtime.errors import SetupError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SECONDS = 2.0
"""Of processor time that compiling one constraint may take."""
PATIENCE = 20.0
"""Seconds to wait for it on a machine that is busy with other things."""
MEMORY = 2 << 30
"""Bytes of address space, where the system keeps to it."""
FUEL = 50_000
"""Of llguidance for the lexer, at one token: a quarter of its default, which may take more than a second."""
_START = "from mlcbuild_runtime.trial import work; work()"


class Trial:
    """A child process that is started when it is needed. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def error(self, grammar: str) -> str:
        """What is wrong with a grammar in Lark's language, in llguidance's words; empty: nothing. Raises
        ValueError for one that is too costly, SetupError when there can be no child process."""
        with self._lock:
            child = self._running()
            line = _answer(child, grammar)
            if line:
                return str(json.loads(line))
            self._end()
            if child.returncode == 1:
                raise SetupError("the process that tries constraints has failed: see the lines above")
            raise ValueError(
                f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB to compile: simplify it"
            )

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _START],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    start_new_session=True,  # Ctrl-C is the server's
                )
            except OSError as error:
                raise SetupError(f"constraints cannot be tried: {error}") from None
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _answer(child: subprocess.Popen[bytes], grammar: str) -> bytes:
    """A line; empty where the child has ended instead, or takes too long."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(grammar).encode() + b"\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], PATIENCE)
        return child.stdout.readline() if ready else b""
    except BrokenPipeError:
        return b""


TRIAL = Trial()
"""Of this process: it knows no vocabulary, so that all models can share it."""
atexit.register(TRIAL.close)


class _Bytes:
    """A vocabulary of bytes, an end token and a special one, as llguidance asks for one: what a constraint
    costs does not depend on more."""

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"", b""]
        self.bos_token_id, self.eos_token_id, self.special_token_ids = None, 256, [256, 257]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def work() -> None:
    """The child's part: one grammar a line, one answer a line, to the end of its input."""
    from llguidance import LLTokenizer, TokenizerWrapper

    _limit_memory()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=258, eos_token=[256])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        grammar = re.sub(r"<\[[^\]]*\]>", "<[257]>", json.loads(line))  # one special token is like another
        error = beginning(matcher(tokenizer, grammar))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher of a grammar; its errors, too, are in it."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(step_lexer_fuel=FUEL))


def beginning(matcher: LLMatcher) -> str:
    """What is wrong with a fresh matcher, or with the first token that it asks for; empty: nothing."""
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        return "no text fits it"
    if not matcher.is_error():
        return ""
    return {"NoExtensionBias": "no text fits it"}.get(matcher.get_error(), matcher.get_error())


def _limit_memory() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    except (ValueError, OSError):
        return  # macOS has no such limit
