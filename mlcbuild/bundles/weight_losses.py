"""Evaluates a model in NumPy with quantized weights, and compares it with its exact logits."""

from __future__ import annotations

import json
import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mlcbuild import models
from mlcbuild.bundles.divergence import divergence, log_softmax
from mlcbuild.bundles.reference import Reference, head, hidden
from mlcbuild.bundles.reference_blocks import Array
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
from mlcbuild.checkpoints.checkpoint_views import views_of
from mlcbuild.checkpoints.exact_weights import Weight, checkpoint, read_tensor_names
from mlcbuild.models import Param
from mlcbuild.quant import Storage, scheme_for
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.groups import GROUP
from mlcbuild.quant.stack import Stack

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ScoredPrompt:
    """The tokens of one prompt, and the .npy file with the exact model's logits [n, vocab] for them."""

    tokens: tuple[int, ...]
    path: Path

    def losses(self, logits: Array) -> float:
        """Returns the sum over a prompt's n tokens of KL(exact || approximate) in nats, between the
        next-token distributions of the exact model, whose logits are read from the file `path`, and of an
        approximate one. logits: those of the approximate model, [n, vocab].
        """
        return float(divergence(log_softmax(np.load(self.path)), log_softmax(logits)).sum())


@dataclass(frozen=True)
class WeightTrial:
    """A model with its exact weights, and the prompts on which the losses of its quantized versions are
    measured.
    """

    exact: Reference
    params: Mapping[str, Param]
    """Name of a parameter -> the parameter, in the order of the model."""
    prompts: tuple[ScoredPrompt, ...]

    @property
    def tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def matrices(self) -> tuple[Param, ...]:
        """Returns the model's parameters that are matrices or stacks of matrices, which quantization schemes
        quantize.
        """
        return tuple(param for param in self.params.values() if param.matrix is not None)

    def within(self, most: int) -> WeightTrial:
        """Returns a copy of this trial (a model and prompts) with fewer prompts: the first ones that have at
        most `most` tokens together, but at least one prompt.
        """
        count, total = 0, 0
        for prompt in self.prompts:
            total += len(prompt.tokens)
            if count and total > most:
                break
            count += 1
        return replace(self, prompts=self.prompts[:count])

    def loss(self, scheme: Storage, on_prompt: Callable[[], None] = lambda: None) -> float:
        """Returns the mean KL divergence per token, in nats, from the exact model, of the model whose
        matrices are stored under a quantization scheme and whose activations are rounded as the scheme
        requires, except in products with experts. on_prompt: called without arguments after each prompt,
        possibly by another thread. Raises CheckpointError for weights that the scheme cannot store.
        """
        weights = _Quantized(self.exact.weights, self.params, scheme)

        def rounded(name: str, rows: Array) -> Array:
            return rounded_activations(rows, scheme_for(scheme, name))

        changed = replace(self.exact, weights=weights, rounded=rounded)

        def run(prompt: ScoredPrompt) -> float:
            logits = head(changed, hidden(changed, prompt.tokens)[0])
            on_prompt()
            return prompt.losses(logits)

        return sum(in_threads(run, self.prompts)) / self.tokens


def open_trial(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> WeightTrial:
    """Returns a model with exact weights and the prompts on which a build step measures losses (KL
    divergences from it). params: `context_window` in tokens or None, and `file` and `adapters` of the
    checkpoint if there are any; inputs: directories of config, checkpoint, reference and adapters. Raises
    CheckpointError for a checkpoint that cannot be read.
    """
    config = models.from_json(json.loads((inputs["config"] / "config.json").read_bytes()))
    names = read_tensor_names(inputs["config"])
    weights = checkpoint(checkpoint_path(params, inputs), config, names, views_of(params, inputs))
    window = models.context_window(config, cast("int | None", params["context_window"]))
    sequences = json.loads((inputs["reference"] / "tokens.json").read_bytes())
    prompts = tuple(
        ScoredPrompt(tuple(tokens), inputs["reference"] / f"logits-{i:04}.npy")
        for i, tokens in enumerate(sequences)
    )
    listed = {param.name: param for param in models.parameters(config)}
    return WeightTrial(Reference(config, weights, context_window=window), listed, prompts)


def quantized(param: Param, values: Weight, scheme: Storage) -> Weight:
    """Quantizes a matrix, or a stack of matrices, under a scheme, and returns its float32 values after
    unpacking, in the same shape; a matrix of a stack is computed each time it is read. param: describes the
    matrix; values: its exact values. Raises CheckpointError for values that the scheme cannot store; for
    those of a stack, when they are read.
    """

    def rounded(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        form = scheme.definition
        return form.unpack(form.pack(matrix, Scratch(), param.name), cast("tuple[int, int]", param.matrix))

    if len(param.shape) == 2:
        return rounded(np.ascontiguousarray(values))
    shape = cast("tuple[int, int, int]", param.shape)
    return Stack(shape, lambda index: rounded(np.ascontiguousarray(values[index])))


def rounded_activations(rows: Array, scheme: Storage) -> Array:
    """Returns activations, floats [n, columns], after the rounding that a product with a matrix of this
    quantization scheme applies to them: to 8 bits, with a scale for each group of 32 columns (the last may be
    shorter), and back to floats. Scales are powers of two for 4-bit weights in this project's own formats,
    not for GGUF's. Activations are unchanged if the scheme keeps them as floats.
    """
    if scheme.activation_bits == 0:
        return rows
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % GROUP)))
    groups = padded.reshape(len(rows), -1, GROUP)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / rows.dtype.type(127)
    if scheme.bits == 4 and scheme.definition.blocks is None:
        scales = np.exp2(np.ceil(np.log2(np.maximum(scales, 1e-30)))).astype(rows.dtype)
    steps = np.rint(groups / np.where(scales == 0, 1, scales))
    values: Array = (steps * scales).reshape(padded.shape)[:, : rows.shape[1]]
    return values


@dataclass(frozen=True)
class _Quantized(Mapping[str, Weight]):
    """A mapping from parameter name to values in which each matrix is quantized and unpacked again at each
    access.
    """

    exact: Mapping[str, Weight]
    params: Mapping[str, Param]
    scheme: Storage

    def __getitem__(self, name: str) -> Weight:
        param, values = self.params[name], self.exact[name]
        return values if param.matrix is None else quantized(param, values, scheme_for(self.scheme, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.exact)

    def __len__(self) -> int:
        return len(self.exact)


def with_weights(model: Reference, names: Iterable[str]) -> Reference:
    """Returns a copy of the model that holds the weights `names` in memory, which would otherwise be read
    from the checkpoint at each access. Stacks of matrices are still read one matrix at a time.
    """
    values = {name: model.weights[name] for name in names}
    return replace(model, weights=ChainMap(values, cast("dict[str, Weight]", model.weights)))


def with_layer(model: Reference, index: int) -> Reference:
    """Returns a copy of the model that holds the weights of the layer `index` in memory, except for stacks of
    matrices (experts); these and all other layers are still read from the checkpoint at each access.
    """
    return with_weights(model, [name for name in model.weights if name.startswith(f"layers.{index}.")])


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
    """Calls a function for each item on as many threads as the environment variable MLCBUILD_CORES states (1
    if it is not set), and returns the results in the order of the items. Each call computes on one core, so
    that no result depends on the number of threads. If a call fails, its exception is raised when the calls
    that run have ended, and calls that have not started are left out.
    """
    with ThreadPoolExecutor(int(os.environ.get("MLCBUILD_CORES", "1"))) as pool:
        return list(pool.map(function, items))
