"""Resolves a name on the command line to bundles, and builds or downloads those that are not
installed yet.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mlcbuild_runtime.locations import directories

from mlcbuild.errors import StoreError, UsageError, did_you_mean
from mlcbuild.installed import entries
from mlcbuild.installed.entries import MANIFEST, InstalledModel, InstallOptions
from mlcbuild.targets.host import host

CONFIG = "config.json"
ADDRESSES = ("oci://", "hf://")
_NAMES = (
    "write the directory of a bundle or checkpoint, a GGUF file, hf://organisation/model, or"
    " oci://host/name:tag"
)


def bundles(name: str, options: InstallOptions) -> tuple[Path, ...]:
    """Returns the directories of the bundles to which a name refers; several for a directory of bundles.

    A name is a bundle, a directory of bundles, a checkpoint (a directory or a GGUF file), an address (oci://
    or hf://), or the name of an installed bundle, in this order of precedence. A missing bundle is built or
    downloaded, and kept. Raises UsageError for a name that refers to nothing or a wrong scheme, SetupError if
    this machine's system is not supported and the name is no existing bundle or directory of bundles,
    StoreError if the store cannot be written, and the error of a build or download that fails.
    """
    path = Path(name)
    if not name:
        raise UsageError(f"the name is empty: {_NAMES}")
    if name.startswith(ADDRESSES):
        # An address without a branch means the same branch, and so the same installed model.
        source = name.removesuffix("@main") if name.startswith("hf://") else name
        return (_installed(source, options),)
    if "://" in name:
        raise UsageError(f"'{name}': an address starts with {' or '.join(ADDRESSES)}")
    if not path.exists():
        return (_by_name(name, options),)
    bundle_directories = directories(path)
    if bundle_directories:
        return bundle_directories
    source = str(_checkpoint(path).absolute())
    entries.check_path(source)
    return (_installed(source, options),)


def machine_words() -> str:
    """Returns a text that describes this machine as a target: triple, processor and features, separated by
    spaces. Raises SetupError on anything but Linux (x86-64, 64-bit Arm) and macOS (arm64), or if the system's
    description of the processor cannot be read."""
    triple, cpu, features = host()
    return " ".join((triple, cpu, *features))


def _by_name(name: str, options: InstallOptions) -> Path:
    """Returns the directory of the bundle of the installed model called `name`, and records that it is used
    now. The bundle is built or downloaded again if it is missing or its checkpoint has changed. If the
    options name another scheme, the bundle with that scheme is built unless it is installed. Raises
    UsageError if there is no such model, or if a scheme is wrong or named for a downloaded bundle, SetupError
    if this machine's system is not supported, StoreError if the store cannot be written, and the error of a
    build or download that fails."""
    installed_models = entries.read(options.root)
    entry = next((entry for entry in installed_models if entry.name == name), None)
    if entry is None:
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            raise UsageError(f"'{name}' is not here; for a model of the Hugging Face hub write hf://{name}")
        names = did_you_mean(name, [entry.name for entry in installed_models])
        installed = f"; installed models: {names.removeprefix('known: ')}" if installed_models else ""
        raise UsageError(f"'{name}' is not here: {_NAMES}{installed}")
    if options.scheme not in (None, entry.scheme):
        return _installed(entry.source, options)
    return _installed(entry.source, replace(options, scheme=entry.scheme or None))


def _installed(source: str, options: InstallOptions) -> Path:
    """Returns the directory of the bundle of a model; builds or downloads the bundle if it is not installed,
    and records that it is used now. source: an oci:// or hf:// address, or the absolute path of a checkpoint.
    Raises SetupError if this machine's system is not supported, UsageError for a scheme that is wrong or
    named for a published bundle, StoreError if the store cannot be written, and the error of a build or
    download that fails."""
    words = machine_words()
    entry = _kept(source, options, words) or _new(source, options, words)
    entry.note_use()
    return entry.bundle


def _new(source: str, options: InstallOptions, words: str) -> InstalledModel:
    """Builds or downloads the bundle of a model, and returns it as an installed model. If another process
    installs the same model, waits for its end, and uses what it has installed. source: an address, or the
    absolute path of a checkpoint; words: triple, processor and features of this machine, separated by spaces.
    Raises UsageError for a wrong scheme or source, StoreError if the store cannot be written, the error of a
    build or download that fails, and KeyboardInterrupt if the build was interrupted."""
    from mlcbuild.canon import bytes_digest
    from mlcbuild.installed.install import activity_lock, install
    from mlcbuild.store.locks import holder, try_lock, wait_lock

    place = options.root / entries.DIRECTORY / f".{bytes_digest(os.fsencode(source))[:16]}.lock"
    with ExitStack() as held:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = try_lock(place)
            if lock is None:
                options.note(f"{source}: another mlcbuild installs it ({holder(place)}): waiting for its end")
                lock = wait_lock(place)
            held.enter_context(lock)
            held.enter_context(wait_lock(activity_lock(options.root), shared=True, keep=True))
        except OSError as error:
            raise StoreError(f"{place.parent}: cannot be written: {error.strerror or error}") from None
        return _kept(source, options, words) or install(source, words, options)


def _kept(source: str, options: InstallOptions, words: str) -> InstalledModel | None:
    """Returns the complete installed bundle that was made from `source`, an address or the path of a
    checkpoint, for this machine; None if there is none. If the user named a quantization scheme, only a
    bundle with this scheme counts; otherwise a downloaded one, or one whose scheme mlcbuild chose, is
    preferred. Of several, the last used is returned.

    words: triple, processor and features of this machine, separated by spaces. Raises UsageError if a scheme
    is named and the bundle was downloaded, since it has its own scheme.
    """
    usable = [
        entry
        for entry in entries.read(options.root)
        if entry.source == source and entry.target in ("", words) and entry.is_complete
    ]
    if options.scheme is not None:
        if any(not entry.scheme for entry in usable):
            raise UsageError(f"{source}: it is a published bundle, which has its scheme: leave --scheme out")
        return next((entry for entry in usable if entry.scheme == options.scheme), None)
    automatic = (entry for entry in usable if not entry.scheme or entry.is_default)
    return next(automatic, next(iter(usable), None))


def _checkpoint(path: Path) -> Path:
    """Returns the path of the checkpoint that an existing path names: the path itself if it is a GGUF file or
    a directory with config.json, or the only GGUF file in a directory without one. Raises UsageError for any
    other path."""
    if path.suffix == ".gguf" or (path / CONFIG).is_file():
        return path
    if path.is_file():
        hint = (
            f"mlcbuild run {path} builds its bundles"
            if path.suffix in (".yaml", ".yml")
            else ("name a directory, or a GGUF file")
        )
        raise UsageError(f"{path}: it is neither a bundle nor a checkpoint: {hint}")
    packed = sorted(path.glob("*.gguf"))
    if len(packed) == 1:
        return packed[0]
    hint = f"; it holds {len(packed)} GGUF files: name one, such as {packed[0]}" if packed else ""
    if refused := sorted(path.glob(f".*.refused/{MANIFEST}")):
        hint = f"; the bundle in {refused[0].parent} failed its verification"
    raise UsageError(
        f"{path}: it holds neither {MANIFEST} nor {CONFIG}, so it is no bundle and no checkpoint{hint}"
    )
