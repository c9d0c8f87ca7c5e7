"""Computes the memory that a variant's bundle takes while it is served, as far as a plan can state it."""

from __future__ import annotations

import json
from typing import Any

from mlcbuild.build.plan import Plan
from mlcbuild.bundles.assemble import LIBRARY
from mlcbuild.models import cached_bytes, context_window, from_json
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.quant.format import ITEM_BYTES
from mlcbuild.scheme_fit import most_stored_bytes
from mlcbuild.store.store import Store
from mlcbuild.targets.backends import backend

PARTS = ("weights", "kv_cache", "workspace")
"""Names of the parts of the memory that a bundle takes while it is served, as its library states them."""


def serving_memory(pipeline: Pipeline, product: Product, plan: Plan, store: Store) -> dict[str, int] | None:
    """Returns "weights", "kv_cache" and "workspace" -> bytes of memory while a variant's bundle is served;
    None for a model on a hub whose config and library are not in the store.

    A compiled library states all three. Before compilation, weights (an upper bound while formats are not
    chosen) and KV cache are computed from the model's config, and the workspace is missing. Raises StoreError
    if the library or the config cannot be read from the store.
    """
    library = _stored(pipeline, product.library, LIBRARY, plan, store)
    if library is not None:
        return {part: int(library["memory"][part]) for part in PARTS}
    variant = product.variant
    config = pipeline.configs.get(variant.model.name)
    if config is None:
        step = next(name for name in product.steps if name.startswith("config/"))
        document = _stored(pipeline, step, "config.json", plan, store)
        if document is None:
            return None
        config = from_json(document)
    tokens = context_window(config, variant.limits.context_window) * variant.limits.max_batch
    scheme = backend(variant.target).storage(variant.scheme)
    return {
        "weights": most_stored_bytes(variant.scheme, backend(variant.target), config),
        "kv_cache": tokens * cached_bytes(config, variant.kv_cache, ITEM_BYTES[scheme.dtype]),
    }


def _stored(pipeline: Pipeline, step: str, path: str, plan: Plan, store: Store) -> Any:
    """Returns the decoded JSON document of the file `path` in the result of a planned step, or None if the
    result is not in the store. Raises StoreError if the file cannot be read."""
    planned = plan.by_name.get(pipeline.graph.resolve(step))
    if planned is None or planned.state != "hit" or planned.record is None:
        return None
    return json.loads(store.read_blob(next(entry for entry in planned.record.files if entry.path == path)))
