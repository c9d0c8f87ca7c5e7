"""Measures the memory of a bundle in a separate process in which every sequence fills the context window."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

from mlcbuild.bundles import fresh_process


def measure(bundle: Path) -> int:
    """Loads a bundle in a new process, fills its limits, and returns the number of bytes by which the peak
    memory of that process grows after loading.

    It runs max_batch sequences of context_window tokens, which takes as long as computing these tokens.
    Raises VerificationError with the runtime's message if the bundle cannot be run."""
    return int(fresh_process.run("mlcbuild.bundles.footprint", str(bundle)))


def _peak() -> int:
    """Returns the peak memory of this process in bytes. Linux's ru_maxrss would include the parent's, so
    VmHWM is read there."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _grown(path: str) -> int:
    """Loads a bundle, runs sequences that fill its limits, and returns the number of bytes by which the peak
    memory of this process grows after loading. The process must be new, since a peak never falls. path: the
    bundle's directory."""
    from mlcbuild_runtime.executor import loading
    from mlcbuild_runtime.executor.batch import ModelStep
    from mlcbuild_runtime.executor.executor import forward

    model = loading.load(path)
    # Weights are mapped and the cache is reserved; neither takes memory before its first use.
    before = _peak()
    limits = model.manifest.limits
    per_sequence = limits.sequence_pages
    pages = [range(number * per_sequence, (number + 1) * per_sequence) for number in range(limits.max_batch)]
    # One token over and over would read the weights of a few experts only.
    rng = Random(0)
    for sequence_pages in pages:
        for start in range(0, limits.context_window, limits.prefill_chunk):
            end = min(start + limits.prefill_chunk, limits.context_window)
            tokens = [rng.randrange(model.manifest.vocab_size) for _ in range(start, end)]
            forward(model, ModelStep.of([(tokens, end, sequence_pages)]))
    forward(model, ModelStep.of([([0], limits.context_window, sequence_pages) for sequence_pages in pages]))
    return _peak() - before


if __name__ == "__main__":
    fresh_process.main(_grown)
