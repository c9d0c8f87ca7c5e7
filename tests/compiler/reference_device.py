"""A device for tests that can run every model: its library is the model's config, and its executor evaluates
the NumPy reference.

The file contains both parts of a device, as an extension would: the backend with its action and tools, and
the function that loads an executor. The KV cache holds the tokens of a sequence, and each step computes the
whole sequence again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format import versions as format_versions
from mlcbuild_format.bundle import Manifest
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor

from mlcbuild import models, quant
from mlcbuild.bundles import reference
from mlcbuild.checkpoints import conversion
from mlcbuild.compiler.compile_request import read_request
from mlcbuild.compiler.library_metadata import LibraryCode, LibraryMemory, describe
from mlcbuild.targets.target import Target
from tests.runtime.numpy_executor import NumpyExecutor

LIBRARY = "model.json"
PAGE_BYTES = 8 * abi.PAGE
"""Number of bytes of one page of the KV cache, which holds tokens as int64."""


def compile_library(params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path) -> None:
    """Action for tests: writes model.json, with the config and the scheme, and library.json, with the
    metadata that a bundle needs."""
    request = read_request(params, inputs)
    stored = quant.stored_parameters(models.parameters(request.config), request.scheme)
    (out / LIBRARY).write_text(json.dumps(request.to_json()))
    code = LibraryCode(
        format_versions.LIBRARY,
        [(item.name, item.shape, item.dtype, item.layout) for item in stored],
        tools(request.target),
        LibraryMemory(sum(item.size for item in stored), PAGE_BYTES, PAGE_BYTES * request.limits.pages, 0),
        kernels={},
        fallbacks={},
    )
    (out / "library.json").write_text(describe(request, code))


def tools(target: Target) -> dict[str, str]:
    return {"numpy": np.__version__}


def load(path: Path, manifest: Manifest, threads: int | None, pages: int | None) -> Executor:
    return ReferenceExecutor(path, manifest, pages or manifest.limits.pages)


class ReferenceExecutor(NumpyExecutor):
    """An executor for tests that computes logits of a real model with NumPy. It has the paging and batching
    of NumpyExecutor, whose logits are only weighted sums of token ids."""

    def __init__(self, path: Path, manifest: Manifest, pages: int) -> None:
        self.path, self.manifest, self.pages = path, manifest, pages
        library = json.loads((path / manifest.library).read_text())
        config = models.from_json(library["config"])
        weights = conversion.unpacked(path, config, quant.from_json(library["scheme"]))
        self.vocab_size = config.vocab_size
        self.model = reference.Reference(config, weights, context_window=manifest.limits.context_window)
        self.cache = np.full((pages, manifest.limits.page_size), -1)
        self.rows_computed, self.interrupted, self.prepared = 0, False, 0

    def _totals(self, step: ModelStep) -> Any:
        """Writes the token ids of a step to their slots of the KV cache, and returns the hidden states
        [tokens, hidden] of these tokens. They are computed from all cached tokens of each sequence."""
        positions, slots = step.places(self.manifest.limits.page_size)
        self.cache.ravel()[slots] = step.tokens
        for source, target, count in step.forks:
            self.cache[target, :count] = self.cache[source, :count]
        states = []
        for s, length in enumerate(step.lengths):
            pages = step.page_table[step.page_indptr[s] : step.page_indptr[s + 1]]
            hidden, _ = reference.hidden(self.model, self.cache[pages].ravel()[:length])
            states.append(hidden[positions[step.indptr[s] : step.indptr[s + 1]]])
        return np.concatenate(states)

    def _logits(self, totals: Any) -> Any:
        return reference.head(self.model, totals).astype(np.float32)
