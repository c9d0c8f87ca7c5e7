"""Defines content identity: canonical JSON, tagged BLAKE3, and digests of files, trees and code.

Every digest is 256-bit BLAKE3, written as 64 lower-case hex digits. A file's digest is the plain BLAKE3 of
its bytes (the output of `b3sum`). Structured values are hashed as `tag NUL canonical-JSON`, so that values of
two kinds never share a digest.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

Json: TypeAlias = bool | int | str | list["Json"] | dict[str, "Json"] | None

PACKAGES = ("mlcbuild", "mlcbuild_format", "mlcbuild_runtime")
"""The packages of which each source file that a build step's action imports, directly or indirectly, is
hashed into the step's cache key."""


_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode


def canonical(value: object) -> bytes:
    """Returns the unique byte string of a JSON value: keys sorted by code point, no spaces, UTF-8.

    Raises TypeError on a float, because its text differs between writers (identities hold floats as strings),
    on a key that is not a string, and on any other type that JSON lacks; tuples count as lists. Raises
    ValueError on text without a UTF-8 form (a lone surrogate).
    """
    return canonical_plain(_plain(value))


def canonical_plain(value: object) -> bytes:
    """Returns the canonical bytes of a JSON value (keys sorted, no spaces, UTF-8), as `canonical` does, but
    does not check that the value holds no floats and that all keys are strings: the caller must ensure it.

    The check takes longer than encoding: 6 of 9 microseconds for the inputs of a step. Raises ValueError for
    text that UTF-8 cannot hold, and for NaN and infinite floats.
    """
    try:
        return _encode(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"canonical JSON must be UTF-8, found {error.object!r}") from None


def _plain(value: object) -> Json:
    if value is None or isinstance(value, str | int):  # bool is a subclass of int
        return value
    if isinstance(value, dict | Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key of canonical JSON must be a string, not {key!r}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"canonical JSON cannot hold a {type(value).__name__}: {value!r}")


def digest(tag: str, value: object) -> str:
    """Returns the BLAKE3 digest of a JSON value, hashed as `tag NUL canonical-JSON`, as 64 hex digits. Raises
    TypeError for a float, a key that is not a string or a type that JSON lacks, and ValueError for text
    that UTF-8 cannot hold.
    """
    return blake3(tag.encode() + b"\0" + canonical(value)).hexdigest()


def bytes_digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


_MANY_THREADS = 64 << 20
"""Size in bytes from which on a file is hashed on all cores, which is slower for smaller files."""


def file_digest(path: Path) -> str:
    """Returns the BLAKE3 digest of a file, in hex. The file is memory-mapped; large files are hashed on all
    cores. Raises OSError if the file cannot be read.
    """
    large = path.stat().st_size >= _MANY_THREADS
    hasher = blake3(max_threads=blake3.AUTO if large else 1)
    hasher.update_mmap(path)
    return hasher.hexdigest()


_noted: dict[tuple[int, int, int, int], str] = {}


def note_digest(path: Path, digest: str) -> None:
    """Caches `digest`, which the caller has computed as the BLAKE3 digest of a file, so that `noted_digest`
    returns it without reading the file. The file must not change again during this build step.

    Raises OSError if the file cannot be examined.
    """
    _noted[_state(path)] = digest


def noted_digest(path: Path) -> str | None:
    """Returns the digest that `note_digest` cached for a file, if the file's inode, size and mtime are
    unchanged; None otherwise. Raises OSError if the file cannot be examined.
    """
    return _noted.get(_state(path))


def forget_digests() -> None:
    """Clears the cache of file digests that `note_digest` fills. It must be called between two build steps,
    because inode numbers, which are part of the cache's keys, are reused.
    """
    _noted.clear()


def _state(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, order=True)
class Entry:
    """One file of a tree. `path` is relative, with `/` between its components; `digest` is its BLAKE3 in hex;
    `size` is in bytes.
    """

    path: str
    digest: str
    size: int


def tree_digest(entries: Iterable[Entry]) -> str:
    """Returns the BLAKE3 digest, in hex, of a tree of files: of their paths, sizes and contents, without
    modes and times. The order of the entries has no effect. Raises ValueError for a path that UTF-8 cannot
    hold.
    """
    return rows_digest(map(_row, entries))


def rows_digest(rows: Iterable[tuple[str, str, int]]) -> str:
    """Returns the BLAKE3 digest, in hex, of a tree of files. rows: (path, digest in hex, size in bytes) of
    each file, in any order. Raises ValueError for a path that UTF-8 cannot hold.
    """
    return blake3(b"tree/1\0" + canonical_plain(sorted(rows))).hexdigest()


def _row(entry: Entry) -> tuple[str, str, int]:
    return entry.path, entry.digest, entry.size


@dataclass(frozen=True)
class Tree:
    """A tree of files: the files, sorted by path, and the tree's digest."""

    digest: str
    files: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Tree:
        files = tuple(sorted(entries, key=_row))
        return cls(tree_digest(files), files)


def salt(code: Mapping[str, str], tools: Mapping[str, str]) -> str:
    """Returns the salt of a build step: the BLAKE3 digest, in hex, of everything except its inputs and
    parameters that determines its result. code: name of a source file -> digest; tools: name -> version.
    """
    return blake3(b"salt/1\0" + canonical_plain({"code": dict(code), "tools": dict(tools)})).hexdigest()


def step_key(action: str, params: bytes, salted: str, inputs: Mapping[str, str]) -> str:
    """Returns a build step's cache key: the BLAKE3 digest, in hex, of the JSON list `["step/1", action,
    params, salt, inputs]`.

    action: "module:function". params: the parameters as canonical JSON, which is inserted as it is; a graph
    has that text to merge equal steps. salted: the step's salt, as the function `salt` returns it. inputs:
    argument of the action -> digest.
    """
    names = canonical_plain(action), params, salted.encode(), canonical_plain(dict(inputs))
    text = b'["step/1",%s,%s,"%s",%s]' % names
    return blake3(text).hexdigest()


SourceFiles: TypeAlias = dict[str, tuple[str, str, tuple[str, ...]] | None]
"""Name of a module -> (name of its source file that is the same on every machine, such as mlcbuild/canon.py,
digest of that file, names of the modules that it may import); None for a module without a source file.
"""


ImportTable: TypeAlias = dict[tuple[str, str], tuple[str, ...]]
"""(digest of a source file, package in which its relative imports start) -> names of the modules that the
file may import.
"""


def code_files(
    *modules: str, files: SourceFiles | None = None, imports: ImportTable | None = None
) -> dict[str, str]:
    """Returns portable name -> BLAKE3 digest of each source file that the modules import, directly or
    indirectly, of the modules' own files, and of the `__init__.py` of every package that contains one of
    them. Portable names are paths such as `mlcbuild/compiler/kernels/w4.py`, the same on every machine.

    Only modules inside PACKAGES and the top-level packages of `modules` count; names without a source file
    are left out. Imports are read from the syntax tree, including those inside functions, so that a lazy
    import counts. files: a cache of source files, to which new ones are added; a caller that computes many
    closures passes it, so that every file is read once. imports: cached imports of files; a file in it is
    hashed but not parsed, and the imports of other files are added. Raises SyntaxError for a file that is not
    valid Python.
    """
    files = {} if files is None else files
    imports = {} if imports is None else imports
    packages = frozenset((*PACKAGES, *(module.partition(".")[0] for module in modules)))
    digests: dict[str, str] = {}
    pending = list(modules)
    visited: set[str] = set()
    while pending:
        name = pending.pop()
        if name in visited or name.partition(".")[0] not in packages:
            continue
        visited.add(name)
        if "." in name:
            pending.append(name.rpartition(".")[0])
        if name not in files:
            files[name] = _source_file(name, imports)
        if (file := files[name]) is not None:
            portable, digests[portable], imported = file
            pending.extend(imported)
    return dict(sorted(digests.items()))


def _source_file(name: str, imports: ImportTable) -> tuple[str, str, tuple[str, ...]] | None:
    path = module_path(name)
    if path is None:
        return None
    source = path.read_bytes()
    digest = bytes_digest(source)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    if (digest, package) not in imports:
        if (digest, package) not in _imported:  # Parsing takes most of the time.
            with _parsing:
                body = ast.parse(source, filename=name).body
            _imported[digest, package] = tuple(_read_imports(body, package))
        imports[digest, package] = _imported[digest, package]
    return _portable(name, path), digest, imports[digest, package]


@cache
def module_path(name: str) -> Path | None:
    """Returns the path of a Python module's source file without importing the module; None when there is
    none. For a top-level module that is no Python file, returns its origin: a .so file, or "built-in".
    """
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # A module such as __main__ has no spec.
        return None
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin and not rest else None
    for location in spec.submodule_search_locations:
        base = Path(location, *rest)
        for candidate in (base / "__init__.py", base.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


def source_digest(portable: str) -> str | None:
    """Returns the BLAKE3 digest, in hex, of a Python source file named like `mlcbuild/canon.py`; None if its
    module is not installed on this machine.
    """
    path = module_path(portable.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return None if path is None else bytes_digest(path.read_bytes())


def _portable(name: str, path: Path) -> str:
    parts = name.split(".")
    return "/".join([*parts, "__init__.py"]) if path.name == "__init__.py" else "/".join(parts) + ".py"


_imported: ImportTable = {}
"""Cache of the imports of all source files that this process has parsed: (digest of the file, package in
which its relative imports start) -> names of the modules that it may import.
"""
_parsing = threading.Lock()
"""A lock that is held while a source file is parsed: in CPython 3.11 `ast.parse` of two threads may raise
SystemError.
"""


@cache
def import_reader() -> str:
    """Returns an identifier, 16 hex digits, of the code that reads imports from source files and of the
    Python version that runs it. Cached imports with another identifier must not be reused.
    """
    return bytes_digest(Path(__file__).read_bytes() + sys.version.encode())[:16]


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _checks_types(node: ast.stmt) -> bool:
    """Returns True if a Python statement is `if TYPE_CHECKING:`; `if typing.TYPE_CHECKING:` is none."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _read_imports(body: list[ast.stmt], package: str) -> Iterator[str]:
    """Yields the names of the modules that Python statements import, including imports in functions. package:
    the package in which relative imports start. `from a import b` yields both `a` and `a.b`, since b may be a
    module.

    Expressions, which are most of a syntax tree, contain no imports and are not visited; neither is the body
    of `if TYPE_CHECKING:`, which never runs.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            yield base
            # `from package import module` names a module in the alias.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            for block in ("orelse",) if _checks_types(node) else _BLOCKS:
                inner = getattr(node, block, None)
                if isinstance(inner, list):
                    yield from _read_imports(inner, package)
