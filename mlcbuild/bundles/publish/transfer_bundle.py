"""Sends and fetches bundles, and checks them on both ways."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from mlcbuild_format import bundle as form
from mlcbuild_format.bundle import Manifest

from mlcbuild.bundles.provenance import ENVELOPE, STATEMENT
from mlcbuild.errors import PublishError, RemoteError
from mlcbuild.remotes.kinds import destination
from mlcbuild.remotes.transport import border, quoted

_OWN = (form.MANIFEST, STATEMENT, ENVELOPE)
"""Files of a bundle that its manifest does not list."""
Seen: TypeAlias = dict[tuple[str, str], tuple[str, str]]
"""(registry, BLAKE3) -> (SHA-256, a repository that has it)."""


@dataclass(frozen=True)
class Published:
    """Where a bundle is now."""

    url: str
    """With the digest or commit that stands for exactly this content."""
    sent: int
    """Bytes that were not there before; 0 when all of it was there already."""


def publish(bundle: Path, to: str, seen: Seen | None = None) -> Published:
    """Sends a bundle, after a check of all of it, to a place that `fault` finds nothing wrong with.

    `seen` remembers, from one call to the next, what registries have. Raises PublishError, and BundleError
    for a bundle that is damaged.
    """
    manifest = form.check(bundle, full=True)
    try:
        with border():
            sent = _place(to).push(
                bundle, manifest, files(bundle, manifest), to, {} if seen is None else seen
            )
            return Published(*sent)
    except RemoteError as error:
        raise PublishError(f"{to}: {error}") from None


def pull(source: str, directory: Path) -> tuple[str, Manifest]:
    """Fetches a bundle into a directory that does not exist, or holds just this bundle.

    The address that names exactly this content, and its manifest. What has come stays when a transfer
    breaks off, and is used the next time. Raises PublishError.
    """
    if directory.exists() and not (directory / form.MANIFEST).is_file():
        raise PublishError(f"{directory}: it exists and is no bundle: name another directory")
    part = directory.absolute().with_name(f".{directory.absolute().name}.partial")
    try:
        with border():
            part.mkdir(parents=True, exist_ok=True)
            exact, listed = _place(source).fetch(source, part)
            manifest = _checked(source, part, listed)
            _show(part, directory)
    except RemoteError as error:
        raise PublishError(f"{source}: {error}") from None
    return exact, manifest


class _Place(Protocol):
    """What the module of a kind of remote offers, see mlcbuild/remotes/kinds.py."""

    def push(
        self, bundle: Path, manifest: Manifest, files: Mapping[str, int], to: str, seen: Seen
    ) -> tuple[str, int]:
        """Sends files, and returns the address of exactly this content and the bytes that went."""

    def fetch(self, source: str, directory: Path) -> tuple[str, frozenset[str]]:
        """Brings files into a directory, and returns the address of exactly them and their paths."""


def _place(url: str) -> _Place:
    found = destination(url)
    assert found is not None  # else `fault` refuses the address
    return cast(_Place, found.load())


def files(bundle: Path, manifest: Manifest) -> dict[str, int]:
    """The files that make a bundle, with their sizes, and nothing else that lies in its directory."""
    found = {name: file.size for name, file in manifest.files.items()}
    own = [name for name in _OWN if (bundle / name).is_file()]
    return dict(sorted((found | {name: (bundle / name).stat().st_size for name in own}).items()))


def _checked(source: str, part: Path, listed: frozenset[str]) -> Manifest:
    """The manifest of what was fetched; a bundle that is wrong is removed."""
    try:
        for path in sorted(part.rglob("*"), reverse=True):  # of an earlier version, whose transfer broke off
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
        raise PublishError(f"{source}: what was fetched is refused: {words}") from None


def _show(part: Path, directory: Path) -> None:
    """Gives what was checked its name; what had it before is a bundle, and goes."""
    old = directory.absolute().with_name(f".{directory.absolute().name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    part.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
