"""A cache in the store: digests of unchanged files, and the recent keys of each step.

It is one SQLite file, which survives kill -9 and any number of writers. Its loss costs only re-hashing and
the reasons in a plan, so every fault of the file is handled by going on without it. SQLite does not detect a
flipped bit, so each row of `hashed` and `imports` has a checksum, and a row with a wrong one is ignored.

The imports of a source file follow from its bytes, which are hashed in every plan; the table `imports` of the
cache saves parsing the files, which would take 110 of the 350 ms of a plan without work.

A file counts as unchanged while its device, inode, size, mtime and ctime are those at the time of hashing. A
file for which `stamp.is_racy` holds when it is hashed is not stored: it could be written again within one
tick of the filesystem's clock without a visible change.

Whoever can write the file can make a run take other bytes for a source. It is therefore used only in a
directory that no other user can write (`layout.private_directory`), and only with exactly the tables below: a
view or a trigger would run for as long as its author likes.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mlcbuild.canon import ImportTable, bytes_digest, file_digest, import_reader
from mlcbuild.errors import SourceError
from mlcbuild.store import layout
from mlcbuild.store.stamp import is_racy

if TYPE_CHECKING:
    import sqlite3

_Row: TypeAlias = tuple[int | str, int | str, int | str, str, str]
"""A cached file digest: (size in bytes, mtime and ctime of the file in nanoseconds, digest, checksum of this
row); the checksum is "" for a row that is not in the database yet."""
Hashing: TypeAlias = Callable[[Path, int], None]
"""Callback that receives a file's path and size in bytes before the file is hashed."""

KEPT_KEYS = 8
"""Number of most recent keys that the store's cache keeps for each step name; a plan compares with them to
say what has changed."""

LOCK_SECONDS = 2
"""Maximum seconds to wait while another process locks the cache's file. A process that has waited so long
goes on without the cache. Transactions take milliseconds, and Ctrl-C has no effect while SQLite waits.
"""
_UNUSED_DAYS = 180
_TABLES = """
create table if not exists hashed (
    device integer, inode integer, size integer, mtime integer, ctime integer, day integer, digest text,
    checksum text, primary key (device, inode)) without rowid;
create table if not exists imports (
    source text, package text, day integer, modules text, checksum text, primary key (source, package)
    ) without rowid;
create table if not exists step (name text primary key, keys text) without rowid;
"""


class StatCache:
    """A cache of digests of files and of recent keys of steps. It is not thread-safe. `save` writes all
    changes in one transaction.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._usable = True
        """False once the SQLite file of this cache could not be opened, read or written, for example because
        another process keeps it locked; this object does not use it again. A damaged file is deleted
        instead."""
        self._files: dict[tuple[int, int], _Row] | None = None
        self._latest: dict[str, list[str]] | None = None
        self._imports: ImportTable | None = None
        self._read_imports: frozenset[tuple[str, str]] = frozenset()
        self._new_files: dict[tuple[int, int], _Row] = {}
        self._new_keys: dict[str, list[str]] = {}

    def digest(self, path: Path, hashing: Hashing | None = None) -> tuple[str, os.stat_result]:
        """Returns (BLAKE3 digest of the file at `path`, the file's stat when it had this digest). The digest
        comes from the cache if the file has not changed since it was hashed.

        hashing: function that is called with the path and the size in bytes before a file is read and hashed.
        Raises SourceError if the file changes meanwhile, three times in a row, and OSError if it cannot be
        read or is not a regular file.
        """
        for _ in range(3):
            before = path.stat()
            place = before.st_dev, before.st_ino
            cached = self._known_files().get(place)
            state = (before.st_size, before.st_mtime_ns, before.st_ctime_ns)
            if cached is not None and cached[:3] == state and cached[4] in ("", _checksum(place, cached)):
                return cached[3], before
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if hashing is not None:
                hashing(path, before.st_size)
            started = time.time_ns()
            digest = file_digest(path)
            after = path.stat()
            if (
                after.st_size,
                after.st_mtime_ns,
                after.st_ctime_ns,
            ) != state or after.st_ino != before.st_ino:
                continue
            if not is_racy(max(before.st_mtime_ns, before.st_ctime_ns), started):
                entry = (*state, digest, "")
                self._new_files[before.st_dev, before.st_ino] = entry
                self._known_files()[before.st_dev, before.st_ino] = entry
            return digest, before
        raise SourceError(f"{path} changes while it is read: let its writer finish, then run again")

    def imports(self) -> ImportTable:
        """Returns the cache's own mapping (digest of a source file, package in which its relative imports
        start) -> names of the modules that the file may import. `save` also writes entries that the caller
        adds to it. It is empty if the cache's file is missing or cannot be read."""
        if self._imports is None:
            rows = self._rows("select source, package, modules, checksum from imports")
            self._imports = {
                (str(source), str(package)): tuple(str(modules).split())
                for source, package, modules, checksum in rows
                if checksum == _checksum_of_imports(source, package, modules)
            }
            self._read_imports = frozenset(self._imports)
        return self._imports

    def keys(self, name: str) -> list[str]:
        """Returns the keys, at most KEPT_KEYS, that the step called `name` had in recent plans, the latest
        first; [] for an unknown step."""
        return self._known_keys().get(name, [])

    def remember(self, latest: Mapping[str, str]) -> None:
        """Adds the latest key of each step to its recent keys, which `save` writes to the database; plans
        compare with them to say what changed. latest: step name -> key."""
        latest_keys = self._known_keys()
        for name, key in latest.items():
            old = latest_keys.get(name, [])
            if not old or old[0] != key:
                latest_keys[name] = self._new_keys[name] = [key, *(k for k in old if k != key)][:KEPT_KEYS]

    def save(self) -> None:
        """Writes all changes to the cache's file, and then removes digests and imports that were written more
        than 180 days ago; without changes it does nothing. Errors are ignored, because a lost cache costs
        only re-hashing."""
        new_imports = (self._imports or {}).keys() - self._read_imports
        if not self._new_files and not self._new_keys and not new_imports:
            return
        if (
            self._new_files
        ):  # A plan before the first run has hashed sources, which is worth creating the directory.
            with suppress(OSError):
                layout.make_private(self._path.parent)
        day = time.time_ns() // 86_400_000_000_000
        files = [
            (*_signed(place), *row[:3], day, row[3], _checksum(place, row))
            for place, row in self._new_files.items()
        ]
        keys = [(name, " ".join(keys)) for name, keys in self._new_keys.items()]
        imports = [
            (*place, day, modules, _checksum_of_imports(*place, modules))
            for place in new_imports
            for modules in (" ".join(self.imports()[place]),)
        ]
        self._new_files, self._new_keys = {}, {}
        self._read_imports |= new_imports
        self._run(
            [
                ("insert or replace into hashed values (?, ?, ?, ?, ?, ?, ?, ?)", files),
                ("insert or replace into step values (?, ?)", keys),
                ("insert or replace into imports values (?, ?, ?, ?, ?)", imports),
                ("delete from hashed where day < ?", [(day - _UNUSED_DAYS,)]),
                ("delete from imports where day < ?", [(day - _UNUSED_DAYS,)]),
            ]
        )

    def _known_files(self) -> dict[tuple[int, int], _Row]:
        if self._files is None:
            rows = self._rows("select device, inode, size, mtime, ctime, digest, checksum from hashed")
            self._files = {
                (_unsigned(d), _unsigned(i)): (size, mtime, ctime, str(digest), str(checksum) or "none")
                for d, i, size, mtime, ctime, digest, checksum in rows
                if isinstance(d, int) and isinstance(i, int)
            }
        return self._files

    def _known_keys(self) -> dict[str, list[str]]:
        if self._latest is None:
            rows = self._rows("select name, keys from step")
            self._latest = {str(name): str(keys).split() for name, keys in rows}
        return self._latest

    def _rows(self, query: str) -> list[tuple[int | str, ...]]:
        import sqlite3

        if not self._usable or not self._path.exists():
            return []
        try:
            with closing(self._open()) as database:
                return database.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "decode to UTF-8" in str(error):  # a damaged text
                self._discard()
            else:  # The file is read-only or busy.
                self._usable = False
        except sqlite3.DatabaseError:  # The file is no longer a database.
            self._discard()
        return []

    def _run(self, statements: Sequence[tuple[str, Sequence[tuple[int | str, ...]]]]) -> None:
        import sqlite3

        for _ in range(2):
            if not self._usable:
                return
            try:
                with closing(self._open()) as database, database:
                    for statement, rows in statements:
                        database.executemany(statement, rows)
                return
            except sqlite3.OperationalError:
                self._usable = False
            except sqlite3.DatabaseError:
                self._discard()

    def _discard(self) -> None:
        try:
            for path in self._paths():
                path.unlink(missing_ok=True)
        except OSError:
            self._usable = False

    def _paths(self) -> list[Path]:
        names = (self._path.name + suffix for suffix in ("", "-wal", "-shm", "-journal"))
        return [self._path.with_name(name) for name in names]

    def _check_place(self) -> None:
        """Removes links, pipes and devices at the paths of the database's files, which SQLite would open.
        Raises sqlite3.OperationalError if one cannot be removed, or if the directory is missing or another
        user can write it."""
        import sqlite3

        try:
            if not layout.is_private(self._path.parent.lstat()):
                raise sqlite3.OperationalError("another user can write the directory")
            for path in self._paths():
                if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from None

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        self._check_place()
        database = sqlite3.connect(self._path, timeout=LOCK_SECONDS)
        try:
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = normal")
            database.executescript(_TABLES)
            if _schema(database) != _own_schema():
                raise sqlite3.DatabaseError("it has other tables")
        except sqlite3.Error:
            database.close()
            raise
        return database


def _schema(database: sqlite3.Connection) -> list[tuple[object, ...]]:
    """Returns (type, name, SQL text) of each table, index, view and trigger of a database, sorted by name."""
    return database.execute("select type, name, sql from sqlite_master order by name, type").fetchall()


@cache
def _own_schema() -> list[tuple[object, ...]]:
    import sqlite3

    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_TABLES)
        return _schema(database)


def _checksum(place: tuple[int, int], row: tuple[object, ...]) -> str:
    return bytes_digest(" ".join(map(str, (*place, *row[:4]))).encode())[:16]


def _checksum_of_imports(source: object, package: object, modules: object) -> str:
    return bytes_digest(f"{import_reader()} {source} {package} {modules}".encode())[:16]


def _signed(place: tuple[int, int]) -> tuple[int, int]:
    """Converts a file's (device, inode), unsigned 64-bit integers, to the signed ones that SQLite stores."""
    return place[0] - (place[0] >> 63 << 64), place[1] - (place[1] >> 63 << 64)


def _unsigned(number: int) -> int:
    return number % (1 << 64)
