"""Defines the interface of a compiled library: the functions that the builder emits and every runtime calls.

It lists the functions with their argument order, the columns of the tables among the arguments, and the
special values. Builder and runtime refer to all of it by name; neither counts arguments or columns itself.

Sizes in shapes: n new tokens, q rows whose logits are computed, b sequences, p entries of the page table, f
forks, m masks of w columns, k steps of a decode loop, e end-of-sequence tokens, v columns of logits; `hidden`
and `vocab` are the model's. A tensor without a dtype here has the dtype that the model uses: the KV cache,
whose layout the library defines, and `params`, the tuple of all weights in the signature's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")

PAGE = 16
"""Number of tokens in one page of the KV cache."""


class SamplingParams(NamedTuple):
    """The sampling parameters of one row of logits, in the order of the columns of the argument
    `sampling_params`, float64, which has one such row for each row of logits."""

    inverse_temperature: float
    """The number 1 / temperature, by which logits are multiplied; 0: the most likely token is always sampled;
    a negative number: no token is sampled from this row of logits (the result is NO_TOKEN)."""
    logit_drop: float
    """A number, at most 0, in units of the logits before temperature: a token is dropped if its logit is
    below the largest one plus this number, which is temperature * log(min_p). Minus infinity keeps every
    token."""
    top_p: float
    """Nucleus sampling: of the tokens that `logit_drop` and `top_k` keep, the fewest most likely ones stay
    that have at least this share, from 0 to 1, of the probability of all of these, and with them those as
    likely as the last; 1 keeps every token."""
    top_k: float
    """The number of most likely tokens from which the token is sampled; 0 means all tokens. Tokens as likely
    as the last of them count, too."""
    random: float
    """The random number in [0, 1) that selects the token. It is the last of the sampling parameters because a
    request fixes the others, while each of its tokens has a different random number."""


SAMPLING_DTYPE = "float64"
SAMPLING_COLUMNS = SamplingParams._fields
SKIP = SamplingParams(inverse_temperature=-1.0, logit_drop=-inf, top_p=1.0, top_k=0.0, random=0.0)
"""The sampling parameters of a row of logits from which no token is sampled: their inverse temperature is
negative."""
NO_TOKEN, INVALID_TOKEN = -2, -1
"""Special values, both negative, in place of a sampled token: NO_TOKEN for a row of logits from which no
token is to be sampled, INVALID_TOKEN for a row in which a logit is NaN or the largest one is infinite, of
either sign."""


class LoopState(NamedTuple):
    """The progress of a decode loop: the argument `state`, int32 [3], of the library's functions for decode
    loops. Its elements are the number of steps done so far, the number of steps after which the loop pauses,
    and the maximum number of steps. All three count from the loop's first step, over all calls that continue
    it."""

    steps_done: int
    pause_after: int
    """Number of finished steps, counted over all calls that continue a decode loop, at which it returns to
    its caller, with the inputs of the next step in place, so that another call can continue."""
    step_limit: int
    """Maximum number of steps of a decode loop, counted over all calls that continue it. After the last step,
    no inputs of another step are written."""


STATE_COLUMNS = LoopState._fields

MASK_ROW, MASK_BITS = 0, 1
"""The columns of a logit mask, int32: column 0 is the index of the row of logits to which the mask applies,
the words of its bits begin in column 1. There is one bit for each token, lowest token first, 32 in a word,
set where the token is allowed."""
MASK_WORD = 32
"""Number of tokens (bits) in one word of a logit mask."""


@dataclass(frozen=True)
class Argument:
    name: str
    dtype: str | None
    """The element type of an argument of a library function; None for the KV cache and the weights, whose
    types depend on the model."""
    shape: tuple[str | int, ...] = ()
    """Sizes of the dimensions of a library function's argument, each a number, a letter or name that stands
    for a size (the docstring of abi.py lists them), or a sum such as "b+1"; () for a scalar, or if the
    library decides the shape."""


@dataclass(frozen=True)
class Function:
    """The signature of one function of a compiled library. Calls pass all arguments by position."""

    name: str
    arguments: tuple[Argument, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    def index(self, name: str) -> int:
        """Returns the position, from 0, of the argument called `name` among the function's arguments. Raises
        ValueError if there is none."""
        return self.names.index(name)

    def ordered(self, values: Mapping[str, Value]) -> list[Value]:
        """Returns the values of a call's arguments in the order of the function's arguments. `values` maps
        argument name -> value.

        Raises KeyError for an argument without a value, ValueError for a value without an argument.
        """
        arguments = list(map(values.__getitem__, self.names))
        if len(arguments) != len(values):
            extra = ", ".join(sorted(set(values) - set(self.names)))
            raise ValueError(f"{self.name} has no argument {extra}")
        return arguments


PARAMS = Argument("params", None)
BATCH = (
    Argument("pages", None),
    Argument("positions", "int32", ("n",)),
    Argument("slots", "int32", ("n",)),
    Argument("q_indptr", "int32", ("b+1",)),
    Argument("page_indptr", "int32", ("b+1",)),
    Argument("page_table", "int32", ("p",)),
    Argument("kv_lengths", "int32", ("b",)),
)
"""The arguments that describe a batch to attention: the KV cache; each token's position in its sequence, and
its slot in the cache (page number * tokens per page + index in the page); where each sequence's tokens and
pages begin in the concatenated lists, and as the last entry where the lists end; the page table; and the
length of each sequence including its new tokens."""
FORKS = Argument("forks", "int32", ("f", 3))
"""Copies of the first tokens of KV cache pages, as rows (source page, destination page, number of tokens).
The copies are made in this order, after the keys and values of all new tokens are in the cache."""

_TOKENS = Argument("tokens", "int32", ("n",))
_ROWS = Argument("logit_positions", "int32", ("q",))
_SAMPLING = Argument("sampling_params", SAMPLING_DTYPE, ("q", len(SAMPLING_COLUMNS)))
_MASKS = Argument("masks", "int32", ("m", "w"))
_EMBEDDINGS = Argument("input_embeds", "float32", (1, "n", "hidden"))
_STEP = (_TOKENS, _ROWS, _SAMPLING, Argument("sampled", "int32", ("q",)), _MASKS, *BATCH)
_LOOP = (
    Argument("tokens", "int32", ("n",)),
    Argument("logit_positions", "int32", ("n",)),
    Argument("sampling_params", SAMPLING_DTYPE, ("n", len(SAMPLING_COLUMNS))),
    _MASKS,
    Argument("random_numbers", SAMPLING_DTYPE, ("k", "n")),
    Argument("stops_at_eos", "int32", ("n",)),
    Argument("eos_tokens", "int32", ("e",)),
    Argument("interrupt", "int32", (1,)),
    Argument("sampled_tokens", "int32", ("k", "n")),
    Argument("state", "int32", (len(STATE_COLUMNS),)),
    Argument("continues", "bool"),
)
"""The arguments of the library functions that run a loop of decode steps with one token per sequence, except
those that describe the batch.

Each step replaces `tokens` by the tokens that it samples, and stores them in row i of `sampled_tokens`; i is
the number of steps done before it (`state`), counted over all calls that continue the loop. Step 0 uses the
random numbers in `sampling_params`, a later one row i of `random_numbers`. A step sets `continues` to True if
the loop executes another one in this call: no sequence with `stops_at_eos` has sampled one of `eos_tokens`,
no token is negative (INVALID_TOKEN or NO_TOKEN), no limit in `state` is reached, and no thread has set
`interrupt`."""

CREATE_CACHE = Function("create_paged_kv_cache", (Argument("num_pages", "int64"),))
"""The library function that returns an uninitialised KV cache of `num_pages` pages, passed as a shape."""
METADATA = Function("_metadata", ())
"""The library function that returns the library's metadata as JSON text, an object with the keys format,
config, scheme, target, limits, params and signature."""
EMBED = Function("embed", (_TOKENS, PARAMS))
"""The library function that returns rows of the input embedding table, float32 [n, hidden], for n token ids,
an int32 tensor."""
STEP = Function("step", (*_STEP, FORKS, PARAMS))
"""The library function that runs the model on a batch, samples a token from each row of logits into
`sampled`, and returns the masked logits, float32 [1, q, vocab]. It also makes the copies in the KV cache that
`forks` lists. In a batch of up to 16 new tokens, each row of logits has the same bits whatever else is in the
batch."""
STEP_PREFILL = Function("step_prefill", (*_STEP, PARAMS))
"""The library function for steps whose tokens belong to prompts: it runs the model on a batch, samples a
token from each row of logits and returns the masked logits, float32 [1, q, vocab]. Its kernels are faster for
many rows than those of the function `step`, and may round differently."""
STEP_ON = Function("step_on", (*_LOOP, *BATCH, PARAMS))
"""The library function for a decode step with one token per sequence: it runs the model, samples a token from
each row of logits, changes its arguments into those of the next step (`tokens`, `positions`, `slots`,
`kv_lengths` and the random numbers) unless the loop ends, and returns the masked logits, float32 [1, n,
vocab]."""
STEPS = Function("steps", (*_LOOP, *BATCH, PARAMS))
"""The library function that executes a decode step, with one token per sequence and no masks, and repeats it
while the flag `continues`, which each step sets, is true; it returns `continues` and no logits."""
SAMPLE = Function(
    "sample_tokens",
    (Argument("logits", "float32", ("q", "v")), _SAMPLING, Argument("tokens", "int32", ("q",)), _MASKS),
)
"""The library function that masks q rows of logits in place, float32 [q, v] with one column per token,
samples a token from each row into `tokens`, int32 [q], and returns the logits, float32 [1, q, v]."""
HIDDEN_STATES = Function("batch_prefill_to_last_hidden_states", (_EMBEDDINGS, *BATCH, PARAMS))
"""The library function that runs the model on embeddings and returns the hidden states after the last norm,
float32 [1, n, hidden]."""

CAPABILITIES: Mapping[str, tuple[Function, ...]] = {
    "generate": (METADATA, CREATE_CACHE, STEP, STEP_PREFILL, SAMPLE),
    "decode_loop": (STEP_ON, STEPS),
    "hidden_states": (EMBED, HIDDEN_STATES),
}
"""Name of a capability of a compiled library -> the functions that a library with this capability exports."""
