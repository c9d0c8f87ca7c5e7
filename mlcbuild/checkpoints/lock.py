"""Reads and writes recipe.lock, which pins the exact files of every source that is not on this machine.

version: 1
sources:
  "hf://organisation/name@main":
    commit: 0123456789abcdef0123456789abcdef01234567
    files:
      config.json: {size: 649, sha256: 4a5f...}

Users commit it. `resolve` and `moved` query the hub; nothing else here needs a network. A run uses `read` and
`check`, and uses the pinned commits even when a branch has moved on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlcbuild.canon import Json
from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.checkpoint_kinds import ADAPTER_CONFIG
from mlcbuild.checkpoints.fetch import (
    LARGEST_INDEX,
    Pinned,
    file_sha256,
    gguf_parts,
    index_of,
    index_shards,
    needed_files,
)
from mlcbuild.checkpoints.hub import HubFile, HubSource
from mlcbuild.documents import document
from mlcbuild.documents.document import Data, Document, Where
from mlcbuild.errors import InputError, Problem, SourceError, UsageError

NAME = "recipe.lock"
VERSION = 1
_HEAD = "# Pins what the recipe's sources are. Written by `mlcbuild lock`; commit it, do not edit it.\n"


@dataclass(frozen=True)
class Locked:
    """The commit, and the files with sizes in bytes and SHA-256, at which recipe.lock pins one source."""

    commit: str
    """The pinned commit of the source's repository on the hub, as 40 hex digits."""
    files: Mapping[str, Pinned]

    def params(self, source: HubSource) -> dict[str, Json]:
        """Returns the parameters of the build step that downloads this source: "repo", "commit", and "files"
        (name -> "size" in bytes and "sha256"). They contain no branch or tag, so that no cache key depends on
        one.
        """
        files: dict[str, Json] = {
            name: {"size": pinned.size, "sha256": pinned.sha256} for name, pinned in self.files.items()
        }
        return {"repo": source.repo, "commit": self.commit, "files": files}


@dataclass(frozen=True)
class Lock:
    sources: Mapping[HubSource, Locked] = field(default_factory=dict)


def text(lock: Lock) -> str:
    """Returns the text of a recipe.lock file: sorted, one line for each file of a source, so that diffs show
    changes.
    """
    lines = [_HEAD, f"version: {VERSION}\n", "sources:\n" if lock.sources else "sources: {}\n"]
    for source, locked in sorted(lock.sources.items()):
        quoted = json.dumps(str(source), ensure_ascii=False)
        lines += [f"  {quoted}:\n", f'    commit: "{locked.commit}"\n', "    files:\n"]
        for name, pinned in sorted(locked.files.items()):
            quoted = json.dumps(name, ensure_ascii=False)
            lines.append(f'      {quoted}: {{size: {pinned.size}, sha256: "{pinned.sha256}"}}\n')
    return "".join(lines)


def write(path: Path, lock: Lock) -> bool:
    """Writes recipe.lock to the path and returns True; returns False if the file already has the same text.
    Raises UsageError if it cannot be written.
    """
    new = text(lock).encode()
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.is_file() and path.read_bytes() == new:
            return False
        partial.write_bytes(new)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return True


def read(path: Path) -> Lock:
    """Reads and checks a recipe.lock file, and returns its contents. Raises InputError with all problems and
    their positions, and UsageError if the file does not exist.
    """
    if not path.exists():
        raise UsageError(f"{path}: not found; run `mlcbuild lock` to pin the recipe's hf:// sources")
    try:
        parsed = document.read(path)
    except InputError as error:
        raise InputError(_advised(error.problems)) from None
    problems = list(parsed.problems)
    lock = _Reader(parsed, problems).lock()
    if problems:
        raise InputError(_advised(problems))
    return lock


def _advised(problems: Iterable[Problem]) -> list[Problem]:
    """Returns problems of a recipe.lock file with a remedy added to each message: to restore the file or
    write it again, since it is not edited by hand.
    """
    advice = "; restore the file from version control, or delete it and run `mlcbuild lock`"
    return [Problem(p.file, p.line, p.column, p.message + advice) for p in problems]


@dataclass(frozen=True)
class _Reader:
    """Checks the data of a recipe.lock file; the method `lock` returns its contents. Instead of raising an
    error, adds an error message for every problem to the list `problems`."""

    document: Document
    problems: list[Problem]

    def lock(self) -> Lock:
        top = self.mapping((), {"version", "sources"})
        if "version" in top and top["version"] != VERSION:
            self.fault(("version",), f"version {top['version']} is not known; this mlcbuild reads {VERSION}")
            return Lock()
        sources: dict[HubSource, Locked] = {}
        for name in self.mapping(("sources",)):
            source, locked = self.source(("sources", name), name)
            if source is not None:
                sources[source] = locked
        return Lock(sources)

    def source(self, where: Where, name: str) -> tuple[HubSource | None, Locked]:
        entry = self.mapping(where, {"commit", "files"})
        try:
            source = hub.parse_source(name)
        except UsageError as error:
            source = None
            self.fault(where, str(error))
        else:
            if source is None:
                self.fault(where, f"'{name}' is a directory; only hf:// sources are locked")
        commit = entry.get("commit")
        if "commit" in entry and not (isinstance(commit, str) and hub.is_commit(commit)):
            self.fault((*where, "commit"), "a commit is 40 hex digits")
        elif source is not None and source.is_pinned and commit != source.revision:
            self.fault(
                (*where, "commit"), f"the source is at commit {source.revision}, but {commit} is pinned"
            )
        files = {
            file: self.file((*where, "files", file), file)
            for file in (self.mapping((*where, "files")) if "files" in entry else {})
        }
        first = source.file if source is not None and source.file else "config.json"
        if "files" in entry and not {first, ADAPTER_CONFIG} & set(files):
            self.fault((*where, "files"), f"there is no {first} among the files")
        return source, Locked(str(commit), files)

    def file(self, where: Where, name: str) -> Pinned:
        entry = self.mapping(where, {"size", "sha256"})
        size, sha256 = entry.get("size"), entry.get("sha256")
        try:
            hub.check_name(name)
        except SourceError as error:
            self.fault(where, str(error))
        if "size" in entry and (type(size) is not int or size < 0):
            self.fault((*where, "size"), "a size is a number of bytes")
        if "sha256" in entry and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
            self.fault((*where, "sha256"), "a sha256 is 64 hex digits")
        return Pinned(size if type(size) is int else 0, str(sha256))

    def mapping(self, where: Where, keys: set[str] | None = None) -> dict[str, Data]:
        """Returns the mapping at the path `where` of the lock file, such as ("sources", name, "files"). If
        there is none, adds a problem to the list of problems and returns {}. If its keys are not exactly
        `keys` (None: any), also adds problems, but returns the mapping.
        """
        value = self.document.get(where)
        name = f"'{where[-1]}'" if where else "the file"
        if not isinstance(value, dict):
            self.fault(where, f"{name} must be a mapping")
            return {}
        if keys is not None:
            for key in sorted(keys - set(value)):
                self.fault(where, f"{name} lacks '{key}'")
            for key in sorted(set(value) - keys):
                self.fault((*where, key), f"'{key}' is not known here")
        return value

    def fault(self, where: Where, message: str) -> None:
        self.problems.append(self.document.key_place(where).problem(message))


def check(sources: Iterable[HubSource], lock: Lock, path: Path) -> None:
    """Raises UsageError that names every source of a recipe that the lock file does not pin; does nothing if
    all are pinned. path: the lock file, for the message.

    Sources that the lock file pins needlessly are harmless; `mlcbuild lock` removes them.
    """
    missing = sorted(set(sources) - set(lock.sources))
    if not missing:
        return
    revisions = {source.repo: source for source in lock.sources}
    lines = []
    for source in missing:
        other = revisions.get(source.repo)
        hint = f" (it pins {other})" if other else ""
        lines.append(f"{path}: {source} is not pinned{hint}")
    raise UsageError("\n".join(lines) + "\nthe recipe has changed since it was locked: run `mlcbuild lock`")


def resolve(sources: Iterable[HubSource], keep: Lock | None = None) -> Lock:
    """Queries the hub for the present commit and files of each source, and returns them as a Lock. A source
    that `keep` already pins keeps its commit and files, and is not queried; other pins of `keep` are left
    out.

    If any source fails, raises SourceError with a message for each that failed, and returns nothing for the
    others.
    """
    pins: dict[HubSource, Locked] = {}
    problems = []
    for source in sorted(set(sources)):
        if keep is not None and source in keep.sources:
            pins[source] = keep.sources[source]
            continue
        try:
            pins[source] = _pin(source)
        except SourceError as error:
            problems.append(str(error))
    if problems:
        raise SourceError("\n".join(problems))
    return Lock(pins)


def moved(lock: Lock) -> dict[HubSource, str]:
    """Returns source -> current commit, for the branches and tags pinned in `lock` that have moved since they
    were pinned; {} if none has. Pinned sources whose revision is a commit are not queried.

    If any source cannot be queried, raises SourceError with a message for each of these, and returns nothing
    for the others.
    """
    commits: dict[HubSource, str] = {}
    problems = []
    for source, locked in sorted(lock.sources.items()):
        if source.is_pinned:
            continue
        try:
            commit = hub.current_commit(source)
        except SourceError as error:
            problems.append(str(error))
            continue
        if commit != locked.commit:
            commits[source] = commit
    if problems:
        raise SourceError("\n".join(problems))
    return commits


def _pin(source: HubSource) -> Locked:
    commit, files = hub.list_files(source)
    at = HubSource(source.repo, commit)
    index = None if source.file else index_of(files)
    if index is not None and files[index].size > LARGEST_INDEX:
        raise SourceError(
            f"{at}: {index}: the hub lists {files[index].size} bytes, at most {LARGEST_INDEX} are read"
        )
    data = b"" if index is None else _small_file(at, index, files[index])[0]
    try:
        if source.file:
            names = gguf_parts(files, source.file)
        else:
            names = needed_files(files, () if index is None else index_shards(data, index))
        for name in names:
            hub.check_name(name)
    except SourceError as error:
        raise SourceError(f"{source}: {error}") from None
    return Locked(commit, {name: _pin_file(at, name, files[name]) for name in names})


def _pin_file(source: HubSource, name: str, file: HubFile) -> Pinned:
    if file.sha256 is not None:
        return Pinned(file.size, file.sha256)
    return _small_file(source, name, file)[1]


def _small_file(source: HubSource, name: str, file: HubFile) -> tuple[bytes, Pinned]:
    """Downloads a file of a source that is read here or whose SHA-256 the hub does not state, such as one
    kept in git; returns (its bytes, its size and SHA-256 as a Pinned).

    Bytes other than those that the hub lists are downloaded once more. Raises SourceError if the hub refuses
    or sends other bytes both times.
    """
    data = b""
    for again in (False, True):
        path = hub.download(source, name, again=again)
        data = path.read_bytes()
        if _is_listed(data, file):
            return data, Pinned(file.size, file_sha256(path))
    raise SourceError(
        f"{source}: {name}: the {len(data)} bytes that were received are not the "
        f"{file.size} bytes the hub lists; "
        "try again, and clear the cache in HF_HOME if that does not help"
    )


def _is_listed(data: bytes, file: HubFile) -> bool:
    """Returns True if the bytes have the size and the digest that the hub states for a file: its SHA-256 if
    it is in large-file storage, where the git object id is that of a pointer, else its git object id.
    """
    if len(data) != file.size:
        return False
    if file.sha256 is not None:
        return hashlib.sha256(data).hexdigest() == file.sha256
    return _git_oid(data) == file.git_oid


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
