"""Files by their digest: the half of a store that holds bytes, below cas/.

    cas/d0/<digest>      blob: a file's bytes, read-only, mtime STAMP

Each is hashed when its bytes are put to use: as an input of a step, in a bundle, in an archive, on its way to
a remote (`link_out`, `read_blob`, `sound`). One that is wrong is taken out (`condemn`), so that the next run
builds it again, and right bytes replace it (`put_blob`). `holds` is a look at a file's stat, and enough only
to tell whether there is anything to do: see `mlcbuild.store.store`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlcbuild_format import regular

from mlcbuild.canon import Entry, bytes_digest, file_digest
from mlcbuild.errors import LostBlobError, StoreError
from mlcbuild.store.layout import is_as_written
from mlcbuild.store.links import link_or_copy, stamp
from mlcbuild.store.staging import remove, remove_tree
from mlcbuild.store.stamp import SPOILT, STAMP_NS

_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Whether an operation failed for want of space."""
    return error.errno in _FULL


class Blobs:
    """The files of a store at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cas = f"{root}/cas/"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError of the store itself into a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            raise self.explain(error) from error

    def explain(self, error: OSError) -> StoreError:
        if is_full(error):
            why = "no space is left; free some, run `mlcbuild cache gc`"
        elif error.errno in _IN_THE_WAY and error.filename:
            why = f"{error.strerror}: {error.filename}; move it away"
        else:
            why = f"{error.strerror or error}; make it writable"
        return StoreError(
            f"the store at {self.root} cannot be written: {why}, or set MLCBUILD_STORE elsewhere"
        )

    def blob(self, digest: str) -> Path:
        return Path(f"{self._cas}{digest[:2]}/{digest}")

    def link_out(self, files: Iterable[Entry], directory: Path) -> None:
        """Makes `files` below a directory, as hard links where possible. Raises OSError, and StoreError for
        one that has other bytes than it should.
        """
        made = set()
        for entry in files:
            place = directory / entry.path
            if place.parent not in made:
                place.parent.mkdir(parents=True, exist_ok=True)
                made.add(place.parent)
            try:
                link_or_copy(self.blob(entry.digest), place)
            except FileNotFoundError:
                raise LostBlobError(
                    f"{self.root}: the blob {entry.digest} of {entry.path} is gone; run again"
                ) from None
            if not has_bytes(place, entry.digest, entry.size):
                raise self.damaged(entry)

    def sound(self, entry: Entry) -> bool:
        """Whether a blob has the right bytes, all of which are read."""
        try:
            return has_bytes(self.blob(entry.digest), entry.digest, entry.size)
        except OSError:
            return False

    def read_blob(self, entry: Entry) -> bytes:
        """The bytes of a small file. Raises StoreError when they are not right."""
        try:
            data = regular.read(self.blob(entry.digest), entry.size, follow_link=False)
        except OSError as error:
            kind = LostBlobError if error.errno == errno.ENOENT else StoreError
            raise kind(
                f"{self.root}: the blob {entry.digest} of {entry.path} cannot be read: "
                f"{error.strerror or error}; run again"
            ) from None
        if bytes_digest(data) != entry.digest:
            raise self.damaged(entry)
        return data

    def damaged(self, entry: Entry) -> StoreError:
        """Takes a blob with wrong bytes out of the store, and returns the error that says so."""
        self.condemn(entry.digest)
        blob = self.blob(entry.digest)
        what = f"{blob}: {entry.path} is damaged in the store: it has other bytes than were written"
        if os.path.lexists(blob):
            return StoreError(f"{what}; it cannot be removed: make the store writable, and run again")
        return LostBlobError(f"{what}; it was removed, run again to build it anew")

    def condemn(self, digest: str) -> None:
        """Takes a blob with wrong bytes out, if the store can be written.

        Its hard links in bundles get the mtime SPOILT, by which store/export.py replaces them; not after a
        write, which may be somebody's work.
        """
        blob = self.blob(digest)
        with suppress(OSError):
            if blob.lstat().st_mtime_ns == STAMP_NS and not blob.is_symlink():
                os.utime(blob, (SPOILT, SPOILT))
        remove(blob)

    def put_blob(self, digest: str, part: Path, *, hashed: bool = False) -> None:
        """Moves a file of the store's filesystem in as a blob. Raises StoreError when its bytes are wrong;
        with `hashed` the caller has seen to that.
        """
        with self.writing():
            if not hashed and file_digest(part) != digest:
                raise StoreError(
                    f"a file that should have the digest {digest} has other bytes: it was not taken"
                )
            self._place(part, digest)

    def hold(self, digest: str, size: int) -> bool:
        """As `holds`, and tells gc that the blob is wanted though no record may name it."""
        found = self.holds(digest, size)
        if found:
            with suppress(OSError):
                stamp(self.blob(digest))
        return found

    def holds(self, digest: str, size: int) -> bool:
        """Whether a blob is there as it was written."""
        try:
            found = self.blob(digest).lstat()
        except OSError:
            return False
        return is_as_written(found, size) or restamped(self.blob(digest), digest, size)

    def _place(self, part: Path, digest: str) -> None:
        size = part.stat().st_size
        if self.hold(digest, size) and has_bytes(self.blob(digest), digest, size):
            return
        if os.path.lexists(self.blob(digest)):
            self.condemn(digest)  # it rotted: these bytes are the right ones
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a power cut must not leave a name without its bytes
        finally:
            os.close(descriptor)
        stamp(part)
        place = self.blob(digest)
        make_shelf(place.parent)
        make_way(place)
        part.replace(place)


def has_bytes(path: Path, digest: str, size: int) -> bool:
    """Whether a path is a regular file with the bytes of a digest, all of which are read. Raises OSError."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size and file_digest(path) == digest


def restamped(blob: Path, digest: str, size: int) -> bool:
    """Hashes a blob whose mtime was lost, as by a plain copy of the store; stamps it when it is right."""
    try:
        if not has_bytes(blob, digest, size):
            return False
        stamp(blob)
    except OSError as error:  # another user's store, or a read-only one: right, and hashed each time
        return error.errno in (errno.EPERM, errno.EACCES, errno.EROFS) and os.access(blob, os.R_OK)
    return True


def make_shelf(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
    except FileExistsError:  # damage: nothing but directories belongs there
        remove(directory)
        directory.mkdir(exist_ok=True)


def make_way(place: Path) -> None:
    """Removes a directory that lies where a file belongs: a rename replaces everything else."""
    if place.is_dir() and not place.is_symlink():
        remove_tree(place)
