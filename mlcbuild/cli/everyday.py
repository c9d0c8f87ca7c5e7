"""The verbs for models by name: chat, serve, list, rm."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mlcbuild_format import sizes

from mlcbuild.errors import StoreError, UsageError, safe_lines
from mlcbuild.installed import entries
from mlcbuild.installed.entries import InstalledModel, InstallOptions
from mlcbuild.installed.resolve import bundles
from mlcbuild.store.store import default_root

if TYPE_CHECKING:
    from mlcbuild.build.events import Reporter


def chat(arguments: argparse.Namespace) -> int:
    """Runs the verb `chat`: chats with a model, which is built or downloaded first where it is not installed.
    Returns the exit code. Raises UsageError if the name refers to several bundles or to nothing, and the
    error of a build or download that fails."""
    from mlcbuild_runtime.chat import run

    return run(arguments, lambda name: _one(name, arguments))


def _one(name: str, arguments: argparse.Namespace) -> Path:
    """Returns the directory of the single bundle to which a name refers; a missing bundle is built or
    downloaded. Raises UsageError if the name refers to several bundles or to nothing, and the error of a
    build or download that fails."""
    directories = bundles(name, _options(arguments))
    if len(directories) > 1:
        listed = ", ".join(str(path) for path in directories)
        raise UsageError(f"mlcbuild chat: {name} holds {len(directories)} bundles: name one of {listed}")
    return directories[0]


def serve(arguments: argparse.Namespace) -> int:
    """Runs the verb `serve`: serves models, which are built or downloaded first where they are not installed,
    and returns the exit code. Raises UsageError for options that contradict each other, for a name that
    refers to nothing, and for NAME=MODEL if MODEL refers to several bundles; also raises the error of a build
    or download that fails."""
    from mlcbuild_runtime.http.arguments import options
    from mlcbuild_runtime.http.serve import serve as run

    try:
        serve_options = options(arguments)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"mlcbuild serve: {error}") from None
    return run([item for name in arguments.bundles for item in _served(name, arguments)], serve_options)


def _served(text: str, arguments: argparse.Namespace) -> Iterator[str]:
    """Yields each bundle to which an argument of `serve` refers: NAME=DIRECTORY, or DIRECTORY without a name;
    a missing bundle is built or downloaded. text: a model's name or path, or NAME=MODEL, which serves it as
    NAME. Without NAME, an installed model has the name that `list` prints, any other bundle none. Raises
    UsageError if MODEL refers to nothing, or to several bundles with a NAME, and the error of a build or
    download that fails."""
    alias, equals, name = text.partition("=")
    if not equals or not alias or "/" in alias or Path(text).exists():
        alias, name = "", text
    directories = bundles(name, _options(arguments))
    if alias and len(directories) > 1:
        raise UsageError(f"mlcbuild serve: {text}: {name} holds {len(directories)} bundles: name one of them")
    installed = {entry.bundle: entry.name for entry in entries.read(_root(arguments))}
    names = ((alias or installed.get(path), path) for path in directories)
    yield from (f"{served}={path}" if served else str(path) for served, path in names)


def _options(arguments: argparse.Namespace) -> InstallOptions:
    stream = _stream(arguments)

    def note(line: str) -> None:
        print(safe_lines(line), file=stream, flush=True)

    return InstallOptions(_root(arguments), arguments.scheme, note, lambda: _watch(stream))


def _root(arguments: argparse.Namespace) -> Path:
    return Path(arguments.store).absolute() if arguments.store else default_root()


def _stream(arguments: argparse.Namespace) -> TextIO:
    """Returns the stream for lines about a build or download: standard error, or one that makes them JSON
    objects, as `serve --log json` asks."""
    if getattr(arguments, "log", "") != "json":
        return sys.stderr
    from mlcbuild_runtime.http.logs import JsonLines

    return JsonLines()


def _watch(stream: TextIO) -> AbstractContextManager[Reporter]:
    from mlcbuild.reports.report import reporting

    return reporting(stream)


def listed(arguments: argparse.Namespace) -> int:
    """Prints the installed models: name, scheme, size, last use and source, with --json also the bundle's
    directory. Returns exit code 0."""
    from mlcbuild.cli.listing import show, table
    from mlcbuild.cli.store_access import ago

    rows, document = [("name", "scheme", "bytes", "last used", "source")], []
    for item in entries.read(_root(arguments)):
        with suppress(OSError):  # It was removed meanwhile.
            used, scheme, size = item.used, _scheme(item), item.size
            rows.append((item.name, scheme or "-", sizes.show(size), ago(time.time() - used), item.source))
            document.append(
                {
                    "name": item.name,
                    "scheme": scheme or None,
                    "bytes": size,
                    "used": used,
                    "source": item.source,
                    "bundle": str(item.bundle),
                }
            )
    nothing = "nothing is installed: mlcbuild chat NAME builds or fetches a model, and keeps it"
    show(arguments.json, {"models": document}, table(rows) if document else [nothing])
    return 0


def _scheme(item: InstalledModel) -> str:
    """Returns the name of the quantization scheme of an installed model: the scheme with which it was built
    or, for a downloaded bundle, the one in its manifest, "" if the manifest cannot be read."""
    from mlcbuild_format import bundle
    from mlcbuild_format.errors import BundleError
    from mlcbuild_format.fields import printable

    if not item.scheme:
        with suppress(BundleError):
            return printable(str(bundle.manifest(item.bundle).scheme["name"]))
    return item.scheme


def remove(arguments: argparse.Namespace) -> int:
    """Removes installed models, and returns exit code 0. Results of their builds stay in the store until
    `cache gc`. Raises UsageError, before anything is removed, for a name that is not installed; StoreError
    for a model whose files cannot be removed, after the removal of the models named before it."""
    installed = entries.read(_root(arguments))
    removed = [entries.named(installed, name) for name in dict.fromkeys(arguments.names)]
    for entry in removed:
        size = entry.size
        try:
            entries.remove(entry)
        except OSError as error:
            raise StoreError(f"{entry.directory}: cannot be removed: {error.strerror or error}") from None
        print(safe_lines(f"{entry.name}: {sizes.show(size)} removed"))
    if any(entry.scheme for entry in removed):
        print(
            "the steps that built them stay in the store: mlcbuild cache gc --unused-days 30 removes old ones"
        )
    if any(entry.source.startswith("hf://") for entry in removed):
        print("files of hf:// stay in the hub's cache (in HF_HOME), which other programs share")
    return 0
