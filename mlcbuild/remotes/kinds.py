"""The kinds of remote caches by URL scheme. A new kind needs one module with a transport, and one line in
`KINDS`.

The functions of a kind import their modules when they are called, so that a recipe's URLs are checked without
loading any client.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from mlcbuild.errors import UsageError
from mlcbuild.remotes.transport import TIMEOUT, Bordered, Transport, border


@dataclass(frozen=True)
class Destination:
    """The functions by which bundles are published to one kind of address, such as registries."""

    name: str
    """Name of this kind of destination in messages, such as "a registry"."""
    fault: Callable[[str, bool], str]
    """Function of (URL, True if bundles are written to it) that returns the reason why the URL is invalid, or
    "".
    """
    pinned: Callable[[str], bool]
    """Function that returns True if an address always names the same bundle, as one with a digest or commit
    does.
    """
    module: str
    """Dotted name of the module whose `push` and `fetch` send and download bundles: see `_Place` in
    mlcbuild/bundles/publish/transfer_bundle.py."""

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


@dataclass(frozen=True)
class Kind:
    """One kind of address of remote caches or published bundles, such as S3: the form of its URLs, and
    functions that check and open them."""

    form: str
    """The beginning of all URLs of this kind, such as "s3://", for messages."""
    fault: Callable[[str], str] | None = None
    """Function that returns the reason why a URL is not accepted as the address of a remote cache, or "".
    None instead of a function if URLs with this scheme only serve for publishing bundles."""
    connect: Callable[[str, float], Transport] | None = None
    """Function of (URL, seconds to wait for each response) that returns the client object with which a remote
    cache is read and written. It raises RemoteError if the remote cannot be opened. None instead of a
    function if URLs with this scheme only serve for publishing bundles."""
    takes_query: bool = False
    """True if a URL of this kind may have options after '?'."""
    publishes: Destination | None = None


def _host_fault(url: str) -> str:
    return "" if urlsplit(url).hostname else f"'{url}' names no host"


def _directory_fault(url: str) -> str:
    parts = urlsplit(url)
    wrong = parts.netloc or not parts.path.startswith("/")
    return f"'{url}' must name a directory of this machine: file:///path" if wrong else ""


def _bucket_fault(url: str) -> str:
    from mlcbuild.remotes import aws

    return aws.fault(url)


def _repository_fault(url: str) -> str:
    from mlcbuild.remotes import oci_reference

    problem, tagged = oci_reference.fault(url), bool(oci_reference.parse(url).reference)
    return problem or (f"'{url}' has a tag or digest: a cache is a whole repository" if tagged else "")


def _http(url: str, timeout: float) -> Transport:
    from mlcbuild.remotes.http import Http

    return Http(url, timeout)


def _directory(url: str, timeout: float) -> Transport:
    from mlcbuild.remotes.directory import Directory

    return Directory(Path(unquote(urlsplit(url).path)), timeout)


def _s3(url: str, timeout: float) -> Transport:
    from mlcbuild.remotes.s3 import S3

    return S3(url, timeout)


def _oci(url: str, timeout: float) -> Transport:
    from mlcbuild.remotes.oci import Oci

    return Oci(url, timeout)


def _artifact_fault(url: str, writing: bool) -> str:
    from mlcbuild.remotes import oci_reference

    if problem := oci_reference.fault(url):
        return problem
    tag = oci_reference.parse(url).reference
    if not tag:
        return f"'{url}' lacks a tag: add ':' and one"
    if tag.startswith("sha256:") and writing:
        return f"'{url}' names content by its digest: publish to a tag"
    return ""


def _artifact_pinned(url: str) -> bool:
    from mlcbuild.remotes import oci_reference

    return oci_reference.parse(url).reference.startswith("sha256:")


def _hub_fault(url: str, writing: bool) -> str:
    from mlcbuild.checkpoints.hub import parse_source

    try:
        source = parse_source(url)
    except UsageError as error:
        return str(error).removeprefix("source ")
    if source is not None and source.file:
        return f"'{url}' names a file: write hf://{source.repo}"
    pinned = source is not None and source.is_pinned and writing
    return f"'{url}' names a commit: publish to a branch" if pinned else ""


def _hub_pinned(url: str) -> bool:
    from mlcbuild.checkpoints.hub import is_commit

    return is_commit(url.rpartition("@")[2])


_ARTIFACT = Destination("a registry", _artifact_fault, _artifact_pinned, "mlcbuild.bundles.publish.artifact")
_REPOSITORY = Destination("a model hub", _hub_fault, _hub_pinned, "mlcbuild.bundles.publish.repository")
KINDS: dict[str, Kind] = {
    "https": Kind("https://", _host_fault, _http),
    "http": Kind("http://", _host_fault, _http),
    "s3": Kind("s3://", _bucket_fault, _s3, takes_query=True),
    "oci": Kind("oci://", _repository_fault, _oci, takes_query=True, publishes=_ARTIFACT),
    "file": Kind("file:///", _directory_fault, _directory),
    "hf": Kind("hf://", publishes=_REPOSITORY),
}


def scheme(url: str) -> str:
    return url.partition("://")[0]


def normal(url: str) -> str:
    """Returns the normal form of a valid URL of a remote cache, so that equal addresses are equal texts: the
    scheme and the host in lower case, no slashes at the end. A path may depend on case and stays as it is, as
    do options after '?'. A valid URL has no user name, so everything before the path is the host and its
    port."""
    kind, separator, rest = url.partition("://")
    host = re.split(r"[/?]", rest, maxsplit=1)[0]
    return f"{kind.lower()}{separator}{host.lower()}{rest[len(host) :].rstrip('/')}"


def fault(url: str) -> str:
    """Returns the reason why a remote cache's URL is invalid, as a sentence that never repeats a password; ""
    if it is valid.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for one that is none
    except ValueError:
        return "the URL cannot be parsed"
    if parts.username is not None or parts.password is not None:
        return (
            "a URL must not hold a user name or password: put them into netrc or the environment "
            "(MLCBUILD_TOKEN_<HOST>, MLCBUILD_LOGIN_<HOST>)"
        )
    kind = KINDS.get(parts.scheme)
    if kind is None or kind.fault is None:
        *forms, last = [item.form for item in KINDS.values() if item.fault is not None]
        return f"'{url}' must start with {', '.join(forms)} or {last}"
    if parts.fragment or re.search(r"[\x00-\x20\x7f]", url) or (parts.query and not kind.takes_query):
        return f"'{url}' must be an address alone, without '?', '#' and spaces"
    return kind.fault(url)


def connect(url: str, timeout: float = TIMEOUT) -> Transport:
    """Connects to the remote cache with the given URL, which must be valid, and returns the connection (a
    `Transport`). timeout: seconds to wait for a response. Raises RemoteError if the connection cannot be set
    up."""
    kind = KINDS[urlsplit(url).scheme]
    assert kind.connect is not None  # `fault` refuses any other URL.
    with border():
        return Bordered(kind.connect(url, timeout))


def destination(url: str) -> Destination | None:
    """Returns the `Destination` with which bundles are published to an address; None if they cannot be
    published to addresses with this scheme."""
    kind = KINDS.get(scheme(url)) if "://" in url else None
    return kind.publishes if kind is not None else None
