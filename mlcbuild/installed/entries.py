"""Manages the directory `installed` of a store: an entry for each bundle that is kept for `chat` and `serve`.

installed/<name>/installed.json    source, scheme, target, and the stats of a local source's files
installed/<name>/recipe.yaml       the recipe that built it, with its lock; absent for a downloaded bundle
installed/<name>/bundle/           the bundle
installed/<name>/.bundle.partial/  what an interrupted download of a bundle has left; `cache gc` removes it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild_format import regular

from mlcbuild.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from mlcbuild.build.events import Reporter

FORMAT = "mlcbuild-installed/1"
DIRECTORY = "installed"
_ENTRY = "installed.json"
_LARGEST = 4 << 20
"""Maximum size in bytes of installed.json, the description of an installed model; a larger one counts as
damaged."""
MANIFEST = "bundle.json"
BUNDLE = "bundle"
"""Name of the directory with the bundle in the directory of an installed model."""

Stats = Mapping[str, tuple[int, int]]
"""Name of a checkpoint's file -> (size in bytes, mtime in nanoseconds)."""


@dataclass(frozen=True)
class InstallOptions:
    """Options for building or downloading a bundle that is not installed yet."""

    root: Path
    """Directory of the store in which the bundle will be kept."""
    scheme: str | None = None
    """Name of the quantization scheme to build with; None: a scheme that suits this machine is chosen."""
    note: Callable[[str], None] = lambda line: None
    """Function that receives one line of text for each decision that mlcbuild makes for the user, such as the
    choice of a quantization scheme."""
    watch: Callable[[], AbstractContextManager[Reporter]] | None = None
    """Function without parameters that returns a context manager for the time of a build. The context manager
    yields the function that receives each event of the build, to show progress. None: no progress is shown.
    """


@dataclass(frozen=True)
class InstalledModel:
    """A bundle that is installed in the store for `chat` and `serve`."""

    directory: Path
    source: str
    """The model from which the bundle was made: absolute path of a checkpoint, or an oci:// or hf://
    address."""
    scheme: str = ""
    """Name of the quantization scheme with which the bundle was built; "" for a downloaded bundle."""
    target: str = ""
    """Triple, processor and features of the machine for which the bundle was built, separated by spaces; ""
    for a downloaded bundle."""
    choice: str = ""
    """The origin of the bundle's quantization scheme: "default" if mlcbuild chose it; "" if the user named it
    or the bundle was downloaded."""
    files: Stats = field(default_factory=dict)
    """File name -> (size in bytes, mtime in ns) for each file of the local checkpoint from which the bundle
    was built; empty if it came from an oci:// or hf:// address."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def is_default(self) -> bool:
        """Returns True if mlcbuild chose the quantization scheme of this bundle, False if the user named it
        or the bundle was downloaded."""
        return self.choice == "default"

    @property
    def bundle(self) -> Path:
        return self.directory / BUNDLE

    @property
    def is_complete(self) -> bool:
        """Returns True if the bundle of this installed model exists, and the files of the local checkpoint
        from which it was built still have their sizes and mtimes, or the whole checkpoint is gone. Files that
        were added to the checkpoint later are not noticed, nor changes of a model that came from an address.
        """
        source = Path(self.source)
        return (self.bundle / MANIFEST).is_file() and (
            not os.access(source, os.F_OK)
            or all(_stat(source, name) == tuple(stat) for name, stat in self.files.items())
        )

    @property
    def size(self) -> int:
        """Returns the size of the installed bundle's files in bytes. Symbolic links are not followed; a
        bundle that is itself one counts as 0, since it may lead anywhere."""
        if self.bundle.is_symlink():
            return 0
        places = (Path(place) / name for place, _, names in os.walk(self.bundle) for name in names)
        return sum(status.st_size for status in map(_lstat, places) if status is not None)

    @property
    def used(self) -> float:
        """Returns the time at which the installed bundle was last used, in seconds since 1970. Raises OSError
        if the model was removed meanwhile."""
        return (self.directory / _ENTRY).stat().st_mtime

    def note_use(self) -> None:
        """Records that the installed bundle is used now; does nothing in a store that cannot be written."""
        with suppress(OSError):
            os.utime(self.directory / _ENTRY)

    def write(self) -> None:
        """Writes the description of this installed model to installed.json in its directory, which must
        exist; an older file is replaced by rename. Raises OSError if the file cannot be written."""
        fields = {name: value for name, value in asdict(self).items() if name != "directory"}
        partial = self.directory / f".{_ENTRY}.{os.getpid()}"
        partial.write_text(json.dumps({"format": FORMAT, **fields}, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.directory / _ENTRY)


def read(root: Path) -> tuple[InstalledModel, ...]:
    """Reads the descriptions of all models that are installed in the store at `root`, and returns them, the
    last used first. Damaged ones are left out.
    """
    entries = sorted(_read_all(root / DIRECTORY), key=lambda item: -item[0])
    return tuple(entry for _, entry in entries)


def _read_all(directory: Path) -> Iterator[tuple[float, InstalledModel]]:
    """Yields (time of its last use, in seconds since 1970, installed model) for each model whose description
    is not damaged, in no particular order. directory: `installed` in the root of a store."""
    for path in directory.glob(f"*/{_ENTRY}"):
        # A number such as 1e999 is infinite, and no integer: OverflowError.
        with suppress(
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
        ):
            fields = json.loads(regular.read(path, _LARGEST))
            if fields.pop("format") != FORMAT:
                continue
            files = {name: (int(size), int(mtime)) for name, (size, mtime) in fields.pop("files").items()}
            if all(isinstance(value, str) for value in fields.values()):
                entry = InstalledModel(path.parent, **fields, files=files)
                yield entry.used, entry


def named(entries: tuple[InstalledModel, ...], name: str) -> InstalledModel:
    """Returns the first of `entries`, the installed models, whose name or source is `name`. Raises
    UsageError, which suggests a similar name or lists the installed models, if there is none."""
    for entry in entries:
        if name in (entry.name, entry.source):
            return entry
    hint = f"; {did_you_mean(name, [entry.name for entry in entries])}" if entries else ""
    raise UsageError(f"'{name}' is not installed{hint}: mlcbuild list shows what is")


def place(root: Path, source: str, scheme: str, target: str) -> Path:
    """Returns the directory for an installed model in the store at `root`, and creates nothing. Its name
    comes from the source and the scheme; a number ("-2", "-3" and so on) is appended if another source or
    machine already uses that name, in upper or lower case, since many filesystems do not tell them apart. A
    model with the same source, scheme and machine has the same directory."""
    base_name = slug(source)
    name = f"{base_name}-{scheme}" if scheme else base_name
    others = {entry.name.lower(): (entry.source, entry.target) for entry in read(root)}
    number, chosen = 2, name
    while others.get(chosen.lower(), (source, target)) != (source, target):
        number, chosen = number + 1, f"{name}-{number}"
    return root / DIRECTORY / chosen


def slug(source: str) -> str:
    """Returns a name for a model, made of the last component of its path or address: ASCII letters, digits,
    '.', '_' and '-', at most 80; other characters in a row become one '-', and neither '.' nor '-' stands at
    an end. A revision (@...), query (?...) and the ending .gguf are left out; "model" if nothing is left."""
    stem = source.partition("://")[2] or source
    stem = stem.partition("?")[0].partition("@")[0].rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return re.sub("[^A-Za-z0-9._-]+", "-", stem)[:80].strip(".-") or "model"


def check_path(path: str) -> None:
    """Raises UsageError for a path that is not UTF-8, since no recipe can name it. path: that of a
    checkpoint, in which Python represents other bytes by surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path}: the path is not UTF-8, as a recipe must be: rename it") from None


def remove(entry: InstalledModel) -> None:
    """Removes an installed model with its bundle. Raises OSError if a file cannot be removed."""
    shutil.rmtree(entry.directory)


def stats(source: Path) -> dict[str, tuple[int, int]]:
    """Returns file name -> (size in bytes, mtime in ns) of a checkpoint's files; {} if its GGUF file is
    missing. source: its directory, of which subdirectories are left out, or a GGUF file, with the other parts
    if it is one of a split file. Raises OSError if the directory of the files cannot be read."""
    if source.is_dir():
        names = [item.name for item in os.scandir(source) if item.is_file()]
    else:
        parts = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", source.name)
        pattern = rf"{re.escape(parts[1])}-\d{{5}}{parts[2]}" if parts else re.escape(source.name)
        names = [item.name for item in source.parent.iterdir() if re.fullmatch(pattern, item.name)]
    return {name: stat for name in sorted(names) if (stat := _stat(source, name)) is not None}


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:  # It was removed meanwhile.
        return None


def _stat(source: Path, name: str) -> tuple[int, int] | None:
    """Returns (size in bytes, mtime in ns) of a file of a checkpoint; None if it does not exist or cannot be
    examined."""
    try:
        stat = ((source if source.is_dir() else source.parent) / name).stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
