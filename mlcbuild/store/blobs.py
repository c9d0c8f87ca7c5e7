"""The blobs of a store: files named by their digest, below cas/.

    cas/d0/<digest>      blob: a file's bytes, read-only, mtime STAMP

A blob is hashed whenever its bytes are used: as an input of a step, in a bundle, in an archive, or in an
upload (`link_out`, `read_blob`, `sound`). A damaged blob is removed (`condemn`), so that the next run builds
it again, and a correct copy replaces it (`put_blob`). `holds` hashes only a blob whose mtime has changed,
which is enough to decide whether there is work to do: see `mlcbuild.store.store`.
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
from mlcbuild.store.layout import is_as_written, shelved
from mlcbuild.store.links import link_or_copy, stamp
from mlcbuild.store.staging import remove, remove_tree
from mlcbuild.store.stamp import SPOILT, STAMP_NS

_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Returns True if an error means that the disk, a quota or the limit on the size of a file is reached."""
    return error.errno in _FULL


class Blobs:
    """The blobs (files named by their digest) of the store in the directory `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cas = f"{root}/cas/"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Returns a context that raises a StoreError, which names a remedy, in place of an OSError."""
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
        return Path(f"{self._cas}{shelved(digest)}")

    def link_out(self, files: Iterable[Entry], directory: Path) -> None:
        """Hard-links files of the store into `directory`, or copies them where links are impossible, and
        checks their bytes. files: path below the directory, digest and size of each; missing subdirectories
        are created.

        Raises OSError, also for a file that exists, and StoreError for a blob that is missing or has wrong
        bytes, which is then removed from the store. Files that were linked before stay.
        """
        directories = set()
        for entry in files:
            place = directory / entry.path
            if place.parent not in directories:
                place.parent.mkdir(parents=True, exist_ok=True)
                directories.add(place.parent)
            try:
                link_or_copy(self.blob(entry.digest), place)
            except FileNotFoundError:
                raise LostBlobError(
                    f"{self.root}: the blob {entry.digest} of {entry.path} is gone; run again"
                ) from None
            if not has_bytes(place, entry.digest, entry.size):
                raise self.damaged(entry)

    def sound(self, entry: Entry) -> bool:
        """Reads a blob in full, and returns True if it has the digest and size that `entry`, the description
        of the file, states; False also if it cannot be read. A damaged blob is not removed."""
        try:
            return has_bytes(self.blob(entry.digest), entry.digest, entry.size)
        except OSError:
            return False

    def read_blob(self, entry: Entry) -> bytes:
        """Returns the bytes of the small blob that `entry` describes. Raises StoreError if they cannot be
        read or are damaged. A blob with wrong bytes is removed, but one that is longer than `entry` states
        counts as unreadable and stays."""
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
        """Removes a damaged blob from the store and returns the error that the caller should raise: a
        LostBlobError, or another StoreError if the blob cannot be removed."""
        self.condemn(entry.digest)
        blob = self.blob(entry.digest)
        problem = (
            f"{blob}: {entry.path} is damaged in the store: its content has changed since it was written"
        )
        if os.path.lexists(blob):
            return StoreError(f"{problem}; it cannot be removed: make the store writable, and run again")
        return LostBlobError(f"{problem}; it was removed, run again to build it anew")

    def condemn(self, digest: str) -> None:
        """Removes a damaged blob (a stored file); if the store cannot be written, it stays, and nothing is
        raised.

        If nobody has written to the blob since it was stored, its hard links in bundles get the mtime SPOILT,
        by which store/export.py recognises and replaces them. A blob that somebody wrote to keeps its mtime,
        because the change may be a user's work.
        """
        blob = self.blob(digest)
        with suppress(OSError):
            if blob.lstat().st_mtime_ns == STAMP_NS and not blob.is_symlink():
                os.utime(blob, (SPOILT, SPOILT))
        remove(blob)

    def put_blob(self, digest: str, part: Path, *, hashed: bool = False) -> None:
        """Moves the file `part`, which must be on the store's filesystem, into the store as the blob with
        this digest, read-only and in place of a damaged one. If the store has the blob already, intact,
        `part` stays where it is.

        hashed: True if the caller has verified the digest of `part`, which is then not computed again. Raises
        StoreError if `part` has another digest, or the store cannot be written.
        """
        with self.writing():
            if not hashed and file_digest(part) != digest:
                raise StoreError(
                    f"a file that should have the digest {digest} has other content: it was refused"
                )
            self._place(part, digest)

    def hold(self, digest: str, size: int) -> bool:
        """Returns True if a blob of `size` bytes is present and unchanged, by the rule of `holds`, and renews
        its ctime if it can, by which garbage collection during a build keeps it for a day even if no step's
        result contains it yet."""
        is_held = self.holds(digest, size)
        if is_held:
            with suppress(OSError):
                stamp(self.blob(digest))
        return is_held

    def holds(self, digest: str, size: int) -> bool:
        """Returns True if a blob of this size in bytes is present and unchanged according to its stat. Only
        if its mtime is not the store's are the bytes read; if they are right, the mtime is restored where the
        store can be written. Returns False for a blob that is absent or cannot be read."""
        try:
            stat_result = self.blob(digest).lstat()
        except OSError:
            return False
        return is_as_written(stat_result, size) or restamped(self.blob(digest), digest, size)

    def _place(self, part: Path, digest: str) -> None:
        size = part.stat().st_size
        if self.hold(digest, size) and has_bytes(self.blob(digest), digest, size):
            return
        if os.path.lexists(self.blob(digest)):
            self.condemn(digest)  # the old blob is damaged, `part` is right
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # After a power failure, a name must not exist without its bytes.
        finally:
            os.close(descriptor)
        stamp(part)
        place = self.blob(digest)
        make_shelf(place.parent)
        make_way(place)
        part.replace(place)


def has_bytes(path: Path, digest: str, size: int) -> bool:
    """Reads a file in full, and returns True if it is a regular file with this BLAKE3 digest and size in
    bytes. Raises OSError if it cannot be read.
    """
    stat_result = path.lstat()
    return stat.S_ISREG(stat_result.st_mode) and stat_result.st_size == size and file_digest(path) == digest


def restamped(blob: Path, digest: str, size: int) -> bool:
    """Reads a blob, and returns True if its bytes match digest and size. Then also restores the blob's mtime,
    which plain copies of a store lose, if the store can be written. Returns False if it cannot be read.
    """
    try:
        if not has_bytes(blob, digest, size):
            return False
        stamp(blob)
    # The store is another user's, or read-only: the blob is right, but must be hashed each time.
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES, errno.EROFS) and os.access(blob, os.R_OK)
    return True


def make_shelf(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
    except FileExistsError:  # damaged: only directories belong here
        remove(directory)
        directory.mkdir(exist_ok=True)


def make_way(place: Path) -> None:
    """Removes a directory, with all that is in it, at a path where a file belongs, since a rename cannot
    replace a directory; anything else stays. Raises nothing if it cannot be removed."""
    if place.is_dir() and not place.is_symlink():
        remove_tree(place)
