"""Bundles on disk: what must agree with the manifest before anything of a bundle is used.

A bundle is exactly its manifest: whatever else lies in its directory is refused. `read` makes the checks that
every load makes (files and sizes, digests of everything but weights, headers of weights and library, one
signature everywhere); `check(full=True)` also digests the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlcbuild_format import binary, files, weights
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.limits import Limits
from mlcbuild_format.manifest import (
    ENVELOPE,
    FORMAT,
    MANIFEST,
    POOLINGS,
    PROVENANCE,
    File,
    Machine,
    Manifest,
    Memory,
    Model,
    Pooling,
    Serving,
    parse,
)
from mlcbuild_format.signature import signature

__all__ = [
    "ENVELOPE",
    "FORMAT",
    "MANIFEST",
    "POOLINGS",
    "PROVENANCE",
    "File",
    "Limits",
    "Machine",
    "Manifest",
    "Memory",
    "Model",
    "Pooling",
    "Serving",
    "check",
    "manifest",
    "parse",
    "read",
    "signature",
]

MAX_MANIFEST = 16 << 20
"""Bytes of bundle.json."""


def read(path: Path) -> Manifest:
    """The manifest of the bundle in directory `path`, after every check that needs no reading of weights.

    Raises BundleError with one sentence.
    """
    return check(path, full=False)


def check(path: Path, full: bool = True) -> Manifest:
    """As `read`; `full` also digests the weights, at about 2 GB per CPU-second."""
    found = manifest(path)
    files.check_listing(path, found.everything)
    for name, file in sorted(found.files.items()):
        _check_size(path / name, file)
    for name in sorted(found.files.keys() - set(found.weights)):
        _check_digest(path / name, found.files[name])
    for name in found.weights:
        own = weights.read_header(path / name).signature
        if own != found.signature:
            raise BundleError(
                f"{path}: the weights in {name} have signature {own[:12]}, but {MANIFEST} is for"
                f" {found.signature[:12]}: they belong to another model or scheme; build the bundle again"
            )
    if found.machine.output == "shared":
        binary.check_model(path / found.library)
    for name in found.weights if full else ():
        _check_digest(path / name, found.files[name])
    return found


def manifest(path: Path) -> Manifest:
    """What bundle.json says, without a look at the other files. Raises BundleError."""
    file = path / MANIFEST
    try:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise BundleError(f"{path}: {what}, but a bundle is a directory that holds {MANIFEST}")
        file.lstat()
    except FileNotFoundError:
        raise BundleError(f"{path}: there is no {MANIFEST} in it, so it is not a bundle") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    data = files.read_bytes(file, MAX_MANIFEST)
    try:
        return parse(parse_json(data))
    except FieldError as error:
        raise BundleError(f"{file}: {error}; build the bundle again") from None
    except ValueError as error:
        raise BundleError(f"{file}: not valid JSON ({error}); build the bundle again") from None


def _check_size(path: Path, file: File) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise BundleError(f"{path}: missing, but {MANIFEST} lists it: copy the bundle again") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    if size != file.size:
        raise BundleError(f"{path}: has {size} bytes, but {MANIFEST} says {file.size}: copy the bundle again")


def _check_digest(path: Path, file: File) -> None:
    found = files.digest(path)
    if found != file.blake3:
        raise BundleError(
            f"{path}: has BLAKE3 {found[:12]}, but {MANIFEST} says {file.blake3[:12]}: it was changed or"
            " damaged after the build, so copy the bundle again"
        )


def check_tokens(tokens: Sequence[int], manifest: Manifest) -> None:
    """Raises ValueError for a token outside the vocabulary: the library would read beyond its table."""
    vocab_size = manifest.vocab_size
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size} tokens")
