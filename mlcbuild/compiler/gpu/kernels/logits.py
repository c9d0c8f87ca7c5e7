"""Emits GPU kernels from tokens to embeddings, and from logits to tokens: embedding, masks, choice, and the
inputs of the next step.

Logits are compared as integers of the same order: WGSL lets compilers assume that no NaN exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlcbuild_format import abi
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.page_layout import InputPlaces
from mlcbuild.compiler.gpu.kernels.storage import StoredAs, StoredMatrix
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    exact,
    kernel,
    local,
    number,
    put,
    strided,
    when,
)

CHOOSERS = 256
"""Number of threads that together search for the largest logit in a part of a row."""
PART = 4096
"""Number of consecutive logits of a row that one workgroup searches for the largest."""
CANDIDATES = 64
_INFINITY = 0x7F800000
"""The bits of float32 infinity, as an integer. Logits are compared by integer keys that have the same order;
only keys of NaN (with sign bit 0) are greater than this number."""
_SMALLEST = -(1 << 31) + 1


def embed(
    name: str, form: StoredAs, shape: tuple[int, int], scale: float, inputs: InputPlaces
) -> KernelBuilder:
    """Returns the kernel x[row] = table[token of the row - first] * scale, for a part of the embedding table
    that begins at token `first`, a scalar of the kernel. Rows with tokens of other parts are left unchanged.
    shape: (rows, columns) of the part.
    """
    rows, columns = shape
    with kernel(name) as k:
        block, x = inputs.declare(k), k.buffer("x", (k.size("n"), columns))
        table = StoredMatrix.declare(k, form, rows, columns)
        first = k.scalar("first")
        with k.launch(WORKGROUP, -(-columns // WORKGROUP), "n") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            token = bind(block[inputs.tokens + row] - first)
            with when(T.And(column < columns, T.And(token >= 0, token < rows))):
                value = table.number(token, column)
                put(x, value if scale == 1 else value * exact(scale), row, column)
    return k


def add_positions(
    name: str, form: StoredAs, shape: tuple[int, int], offset: int, inputs: InputPlaces
) -> KernelBuilder:
    """Returns the kernel x[row] += table[position of the row + offset], which adds learned position
    embeddings in place; a place beyond the table's end reads its last row. shape: (rows, columns) of the
    table."""
    rows, columns = shape
    with kernel(name) as k:
        block, x = inputs.declare(k), k.buffer("x", (k.size("n"), columns))
        table = StoredMatrix.declare(k, form, rows, columns)
        with k.launch(WORKGROUP, -(-columns // WORKGROUP), "n") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            place = bind(T.min(block[inputs.positions + row] + offset, rows - 1))
            with when(column < columns):
                put(x, x[row, column] + table.number(place, column), row, column)
    return k


def mask(name: str, vocab: int) -> KernelBuilder:
    """Returns the kernel that sets the logits [q, vocab] of excluded tokens to minus infinity, in place. A
    row of `masks`, int32, is the index of a row of logits, followed by words with one bit for each token, 0
    if it is excluded; the lowest bit of a word comes first."""
    words = -(-vocab // abi.MASK_WORD)
    with kernel(name) as k:
        logits = k.buffer("logits", (k.size("q"), vocab), "uint32")
        masks = k.buffer("masks", (k.size("m"), 1 + words), "int32")
        with k.launch(WORKGROUP, -(-vocab // WORKGROUP), "m") as (bx, index, tx):
            token = bind(bx * WORKGROUP + tx)
            with when(token < vocab):
                word = bind(T.Cast("uint32", masks[index, 1 + token // abi.MASK_WORD]))
                bit = T.bitwise_and(T.shift_right(word, T.Cast("uint32", token % abi.MASK_WORD)), T.uint32(1))
                with when(bit == T.uint32(0)):
                    put(logits, T.uint32(0xFF800000), masks[index, 0], token)
    return k


def key(bits: Value) -> Value:
    """Returns an int32 key of the float32 with these bits (int32); keys are ordered like the numbers, and -0
    and 0 have the same key. A NaN comes after infinity or, with sign bit 1, before minus infinity.
    """
    ordered = bind(T.bitwise_xor(bits, T.bitwise_and(T.shift_right(bits, T.int32(31)), T.int32(0x7FFFFFFF))))
    return bind(T.Select(ordered == -1, 0, ordered))


def best_of_parts(name: str, vocab: int) -> KernelBuilder:
    """Returns the kernel that searches each part of 4096 of a row's logits for the largest, the first of
    equal ones, and writes (integer key, token) to `best` int32 [rows, parts, 2]. Keys are int32 numbers
    ordered like the float32 logits; NaN has the largest key, whatever its sign. vocab: logits of a row.
    """
    parts = -(-vocab // PART)
    with kernel(name) as k:
        q = k.size("q")
        logits, best = k.buffer("logits", (q, vocab), "int32"), k.buffer("best", (q, parts * 2), "int32")
        with k.launch(CHOOSERS, parts, "q") as (part, row, tx):
            chosen = _Chosen(k)
            with T.serial(PART // CHOOSERS) as index:
                token = bind(part * PART + index * CHOOSERS + tx)
                with when(token < vocab):
                    bits = bind(logits[row, token])
                    is_nan = T.bitwise_and(bits, T.int32(0x7FFFFFFF)) > _INFINITY
                    chosen.consider(bind(T.Select(is_nan, T.int32(0x7FFFFFFF), key(bits))), token)
            chosen.reduce(tx)
            with when(tx == 0):
                put(best, chosen.keys[0], row, 2 * part)
                put(best, chosen.tokens[0], row, 2 * part + 1)
    return k


def best_of_row(name: str, vocab: int) -> KernelBuilder:
    """Returns the kernel that writes the token of each row's largest logit to `sampled` int32 [rows], or
    abi.INVALID_TOKEN (-1) if that logit is NaN or infinite. For each part of 4096 logits it reads (key,
    token) of the largest from `best` int32 [rows, parts * 2]; keys are int32, ordered like the logits.
    """
    parts = -(-vocab // PART)
    with kernel(name) as k:
        q = k.size("q")
        best, sampled = k.buffer("best", (q, parts * 2), "int32"), k.buffer("sampled", (q,), "int32")
        with k.launch(WORKGROUP, "q") as (row, _, tx):
            chosen = _Chosen(k, WORKGROUP)
            strided(
                parts,
                tx,
                WORKGROUP,
                lambda part: chosen.consider(bind(best[row, 2 * part]), bind(best[row, 2 * part + 1])),
            )
            chosen.reduce(tx)
            with when(tx == 0):
                largest = bind(chosen.keys[0])
                # The key of minus infinity: the bits 0xFF800000 xor 0x7FFFFFFF.
                invalid = T.Or(largest >= _INFINITY, largest <= -_INFINITY - 1)
                put(sampled, T.Select(invalid, abi.INVALID_TOKEN, chosen.tokens[0]), row)
    return k


class _Chosen:
    """The largest logit that the threads of a workgroup have compared so far, as an int32 key in the order of
    logits, and the lowest token that has it.
    """

    def __init__(self, k: KernelBuilder, threads: int = CHOOSERS) -> None:
        self._threads = threads
        self._best = local(2, "int32")
        self.keys, self.tokens = k.shared(threads, "int32"), k.shared(threads, "int32")
        put(self._best, T.int32(_SMALLEST), 0)
        put(self._best, T.int32(0), 1)

    def consider(self, value: Value, token: Value) -> None:
        """Emits code that replaces the running thread's largest logit and its token if another logit is
        larger. value: the other logit, as an int32 key in the order of logits; token: its token. A thread
        must consider tokens in ascending order, so that the lowest of several equal logits remains."""
        with when(value > self._best[0]):
            put(self._best, value, 0)
            put(self._best, token, 1)

    def reduce(self, tx: Value) -> None:
        """Emits the reduction over the workgroup's threads, after which the shared keys[0] and tokens[0] hold
        the largest logit, as an int32 key in the order of logits, and the lowest token that has it. tx: index
        of the thread.
        """
        keys, tokens = self.keys, self.tokens
        put(keys, self._best[0], tx)
        put(tokens, self._best[1], tx)
        barrier()
        step = self._threads // 2
        while step:
            bounded = bind(T.min(tx + step, self._threads - 1))
            other, current = bind(keys[bounded]), bind(keys[tx])
            first, second = bind(tokens[tx]), bind(tokens[bounded])
            better = bind(T.Or(other > current, T.And(other == current, second < first)))
            barrier()
            with when(T.And(tx < step, better)):
                put(keys, other, tx)
            with when(T.And(tx < step, better)):
                put(tokens, second, tx)
            barrier()
            step //= 2


def candidates(name: str, vocab: int) -> KernelBuilder:
    """Returns the kernel that selects the 64 largest logits of each row. It writes to `top` int32 [q, 2 + 2 *
    64] the bits of the largest logit, those of the sum of exp(logit - largest) over the row, then bits and
    token of each selected logit, unordered; for a row with fewer than 64 logits the rest of `top` stays
    unchanged.

    The smallest selected logit is found by bisection over integers that have the order of the logits. Of
    several tokens with this logit, any are selected.
    """
    with kernel(name) as k:
        q = k.size("q")
        logits = k.buffer("logits", (q, vocab), "int32")
        top = k.buffer("top", (q, 2 + 2 * CANDIDATES), "int32")
        with k.launch(CHOOSERS, "q") as (row, _, tx):
            counts, reals, thread_count = k.shared(CHOOSERS, "int32"), k.shared(CHOOSERS), local(1, "int32")
            real, low = local(1), local(1, "int32")
            line = _Line(logits, vocab, row, tx, counts, thread_count)
            maximum = line.maximum()
            put(real, number(0), 0)
            line.each(lambda _, bits: put(real, real[0] + T.exp(T.reinterpret("float32", bits) - maximum), 0))
            put(reals, real[0], tx)
            _reduce(reals, tx, CHOOSERS, lambda left, right: left + right)
            with when(tx == 0):
                put(top, T.reinterpret("int32", maximum), row, 0)
                put(top, T.reinterpret("int32", reals[0]), row, 1)
            line.find_threshold(low)
            line.gather(top, low)
    return k


@dataclass(frozen=True)
class _Line:
    """One row of logits, which the threads of a workgroup search together."""

    logits: Value
    vocab: int
    row: Value
    tx: Value
    """Index, within its workgroup, of the thread for which code is emitted."""
    counts: Value  # int32, one count per thread, in shared memory
    thread_count: Value  # int32, of one thread

    def each(self, body: Callable[[Value, Value], None]) -> None:
        """Emits a loop over those logits of the row that belong to the running thread. body: function of
        (token, bits of the logit as int32) that emits the loop's body.
        """
        with T.serial(-(-self.vocab // CHOOSERS)) as index:
            token = bind(index * CHOOSERS + self.tx)
            with when(token < self.vocab):
                body(token, bind(self.logits[self.row, token]))

    def maximum(self) -> Value:
        """Emits code with which all threads of a workgroup search a row of logits for the largest, and
        returns this logit as a float32 expression. NaN counts as larger than all numbers or, with sign bit 1,
        as smaller."""
        put(self.thread_count, T.int32(_SMALLEST), 0)
        self.each(lambda _, bits: put(self.thread_count, T.max(self.thread_count[0], key(bits)), 0))
        put(self.counts, self.thread_count[0], self.tx)
        _reduce(self.counts, self.tx, CHOOSERS, T.max)
        largest = bind(self.counts[0])
        barrier()
        bits = T.Select(largest < 0, T.bitwise_xor(largest, T.int32(0x7FFFFFFF)), largest)
        return bind(T.reinterpret("float32", bits))

    def find_threshold(self, low: Value) -> None:
        """Emits code that searches for the largest threshold which at least 64 logits of the row reach, the
        smallest key if the row has fewer, and stores it in `low`, an array of one int32 per thread. Threshold
        and logits are compared as keys, int32 numbers in the order of the logits. The search determines the
        key bit by bit from the highest."""
        thread_count, tx = self.thread_count, self.tx
        put(low, T.int32(_SMALLEST), 0)
        with T.serial(32) as bit:
            probe = bind(low[0] + T.Cast("int32", T.shift_left(T.uint32(1), T.Cast("uint32", 31 - bit))))
            put(thread_count, T.int32(0), 0)

            def count(_: Value, bits: Value) -> None:
                with when(key(bits) >= probe):
                    put(thread_count, thread_count[0] + 1, 0)

            self.each(count)
            put(self.counts, thread_count[0], tx)
            _reduce(self.counts, tx, CHOOSERS, lambda left, right: left + right)
            enough = bind(self.counts[0] >= CANDIDATES)
            barrier()
            with when(T.And(enough, probe > low[0])):
                put(low, probe, 0)

    def gather(self, top: Value, low: Value) -> None:
        """Emits code that writes up to 64 logits of a row to the row of `top`, from column 2 on, each as
        (bits of the logit, token): first those above the threshold `low`, then those equal to it until there
        are 64; neither group is sorted. Columns that are not filled stay unchanged. low: array of one int32
        that `find_threshold` has filled, so that fewer than 64 logits are above it; it is compared with the
        keys of logits, integers that have the order of logits.
        """
        thread_count, at = local(1, "int32"), local(1, "int32")
        start = T.int32(0)
        for above in (True, False):
            put(thread_count, T.int32(0), 0)

            def chosen(bits: Value, above: bool = above) -> Value:
                return key(bits) > low[0] if above else key(bits) == low[0]

            def count(_: Value, bits: Value) -> None:
                with when(chosen(bits)):
                    put(thread_count, thread_count[0] + 1, 0)

            self.each(count)
            put(self.counts, thread_count[0], self.tx)
            barrier()
            put(at, start, 0)
            total = local(1, "int32")
            put(total, start, 0)
            with T.serial(CHOOSERS) as other:
                more = bind(self.counts[other])
                with when(other < self.tx):
                    put(at, at[0] + more, 0)
                put(total, total[0] + more, 0)

            def store(token: Value, bits: Value) -> None:
                with when(T.And(chosen(bits), at[0] < CANDIDATES)):
                    put(top, bits, self.row, 2 + 2 * at[0])
                    put(top, token, self.row, 3 + 2 * at[0])
                    put(at, at[0] + 1, 0)

            self.each(store)
            start = bind(total[0])
            barrier()


def _reduce(buffer: Value, tx: Value, threads: int, combine: Callable[[Value, Value], Value]) -> None:
    barrier()
    step = threads // 2
    while step:
        with when(tx < step):
            put(buffer, combine(buffer[tx], buffer[tx + step]), tx)
        barrier()
        step //= 2


def advance(name: str, rows: int, steps: int, inputs: InputPlaces) -> KernelBuilder:
    """Returns the kernel that ends a step of a decode loop. It writes the sampled token of each sequence to
    the next row of `history` int32 [steps, rows], makes these tokens, their positions and their slots (places
    in the KV cache) the inputs of the next step, and adds 1 to the number of completed steps among the
    inputs. An invalid token (-1) stays -1 in `history`, but becomes 0 as an input. rows: maximum number of
    sequences in a step; steps: maximum number of steps of the loop; inputs: offsets of the inputs in their
    buffer."""
    with kernel(name) as k:
        n = k.size("n")
        block, sampled = inputs.declare(k), k.buffer("sampled", (n,), "int32")
        history = k.buffer("history", (steps, rows), "int32")
        with k.launch(CHOOSERS, 1) as (_, _y, tx):
            done = bind(block[inputs.count])
            barrier()
            with T.serial((n + CHOOSERS - 1) // CHOOSERS) as index:
                row = bind(index * CHOOSERS + tx)
                with when(row < n):
                    token, position = bind(sampled[row]), bind(block[inputs.positions + row] + 1)
                    put(history, token, done, row)
                    put(block, T.max(token, 0), inputs.tokens + row)
                    put(block, position, inputs.positions + row)
                    entry = inputs.page_table + block[inputs.first_page + row] + position // abi.PAGE
                    put(block, block[entry] * abi.PAGE + position % abi.PAGE, inputs.slots + row)
            with when(tx == 0):
                put(block, done + 1, inputs.count)
    return k
