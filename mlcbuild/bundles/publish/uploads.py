"""Sends bundles to registries and model hubs, one after the other, and returns a result for each. If one
fails, the result has the status "failed" and the error's text, and the others are still sent; a damaged
bundle raises BundleError instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from mlcbuild.bundles.publish import fault
from mlcbuild.bundles.publish.transfer_bundle import publish
from mlcbuild.errors import PublishError, UsageError

Parcel: TypeAlias = tuple[str, Path, str]
"""(name of a bundle, its directory, its destination): a bundle to send."""


@dataclass(frozen=True)
class Sent:
    """The result of sending one bundle to one address."""

    name: str
    """Name of the published bundle: that of its variant in a recipe or, if the caller passed a directory, the
    directory's name.
    """
    to: str
    """Address of the registry or hub to which the bundle is sent, as the recipe or the caller stated it; ""
    for a variant that is not sent."""
    status: Literal["published", "present", "failed", "skipped"]
    """The outcome of sending the bundle: "published" (bytes were sent), "present" (the destination already
    had all files), "failed", or "skipped" (a recipe's variant that is not published because it is not
    verified)."""
    address: str = ""
    """Immutable address of the published bundle, with the digest or commit of its content, also if the
    destination already had it; "" if sending failed or was skipped."""
    size: int = 0
    """Number of bytes of a bundle that were sent to the registry or hub."""
    note: str = ""
    """The error message if sending the bundle failed, or the reason why it was skipped; "" if the bundle was
    sent.
    """


def publish_bundle(
    bundle: str | Path, to: Sequence[str], on_sent: Callable[[Sent], None] | None = None
) -> tuple[Sent, ...]:
    """Checks every file of the bundle in a directory and sends it to registries and model hubs.

    to: addresses such as oci://host/repository:tag or hf://organisation/name. on_sent: called with the result
    for each address. Returns a result for each address; a failure at one does not stop the others. Raises
    UsageError for an address to which bundles cannot be published, before any is used, and BundleError for a
    damaged bundle.
    """
    for url in to:
        if problem := fault(url, writing=True):
            raise UsageError(f"mlcbuild publish: --to {problem}")
    place = Path(bundle)
    return send(((place.name, place, url) for url in to), on_sent)


def send(parcels: Iterable[Sent | Parcel], on_sent: Callable[[Sent], None] | None) -> tuple[Sent, ...]:
    """Sends bundles to their addresses and returns the results in the same order. parcels: bundles to send,
    or results of other bundles, which are returned unchanged. on_sent: called with each result.

    A failure at one address does not stop the others. Raises BundleError for a damaged bundle, after which no
    other is sent.
    """
    uploaded: dict[tuple[str, str], tuple[str, str]] = {}
    rows = []
    for parcel in parcels:
        if isinstance(parcel, Sent):
            sent = parcel
        else:
            name, bundle, url = parcel
            try:
                place = publish(bundle, url, uploaded)
            except PublishError as error:
                sent = Sent(name, url, "failed", note=str(error))
            else:
                status: Literal["published", "present"] = "published" if place.sent else "present"
                sent = Sent(name, url, status, place.url, place.sent)
        rows.append(sent)
        if on_sent is not None:
            on_sent(sent)
    return tuple(rows)
