"""Publishes bundles to OCI registries and model hubs, and downloads them. Every file is compared with the
bundle's manifest before it is sent and after it is received.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from mlcbuild_format import bundle as form
from mlcbuild_format.bundle import Manifest

from mlcbuild.bundles.provenance import ENVELOPE, STATEMENT
from mlcbuild.errors import PublishError, RemoteError, SourceError
from mlcbuild.remotes.kinds import destination
from mlcbuild.remotes.transport import border, quoted

_OWN = (form.MANIFEST, STATEMENT, ENVELOPE)
"""Names of the files of a bundle that its manifest does not list: the manifest itself and, where they exist,
the provenance statement and its signed envelope."""
Uploaded: TypeAlias = dict[tuple[str, str], tuple[str, str]]
"""Files that registries are known to have: (registry, BLAKE3 of a file) -> (digest "sha256:<hex>" of the
file, a repository of the registry that has it)."""


@dataclass(frozen=True)
class PublishedBundle:
    """The address of a published bundle, and the number of bytes that were sent."""

    url: str
    """Immutable address of the published bundle, with the digest or commit of exactly its content."""
    sent: int
    """Number of bytes of the bundle that were sent; 0 if the destination already had all files."""


def publish(bundle: Path, to: str, uploaded: Uploaded | None = None) -> PublishedBundle:
    """Checks every file of the bundle in a directory, sends the bundle to the address `to` of a registry or
    model hub, which `publish.fault` must have accepted, and returns its immutable address and the number of
    bytes sent.

    uploaded: files that registries have (see Uploaded), which is updated and can be passed to the next call.
    Raises PublishError if the transfer fails, and BundleError for a damaged bundle.
    """
    manifest = form.check(bundle, full=True)
    try:
        with border():
            sent = _place(to).push(
                bundle, manifest, files(bundle, manifest), to, {} if uploaded is None else uploaded
            )
            return PublishedBundle(*sent)
    except RemoteError as error:
        raise PublishError(f"{to}: {error}") from None
    except SourceError as error:  # Its message names the address.
        raise PublishError(str(error)) from None


def pull(source: str, directory: Path) -> tuple[str, Manifest]:
    """Downloads the bundle at the address `source`, which `publish.fault` must have accepted, into a
    directory that does not exist or already holds a bundle, which is replaced.

    Returns (immutable address, manifest). The next call resumes an interrupted transfer. Raises PublishError
    if the directory exists without a bundle.json, the transfer fails or the bundle is damaged; the directory
    is then as before.
    """
    if os.path.lexists(directory) and not (directory / form.MANIFEST).is_file():
        raise PublishError(f"{directory}: it exists and is not a bundle: name another directory")
    directory = Path(os.path.normpath(directory.absolute()))  # "." and "x/.." cannot be renamed.
    part = unfinished(directory)
    try:
        with border():
            part.mkdir(parents=True, exist_ok=True)
            exact, listed = _place(source).fetch(source, part)
            manifest = _checked(source, part, listed)
            _show(part, directory)
    except RemoteError as error:
        raise PublishError(f"{source}: {error}") from None
    except SourceError as error:  # Its message names the address.
        raise PublishError(str(error)) from None
    return exact, manifest


def unfinished(directory: Path) -> Path:
    """Returns the directory in which `pull` collects the files of the bundle that it downloads to
    `directory`, and in which they stay when it is interrupted."""
    return directory.with_name(f".{directory.name}.partial")


class _Place(Protocol):
    """The interface of a module that publishes bundles to one kind of address, such as oci:// or hf://, and
    downloads them. The table in mlcbuild/remotes/kinds.py maps addresses to these modules.
    """

    def push(
        self, bundle: Path, manifest: Manifest, files: Mapping[str, int], to: str, uploaded: Uploaded
    ) -> tuple[str, int]:
        """Sends the files of the bundle in a directory to the address `to`, and returns (immutable address,
        number of bytes sent). files: path -> size in bytes; uploaded: files that registries already have,
        which is updated. Raises RemoteError or SourceError if the transfer fails.
        """

    def fetch(self, source: str, directory: Path) -> tuple[str, frozenset[str]]:
        """Downloads the files of the bundle at the address `source` into a directory, and returns (immutable
        address, paths of the files in it). The caller checks their contents. Raises RemoteError or
        SourceError if the transfer fails, OSError if a file cannot be written."""


def _place(url: str) -> _Place:
    publisher = destination(url)
    assert publisher is not None  # `fault` refuses any other address.
    return cast(_Place, publisher.load())


def files(bundle: Path, manifest: Manifest) -> dict[str, int]:
    """Returns path -> size in bytes, sorted by path, of the files that belong to a bundle: those that its
    manifest lists, with the sizes that it states, the manifest, and the provenance if there is one. Other
    files in its directory are ignored."""
    sizes = {name: file.size for name, file in manifest.files.items()}
    extra_files = [name for name in _OWN if (bundle / name).is_file()]
    return dict(sorted((sizes | {name: (bundle / name).stat().st_size for name in extra_files}).items()))


def _checked(source: str, part: Path, listed: frozenset[str]) -> Manifest:
    """Checks a bundle that was downloaded from the address `source` to the directory `part`, and returns its
    manifest. Files in `part` that are not in `listed`, the paths of the downloaded files, are deleted first.
    If a file is missing, has other contents than the manifest states, or is not listed in the manifest, it
    removes `part` and raises PublishError."""
    try:
        # an interrupted transfer of an earlier version left them
        for path in sorted(part.rglob("*"), reverse=True):
            if path.is_file() and path.relative_to(part).as_posix() not in listed:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        manifest = form.check(part, full=True)
        if extra := listed - manifest.files.keys() - {*_OWN}:
            raise PublishError(f"{form.MANIFEST} does not list its file {quoted(min(extra))}")
        return manifest
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        words = str(error).replace(f"{part}/", "").replace(f"{part}: ", "")
        raise PublishError(f"{source}: the fetched bundle is refused: {words}") from None


def _show(part: Path, directory: Path) -> None:
    """Moves a checked bundle from its temporary directory `part` to its final path `directory`, which is
    absolute. An older bundle or a symbolic link to one is moved away before and then removed, so that for a
    moment nothing is there. Raises OSError if the path cannot be renamed."""
    old = directory.with_name(f".{directory.name}.old")
    _remove(old)
    if os.path.lexists(directory):
        directory.rename(old)
    try:
        part.rename(directory)
    except OSError:
        if os.path.lexists(old):
            old.rename(directory)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    """Removes a directory, or a symbolic link and not that to which it leads; nothing if neither exists. What
    cannot be removed of a directory is left without an error."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
