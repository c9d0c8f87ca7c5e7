"""Measures what a model loses when one of its matrices is quantized, as the step `sensitivity/<model>`.

The layers before a matrix compute what they compute in the exact model, so each trial (one matrix in one
quantization scheme) begins at the layer of its matrix. All trials of a layer pass through the later layers
together: each layer's weights are read once for all of them, and memory holds one layer and one residual
stream for each trial.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mlcbuild import progress
from mlcbuild.bundles.reference import Reference, embedded, head, layer, normalized
from mlcbuild.bundles.reference_blocks import Array
from mlcbuild.bundles.weight_losses import (
    WeightTrial,
    in_threads,
    open_trial,
    quantized,
    with_layer,
    with_weights,
)
from mlcbuild.canon import Json
from mlcbuild.checkpoints.exact_weights import Weight
from mlcbuild.models import Param
from mlcbuild.quant import Storage, from_json, stored_bytes

SENSITIVITY = "sensitivity.json"
MOST_TOKENS = 1024
"""Maximum number of prompt tokens with which the loss of each pair of a matrix and a quantization scheme is
measured. The limit saves time: each pair needs an evaluation of its own. The prompts beyond it are used only
to evaluate the model with the chosen schemes as a whole.
"""


def sensitivity(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: writes to `out` sensitivity.json, with the bytes and the loss of each matrix of
    a model in each candidate quantization scheme: {"tokens": number measured, "matrices": [{"name", "losses"
    and "bytes": scheme name -> value}]}.

    params: `candidates`, a list of schemes as JSON; `context_window` in tokens, which selects LongRoPE's
    frequencies. inputs: directories with the config, the checkpoint, and the reference (the prompts' tokens
    and exact logits). A loss is the mean KL divergence from the exact model, in nats, of the model in which
    this matrix alone is quantized, over the first prompts (at most MOST_TOKENS tokens, but at least one
    prompt), to four significant digits; activations stay floating point. Raises CheckpointError for a
    checkpoint that cannot be read or that a candidate scheme cannot store.
    """
    candidates = [from_json(value) for value in cast("list[Json]", params["candidates"])]
    trial = open_trial(params, inputs).within(MOST_TOKENS)
    losses = dict(_losses(trial, candidates))
    rows: list[dict[str, object]] = []
    for param in trial.matrices:
        losses_by_scheme = {scheme.name: losses[param.name, scheme.name] for scheme in candidates}
        size = {scheme.name: stored_bytes([param], scheme) for scheme in candidates}
        rows.append({"name": param.name, "losses": losses_by_scheme, "bytes": size})
    document = {"tokens": trial.tokens, "matrices": rows}
    (out / SENSITIVITY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@dataclass
class _Run:
    """An evaluation (trial) of the model with a single matrix quantized: the matrix, its candidate scheme,
    and the residual stream of each prompt after the layers computed so far.
    """

    param: Param
    scheme: Storage
    streams: list[Array]
    """The residual stream [n, hidden] of each prompt after the layers that were computed so far."""


class _Progress:
    """Reports to the user how many layers have been computed, out of all that the step must compute. Each
    pair of a matrix and a quantization scheme counts the layers from the matrix's own to the last one, plus
    one for the logits, because layers before the matrix do not change.
    """

    def __init__(self, trial: WeightTrial, formats: int) -> None:
        self._depth = len(trial.exact.config.layers)
        self._total = formats * sum(self.left(_layer_of(param)) for param in trial.matrices)
        self._done = 0

    def left(self, index: int) -> int:
        """Returns the number of the model's layers from `index` (-1 counts as 0) to the last one, plus one
        for the logits: the work of one trial, in layers."""
        return self._depth - max(index, 0) + 1

    def add(self, runs: int) -> None:
        self._done += runs
        progress.report(self._done, self._total, "layers")


def _layer_of(param: Param) -> int:
    """Returns the index of the layer to which a parameter belongs; -1 for a parameter outside the layers,
    such as the embedding.
    """
    first, _, rest = param.name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


def _losses(trial: WeightTrial, candidates: Sequence[Storage]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yields ((name of a matrix, name of a quantization scheme), loss) for every matrix and candidate scheme,
    first for matrices outside the layers, then layer by layer. The loss is the mean KL divergence, from the
    exact model, of the model with only this matrix quantized, in nats per token, rounded to four significant
    digits."""
    note = _Progress(trial, len(candidates))
    depth = len(trial.exact.config.layers)
    outside = [param for param in trial.matrices if _layer_of(param) < 0]
    for param in outside:
        for scheme in candidates:
            changed = _changed(trial.exact, param, scheme)
            run = _Run(param, scheme, [embedded(changed, prompt.tokens) for prompt in trial.prompts])
            for index in range(depth):
                _advance(trial, [run], index)
                note.add(1)
            yield from _finished(trial, [run], changed, note)
    streams = [embedded(trial.exact, prompt.tokens) for prompt in trial.prompts]
    for index in range(depth):
        runs = [
            _Run(param, scheme, list(streams))
            for param in trial.matrices
            if _layer_of(param) == index
            for scheme in candidates
        ]
        in_threads(lambda run: _begin(trial, run), runs)
        note.add(len(runs))
        for later in range(index + 1, depth):
            _advance(trial, runs, later)
            note.add(len(runs))
        yield from _finished(trial, runs, trial.exact, note)
        base = _Run(trial.matrices[0], candidates[0], streams)
        _advance(trial, [base], index)
        streams = base.streams


def _changed(exact: Reference, param: Param, scheme: Storage) -> Reference:
    values = quantized(param, exact.weights[param.name], scheme)
    return replace(exact, weights=ChainMap({param.name: values}, cast("dict[str, Weight]", exact.weights)))


def _begin(trial: WeightTrial, run: _Run) -> None:
    """Starts an evaluation of the model with one matrix quantized (a trial), whose residual streams are still
    those of the exact model before the matrix's layer: computes this layer with the quantized matrix, and
    replaces the streams by its output.
    """
    changed = _changed(trial.exact, run.param, run.scheme)
    run.streams = [layer(changed, _layer_of(run.param), x)[0] for x in run.streams]


def _advance(trial: WeightTrial, runs: Sequence[_Run], index: int) -> None:
    """Computes the layer `index` with exact weights for all evaluations `runs` of the model, each of which
    has one quantized matrix in an earlier layer, and replaces the residual streams of each by the layer's
    output. The layer's weights are read once for all of them.
    """
    held = with_layer(trial.exact, index)

    def one(run: _Run) -> None:
        run.streams = [layer(held, index, x)[0] for x in run.streams]

    in_threads(one, runs)


def _finished(
    trial: WeightTrial, runs: Sequence[_Run], model: Reference, note: _Progress
) -> Iterator[tuple[tuple[str, str], float]]:
    """Finishes evaluations of a model, each with a single quantized matrix, whose layers have all been
    computed: computes their logits and yields ((name of the quantized matrix, name of its scheme), loss). The
    loss is the mean KL divergence from the exact model, in nats per token, to four significant digits. model:
    source of the weights of the final norm and of the output matrix.
    """
    table = "embed.weight" if model.config.tie_embeddings else "lm_head.weight"
    held = with_weights(model, [table])

    def one(run: _Run) -> float:
        pairs = zip(trial.prompts, run.streams, strict=True)
        return sum(prompt.losses(head(held, normalized(held, x))) for prompt, x in pairs) / trial.tokens

    for run, loss in zip(runs, in_threads(one, runs), strict=True):
        # Four digits, because further ones depend on the order of sums in the machine's linear algebra.
        yield (run.param.name, run.scheme.name), float(f"{loss:.4g}")
    note.add(len(runs))
