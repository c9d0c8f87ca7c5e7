"""The interface of a compiled library: what the builder emits and every runtime calls.

Functions with the order of their arguments, the columns of the tables among these, and the meaning of special
numbers. Builder and runtime take all of it from here by name; neither counts arguments or columns itself.

Sizes in shapes: n new tokens, q rows whose logits are computed, b sequences, p entries of the page table,
f forks, m masks of w columns, k steps of a loop, e tokens that end an answer, v columns of logits. `hidden`
and `vocab` belong to the model. A tensor without a dtype here has that of the model: the KV cache, whose
layout is the library's own, and `params`, the tuple of all weights in the order of the signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")

PAGE = 16
"""Tokens in one page of the KV cache."""


class SamplingParams(NamedTuple):
    """How one token is drawn from one row of logits: a row of `sampling_params`, float64."""

    inverse_temperature: float
    """0: the most likely token. Below 0: no token at all, see NO_TOKEN."""
    logit_drop: float
    """How far below the largest logit a token's may be, as a number that is not positive (min_p)."""
    top_p: float
    """1: every token."""
    top_k: float
    """0: every token."""
    random: float
    """The random number, from 0 up to 1, without 1. It is the last column: a request fixes the others, and
    each of its tokens appends one."""


SAMPLING_DTYPE = "float64"
SAMPLING_COLUMNS = SamplingParams._fields
SKIP = SamplingParams(inverse_temperature=-1.0, logit_drop=-inf, top_p=1.0, top_k=0.0, random=0.0)
"""Draws no token from a row."""
NO_TOKEN, INVALID_TOKEN = -2, -1
"""Stand for a token: of a row whose parameters are SKIP; of a row whose largest logit is NaN."""


class LoopState(NamedTuple):
    """How far a loop of decoding steps has come: `state`, int32, changed by every step."""

    steps_done: int
    pause_after: int
    """The loop returns after this many steps, though more may follow."""
    step_limit: int
    """No step follows this many."""


STATE_COLUMNS = LoopState._fields

MASK_ROW, MASK_BITS = 0, 1
"""Columns of a logit mask: the row that it applies to; the first word of bits, one for each token from the
lowest on, set where the token may be drawn."""
MASK_WORD = 32
"""Tokens in a word of a mask."""


@dataclass(frozen=True)
class Argument:
    name: str
    dtype: str | None
    """None: that of the model."""
    shape: tuple[str | int, ...] = ()
    """Sizes by name, also "b+1"; () for a scalar and where the model decides."""
    in_place: bool = False
    """The function changes it."""


@dataclass(frozen=True)
class Function:
    """A function of a library. Calls give all arguments by position."""

    name: str
    arguments: tuple[Argument, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    def index(self, name: str) -> int:
        """The position of an argument. Raises ValueError if there is none of this name."""
        return self.names.index(name)

    def ordered(self, values: Mapping[str, Value]) -> list[Value]:
        """Returns the values of a call, given by name, in the order of the arguments.

        Raises KeyError for an argument without a value, ValueError for a value without an argument.
        """
        found = list(map(values.__getitem__, self.names))
        if len(found) != len(values):
            extra = ", ".join(sorted(set(values) - set(self.names)))
            raise ValueError(f"{self.name} has no argument {extra}")
        return found


PARAMS = Argument("params", None)
BATCH = (
    Argument("pages", None, in_place=True),
    Argument("positions", "int32", ("n",)),
    Argument("slots", "int32", ("n",)),
    Argument("q_indptr", "int32", ("b+1",)),
    Argument("page_indptr", "int32", ("b+1",)),
    Argument("page_table", "int32", ("p",)),
    Argument("kv_lengths", "int32", ("b",)),
)
"""Which tokens belong to which sequence, and where their keys and values are: the cache; each token's
position in its sequence and its slot, page * PAGE + offset; where a sequence's tokens and pages begin in the
lists of all; the pages; and the length of each sequence with its new tokens."""
FORKS = Argument("forks", "int32", ("f", 3))
"""(from page, to page, tokens): copies of the beginnings of pages, made in this order after all new keys and
values are in the cache."""

_TOKENS = Argument("tokens", "int32", ("n",))
_ROWS = Argument("logit_positions", "int32", ("q",))
_SAMPLING = Argument("sampling_params", SAMPLING_DTYPE, ("q", len(SAMPLING_COLUMNS)))
_MASKS = Argument("masks", "int32", ("m", "w"))
_PROMPTS = Argument("input_embeds", "float32", (1, "n", "hidden"))
_STEP = (_TOKENS, _ROWS, _SAMPLING, Argument("sampled", "int32", ("q",), in_place=True), _MASKS, *BATCH)
_LOOP = (
    Argument("tokens", "int32", ("n",), in_place=True),
    Argument("logit_positions", "int32", ("n",)),
    Argument("sampling_params", SAMPLING_DTYPE, ("n", len(SAMPLING_COLUMNS)), in_place=True),
    _MASKS,
    Argument("random_numbers", SAMPLING_DTYPE, ("k", "n")),
    Argument("stops_at_eos", "int32", ("n",)),
    Argument("eos_tokens", "int32", ("e",)),
    Argument("interrupt", "int32", (1,)),
    Argument("sampled_tokens", "int32", ("k", "n"), in_place=True),
    Argument("state", "int32", (len(STATE_COLUMNS),), in_place=True),
    Argument("continues", "bool", in_place=True),
)
"""The arguments of a loop beside a batch with one token of each sequence. `tokens` are replaced by those of
the next step; step i reads row i of `random_numbers` and writes row i of `sampled_tokens`. No step follows
one of `eos_tokens` in a sequence that `stops_at_eos`, nor after any thread has set `interrupt`. `continues`:
another step must follow at once."""

CREATE_CACHE = Function("create_paged_kv_cache", (Argument("num_pages", "int64"),))
"""-> the cache of so many pages, not initialised. The argument is a shape."""
METADATA = Function("_metadata", ())
"""-> JSON: format, config, scheme, target, limits, params, signature."""
EMBED = Function("embed", (_TOKENS, PARAMS))
"""-> embeddings float32 [n, hidden]."""
STEP = Function("step", (*_STEP, FORKS, PARAMS))
"""-> logits float32 [1, q, vocab], masked, after a token is drawn from each row into `sampled`. A row has the
same bits whatever shares its batch."""
STEP_PREFILL = Function("step_prefill", (*_STEP, PARAMS))
"""As `step`, for prompts: a faster way, which may round differently."""
STEP_ON = Function("step_on", (*_LOOP, *BATCH, PARAMS))
"""As `step` for one token of each sequence; what it changes are the arguments of the step that follows."""
STEPS = Function("steps", (*_LOOP, *BATCH, PARAMS))
"""`step_on`, without masks, for as long as `continues` is true -> `continues`."""
SAMPLE = Function(
    "sample_tokens",
    (Argument("logits", "float32", ("q", "v")), _SAMPLING, Argument("tokens", "int32", ("q",)), _MASKS),
)
"""Masks logits in place and draws a token from each row into `tokens` -> logits float32 [1, q, v]."""
PREFILL = Function("prefill", (_PROMPTS, _ROWS, *BATCH, PARAMS))
"""-> logits float32 [1, q, vocab] of one sequence."""
BATCH_PREFILL = Function("batch_prefill", PREFILL.arguments)
BATCH_VERIFY = Function("batch_verify", (_PROMPTS, _ROWS, *BATCH, FORKS, PARAMS))
"""As `batch_prefill`, with rows computed as `batch_decode` computes them, bit by bit."""
DECODE = Function("decode", (Argument("input_embeds", "float32", ("b", 1, "hidden")), *BATCH, PARAMS))
"""-> logits float32 [b, 1, vocab] of one sequence's token."""
BATCH_DECODE = Function("batch_decode", DECODE.arguments)
HIDDEN_STATES = Function("prefill_to_last_hidden_states", (_PROMPTS, *BATCH, PARAMS))
"""-> the hidden states of one sequence after the last norm, float32 [1, n, hidden]."""
BATCH_HIDDEN_STATES = Function("batch_prefill_to_last_hidden_states", HIDDEN_STATES.arguments)

CAPABILITIES: Mapping[str, tuple[Function, ...]] = {
    "generate": (METADATA, CREATE_CACHE, STEP, STEP_PREFILL, SAMPLE),
    "decode_loop": (STEP_ON, STEPS),
    "hidden_states": (EMBED, HIDDEN_STATES, BATCH_HIDDEN_STATES),
}
"""Capability of a library -> the functions that it has then."""
