"""The verbs `cache` and `keys` of the command line: for the store, and for the key that signs step records
and provenance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild import keyfile, replication
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import open_session
from mlcbuild.cli.store_access import no_operands, open_store, status
from mlcbuild.errors import StoreError, UsageError, safe_lines
from mlcbuild.installed.install import remove_unfinished
from mlcbuild.remotes import Remote, archive, fault, normal
from mlcbuild.selection import Selection
from mlcbuild.session import Session
from mlcbuild.store import upkeep


def keys(arguments: argparse.Namespace) -> int:
    """Runs the verb `keys`: `keys new` creates the key with which step records and provenance are signed,
    `keys show` reads it; both print its public half. Raises UsageError if there is no key to show or it
    cannot be read, and for `new` if the file exists or cannot be written."""
    path = Path(arguments.file) if arguments.file else keyfile.default_path()
    if path is None:
        raise UsageError(
            "mlcbuild keys: this system knows no home directory: name the key's file with --file"
        )
    if arguments.action == "new":
        signer = keyfile.create(path)
    else:
        loaded = keyfile.load(path)
        if loaded is None:
            raise UsageError(f"{path}: there is no key; `mlcbuild keys new` creates one")
        signer = loaded
    document = {"file": str(path), "public": signer.public}
    show(arguments.json, document, [f"{path}: the private key: keep it secret", signer.public])
    return 0


def cache(arguments: argparse.Namespace) -> int:
    if arguments.only and not _selects_steps(arguments):
        raise UsageError(
            f"mlcbuild cache {arguments.action}: --only selects steps of a recipe to push, pull or export: "
            "name the recipe, or leave the option out"
        )
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


def _selects_steps(arguments: argparse.Namespace) -> bool:
    """Returns True if the action of `cache` handles the results of a recipe's steps, from which --only may
    select: pull, push without --all, export with a recipe. Returns False for all others, which handle the
    whole store."""
    action = arguments.action
    return (
        action == "pull"
        or (action == "push" and not arguments.all)
        or (action == "export" and len(arguments.operands) > 1)
    )


def push(arguments: argparse.Namespace) -> int:
    """Runs `cache push`: sends the store's results of a recipe's build steps, or with --all of the whole
    store, to remote caches, and prints how much each received. Returns exit code 0. Raises UsageError for
    wrong operands and, after the transfer, RemoteError if a remote lacks some of them, or had a problem."""
    store = open_store(arguments)
    recipe, urls = _operands(arguments, "push", everything=True)
    if recipe is None:
        signer = keyfile.load_own()
        pushed = replication.push(store, replication.stored(store), _remotes(arguments, urls), signer)
    else:
        pushed = _over(arguments, urls).push(Selection(tuple(arguments.only)))
    for name, sent in pushed.sent.items():
        print(
            f"{name}: sent {sent.records} records with {sizes.show(sent.bytes)}; "
            f"{pushed.records} of {pushed.records} are there"
        )
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Runs `cache pull`: downloads all results that remote caches have for a recipe, for later runs without a
    network. A result that no remote has is no error.

    Raises RemoteError if a download failed, or if there was a problem with a remote and a result is missing;
    UsageError without a recipe, and for --all, since a remote cannot list what it has.
    """
    if arguments.all:
        raise UsageError("mlcbuild cache pull: a remote cannot list what it has: name a recipe, not --all")
    _, urls = _operands(arguments, "pull", everything=False)
    pulled = _over(arguments, urls).pull(Selection(tuple(arguments.only)))
    _warn(pulled.warnings)
    print(f"{pulled.fetched} fetched, {pulled.present} were here, {pulled.absent} are in no remote")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Runs `cache verify`: hashes everything in the store and removes damaged files. If a recipe with remote
    caches or URLs of remote caches are named, downloads damaged and missing files from these.

    The exit code is 1 if anything remains damaged or missing, also because a download failed; the next run
    that needs it builds it again. Raises UsageError for an invalid address, or if a recipe without remote
    caches is named and no URL; StoreError if the store cannot be read or, for downloads, written."""
    store, operands = open_store(arguments), arguments.operands
    if operands and "://" not in operands[0]:
        arguments.recipe = operands[0]
        verified = _over(arguments, operands[1:]).verify_store()
    else:
        verified = replication.verify(store, _remotes(arguments, operands))
    _warn(verified.warnings)
    check = verified.check
    lines = [*(f"{sentence}: fetched anew" for sentence in check.mended), *check.damaged, *check.missing]
    problems = len(check.damaged) + len(check.missing)
    lines.append(
        f"{check.records} records and {check.blobs} files are as they were written"
        if check.ok
        else f"{problems} problems: what was damaged is removed, and built again when a run needs it"
    )
    show(arguments.json, {**vars(check), "ok": check.ok}, lines)
    return 0 if check.ok else 1


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"warning {safe_lines(sentence)}", file=sys.stderr)


def gc(arguments: argparse.Namespace) -> int:
    """Runs `cache gc`: removes results of build steps from the store that were not used for --unused-days,
    those that alone are larger than --max-size, and the least recently used ones until the rest fits into
    --max-size; also what interrupted downloads have left. While a build runs, results used within the last
    hour stay. Raises UsageError if neither limit is given."""
    no_operands(arguments)
    if arguments.max_size is None and arguments.unused_days is None:
        raise UsageError("mlcbuild cache gc: name what to remove: --max-size 50GB, --unused-days 30, or both")
    store = open_store(arguments)
    removed = upkeep.gc(store, unused_days=arguments.unused_days, max_bytes=arguments.max_size)
    remove_unfinished(store.root)
    document = vars(removed)
    show(
        arguments.json,
        document,
        [f"removed {removed.records} records and {removed.blobs} files, {sizes.show(removed.bytes)}"],
    )
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Runs `cache export FILE [RECIPE]`: writes all results in the store that other machines may use, or
    those of a recipe, into one file, which is replaced. Raises UsageError for another number of operands,
    StoreError if a result is damaged, MlcbuildError if the file cannot be written; an old file stays as it is
    after any of these."""
    store = open_store(arguments)
    if not 1 <= len(arguments.operands) <= 2:
        raise UsageError("mlcbuild cache export: write `mlcbuild cache export FILE [RECIPE]`")
    path, *recipe = arguments.operands
    arguments.recipe = recipe[0] if recipe else None
    chosen = Selection(tuple(arguments.only))
    records = open_session(arguments, ()).records(chosen) if recipe else replication.stored(store)
    moved = archive.write(store, records, Path(path), keyfile.load_own())
    print(f"{path}: {moved.records} records and {moved.blobs} files, {sizes.show(moved.bytes)}")
    return 0


def take(arguments: argparse.Namespace) -> int:
    """Runs `cache import FILE`: adds to this machine's store the results that `cache export` wrote from
    another store to the file. Raises UsageError unless exactly one readable file is named, and for an invalid
    archive or, with --trust, a result that no such key signed; StoreError if the store cannot be written.
    Results that precede the fault are kept."""
    if len(arguments.operands) != 1:
        raise UsageError("mlcbuild cache import: write `mlcbuild cache import FILE`")
    moved = archive.read(open_store(arguments), Path(arguments.operands[0]), _trusted(arguments))
    print(f"{moved.records} records and {moved.blobs} files, {sizes.show(moved.bytes)}, are in the store")
    return 0


def _operands(
    arguments: argparse.Namespace, action: str, *, everything: bool
) -> tuple[str | None, Sequence[str]]:
    """Returns (path of the recipe or None, URLs of remote caches) from the words after `cache push` or `cache
    pull`, and sets `arguments.recipe`. action: "push" or "pull", for messages; everything: True if the verb
    also works without a recipe, with --all. Raises UsageError if the recipe, or with --all every URL, is
    missing."""
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


def _remotes(arguments: argparse.Namespace, urls: Sequence[str]) -> list[Remote]:
    """Returns the remote caches at the addresses `urls` of a command line, each with all public keys of
    --trust. Raises UsageError for an invalid address or key."""
    for url in urls:
        if problem := fault(url):
            raise UsageError(f"mlcbuild cache: {problem}")
    trust = _trusted(arguments)
    return [Remote(normal(url), trust=trust) for url in urls]


def _over(arguments: argparse.Namespace, urls: Sequence[str]) -> Session:
    """Opens the recipe of a command line as a Session. Remote caches that the command line names (`urls`)
    replace those of the recipe; without any, the recipe's own are used.

    The public keys that a recipe trusts for an address are also used for that address on the command line.
    The option --trust replaces the keys of all these remote caches, the recipe's own included. Raises
    UsageError for an invalid address or key, InputError for mistakes in the recipe."""
    named, session = _remotes(arguments, urls), open_session(arguments)
    trust = _trusted(arguments)
    if not trust:
        return session.over(urls) if urls else session
    return session.over(named or [replace(remote, trust=trust) for remote in session.recipe.remotes])


def _trusted(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the public keys that the option --trust of a command line names, () without it. Raises
    UsageError for a text that is no key."""
    for key in arguments.trust:
        if not keyfile.is_public(key):
            action = f"mlcbuild cache {arguments.action}"
            raise UsageError(f"{action}: --trust {key}: a key is ed25519: and 43 characters")
    return tuple(arguments.trust)
