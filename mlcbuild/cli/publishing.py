"""Verbs about bundles elsewhere: publish, pull."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.bundles.publish import fault, pinned
from mlcbuild.bundles.publish.transfer_bundle import publish as send
from mlcbuild.bundles.publish.transfer_bundle import pull as fetch
from mlcbuild.cli import build
from mlcbuild.cli.listing import show
from mlcbuild.errors import PublishError, UsageError
from mlcbuild.pipeline import Product


def publish(arguments: argparse.Namespace) -> int:
    """`publish RECIPE` builds and sends what the recipe says; `publish BUNDLE --to URL` sends one bundle.

    Exit code 1 when anything that should have been sent was not; the rest is sent all the same.
    """
    for url in arguments.to:
        if problem := fault(url, writing=True):
            raise UsageError(f"mlcbuild publish: --to {problem}")
    if Path(arguments.recipe).is_dir():
        if not arguments.to:
            raise UsageError(
                "mlcbuild publish: say where to: mlcbuild publish BUNDLE --to oci://host/name:tag"
            )
        bundle = Path(arguments.recipe)
        rows = [*_send(arguments, [(bundle.name, bundle, url) for url in arguments.to])]
        document: dict[str, object] = {"published": rows}
    else:
        if arguments.to:
            raise UsageError("mlcbuild publish: --to is for a bundle; a recipe says it in 'publish'")
        products = _products(arguments)
        if arguments.dry_run:
            return build.plan(arguments)
        run, code = _build(arguments)
        if code:
            print("nothing was published: not all of it was built", file=sys.stderr)
            return code
        rows = [*_send(arguments, list(_wanted(arguments, products, run)))]
        document = {"published": rows, "run": run}
    if arguments.json:
        show(True, document, [])
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def _send(
    arguments: argparse.Namespace, wanted: list[tuple[str, Path, str]]
) -> Iterator[dict[str, str | int]]:
    """Sends one after the other, and tells of each when it is there."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for name, bundle, url in wanted:
        row: dict[str, str | int] = {"step": f"publish/{name}", "to": url}
        try:
            found = send(bundle, url, seen)
        except PublishError as error:
            yield {**row, "status": "failed", "note": str(error)}
            print(f"failed  publish/{name}: {error}", file=sys.stderr)
            continue
        status = "published" if found.sent else "present"
        yield {**row, "status": status, "address": found.url, "sent": found.sent}
        if not arguments.json:
            print(f"{status:<9} {found.url}" + (f"  ({sizes.show(found.sent)} sent)" if found.sent else ""))


def _products(arguments: argparse.Namespace) -> Mapping[str, Product]:
    """By the names of variants. Raises UsageError when the recipe sends nothing."""
    pipeline = build.read_pipeline(arguments)
    if not pipeline.recipe.destinations:
        raise UsageError(
            f"{arguments.recipe}: it says nowhere to publish to: add `publish: [{{to: "
            '"oci://host/team/{model}:{quantization}-{target}"}]`'
        )
    return {product.variant.name: product for product in pipeline.products}


def _build(arguments: argparse.Namespace) -> tuple[dict[str, list[dict[str, str]]], int]:
    """What a run says with --json, and its exit code; what is for people goes to stderr meanwhile."""
    wanted, arguments.json = arguments.json, True
    try:
        with redirect_stdout(io.StringIO()) as said:
            code = build.run(arguments)
    finally:
        arguments.json = wanted
    return json.loads(said.getvalue()), code


def _wanted(
    arguments: argparse.Namespace, products: Mapping[str, Product], run: Mapping[str, list[dict[str, str]]]
) -> Iterator[tuple[str, Path, str]]:
    """Variant, bundle and address of everything that this run has finished."""
    for row in run["variants"]:
        product = products[row["name"]]
        if row["status"] not in ("built", "reused"):
            continue
        if product.verify is None and not arguments.unverified:
            print(
                f"skipped publish/{row['name']}: it is not verified, {product.unverified}; "
                "--unverified publishes it all the same",
                file=sys.stderr,
            )
            continue
        for url in product.variant.destinations:
            yield row["name"], product.variant.output, url


def pull(arguments: argparse.Namespace) -> int:
    """Fetches a published bundle into a directory and prints where it is and what pins it."""
    if problem := fault(arguments.source, writing=False):
        raise UsageError(f"mlcbuild pull: {problem}")
    directory = Path(arguments.directory or _name(arguments.source))
    exact, manifest = fetch(arguments.source, directory)
    document = {"bundle": str(directory), "name": manifest.name, "address": exact}
    lines = [f"{directory}: {manifest.name}, {len(manifest.files)} files are as its manifest says"]
    if not pinned(arguments.source):
        lines.append(f"exactly this content is {exact}")
    show(arguments.json, document, lines)
    return 0


def _name(source: str) -> str:
    """A directory's name for an address: its last part, without tag, digest and revision."""
    return source.partition("://")[2].partition("?")[0].partition("@")[0].rpartition("/")[2].partition(":")[0]
