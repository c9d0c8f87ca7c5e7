"""The verbs of the command line for bundles in registries and model hubs: publish, pull."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.bundles.publish import fault, pinned
from mlcbuild.bundles.publish.transfer_bundle import pull as fetch
from mlcbuild.bundles.publish.uploads import Sent, publish_bundle
from mlcbuild.cli import build
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import open_session
from mlcbuild.errors import UsageError, safe_lines
from mlcbuild.outcomes import Result
from mlcbuild.session import Session


def publish(arguments: argparse.Namespace) -> int:
    """Publishes bundles: `publish RECIPE` builds and sends the bundles of a recipe, `publish BUNDLE --to URL`
    sends the bundle in one directory.

    Returns exit code 1 if a bundle could not be sent; the others are sent nevertheless. If the build fails,
    nothing is sent and the code is the build's. With --dry-run the plan is printed and nothing is built or
    sent. Raises UsageError for a destination that is wrong, missing, or given for a recipe, which lists its
    own, and for --dry-run with a bundle; InputError for an invalid recipe; BundleError for a damaged bundle,
    after those before it were sent."""
    for url in arguments.to:
        if problem := fault(url, writing=True):
            raise UsageError(f"mlcbuild publish: --to {problem}")
    if Path(arguments.recipe).is_dir():
        return _publish_bundle(arguments)
    if arguments.to:
        raise UsageError(
            "mlcbuild publish: --to applies to a bundle; a recipe lists destinations under 'publish'"
        )
    open_session(arguments).require_destinations()
    if arguments.dry_run:
        return build.plan(arguments)
    session, result = _build(arguments)
    if code := result.exit_code:
        print("nothing was published, because not everything was built: run again", file=sys.stderr)
        return code
    sent = session.publish(result, unverified=arguments.unverified, on_sent=_printing(arguments))
    return _conclude(arguments, sent, {"run": build.document(result)})


def _publish_bundle(arguments: argparse.Namespace) -> int:
    if not arguments.to:
        raise UsageError(
            "mlcbuild publish: the destination is missing: mlcbuild publish BUNDLE --to oci://host/name:tag"
        )
    if arguments.dry_run:
        raise UsageError(
            "mlcbuild publish: --dry-run prints the plan of a recipe; a bundle has none: leave it out to send"
        )
    return _conclude(arguments, publish_bundle(arguments.recipe, arguments.to, _printing(arguments)), {})


def _build(arguments: argparse.Namespace) -> tuple[Session, Result]:
    """Builds the recipe that the arguments of `publish` name, with messages on stderr, and returns (the
    Session of the open recipe, the Result of the build), also if a step failed."""
    return build.build(argparse.Namespace(**{**vars(arguments), "json": True}))


def _printing(arguments: argparse.Namespace) -> Callable[[Sent], None]:
    """Returns a function that prints the outcome of sending one bundle to one address: failures and skipped
    bundles to stderr, and unless --json is used, others to stdout. It is called as soon as the bundle was
    sent, skipped or has failed."""

    def show_one(sent: Sent) -> None:
        if sent.status == "skipped":
            hint = "--unverified publishes it all the same"
            print(f"skipped publish/{sent.name}: {safe_lines(sent.note)}; {hint}", file=sys.stderr)
        elif sent.status == "failed":
            print(f"failed  publish/{sent.name}: {safe_lines(sent.note)}", file=sys.stderr)
        elif not arguments.json:
            size = f"  ({sizes.show(sent.size)} sent)" if sent.size else ""
            print(f"{sent.status:<9} {sent.address}{size}")

    return show_one


def _conclude(arguments: argparse.Namespace, sent: Iterable[Sent], more: Mapping[str, object]) -> int:
    """Prints the JSON document of `publish --json`, if the command line requests it, and returns the exit
    code: 1 if a bundle could not be sent, else 0. sent: results, one for each bundle and address; more:
    further fields of the document. Skipped bundles do not count as failures and are not in the document."""
    rows = [_row(item) for item in sent if item.status != "skipped"]
    if arguments.json:
        show(True, {"published": rows, **more}, [])
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def _row(sent: Sent) -> dict[str, str | int]:
    row: dict[str, str | int] = {"step": f"publish/{sent.name}", "to": sent.to, "status": sent.status}
    if sent.status == "failed":
        return {**row, "note": sent.note}
    return {**row, "address": sent.address, "sent": sent.size}


def pull(arguments: argparse.Namespace) -> int:
    """Downloads a published bundle into a directory, by default one named like the bundle, and prints the
    directory and, unless the passed address is immutable already, an immutable one. A bundle that the
    directory holds already is replaced. Raises UsageError for an invalid address, such as one of another kind
    than oci:// and hf://, PublishError if the directory exists without a bundle or the download fails."""
    if problem := fault(arguments.source, writing=False):
        raise UsageError(f"mlcbuild pull: {problem}")
    directory = Path(arguments.directory or _name(arguments.source))
    exact, manifest = fetch(arguments.source, directory)
    document = {"bundle": str(directory), "name": manifest.name, "address": exact}
    lines = [f"{directory}: {manifest.name}, {len(manifest.files)} files are as its manifest says"]
    if not pinned(arguments.source):
        lines.append(f"the immutable address of this content is {exact}")
    show(arguments.json, document, lines)
    return 0


def _name(source: str) -> str:
    """Returns a directory name for the address of a bundle: the last part of the address's path, without tag,
    digest and revision."""
    return source.partition("://")[2].partition("?")[0].partition("@")[0].rpartition("/")[2].partition(":")[0]
