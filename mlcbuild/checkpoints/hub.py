"""Communicates with a Hugging Face hub: repository names, queries, downloads, and error messages.

It uses huggingface_hub, which honours the cache, endpoint, token and offline mode of its environment
variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). It is imported on use, because loading it is slow.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlcbuild.checkpoints.hub_failures import (
    AbsentError,
    Failure,
    UnreachableError,
    causes,
    disk_failure,
    network_failure,
    status_failure,
)
from mlcbuild.errors import SourceError, UsageError

ATTEMPTS = 3
"""Number of attempts to reach the hub for one query, one second apart."""
_GGUF = ".gguf"
NAME_LIMIT = 255
"""Maximum length in bytes of one component of a path, a limit of common filesystems."""

_NAME = "[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
"""Regular expression for the whole name of an organisation, or the name of a repository in it, by the rule of
huggingface_hub: at most 96 characters each, of which the first and the last are no dot and no hyphen."""

Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class HubSource:
    """A model repository of a Hugging Face hub at a branch, tag or commit, or a GGUF file in it."""

    repo: str
    revision: str = "main"
    file: str = ""
    """Path of a GGUF file in the repository; "" for a checkpoint that is the whole repository."""

    def __str__(self) -> str:
        return f"hf://{self.repo}{self.file and '/'}{self.file}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Returns True if the revision is a full commit hash, 40 hex digits in lower case, which is
        immutable.
        """
        return is_commit(self.revision)


@dataclass(frozen=True)
class HubFile:
    """The description of a file in a hub's repository. `size` is in bytes. `git_oid` is the id of the file's
    git blob; for a file in large-file storage, that is a blob with a pointer to the file. `sha256` is None
    unless the file is in large-file storage."""

    size: int
    git_oid: str
    sha256: str | None


def is_commit(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{40}", text) is not None


def parse_source(text: str) -> HubSource | None:
    """Returns the repository, or the GGUF file in it, that the `source:` of a recipe names; None if it names
    a directory, which is any text without `://`. The revision is "main" if the text has none.

    Raises UsageError for a text with `://` that is not `hf://organisation/name`, `hf://name` or
    `hf://organisation/name/path/file.gguf`, with or without `@revision` behind it, or whose parts are no
    valid names.
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return None
    form = "write hf://organisation/name@revision"
    if scheme != "hf":
        raise UsageError(f"source '{text}': the scheme '{scheme}' is unknown; {form}, or a directory")
    place, at, revision = rest.partition("@")
    repo, file = place, ""
    if place.endswith(_GGUF):
        organisation, name, file = [*place.split("/", 2), "", ""][:3]
        repo = f"{organisation}/{name}" if file else place
    is_name = re.fullmatch(f"{_NAME}(/{_NAME})?", repo) and not repo.endswith(".git")
    if not is_name or "--" in repo or ".." in repo:
        raise UsageError(f"source '{text}': '{repo}' is not the name of a repository; {form}")
    if at and (not re.fullmatch("[A-Za-z0-9._+-]+(/[A-Za-z0-9._+-]+)*", revision) or ".." in revision):
        raise UsageError(f"source '{text}': '{revision}' is not a branch, tag or commit; {form}")
    if file:
        try:
            check_name(file)
        except SourceError as error:
            raise UsageError(f"source '{text}': {error}") from None
    return HubSource(repo, revision or "main", file)


def check_name(name: str) -> None:
    """Raises SourceError (without naming the source) for a file name that is not a safe relative path: one
    with an empty, `.` or `..` component, a backslash, colon or unprintable character, or a component of more
    than 255 bytes.
    """
    shown = repr(name if len(name) <= 60 else f"{name[:60]}...")
    if (
        any(part in ("", ".", "..") for part in name.split("/"))
        or re.search(r"[\\:]", name)
        or not name.isprintable()
    ):
        raise SourceError(f"the file name {shown} is no plain path inside the repository; it is not written")
    if any(len(os.fsencode(part)) > NAME_LIMIT for part in name.split("/")):
        raise SourceError(f"the file name {shown} is longer than {NAME_LIMIT} bytes; it cannot be written")


def list_files(source: HubSource) -> tuple[str, dict[str, HubFile]]:
    """Queries a hub, and returns (commit to which a repository's revision refers now, path -> description of
    each file). Raises SourceError if the hub refuses, cannot be reached, or states no commit or no size of a
    file."""
    from huggingface_hub import HfApi

    def ask() -> tuple[str, dict[str, HubFile]]:
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
        commit = _commit(source, info.sha)
        files = {}
        for item in info.siblings or ():
            if item.size is None or item.blob_id is None:
                raise SourceError(
                    f"{source}: {item.rfilename}: the hub states no size; is HF_ENDPOINT a hub?"
                )
            files[item.rfilename] = HubFile(item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
        return commit, files

    return _patiently(source, None, ask)


def current_commit(source: HubSource) -> str:
    """Returns the current commit of a branch or tag. Raises SourceError if the hub has none, refuses or
    cannot be reached.
    """
    from huggingface_hub import HfApi

    def ask() -> str:
        return _commit(source, HfApi().model_info(source.repo, revision=source.revision).sha)

    return _patiently(source, None, ask)


def _commit(source: HubSource, stated: str | None) -> str:
    """Returns the commit that a hub has stated, `stated`. Raises SourceError if that is not a commit hash of
    40 hex digits in lower case. source: the repository, which the message names."""
    if stated is None or not is_commit(stated):
        raise SourceError(f"{source}: the hub names no commit for this revision; is HF_ENDPOINT a hub?")
    return stated


def reach(source: HubSource, names: Iterable[str]) -> None:
    """Checks that the hub can be reached, by querying the first of the files `names` that is not in the
    cache on this machine; does nothing if all of them are.

    `source` must be at a commit. Without this check, an unreachable hub would be retried for half a minute
    for every file. In offline mode, all missing files are named at once. Raises SourceError if the hub
    refuses or cannot be reached, or files are missing in offline mode.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    missing = [
        name
        for name in names
        if not isinstance(try_to_load_from_cache(source.repo, name, revision=source.revision), str)
    ]
    if missing and constants.HF_HUB_OFFLINE:
        raise SourceError(
            f"{source}: HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} lacks "
            f"{', '.join(missing)}; unset it, or copy the files into that cache"
        )
    if missing:
        url = hf_hub_url(source.repo, missing[0], revision=source.revision)
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        _patiently(source, missing[0], lambda: get_hf_file_metadata(url, timeout=timeout))


def download(
    source: HubSource, name: str, again: bool = False, count: Callable[[int], None] | None = None
) -> Path:
    """Returns the path of the file `name` in the hub's cache, and downloads it if necessary. again: True
    replaces a cached copy.

    An interrupted transfer is resumed with an HTTP range. `count` is called with the number of new bytes,
    which is negative when a server starts over. Raises SourceError if the hub refuses, the transfer fails for
    good, or the file cannot be written, also because this system knows no home directory for the cache.
    """
    from huggingface_hub import constants, hf_hub_download

    if constants.HF_HUB_CACHE.startswith("~"):
        raise SourceError(f"{source}: this system knows no home directory for the cache; set HF_HOME")

    def get() -> Path:
        path = hf_hub_download(
            source.repo,
            name,
            revision=source.revision,
            force_download=again,
            tqdm_class=_counting(count),
        )
        return Path(path).resolve()

    return _patiently(source, name, get)


def commit(source: HubSource, files: Mapping[str, Path | bytes], gone: Iterable[str], message: str) -> str:
    """Commits changes to the branch of a repository that `source` names, and returns the commit's hash.
    files: path -> content to add or replace, as bytes or the path of a file on this machine; gone: paths to
    remove; message: the commit's message. A missing repository is created as private; a missing branch is
    created, too. Raises SourceError if the hub refuses or cannot be reached."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    def send() -> str:
        api = HfApi()
        api.create_repo(source.repo, private=True, exist_ok=True)
        if source.revision != "main":
            api.create_branch(source.repo, branch=source.revision, exist_ok=True)
        added = [CommitOperationAdd(name, data) for name, data in sorted(files.items())]
        removed = [CommitOperationDelete(name) for name in sorted(gone)]
        done = api.create_commit(
            source.repo, [*added, *removed], commit_message=message, revision=source.revision
        )
        return str(done.oid)

    disable_progress_bars()
    try:
        return _patiently(source, None, send)
    except SourceError as error:
        raise type(error)(str(error).replace("that may read it", "that may write it")) from None


def _counting(count: Callable[[int], None] | None) -> type:
    """Returns a subclass of tqdm's progress bar that displays nothing and passes the number of new bytes of
    the file to `count`, unless that is None.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Counting(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            # Xet storage has two bars for one file; the bytes of the network are not those of the file.
            self.counted = not str(options.get("desc", "")).endswith("downloading bytes")
            # tqdm carries no types.
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if count is not None and self.counted:
                count(int(n or 0))

    return Counting


def _patiently(source: HubSource, name: str | None, ask: Callable[[], Result]) -> Result:
    """Calls `ask`, a query of the hub, up to ATTEMPTS times, one second apart, while the hub cannot be
    reached, and returns its result. source: the repository, which errors name; name: the file that an error
    names, or None. Raises SourceError in place of failures of the hub, the network or the disk; other
    exceptions of `ask` pass unchanged.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            with explained(source, name):
                return ask()
        except UnreachableError:
            time.sleep(1)
    with explained(source, name):
        return ask()


@contextmanager
def explained(source: HubSource, name: str | None) -> Iterator[None]:
    """Returns a context that raises a SourceError, which names the source and, unless `name` is None, the
    file, in place of an exception that a query or transfer is expected to raise. A SourceError and all others
    pass unchanged."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        place = f"{source}: {name}" if name else str(source)
        failure = _hub_refusal(error, source) or network_failure(error) or disk_failure(error)
        if failure is None:
            raise
        kind, message = failure
        raise kind(f"{place}: {message}") from None


def _hub_refusal(error: Exception, source: HubSource) -> Failure:
    """Returns (class, message) of the error to raise in place of `error`, if it or one of its causes means
    that the hub refused a request or answered with an HTTP error; None if it means something else. source:
    the repository, which some messages name."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{source.repo}"
    absent = (errors.RevisionNotFoundError, errors.RepositoryNotFoundError)
    by_kind: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            f"access is restricted; ask for it at {page}, then set HF_TOKEN to your token",
        ),
        (errors.DisabledRepoError, "the hub has disabled this repository; use another source"),
        (errors.RevisionNotFoundError, f"there is no such revision; {page}/commits lists them"),
        (errors.RemoteEntryNotFoundError, "there is no such file at this revision; run `mlcbuild lock`"),
        (
            errors.RepositoryNotFoundError,
            f"{constants.ENDPOINT} has no such repository, or it is private; check the name, "
            "or set HF_TOKEN to a token that may read it",
        ),
    )
    for cause in causes(error):
        for kind, message in by_kind:
            if isinstance(cause, kind):
                return AbsentError if kind in absent else SourceError, message
        if isinstance(cause, errors.HfHubHTTPError):
            return status_failure(cause.response.status_code)
    return None
