"""Reads the metadata of a compiled library, and raises BundleError if they are invalid or contradict the
manifest of the library's bundle. Also finds the TVM runtime with which libraries run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError, SetupError
from mlcbuild_format.fields import (
    FieldError,
    Fields,
    Json,
    describe,
    is_integer,
    parse_json,
    plain,
    printable,
)
from mlcbuild_format.signature import Tensor, signature
from mlcbuild_format.versions import LIBRARY as FORMAT

RUNTIME_VARIABLE = "MLCBUILD_TVM_RUNTIME"


@dataclass(frozen=True)
class Metadata:
    signature: str
    params: tuple[Tensor, ...]
    """(name, shape, dtype, layout) of every parameter tensor that the compiled library takes, in the order of
    its arguments. layout: name of the physical order of the elements, such as "row"."""


def read_metadata(text: str, manifest: Manifest) -> Metadata:
    """Returns the metadata of a compiled library, parsed from its JSON `text`. Raises BundleError for invalid
    metadata, or if they contradict `manifest`."""
    try:
        top = Fields(parse_json(text.encode()))
        if top.value.get("format") != FORMAT:
            found_format = describe(top.value.get("format"))
            raise FieldError(f"'format' must be '{FORMAT}', found {found_format}: build the bundle again")
        metadata = Metadata(top.text("signature"), _params(top))
        _agree(top, manifest)
    except (FieldError, ValueError) as error:
        raise BundleError(f"{manifest.library}: its metadata is not usable: {error}") from None
    if metadata.signature != manifest.signature or signature(metadata.params) != manifest.signature:
        raise BundleError(
            f"{manifest.library} takes weights of signature {metadata.signature[:12]}, but the manifest and"
            f" the weights are {manifest.signature[:12]}: the library was built for another model or scheme"
        )
    return metadata


def _params(top: Fields) -> tuple[Tensor, ...]:
    rows = top.value.get("params")
    if not isinstance(rows, list):
        raise FieldError("'params' must be a list")
    return tuple(_param(row) for row in rows)


def _param(row: Json) -> Tensor:
    match row:
        case [str(name), list(shape), str(dtype), str(layout)]:
            sizes = [size for size in shape if is_integer(size) and size >= 0]
            if len(sizes) == len(shape):
                return name, sizes, dtype, layout
    raise FieldError(f"'params' holds {describe(row)}, not [name, shape, dtype, layout]")


def _agree(top: Fields, manifest: Manifest) -> None:
    """Raises BundleError if a bundle's manifest and the metadata of its library differ in a field of the
    model's config, the scheme, the target or the limits, except the field `name` of each; FieldError if the
    metadata lack one of these four objects."""
    sides = {
        "config": plain(manifest.model.config),
        "scheme": plain(manifest.scheme),
        "target": plain(manifest.target),
        "limits": plain(vars(manifest.limits)),
    }
    for key, ours in sides.items():
        theirs = top.object(key)
        assert isinstance(ours, dict)
        for name in sorted((set(ours) | set(theirs)) - {"name"}):
            if ours.get(name) != theirs.get(name):
                raise BundleError(
                    f"{manifest.library} was compiled with {key}.{name} = {_shown(theirs.get(name))},"
                    f" but bundle.json says {_shown(ours.get(name))}: build the bundle again"
                )


def _shown(value: Json) -> str:
    return printable(json.dumps(value), 200)


def find_runtime(path: Path, manifest: Manifest) -> Path:
    """Returns the path of the TVM runtime library: the one that the manifest lists below lib/, else the one
    that the environment variable MLCBUILD_TVM_RUNTIME names (if it is set and not empty), else that of an
    installed tvm package. Raises SetupError if there is none, or if the variable is used and names no file.
    path: directory of the bundle."""
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    if f"lib/{name}" in manifest.files:
        return path / "lib" / name
    named = os.environ.get(RUNTIME_VARIABLE)
    if named:
        if not os.path.isfile(named):  # noqa: PTH113 - unlike Path.is_file, it raises no PermissionError
            raise SetupError(f"{RUNTIME_VARIABLE} is '{named}', which is not a file")
        return Path(named)
    spec = find_spec("tvm")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        candidate = Path(place, "lib", name)
        if candidate.is_file():
            return candidate
    raise SetupError(
        f"{path}: the bundle brings no TVM runtime (lib/{name}) and this machine has none: set"
        f" {RUNTIME_VARIABLE} to a {name} of version {manifest.tools.get('apache-tvm', 'unknown')}"
    )
