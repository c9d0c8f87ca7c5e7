"""Tests of the limits of transfers (minimum rate, number of attempts), and that transports raise no
exceptions but those of their interface."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import transport
from mlcbuild.remotes.transport import (
    SLOWEST,
    TIMEOUT,
    Attempts,
    Bordered,
    DamagedError,
    Pace,
    SlowError,
    border,
    quoted,
    whole_number,
)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replaces the clock by a simulated one that stands still. Returns a function that advances it by a
    number of seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_a_transfer_is_judged_at_the_end_of_each_window(wait: Callable[[float], None]) -> None:
    pace = Pace(10.0, slowest=100.0)
    wait(9)
    pace.add(1)  # too slow so far, but the window has not ended
    assert pace.is_slow()
    wait(2)
    pace.add(1099)
    assert not pace.is_slow()
    wait(11)
    with pytest.raises(SlowError, match=r"^it is too slow: 1099 bytes in 11 seconds$"):
        pace.add(1099)  # what came in the window before does not count


@pytest.mark.parametrize(("count", "gives_up"), [(0, True), (int(SLOWEST) - 1, True), (int(SLOWEST), False)])
def test_three_requests_in_a_row_must_not_bring_too_little(
    wait: Callable[[float], None], count: int, gives_up: bool
) -> None:
    attempts, error, began = Attempts(), RemoteError("it closed the connection"), time.monotonic()
    wait(1)
    attempts.failed(error, count, began)
    attempts.failed(error, count, began)
    if gives_up:
        with pytest.raises(RemoteError, match="it closed the connection"):
            attempts.failed(error, count, began)
    else:
        attempts.failed(error, count, began)


def test_progress_makes_up_for_earlier_attempts(wait: Callable[[float], None]) -> None:
    attempts, error, began = Attempts(), RemoteError("no"), time.monotonic()
    wait(2 * TIMEOUT)
    enough = int(SLOWEST * TIMEOUT)  # a request that waited longer is not asked for more
    for count in (0, 0, enough, 0, 0):
        attempts.failed(error, count, began)
    with pytest.raises(RemoteError):
        attempts.failed(error, 0, began)


def test_a_slow_transfer_is_not_repeated() -> None:
    with pytest.raises(SlowError):
        Attempts().failed(SlowError("it is too slow"), 1 << 30, time.monotonic())


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (KeyError("secret"), "its answer cannot be parsed (KeyError)"),
        (RecursionError(), "its answer cannot be parsed (RecursionError)"),
        (PermissionError(13, "Permission denied", "/cache/ac"), "/cache/ac: Permission denied"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_foreign_exceptions_become_faults_of_the_remote(raised: Exception, words: str) -> None:
    with pytest.raises(RemoteError) as caught, border():
        raise raised
    assert str(caught.value) == words


@pytest.mark.parametrize("allowed", [RemoteError("full"), DamagedError("wrong"), transport.CancelledError()])
def test_own_exceptions_pass_the_border(allowed: Exception) -> None:
    with pytest.raises(type(allowed)) as caught, border():
        raise allowed
    assert caught.value is allowed


def test_a_body_is_read_within_the_border() -> None:
    class Broken:
        def open(self, name: str, start: int = 0) -> transport.Body | None:
            return transport.Body(start, lambda: b""[0:1] + bytes([256]), lambda: None) if name else None

    remote = Bordered(Broken())  # type: ignore[arg-type]
    assert remote.open("") is None
    body = remote.open("ac/0", 7)
    assert body is not None and body.start == 7
    with pytest.raises(RemoteError, match="cannot be parsed"):
        body.read()


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("", None), ("-1", None), ("1 ", None), ("²", None)],
)
def test_numbers_of_headers(text: str, number: int | None) -> None:
    assert whole_number(text) == number


def test_texts_of_remotes_are_shown_short_and_plain() -> None:
    assert quoted("a\x1b[2J\né") == r"'a\x1b[2J\n\xe9'"
    assert quoted("x" * 61) == f"'{'x' * 60}...'"
