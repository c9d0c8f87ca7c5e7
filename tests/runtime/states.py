"""Computes the hidden states of a bundle's model with the builder's float64 reference: `states.py BUNDLE
OUT.npy TOKENS ...` writes them to OUT.npy.

It is a separate program, because the runtime's tests do not import the builder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mlcbuild_format.bundle import read
from mlcbuild_runtime.devices import tensors

from mlcbuild import models, quant
from mlcbuild.bundles import reference
from mlcbuild.models import parameters
from tests.schemes import SCHEMES, unpack


def main(bundle: Path, out: Path, texts: list[str]) -> None:
    manifest = read(bundle)
    library = json.loads((bundle / "library.json").read_text())
    config, scheme = models.from_json(library["config"]), SCHEMES[library["scheme"]["name"]]
    params = tuple((name, shape, dtype, layout) for name, shape, dtype, layout in library["params"])
    loaded = tensors.load(bundle, manifest.weights, params)
    stored = dict(zip((name for name, *_ in params), loaded.arrays, strict=True))
    weights = {}
    for param in parameters(config):
        parameter_scheme, names = (
            quant.scheme_for(scheme, param.name),
            [t.name for t in quant.stored(param, scheme)],
        )
        if len(names) == 2:
            weights[param.name] = unpack((stored[names[0]], stored[names[1]]), parameter_scheme, param.shape)
        else:
            weights[param.name] = stored[names[0]].astype(np.float32)
    model = reference.Reference(config, weights, np.float64, manifest.limits.context_window)
    listed = [[int(token) for token in text.split(",")] for text in texts]
    results = [reference.hidden(model, tokens)[0] for tokens in listed]
    np.save(out, np.concatenate(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
