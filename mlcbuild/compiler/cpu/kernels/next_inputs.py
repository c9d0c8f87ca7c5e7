"""Emits the kernel that turns the arguments of a decode step into those of the next step, in which each
sequence again has one token.

With this kernel, one call of the library runs several steps. The caller's work is then done once for all of
them, and the caller's code and data, which the model's weights have evicted from the caches, are fetched
once.
"""

from __future__ import annotations

from mlcbuild_format.abi import PAGE, SAMPLING_COLUMNS, SAMPLING_DTYPE, STATE_COLUMNS
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.kernels.floats import kernel, size_var
from mlcbuild.compiler.cpu.kernels.vectors import register

RANDOM = SAMPLING_COLUMNS.index("random")
STEPS_DONE, PAUSE_AFTER, STEP_LIMIT = map(STATE_COLUMNS.index, ("steps_done", "pause_after", "step_limit"))
FIXED = ("tokens", "page_indptr", "page_table", "random_numbers", "stops_at_eos", "eos_tokens", "interrupt")
CHANGED = ("positions", "slots", "kv_lengths", "sampling_params", "sampled_tokens", "state", "continues")
"""Names of the buffers that the library function `step_on` passes to the kernel that prepares the next decode
step, and that this kernel changes in place, in the order of its arguments; those in FIXED, which it only
reads, come before them.
"""


def follow() -> PrimFunc:
    """Returns the kernel that turns the arguments of one decode step into those of the next.

    Its arguments are: tokens int32 [n], page_indptr int32 [n + 1] (the first index in page_table of each
    sequence's pages, which must include that of its next token), page_table int32 [p], random_numbers float64
    [k, n], stops_at_eos int32 [n], eos_tokens int32 [e], interrupt int32 [1]; and, changed in place,
    positions int32 [n], slots int32 [n] (a token's index in the KV cache: page * 16 + index in the page),
    lengths int32 [n] (tokens of each sequence in the KV cache), sampling_params float64 [n, 5] (the last
    column is a random number, the others stay unchanged), sampled_tokens int32 [k, n], state int32 [3] (steps
    done, steps after which the loop pauses, maximum steps), continues bool [].

    `tokens` are those that the step has sampled, and the inputs of the next step. They are copied to row i of
    `sampled_tokens`, where i is the number of steps done before this one; then this number is increased by 1.
    Positions and lengths grow by 1, slots become those of the new positions, and row i + 1 of
    `random_numbers` replaces the step's random numbers. No step follows, for any sequence, if one sampled
    token is negative, or is one of `eos_tokens` in a sequence with `stops_at_eos`, or after the maximum
    number of steps; then only sampled_tokens, state and continues change. `continues` is True if the next
    step must follow in the same call; False if none follows, when the loop pauses, or when any thread has set
    `interrupt`. In the last two cases the next step's arguments are in place.
    """
    with kernel("follow") as building:
        n, many = size_var("n"), size_var("k")
        tokens = building.tensor("tokens", (n,), "int32")
        page_indptr = building.tensor("page_indptr", (n + 1,), "int32")
        page_table = building.tensor("page_table", (size_var("p"),), "int32")
        random_numbers = building.tensor("random_numbers", (many, n), SAMPLING_DTYPE)
        stops_at_eos = building.tensor("stops_at_eos", (n,), "int32")
        eos_tokens = building.tensor("eos_tokens", (size_var("e"),), "int32")
        interrupt = building.tensor("interrupt", (1,), "int32")
        positions = building.tensor("positions", (n,), "int32")
        slots = building.tensor("slots", (n,), "int32")
        lengths = building.tensor("lengths", (n,), "int32")
        sampling_params = building.tensor("sampling_params", (n, len(SAMPLING_COLUMNS)), SAMPLING_DTYPE)
        sampled_tokens = building.tensor("sampled_tokens", (many, n), "int32")
        state = building.tensor("state", (len(STATE_COLUMNS),), "int32")
        continues = building.tensor("continues", (), "bool")
        with building.body():
            step = T.bind(state[STEPS_DONE])
            going = register(T.Select(step + 1 < state[STEP_LIMIT], T.int32(1), T.int32(0)), 1, "int32")
            with T.serial(n) as row:
                token = T.bind(tokens[row])
                T.buffer_store(sampled_tokens, token, [step, row])
                over = register(T.Select(token < 0, T.int32(1), T.int32(0)), 1, "int32")
                with T.serial(eos_tokens.shape[0]) as end:
                    over.set(T.Select(token == eos_tokens[end], over.value | stops_at_eos[row], over.value))
                going.set(T.Select(over.value != 0, T.int32(0), going.value))
            T.buffer_store(state, step + 1, [STEPS_DONE])
            more = T.bind(going.value != 0)
            with T.If(more), T.Then(), T.serial(n) as row:
                position = T.bind(positions[row] + 1)
                T.buffer_store(positions, position, [row])
                page = T.bind(page_table[page_indptr[row] + position // PAGE])
                T.buffer_store(slots, page * PAGE + position % PAGE, [row])
                T.buffer_store(lengths, lengths[row] + 1, [row])
                T.buffer_store(sampling_params, random_numbers[step + 1, row], [row, RANDOM])
            paused = T.Or(step + 1 >= state[PAUSE_AFTER], interrupt[0] != 0)
            T.buffer_store(continues, T.And(more, T.Not(paused)), [])
    return building.func
