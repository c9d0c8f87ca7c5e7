"""Identity: canonical JSON, tagged BLAKE3, digests of files, trees and code.

Every digest is BLAKE3, 256 bits, 64 lower-case hex digits. A file's digest is the plain BLAKE3 of its
bytes (what `b3sum` prints). Everything structured is hashed as `tag NUL canonical-JSON`, so that two kinds
of thing can never share a digest.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

Json: TypeAlias = None | bool | int | str | list["Json"] | dict[str, "Json"]

PACKAGES = ("mlcbuild", "mlcbuild_runtime")
"""The packages whose source decides what an action does."""


def canonical(value: object) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, UTF-8.

    Raises TypeError on a float: its text differs between writers, so floats enter identities as strings.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _plain(value: object) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key of canonical JSON must be a string, not {key!r}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"canonical JSON cannot hold a {type(value).__name__}: {value!r}")


def digest(tag: str, value: object) -> str:
    """Tagged BLAKE3 of a JSON value."""
    return blake3(tag.encode() + b"\0" + canonical(value)).hexdigest()


def bytes_digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def file_digest(path: Path) -> str:
    """BLAKE3 of a file's bytes, memory-mapped. Raises OSError."""
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


@dataclass(frozen=True, order=True)
class Entry:
    """One file of a tree. `path` is relative, with `/` between its parts."""

    path: str
    digest: str
    size: int


def tree_digest(entries: Iterable[Entry]) -> str:
    """Identity of a tree of files: names and contents. Modes and times do not enter."""
    return digest("tree/1", [[entry.path, entry.digest, entry.size] for entry in sorted(entries)])


def code_files(module: str) -> dict[str, str]:
    """Digest of each source file in the import closure of `module`, inside PACKAGES.

    Imports are read from the syntax tree, those inside functions too, so that a lazy import counts. The
    names are paths such as `mlcbuild/compiler/kernels/w4.py`, the same on every machine.
    """
    seen: dict[str, str] = {}
    pending = [module]
    visited = set()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        path = _module_path(name)
        if path is None:
            continue
        seen[_portable(name, path)] = file_digest(path)
        pending.extend(_imports(path, name))
        if "." in name:
            pending.append(name.rpartition(".")[0])
    return dict(sorted(seen.items()))


@lru_cache(maxsize=None)
def _module_path(name: str) -> Path | None:
    """The source file of a module of ours, found without importing it."""
    top, *rest = name.split(".")
    if top not in PACKAGES:
        return None
    spec = find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0], *rest)
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def _portable(name: str, path: Path) -> str:
    parts = name.split(".")
    return "/".join([*parts, "__init__.py"]) if path.name == "__init__.py" else "/".join(parts) + ".py"


@lru_cache(maxsize=None)
def _imports(path: Path, name: str) -> tuple[str, ...]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            found.append(base)
            # `from package import module` names a module in the alias.
            found.extend(f"{base}.{alias.name}" for alias in node.names)
    return tuple(item for item in found if item.split(".")[0] in PACKAGES)
