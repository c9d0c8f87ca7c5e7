"""The verb worker, which runs steps for builds on other machines."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from ctypes.util import find_library

from mlcbuild import machine
from mlcbuild.build import cluster
from mlcbuild.cli.store_access import open_store
from mlcbuild.errors import SetupError
from mlcbuild.targets import presets, requirements
from mlcbuild.targets import target as targets
from mlcbuild.targets.backends import backend


def worker(arguments: argparse.Namespace) -> int:
    """Runs the verb `worker`: joins a cluster and runs its steps until this process is stopped. Returns 0
    after SIGTERM, 130 after SIGINT, 1 after the cluster's scheduler has ended. Raises SetupError when dask is
    missing or no scheduler answers, UsageError for a malformed address or label, an incomplete directory of
    certificates, or a signing key that cannot be read or is missing though $MLCBUILD_KEY names it, StoreError
    when the store cannot be used."""
    from mlcbuild.build.cluster import worker_process

    address = cluster.address(arguments.scheduler, arguments.tls or os.environ.get("MLCBUILD_TLS"))
    texts = [text.strip() for item in arguments.labels for text in item.split(",")]
    labels = {**dict.fromkeys(found_labels(), cluster.PLENTY), **cluster.parse_labels(texts)}
    memory = machine.memory() if arguments.memory is None else arguments.memory
    offer = worker_process.Offer(
        arguments.name or worker_process.default_name(), arguments.cores or machine.cores(), memory, labels
    )
    store = open_store(arguments)
    print(f"worker {offer.name}: {offer.cores} cores, {memory / 1e9:.1f} GB, store {store.root}", flush=True)
    print(f"worker {offer.name}: labels {', '.join(sorted(labels))}", flush=True)
    return worker_process.serve(address, store, offer, lambda line: print(line, flush=True))


def found_labels() -> Iterator[str]:
    """Yields the labels with which a worker states what this machine has, such as "linux x86_64" or "avx2":
    its processor, system and CPU features, the compilers and linkers that work here with their versions,
    CUDA. An item that it lacks has no label."""
    yield machine.label(machine.kind())
    host: list[targets.Target] = []
    with suppress(SetupError):
        host.append(presets.resolve(presets.HOST))
        yield from requirements.labels(host[0])
    for target in (*host, *presets.presets().values()):
        with suppress(SetupError):
            yield from (
                f"{tool} {version}" for tool, version in backend(target).tool_versions(target).items()
            )
    if shutil.which("nvcc"):
        yield "nvcc"
    if find_library("cuda"):
        yield "cuda"
