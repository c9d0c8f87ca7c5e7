"""Computes the forward pass of a ModelConfig in NumPy: the executable specification of compiled libraries.

Nothing here is packed, paged or fused. Each weight is read when it is needed and then released: with a
mapping that reads a tensor on access, the peak memory is one layer, the activations and the cache.

Shapes: n new tokens, m positions in all (past and new).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from mlcbuild.bundles import reference_blocks as blocks
from mlcbuild.bundles.reference_blocks import Array, Inputs, Rotation, State
from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, Rope, frequencies, parameters

Weights: TypeAlias = Mapping[str, Any]
"""Parameter name -> values in the shape that the model's architecture defines for it: arrays of any dtype
that NumPy can convert. A stack of matrices, such as those of all experts, may be a quant.stack.Stack, which
is read one matrix at a time.
"""


@dataclass(frozen=True)
class Past:
    """The state of one sequence in the reference computation: the keys and values, in each layer, of the
    positions computed so far. It never changes; computing more tokens returns a new one."""

    length: int
    """Number of tokens of the sequence that have been computed, and whose keys and values (or other attention
    state) are stored.
    """
    states: tuple[State, ...]
    """The stored attention state of each layer of the model, such as the arrays of its keys and values."""


EMPTY = Past(0, ())


@dataclass(frozen=True)
class Reference:
    """A model with its weights, and the number type and context window with which it is evaluated."""

    config: ModelConfig
    weights: Weights
    dtype: type[np.float32] | type[np.float64] = np.float32
    """The NumPy type in which all numbers of the reference computation are computed."""
    context_window: int | None = None
    """Context window in tokens; None means the model's maximum. It only selects LongRoPE's frequencies, those
    of a library compiled for this window, and does not limit the number of tokens."""
    rounded: Callable[[str, Array], Array] = lambda name, rows: rows
    """Function from (name of a matrix, rows that are multiplied with it) to the rows that the product reads.
    8-bit activations round them; the default leaves them unchanged. Products of experts are not rounded."""


def logits(
    config: ModelConfig,
    weights: Weights,
    tokens: Sequence[int] | Array,
    *,
    dtype: type[np.float32] | type[np.float64] = np.float32,
    context_window: int | None = None,
    on_layer: Callable[[], None] = lambda: None,
) -> Array:
    """Returns the logits [n, vocab] that a model computes after each of n tokens, starting from an empty
    cache. dtype: NumPy type of all arithmetic; context_window: in tokens, which selects LongRoPE's
    frequencies, None for the model's maximum; on_layer: called without arguments after each layer.

    Raises ValueError for no tokens and for token ids outside the vocabulary, IndexError for a position beyond
    a model's table of learned positions, CheckpointError for weights that are missing or misshapen."""
    model = Reference(config, weights, dtype, context_window)
    return head(model, hidden(model, tokens, on_layer=on_layer)[0])


def hidden(
    reference: Reference,
    tokens: Sequence[int] | Array,
    past: Past = EMPTY,
    on_layer: Callable[[], None] = lambda: None,
) -> tuple[Array, Past]:
    """Returns (hidden states [n, hidden] of the tokens after the model's final norm, a new state: `past`
    extended by these tokens). past: attention state after the earlier tokens, which is not changed; on_layer:
    called without arguments after each layer.

    Raises ValueError for no tokens and for token ids outside the vocabulary, IndexError for a position beyond
    a model's table of learned positions, CheckpointError for weights that are missing or misshapen."""
    x, states = embedded(reference, tokens, past.length), []
    for index in range(len(reference.config.layers)):
        x, state = layer(reference, index, x, past)
        states.append(state)
        on_layer()
    return normalized(reference, x), Past(past.length + len(x), tuple(states))


def embedded(reference: Reference, tokens: Sequence[int] | Array, start: int = 0) -> Array:
    """Returns the embeddings [n, hidden] of tokens as they enter the first layer of a model. start: position
    of the first token in its sequence. Raises ValueError for no tokens and for token ids outside the
    vocabulary, IndexError for a position beyond a model's table of learned positions, CheckpointError for
    weights that are missing or misshapen.
    """
    config, ids = reference.config, np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError("tokens must be a sequence of at least one integer")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids must be in 0..{config.vocab_size - 1}")
    weights = _Checked.of(reference)
    x = weights.raw("embed.weight")[ids].astype(reference.dtype) * reference.dtype(config.embedding_scale)
    x = blocks.norm(config.embedding_norm, x, weights, "embed_norm")
    if config.learned_positions:
        positions = np.arange(start, start + ids.size) + config.position_offset
        x = x + weights.raw("position.weight")[positions].astype(reference.dtype)
    rows: Array = x
    return rows


def layer(reference: Reference, index: int, x: Array, past: Past = EMPTY) -> tuple[Array, State]:
    """Computes one decoder layer, and returns (residual stream [n, hidden] after it, the attention state of
    the layer with these n positions added, such as keys and values). index: the layer's number, from 0; x:
    residual stream [n, hidden] before the layer; past: state before these n positions, which is not changed.
    Raises CheckpointError for weights that are missing or misshapen."""
    positions = np.arange(past.length, past.length + len(x))
    rotations = tuple(_rotation(reference, rope, positions) for rope in reference.config.ropes)
    state = past.states[index] if past.states else ()
    weight = partial(_Checked.of(reference).of_layer, index)

    def rounded(name: str, rows: Array) -> Array:
        return reference.rounded(f"layers.{index}.{name}", rows)

    inputs = Inputs(weight, positions, rotations, state, rounded)
    return blocks.layer(reference.config.layers[index], inputs, x)


def normalized(reference: Reference, x: Array) -> Array:
    """Applies only the model's final norm to `x`, the residual stream [n, hidden] of n tokens after the last
    layer, and returns the result, [n, hidden]. Raises CheckpointError if the norm's weights are missing or
    misshapen."""
    last: Array = blocks.norm(reference.config.norm, x, _Checked.of(reference), "norm")
    return last


@lru_cache(maxsize=8)
def _shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return {param.name: param.shape for param in parameters(config)}


def head(reference: Reference, states: Array) -> Array:
    """Returns logits [n, vocab] for the hidden states [n, hidden] of n tokens, which the final norm has
    normalized; the logits are scaled and soft-capped if the model's config says so. Raises CheckpointError
    for weights that are missing or misshapen."""
    config = reference.config
    name = "embed.weight" if config.tie_embeddings else "lm_head.weight"
    shapes = {name: (config.vocab_size, config.hidden_size), "lm_head.bias": (config.vocab_size,)}
    weights = _Checked(reference, shapes)
    matrix, states = weights.raw(name), reference.rounded(name, states)
    scores = np.empty((states.shape[0], config.vocab_size), reference.dtype)
    step = max(1, blocks.BLOCK // config.hidden_size)
    for start in range(0, config.vocab_size, step):
        rows = np.asarray(matrix[start : start + step], reference.dtype)
        scores[:, start : start + step] = states @ rows.T
    if config.head_bias:
        scores += weights("lm_head.bias")
    return blocks.softcap(scores * reference.dtype(config.logit_scale), config.logit_softcap)


def greedy(reference: Reference, prompt: Sequence[int], count: int, stop: Iterable[int] = ()) -> list[int]:
    """Returns up to `count` tokens that follow a prompt, each the most likely one (the lowest id among
    equals), computed with a cache of keys and values; no context window ends the list. It ends early with a
    token of `stop`, which it includes. Raises CheckpointError for weights that cannot be read, ValueError for
    an empty prompt or a token id beyond the vocabulary, IndexError for a position beyond a table of learned
    positions."""
    ends, answer = frozenset(stop), list[int]()
    tokens, past = list(prompt), EMPTY
    while len(answer) < count and not (answer and answer[-1] in ends):
        states, past = hidden(reference, tokens, past)
        tokens = [int(np.argmax(head(reference, states[-1:])))]
        answer += tokens
    return answer


@dataclass(frozen=True)
class _Checked:
    """Reads a model's weights, checks their shapes, and converts them to the number type of the
    computation.
    """

    reference: Reference
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, reference: Reference) -> _Checked:
        return cls(reference, _shapes(reference.config))

    def __call__(self, name: str) -> Array:
        return np.asarray(self.raw(name), self.reference.dtype)

    def of_layer(self, index: int, name: str, expert: int | None = None) -> Array:
        """Returns the values of a parameter of the layer `index` or, unless `expert` is None, those of the
        expert with that number, in the number type of the computation. name: the parameter's name within the
        layer. Raises CheckpointError if the parameter is missing or misshapen."""
        values = self.raw(f"layers.{index}.{name}")
        return np.asarray(values if expert is None else values[expert], self.reference.dtype)

    def raw(self, name: str) -> Any:
        """Returns the weight `name` (a parameter's full name) in its stored dtype, so that callers that need
        few rows of a matrix convert only these. Raises CheckpointError if it is missing or has another shape
        than the model defines."""
        try:
            values = self.reference.weights[name]
        except KeyError:
            raise CheckpointError(f"the weights hold no '{name}', which the model needs") from None
        if tuple(values.shape) != self.shapes[name]:
            shape = tuple(values.shape)
            raise CheckpointError(f"'{name}' must have shape {self.shapes[name]}, found {shape}")
        return values


def _rotation(reference: Reference, rope: Rope, positions: Array) -> Rotation:
    window = reference.context_window or reference.config.max_position
    inv_freq, factor = frequencies(rope, window)
    dtype, scale = reference.dtype, None
    if rope.query_scale is not None:
        periods = positions // rope.query_scale.length
        scale = 1 + dtype(rope.query_scale.beta) * np.log1p(periods.astype(dtype))
    angles = positions.astype(dtype)[:, None] * np.asarray(inv_freq, dtype)
    return Rotation(np.cos(angles) * dtype(factor), np.sin(angles) * dtype(factor), scale)
