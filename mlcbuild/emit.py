"""Writes finished bundles to the output directories that the recipe names, with the results of verification
and a provenance statement."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import cast

from mlcbuild.build.graph import Source, Step
from mlcbuild.bundles import provenance
from mlcbuild.canon import Json
from mlcbuild.keyfile import Signer
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.store.export import materialise
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store

MANIFEST = "bundle.json"


@dataclass(frozen=True)
class Finished:
    """A finished run of a recipe, with what is needed to write its bundles to their output directories."""

    pipeline: Pipeline
    store: Store
    records: Mapping[str, Record]
    """Name of a step -> its step record in the store, which lists the files of the step's result with their
    digests."""
    signer: Signer | None = None
    """The key that signs provenance; None: provenance is not signed."""

    @cached_property
    def recipe(self) -> Json:
        recipe = self.pipeline.recipe
        return {"name": recipe.name, "blake3": self.pipeline.recipe_digest}

    @cached_property
    def version(self) -> str:
        return version("mlcbuild")

    @cached_property
    def sources(self) -> dict[str, dict[tuple[str, str], str]]:
        """Returns a cache of file digests, empty at first: name of a step -> {(name of a local source, path
        of a file in it): BLAKE3 digest}, for each local file that the step read. Steps are added when their
        provenance is written."""
        return {}


def emit(run: Finished, product: Product) -> bool:
    """Writes one finished bundle of a variant to its output directory, and returns True; returns False if it
    was already there, byte for byte.

    The steps of the variant must have results. The manifest, bundle.json, is that of the step `verify` if
    there is one, else that of the bundle step. Raises UsageError when the output holds files of the user,
    StoreError when the store is damaged, MlcbuildError when the output cannot be written; an older output is
    then unchanged.
    """
    graph, store = run.pipeline.graph, run.store
    bundle_record = run.records[graph.resolve(product.bundle)]
    files = {entry.path: entry for entry in bundle_record.files}
    if product.verify is not None:
        verified = run.records[graph.resolve(product.verify)]
        files |= {entry.path: entry for entry in verified.files}
    manifest = store.read_blob(files[MANIFEST])
    statement = _provenance(run, product, manifest)
    provenance_files = {provenance.STATEMENT: statement}
    if run.signer is not None:
        provenance_files[provenance.ENVELOPE] = provenance.envelope(statement, run.signer)
    # The record has no key: the tree is assembled from several steps each time.
    rows = tuple((entry.path, entry.digest, entry.size) for _, entry in sorted(files.items()))
    return materialise(store, Record("", "", rows, b""), product.variant.output, provenance_files)


def _provenance(run: Finished, product: Product, manifest: bytes) -> bytes:
    graph, variant, records = run.pipeline.graph, product.variant, run.records
    steps = [graph.step(name) for name in product.steps]
    sources = {need: graph[need] for step in steps for need in graph.needs(step)}
    fetches = [node for node in sources.values() if isinstance(node, Step) and node.name.startswith("fetch/")]
    steps = [*fetches, *steps]
    dependencies = [*_downloads(fetches), *_files(run, steps)]
    parameters: dict[str, Json] = {
        "recipe": run.recipe,
        "model": variant.model.name,
        "quantization": variant.quantization,
        "target": variant.target.name,
        "limits": dict(vars(variant.limits)),
    }
    keys = {step.name: records[step.name].key for step in steps}
    tools = {name: value for step in steps for name, value in step.tools.items()}
    return provenance.statement(manifest, parameters, keys, dependencies, {**tools, "mlcbuild": run.version})


def _downloads(fetches: Iterable[Step]) -> Iterator[dict[str, Json]]:
    """Yields an SLSA resource descriptor (name, uri, SHA-256 digest) for each file that the steps `fetches`
    downloaded from a hub, in the order of these steps, and of the file names in each."""
    for step in fetches:
        files = cast("dict[str, dict[str, Json]]", step.params["files"])
        for name, pinned in sorted(files.items()):
            yield {
                "name": name,
                "uri": f"hf://{step.params['repo']}@{step.params['commit']}/{name}",
                "digest": {"sha256": pinned["sha256"]},
            }


def _files(run: Finished, steps: Iterable[Step]) -> Iterator[dict[str, Json]]:
    """Yields an SLSA resource descriptor (name, BLAKE3 digest) for each local file that `steps` read, sorted
    by name: the name of its source and the path in it, joined by "/". A file that several steps read is
    yielded once."""
    digests: dict[tuple[str, str], str] = {}
    for step in steps:
        if step.name not in run.sources:
            run.sources[step.name] = _sources(run, step)
        digests |= run.sources[step.name]
    for (node, path), digest in sorted(digests.items()):
        yield {"name": f"{node}/{path}", "digest": {"blake3": digest}}


def _sources(run: Finished, step: Step) -> dict[tuple[str, str], str]:
    graph = run.pipeline.graph
    read = {
        argument: item.node for argument, item in step.inputs.items() if isinstance(graph[item.node], Source)
    }
    if not read:
        return {}
    # Only lists of files are parsed, and not kept: for thousands of records they would be most of a run's
    # memory.
    inputs = json.loads(run.records[step.name].rest)["inputs"]
    return {(node, path): digest for argument, node in read.items() for path, digest, _ in inputs[argument]}
