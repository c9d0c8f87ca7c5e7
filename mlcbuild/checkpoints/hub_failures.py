"""Describes failures of a Hugging Face hub, of networks and of disks, in words for error messages."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from mlcbuild.errors import SourceError


class UnreachableError(SourceError):
    """The exception for a hub that cannot be reached or cannot answer now, and for a broken transfer; a retry
    may succeed."""


class AbsentError(SourceError):
    """The exception for a repository or revision that does not exist, or is hidden from this user."""


Failure = tuple[type[SourceError], str] | None
"""The type of a description of the error to raise in place of an exception of the hub's client: (class,
message); None if the exception is no failure of the kind that a function here recognizes."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, then the exception that it was raised from or while handling, and so on."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        yield error
        error = error.__cause__ or error.__context__


def status_failure(code: int) -> Failure:
    """Returns (class, message) of the error to raise for a hub's answer with this HTTP status, 400 or above:
    UnreachableError for 408, 429 and from 500 on, else SourceError."""
    if code in (401, 403):
        return SourceError, f"the hub refuses access (HTTP {code}); set HF_TOKEN to a token that may read it"
    if code == 404:
        return SourceError, "the hub has no such file (HTTP 404); check the name and the revision"
    if code in (408, 429) or code >= 500:
        return UnreachableError, f"the hub cannot answer now (HTTP {code}); try again later"
    return SourceError, f"the hub refuses the request (HTTP {code})"


_NETWORK_FAILURES: tuple[tuple[frozenset[str], type[SourceError], str], ...] = (
    (
        frozenset({"OfflineModeIsEnabled"}),
        SourceError,
        "the hub must be queried, but HF_HUB_OFFLINE is set; unset it",
    ),
    (
        frozenset({"RemoteProtocolError", "IncompleteRead", "ChunkedEncodingError"}),
        UnreachableError,
        "the download ended before the whole file had arrived; try again",
    ),
    (
        frozenset({"XetError"}),
        SourceError,  # The library has already retried this for minutes.
        "the hub's Xet storage failed ({reason}); try again, or set HF_HUB_DISABLE_XET=1",
    ),
    (
        frozenset({"TimeoutException", "Timeout", "TimeoutError"}),
        UnreachableError,
        "{host} does not answer in time; try again, or raise HF_HUB_ETAG_TIMEOUT (seconds)",
    ),
    (
        frozenset({"NetworkError", "ConnectionError", "ProxyError"}),
        UnreachableError,
        "{host} cannot be reached ({reason}); check the network and HF_ENDPOINT",
    ),
    (
        frozenset({"FileMetadataError", "JSONDecodeError"}),
        SourceError,
        "{host} does not answer like a hub; check HF_ENDPOINT and the proxy",
    ),
    (
        frozenset({"InvalidURL", "UnsupportedProtocol", "MissingSchema", "InvalidSchema"}),
        SourceError,
        "HF_ENDPOINT is '{host}', which is no address; write https://host",
    ),
    (
        frozenset({"TooManyRedirects", "DecodingError", "ContentDecodingError", "ValueError"}),
        SourceError,
        "{host} does not answer like a hub ({reason}); check HF_ENDPOINT and the proxy",
    ),
)
"""(names of exception classes, error class, error message) for network failures. The first row applies that
names the exception's class or a base class of it; {host} and {reason} in its message are replaced. Exceptions
are recognised by the names of their classes, because huggingface_hub has changed its HTTP library twice.
"""


def network_failure(error: Exception) -> Failure:
    """Returns (class, message) of the error to raise if an exception or one of its causes is a network
    failure, an answer that is not a hub's (every ValueError is taken for one), or a query that offline mode
    forbids; None for other exceptions.
    """
    from huggingface_hub import constants

    for cause in causes(error):
        names = {kind.__name__ for kind in type(cause).__mro__}
        if "Consistency check failed" in str(cause):
            names.add("IncompleteRead")
        if type(cause).__name__.startswith("Xet") or (type(cause) is RuntimeError and "CAS" in str(cause)):
            # Subclasses of XetError are also subclasses of unrelated built-in exceptions.
            names = {"XetError"}
        for kinds, result, message in _NETWORK_FAILURES:
            if names & kinds:
                # The host is inserted first, since it cannot contain braces; a reason may.
                text = message.replace("{host}", constants.ENDPOINT)
                return result, text.replace("{reason}", _reason(cause))
    return None


def _reason(error: BaseException) -> str:
    """Returns the first line of an exception's message without its error number, at most 200 characters; the
    name of its class if there is no message.
    """
    return re.sub(r"^\[Errno -?\d+\] |\s*\n.*", "", str(error), flags=re.DOTALL)[:200] or type(error).__name__


def disk_failure(error: Exception) -> Failure:
    """Returns (class, message) of the error to raise if an exception or one of its causes is an OSError with
    an error number, which is taken for a failure of a disk; None for other exceptions. Network failures may
    be such errors, too, so callers must check for them first."""
    for cause in causes(error):
        if not isinstance(cause, OSError) or cause.errno is None:
            continue
        path = cause.filename or "the hub cache"
        if cause.errno == errno.ENAMETOOLONG:
            return (
                SourceError,
                f"the path is too long to write ({str(path)[:60]}...); set HF_HOME to a shorter one",
            )
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                SourceError,
                "the disk is full; free some space, or set HF_HOME to a directory on another disk",
            )
        return SourceError, f"{path}: {cause.strerror}; check it, or set HF_HOME to a directory you can write"
    return None
