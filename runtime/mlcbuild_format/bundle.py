"""Validates a bundle directory against its manifest before any file of the bundle is used.

A bundle consists of exactly the files that its manifest lists; any other file, as any failed check, raises
BundleError. `read` makes the checks of every load (files and sizes, digests of everything but weights,
headers of weights and library, one signature everywhere); `check(full=True)` also computes the digests of the
weights."""

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
"""The largest bundle.json that is read, in bytes. A larger one is refused with a BundleError."""


def read(path: Path) -> Manifest:
    """Returns the manifest of the bundle in directory `path`, after checking that its files have the listed
    names, sizes and digests (weights: no digest), and valid headers. Raises BundleError if a check fails."""
    return check(path, full=False)


def check(path: Path, full: bool = True) -> Manifest:
    """Returns the manifest of a bundle after checking that the directory `path` holds exactly the listed
    files, their sizes, the headers of the weights and of a shared library, the signature of the weights, and
    the digests of all files except weights.

    full: True to check also the digests of the weights, which takes a CPU-second for 2 GB. Raises BundleError
    at the first check that fails.
    """
    described = manifest(path)
    files.check_listing(path, described.everything)
    for name, file in sorted(described.files.items()):
        _check_size(path / name, file)
    for name in sorted(described.files.keys() - set(described.weights)):
        _check_digest(path / name, described.files[name])
    for name in described.weights:
        signature = weights.read_header(path / name).signature
        if signature != described.signature:
            raise BundleError(
                f"{path}: the weights in {name} have signature {signature[:12]}, but {MANIFEST} is for"
                f" {described.signature[:12]}: they belong to another model or scheme; build the bundle again"
            )
    if described.machine.output == "shared":
        binary.check_model(path / described.library)
    for name in described.weights if full else ():
        _check_digest(path / name, described.files[name])
    return described


def manifest(path: Path) -> Manifest:
    """Returns the parsed bundle.json of a bundle directory without checking the other files. Raises
    BundleError if `path` is no directory, or bundle.json is missing, unreadable, larger than 16 MiB or
    invalid.
    """
    file = path / MANIFEST
    try:
        if not path.is_dir():
            problem = "is a file" if path.exists() else "does not exist"
            if any(part.endswith(":") for part in path.parts):  # what a path makes of an address
                problem = "is an address, from which only the program `mlcbuild` fetches"
            raise BundleError(f"{path}: {problem}, but a bundle is a directory that holds {MANIFEST}")
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
    digest = files.digest(path)
    if digest != file.blake3:
        raise BundleError(
            f"{path}: has BLAKE3 {digest[:12]}, but {MANIFEST} says {file.blake3[:12]}: it was changed or"
            " damaged after the build, so copy the bundle again"
        )


def check_tokens(tokens: Sequence[int], manifest: Manifest) -> None:
    """Raises ValueError for a token outside the model's vocabulary, for which the library would read beyond
    its table of embeddings."""
    vocab_size = manifest.vocab_size
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size} tokens")
