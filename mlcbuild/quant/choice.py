"""The scheme that a budget step chose for a model, as later steps read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from mlcbuild.canon import Json, digest
from mlcbuild.quant.scheme import Storage, from_json

CHOICE = "choice.json"
"""Name of the file in which a budget step writes its choice: {"base": name of a candidate, "overrides": list
of [pattern, name of a candidate]}.
"""
INPUT = "budget"
"""Name of the input by which steps read a choice."""


def scheme_of(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> Storage:
    """Returns the scheme of a step: params["scheme"], or for a scheme with a budget the choice in
    inputs["budget"] among params["candidates"].
    """
    if INPUT not in inputs:
        return from_json(params["scheme"])
    document = json.loads((inputs[INPUT] / CHOICE).read_bytes())
    candidates = [from_json(value) for value in cast("list[Json]", params["candidates"])]
    return mixture(candidates, document["base"], document["overrides"])


def mixture(candidates: Sequence[Storage], base: str, overrides: Sequence[tuple[str, str]]) -> Storage:
    """Returns the scheme with a base and overrides among candidates, which are given by name. It has the name
    that a recipe's scheme with these overrides has, so that both give the same bytes.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    if not overrides:
        return by_name[base]
    content: list[Json] = [base, [[pattern, name] for pattern, name in overrides]]
    label = f"{base}-{digest('scheme/1', content)[:8]}"
    return replace(
        by_name[base], name=label, overrides=tuple((pattern, by_name[name]) for pattern, name in overrides)
    )
