"""The identity that ties a library to its weights. Alone in its module: build steps depend on no more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from blake3 import blake3

Tensor = tuple[str, Sequence[int], str, str]
"""(name, shape, dtype, layout)."""


def signature(tensors: Iterable[Tensor]) -> str:
    """Identity of what a library takes as parameters, in order: 64 hex digits."""
    listed = [[name, [int(size) for size in shape], dtype, layout] for name, shape, dtype, layout in tensors]
    text = json.dumps(listed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return str(blake3(b"signature/1\0" + text.encode()).hexdigest())
