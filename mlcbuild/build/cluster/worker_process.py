"""Runs a worker process: it joins a cluster, declares its resources, runs steps, and leaves in an orderly
way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlcbuild import keyfile
from mlcbuild.build.cluster import PLENTY, Address, own_label, security
from mlcbuild.build.cluster.site import LEAVE, Site, sites
from mlcbuild.errors import SetupError
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from distributed import Worker

_CONNECT = 10.0
"""Maximum seconds to wait for an answer of the cluster's scheduler."""
_POLL = 0.1


@dataclass(frozen=True)
class Offer:
    """The resources that a cluster worker declares when it joins a cluster."""

    name: str
    cores: int
    memory: int
    """Maximum bytes of memory that all steps of this cluster worker may use together."""
    labels: Mapping[str, float]
    """Label that this cluster worker declares -> its amount, apart from cores and memory."""

    @property
    def resources(self) -> dict[str, float]:
        return {
            **self.labels,
            own_label(): PLENTY,
            "cores": float(self.cores),
            "memory": float(self.memory),
        }


def default_name() -> str:
    """Returns a name for a cluster worker: the name of this machine and the process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def serve(address: Address, store: Store, offer: Offer, log: Callable[[str], None]) -> int:
    """Joins a cluster, runs the jobs that its scheduler sends, and returns an exit code: 0 after SIGTERM,
    130 after SIGINT, 1 after the scheduler has ended.

    log: called with one line for each change of the worker's state. Raises SetupError when dask is missing
    or no scheduler answers, StoreError when the store cannot be used, and UsageError when the user's signing
    key cannot be read or $MLCBUILD_KEY names a missing one.
    """
    encryption = security(address)
    for name in ("distributed", "distributed.worker", "tornado", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    signer = keyfile.load_own()
    site = Site(offer.name, store, store.staging(), signer)
    sites[:] = [site]
    try:
        return asyncio.run(_serve(address, site, offer, encryption, log))
    finally:
        site.close()


async def _connected(address: Address, site: Site, offer: Offer, encryption: object) -> Worker:
    """Returns a dask worker that has joined the scheduler at `address`. Raises SetupError if no scheduler
    answers.
    """
    from distributed import Worker

    worker = Worker(
        address.url,
        nthreads=offer.cores,
        name=offer.name,
        resources=offer.resources,
        security=encryption,
        memory_limit=0,
        dashboard=False,
        local_directory=str(site.staging.directory),
        death_timeout=_CONNECT,
    )
    try:
        await asyncio.wait_for(worker, _CONNECT)
    except (TimeoutError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error.__cause__ or error).split()) or "no answer"
        raise SetupError(
            f"no scheduler answers at {address}: {why[:200]}; `dask scheduler` starts one"
        ) from None
    return worker


async def _serve(
    address: Address, site: Site, offer: Offer, encryption: object, log: Callable[[str], None]
) -> int:
    ended: list[int] = []
    wake = asyncio.Event()

    def end(code: int) -> None:
        ended.append(code)
        wake.set()

    loop = asyncio.get_running_loop()
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        loop.add_signal_handler(number, end, code)
    worker = await _connected(address, site, offer, encryption)
    log(f"worker {offer.name}: {worker.address}, ready")
    gone = asyncio.ensure_future(worker.finished())
    gone.add_done_callback(lambda _: end(1))
    await wake.wait()
    site.stopping.set()
    if ended[0] == 1:
        log(f"worker {offer.name}: the scheduler {address} has ended")
    with suppress(Exception):  # the scheduler may be gone by now
        await asyncio.wait_for(_leave(worker, site), LEAVE)
    site.left.set()
    with suppress(Exception):
        await asyncio.wait_for(worker.close(timeout=LEAVE, executor_wait=False, reason="stopped"), 2 * LEAVE)
    return ended[0]


async def _leave(worker: Worker, site: Site) -> None:
    """Returns a cluster worker's unfinished jobs to the scheduler, and leaves the cluster.

    dask counts the jobs of a worker that dies as failed attempts, but not those of a worker that is
    retired.
    """
    while site.active:
        await asyncio.sleep(_POLL)
    await asyncio.sleep(_POLL)  # The scheduler first sends the last log events of the jobs.
    await worker.scheduler.retire_workers(workers=[worker.address], close_workers=False, remove=True)
