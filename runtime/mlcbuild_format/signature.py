"""Computes the digest that ties a library to its weights. It is a separate module, so that the keys of build
steps that need it contain few source files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from blake3 import blake3

Tensor = tuple[str, Sequence[int], str, str]
"""One parameter of a library: (name, shape, dtype, layout). dtype: NumPy's name; layout: name of the physical
order of the elements, such as "row"."""


def signature(tensors: Iterable[Tensor]) -> str:
    """Returns a digest of the name, shape, dtype and layout of the parameter tensors that a library takes, in
    their order, as 64 hex digits; the tensors' values do not count. A library and weights files with equal
    digests fit together."""
    listed = [[name, [int(size) for size in shape], dtype, layout] for name, shape, dtype, layout in tensors]
    text = json.dumps(listed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return str(blake3(b"signature/1\0" + text.encode()).hexdigest())
