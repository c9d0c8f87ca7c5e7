"""Reads which stored format an earlier build step chose for each matrix of a model, and returns the choice as
a quantization scheme. That step chooses under a budget (a limit of size or loss), or by the types of a
checkpoint's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from mlcbuild.canon import Json, digest
from mlcbuild.quant.scheme import Storage, from_json

CHOICE = "choice.json"
"""Name of the file in which a step writes its choice of formats, a JSON object: `base` is the name of a
candidate scheme, `overrides` a list of [pattern of parameter names, name of a candidate], and `name` the
result's name where it is not derived from these."""
INPUT = "budget"
"""Name of the step input that is the directory with choice.json, which holds the formats that an earlier step
chose."""


def scheme_of(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> Storage:
    """Returns the quantization scheme that a step uses: if the step has the input "budget", the mixture of
    params["candidates"] that choice.json in this input's directory describes, otherwise params["scheme"]."""
    if INPUT not in inputs:
        return from_json(params["scheme"])
    document = json.loads((inputs[INPUT] / CHOICE).read_bytes())
    candidates = [from_json(value) for value in cast("list[Json]", params["candidates"])]
    scheme = mixture(candidates, document["base"], document["overrides"])
    return replace(scheme, name=document.get("name", scheme.name))


def mixture(candidates: Sequence[Storage], base: str, overrides: Sequence[tuple[str, str]]) -> Storage:
    """Returns the candidate called `base` with overrides. candidates: the schemes to choose from; overrides:
    pairs (pattern of parameter names, name of the candidate for these parameters). The result has the name
    that a recipe's scheme with these overrides has, so that both give the same bytes: the base's name, "-"
    and 8 digits of a digest, or only the base's without overrides. Raises KeyError for a name that no
    candidate has."""
    by_name = {candidate.name: candidate for candidate in candidates}
    if not overrides:
        return by_name[base]
    content: list[Json] = [base, [[pattern, name] for pattern, name in overrides]]
    label = f"{base}-{digest('scheme/1', content)[:8]}"
    return replace(
        by_name[base], name=label, overrides=tuple((pattern, by_name[name]) for pattern, name in overrides)
    )
