"""Tests of failures of a hub, of networks and of disks, by the names of the exceptions that clients raise."""

from __future__ import annotations

import errno

import pytest

from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.hub_failures import (
    UnreachableError,
    causes,
    disk_failure,
    network_failure,
    status_failure,
)
from mlcbuild.errors import SourceError


def named(name: str, *bases: str, text: str = "why") -> Exception:
    """Returns an exception object whose class is called `name` and has base classes called `bases`, like
    exceptions that a hub's client library raises and that callers can recognize by class names only. text:
    its message."""
    parent: type = Exception
    for base in reversed(bases):
        parent = type(base, (parent,), {})
    error: Exception = type(name, (parent,), {})(text)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (named("OfflineModeIsEnabled"), SourceError, "HF_HUB_OFFLINE is set; unset it"),
        (named("IncompleteRead"), UnreachableError, "the download ended before the whole file"),
        (OSError("Consistency check failed: file should be 3"), UnreachableError, "ended before the whole"),
        (named("ReadTimeout", "Timeout", "ConnectionError"), UnreachableError, "does not answer in time"),
        (named("ConnectError", "NetworkError"), UnreachableError, "cannot be reached (why)"),
        (named("XetDownload", "ConnectionError"), SourceError, "Xet storage failed (why)"),
        (RuntimeError("CAS service error: 503"), SourceError, "Xet storage failed (CAS service error: 503)"),
        (
            named("JSONDecodeError", "ValueError"),
            SourceError,
            "does not answer like a hub; check HF_",
        ),
        (named("InvalidURL"), SourceError, "which is no address; write https://host"),
        (named("TooManyRedirects"), SourceError, "does not answer like a hub (why)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_network_failure_has_its_remedy(error: Exception, kind: type[Exception], words: str) -> None:
    outer = RuntimeError("outside")
    outer.__cause__ = error
    for shown in (error, outer):
        failure = network_failure(shown)
        assert failure is not None and failure[0] is kind and words in failure[1]


def test_reasons_are_one_line_and_their_braces_are_no_places() -> None:
    failure = network_failure(named("NetworkError", text="[Errno 111] refused {host}\nTraceback"))
    assert failure is not None and "(refused {host})" in failure[1] and "\n" not in failure[1]
    assert network_failure(KeyError("x")) is None


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (401, SourceError, "set HF_TOKEN"),
        (403, SourceError, "set HF_TOKEN"),
        (404, SourceError, "check the name and the revision"),
        (408, UnreachableError, "try again later"),
        (429, UnreachableError, "try again later"),
        (500, UnreachableError, "try again later"),
        (451, SourceError, "refuses the request (HTTP 451)"),
    ],
)
def test_a_status_says_whether_a_retry_helps(code: int, kind: type[Exception], words: str) -> None:
    failure = status_failure(code)
    assert failure is not None and failure[0] is kind and words in failure[1] and str(code) in failure[1]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.ENAMETOOLONG, "the path is too long to write"),
        (errno.EACCES, "/cache/x: Permission denied; check it"),
    ],
)
def test_failures_of_disks_are_told_from_those_of_networks(code: int, words: str) -> None:
    error = OSError(code, "Permission denied", "/cache/x")
    wrapped = ValueError("outer")
    wrapped.__context__ = error
    for shown in (error, wrapped):
        failure = disk_failure(shown)
        assert failure is not None and words in failure[1]
    assert disk_failure(OSError("without a number")) is None


def test_a_cache_below_a_home_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    # The hub's library expands its default so, and would write to "~" below the current directory.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(SourceError, match=r"^hf://a/b@main: this system knows no home .*; set HF_HOME$"):
        hub.download(hub.HubSource("a/b"), "config.json")


def test_a_circle_of_causes_has_an_end() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]
