"""Opens the store of a command line, and implements `cache status`, which prints number, size and last use of
the stored step records."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.cli.listing import show, table
from mlcbuild.errors import UsageError
from mlcbuild.store import upkeep
from mlcbuild.store.store import Store, default_root


def open_store(arguments: argparse.Namespace) -> Store:
    """Returns the store that --store names, or the user's default store. Raises StoreError for a store of
    another format.
    """
    return Store(Path(arguments.store) if arguments.store else default_root())


def no_operands(arguments: argparse.Namespace) -> None:
    """Raises UsageError if the command line passes operands to an action of `cache` that accepts none."""
    if arguments.operands:
        raise UsageError(
            f"mlcbuild cache {arguments.action}: '{arguments.operands[0]}' is one argument too many"
        )


def status(arguments: argparse.Namespace) -> int:
    no_operands(arguments)
    state = upkeep.status(open_store(arguments))
    now = time.time()
    rows = [("step", "records", "bytes", "last used", "oldest use")]
    rows += [
        (
            name,
            str(kind.records),
            sizes.show(kind.bytes),
            ago(now - kind.last_used),
            ago(now - kind.oldest_use),
        )
        for name, kind in sorted(state.kinds.items())
    ]
    document = {
        "root": str(state.root),
        "records": state.records,
        "blobs": state.blobs,
        "bytes": state.bytes,
        "kinds": {name: vars(kind) for name, kind in sorted(state.kinds.items())},
    }
    last = f"{state.root}: {state.records} records, {state.blobs} files, {sizes.show(state.bytes)}"
    show(arguments.json, document, [*table(rows), last])
    return 0


def ago(seconds: float) -> str:
    """Returns the seconds since something was last used, as text in the largest suitable unit up to days,
    such as "3 days ago"; "just now" for less than a minute."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
