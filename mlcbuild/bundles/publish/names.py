"""Checks the file names of a published bundle: they must form a tree that can be written below one
directory.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlcbuild.checkpoints.hub import check_name
from mlcbuild.errors import RemoteError, SourceError
from mlcbuild.remotes.transport import quoted


def check_names(names: Iterable[str]) -> None:
    """Raises RemoteError unless all file names of a bundle are relative paths inside one directory, with `/`
    between their components, and none is both a file and a directory. Names with a backslash, a colon, an
    unprintable character or a component of more than 255 bytes are refused, too.
    """
    files, directories = set(names), set[str]()
    for name in files:
        try:
            check_name(name)
        except SourceError as error:
            raise RemoteError(str(error)) from None
        parts = name.split("/")
        directories |= {"/".join(parts[:end]) for end in range(1, len(parts))}
    if clash := files & directories:
        raise RemoteError(f"it names {quoted(min(clash))} as a file and as a directory")
