"""Parses, when it is imported, the source files that are part of most cache keys. Commands that are forked
from a process with this module look up only the digests of the files' contents."""

from __future__ import annotations

from mlcbuild.canon import code_files

ACTIONS = (
    "mlcbuild.bundles.assemble",
    "mlcbuild.bundles.reference_logits",
    "mlcbuild.bundles.verify",
    "mlcbuild.checkpoints.conversion",
    "mlcbuild.checkpoints.fetch",
    "mlcbuild.compiler.cpu.action",
    "mlcbuild.models.action",
    "mlcbuild.models.families.llama",
)
"""Modules whose source files are part of the cache keys of most builds, with those that they import."""

code_files(*ACTIONS)
