"""Verbs about the store: cache; and about the key that signs what leaves it: keys."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild import keyfile
from mlcbuild.build.events import Event, Warned
from mlcbuild.canon import Entry
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import open_session
from mlcbuild.cli.store import no_operands, open_store, status
from mlcbuild.errors import RemoteError, StoreError, UsageError, safe_lines
from mlcbuild.remotes import Mode, Remote, archive, fault
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.selection import Selection
from mlcbuild.session import Session
from mlcbuild.store import upkeep
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store

_TRANSFERS = 4
"""Records of a push, or files of a pull, at the same time."""
_WAITING = 256
"""Records of a push that are in memory."""


def keys(arguments: argparse.Namespace) -> int:
    """`keys new` makes the key that records are signed with, `keys show` prints its public half."""
    path = Path(arguments.file) if arguments.file else keyfile.default_path()
    if arguments.action == "new":
        signer = keyfile.create(path)
    else:
        found = keyfile.load(path)
        if found is None:
            raise UsageError(f"{path}: there is no key; `mlcbuild keys new` makes one")
        signer = found
    document = {"file": str(path), "public": signer.public}
    show(arguments.json, document, [f"{path}: the private key: keep it secret", signer.public])
    return 0


def cache(arguments: argparse.Namespace) -> int:
    root = open_store(arguments).root
    file = next((place for place in (root, *root.parents) if place.is_file()), None)
    if file is not None:
        raise StoreError(f"{root}: a store is a directory, but {file} is a file")
    actions = {
        "status": status,
        "verify": verify,
        "gc": gc,
        "push": push,
        "pull": pull,
        "export": export,
        "import": take,
    }
    return actions[arguments.action](arguments)


def push(arguments: argparse.Namespace) -> int:
    """Sends records of a recipe, or of the whole store, to remotes; exit code 1 when any did not arrive."""
    store = open_store(arguments)
    recipe, urls = _operands(arguments, "push", everything=True)
    session = None if recipe is None else open_session(arguments)
    remotes = _remotes(arguments, session, urls, "write")
    records = _all(store) if session is None else _of_recipe(arguments, session)
    signer = keyfile.load(keyfile.default_path())
    sharing = Sharing(store, [Link(remote, signer) for remote in remotes])
    count, lacking = _send(sharing, records)
    if warnings := sharing.take_warnings():
        raise RemoteError("\n".join(warnings))
    for name in sharing.writers:
        print(f"{name}: {count - lacking[name]} of {count} records are there")
    return 1 if lacking else 0


def _send(sharing: Sharing, records: Iterable[Record]) -> tuple[int, Counter[str]]:
    """How many there are, and how many of them each remote lacks."""
    stop, left = threading.Event(), iter(records)
    count, lacking = 0, Counter[str]()
    with Background(_TRANSFERS) as pool:
        try:
            while some := list(islice(left, _WAITING)):
                count += len(some)
                for missing in pool.all(partial(sharing.send, record, stop) for record in some):
                    lacking.update(missing)
        finally:  # an interrupt must not wait for what is on its way
            stop.set()
            sharing.close()
    return count, lacking


def pull(arguments: argparse.Namespace) -> int:
    """Brings everything that remotes have of a recipe into the store, for runs without a network.

    Exit code 1 when a remote failed, or what it holds is not right, and something is lacking.
    """
    store = open_store(arguments)
    if arguments.all:
        raise UsageError("mlcbuild cache pull: a remote cannot list what it has: name a recipe, not --all")
    _, urls = _operands(arguments, "pull", everything=False)
    session = open_session(arguments)
    session = session.over(_remotes(arguments, session, urls, "read"))
    warnings: list[str] = []
    plan = session.plan(Selection(tuple(arguments.only)), partial(_collect, warnings)).plan
    remote = [(step, step.record) for step in plan.steps if step.state == "remote" and step.record]
    sharing = Sharing(store, [Link(remote) for remote in session.recipe.remotes])
    missing = []
    with store.staging() as area:
        fetched = _fetch(sharing, (entry for _, record in remote for entry in record.files))
        for step, record in remote:
            if why := next(filter(None, (fetched[entry.digest] for entry in record.files)), ""):
                missing.append(f"{step.name}: {why}")
            else:
                store.put_record(record, area.subdirectory() / "record")
    warnings += sharing.take_warnings()
    absent = plan.count("run") + plan.count("pending")
    if missing or (warnings and absent):
        raise RemoteError("\n".join([*warnings, *missing]))
    for sentence in warnings:
        print(f"warning {safe_lines(sentence)}", file=sys.stderr)
    print(f"{plan.count('remote')} fetched, {plan.count('hit')} were here, {absent} are in no remote")
    return 0


def _collect(warnings: list[str], event: Event) -> None:
    if isinstance(event, Warned):
        warnings.append(event.message)


def _fetch(sharing: Sharing, entries: Iterable[Entry]) -> dict[str, str]:
    """Brings files into the store, some at the same time; digest -> why it could not be had, or ""."""
    stop = threading.Event()
    distinct = {entry.digest: entry for entry in entries}
    with Background(_TRANSFERS) as pool:
        try:
            found = pool.all(
                partial(sharing.fetch, entry, stop, lambda _: None) for entry in distinct.values()
            )
            return dict(zip(distinct, found, strict=True))
        finally:  # an interrupt must not wait for what is on its way
            stop.set()
            sharing.close()


def verify(arguments: argparse.Namespace) -> int:
    """Hashes everything and removes what is damaged; with a recipe or URLs, fetches that, and what is
    missing, from their remotes.

    Exit code 1 when anything was damaged or is missing; the next run that needs it builds it again.
    """
    store = open_store(arguments)
    found = _mend(arguments, store) if arguments.operands else upkeep.verify(store)
    lines = [*(f"{sentence}: fetched anew" for sentence in found.mended), *found.damaged, *found.missing]
    problems = len(found.damaged) + len(found.missing)
    lines.append(
        f"{found.records} records and {found.blobs} files are as they were written"
        if found.ok
        else f"{problems} problems: what was damaged is removed, and built again when a run needs it"
    )
    show(arguments.json, {**vars(found), "ok": found.ok}, lines)
    return 0 if found.ok else 1


def _mend(arguments: argparse.Namespace, store: Store) -> upkeep.Verified:
    named = "://" not in arguments.operands[0]
    arguments.recipe = arguments.operands[0] if named else None
    urls = arguments.operands[1:] if named else arguments.operands
    session = open_session(arguments) if named else None
    sharing = Sharing(store, [Link(remote) for remote in _remotes(arguments, session, urls, "read")])
    try:
        with store.staging():
            found = upkeep.verify(
                store, mend=lambda entry: sharing.fetch(entry, threading.Event(), lambda count: None)
            )
    finally:
        sharing.close()
    for sentence in sharing.take_warnings():
        print(f"warning {safe_lines(sentence)}", file=sys.stderr)
    return found


def gc(arguments: argparse.Namespace) -> int:
    """Removes what was not used for long, or the oldest of what is too much."""
    no_operands(arguments)
    if arguments.max_size is None and arguments.unused_days is None:
        raise UsageError("mlcbuild cache gc: say what may go: --max-size 50GB, --unused-days 30, or both")
    found = upkeep.gc(open_store(arguments), unused_days=arguments.unused_days, max_bytes=arguments.max_size)
    document = vars(found)
    show(
        arguments.json,
        document,
        [f"removed {found.records} records and {found.blobs} files, {sizes.show(found.bytes)}"],
    )
    return 0


def export(arguments: argparse.Namespace) -> int:
    """`cache export FILE [RECIPE]`: the store, or what it has of a recipe, in one file."""
    store = open_store(arguments)
    if not 1 <= len(arguments.operands) <= 2:
        raise UsageError("mlcbuild cache export: write `mlcbuild cache export FILE [RECIPE]`")
    path, *recipe = arguments.operands
    arguments.recipe = recipe[0] if recipe else None
    records = _of_recipe(arguments, open_session(arguments, ())) if recipe else _all(store)
    moved = archive.write(store, records, Path(path), keyfile.load(keyfile.default_path()))
    print(f"{path}: {moved.records} records and {moved.blobs} files, {sizes.show(moved.bytes)}")
    return 0


def take(arguments: argparse.Namespace) -> int:
    """`cache import FILE`: what another store exported."""
    if len(arguments.operands) != 1:
        raise UsageError("mlcbuild cache import: write `mlcbuild cache import FILE`")
    moved = archive.read(open_store(arguments), Path(arguments.operands[0]), _trusted(arguments))
    print(f"{moved.records} records and {moved.blobs} files, {sizes.show(moved.bytes)}, are in the store")
    return 0


def _operands(
    arguments: argparse.Namespace, action: str, *, everything: bool
) -> tuple[str | None, Sequence[str]]:
    """The recipe, if one is wanted, and the URLs of `cache push` and `cache pull`."""
    operands = list(arguments.operands)
    recipe = None if everything and arguments.all else (operands.pop(0) if operands else "")
    if recipe == "" or (recipe is None and not operands):
        both = (
            "RECIPE [REMOTE ...]` or `mlcbuild cache push --all REMOTE ..."
            if everything
            else "RECIPE [REMOTE ...]"
        )
        raise UsageError(f"mlcbuild cache {action}: write `mlcbuild cache {action} {both}`")
    arguments.recipe = recipe
    return recipe, operands


def _remotes(
    arguments: argparse.Namespace, session: Session | None, urls: Sequence[str], mode: Mode
) -> Sequence[Remote]:
    """The remotes that the command names, or else those of the recipe.

    Whom a recipe trusts for an address holds for that address on the command line, too, unless --trust says
    something else.
    """
    for url in urls:
        if problem := fault(url):
            raise UsageError(f"mlcbuild cache: {problem}")
    trust = _trusted(arguments)
    listed = () if session is None else session.recipe.remotes
    known = {remote.url: remote.trust for remote in listed}
    if urls or session is None:
        names = [url.rstrip("/") for url in urls]
        return [Remote(name, mode, trust=trust or known.get(name, ())) for name in names]
    found = [remote for remote in listed if mode == "write" or remote.reads]
    chosen = [remote for remote in found if mode == "read" or remote.writes()]
    if not chosen:
        raise UsageError(f"{session.recipe.path}: it names no remote to {mode}: name one on the command line")
    return [replace(remote, trust=trust or remote.trust) for remote in chosen]


def _trusted(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The keys of --trust."""
    for key in arguments.trust:
        if not keyfile.is_public(key):
            action = f"mlcbuild cache {arguments.action}"
            raise UsageError(f"{action}: --trust {key}: a key is ed25519: and 43 characters")
    return tuple(arguments.trust)


def _of_recipe(arguments: argparse.Namespace, session: Session) -> Iterator[Record]:
    """Returns the records that the store has of a recipe."""
    steps = session.over(()).plan(Selection(tuple(arguments.only))).steps
    return _shared(step.record for step in steps if step.state == "hit" and step.record is not None)


def _all(store: Store) -> Iterator[Record]:
    found = (store.find(path.name) for path in sorted((store.root / "ac").glob("*/*")))
    return _shared(record for record in found if record is not None)


def _shared(records: Iterable[Record]) -> Iterator[Record]:
    """Those that may leave this machine."""
    for record in records:
        with suppress(ValueError):  # damaged in the part that says so
            if record.made.shared:
                yield record
