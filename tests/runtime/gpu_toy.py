"""Builds the bundle of the toy model (see toy.py) for GPUs: `gpu_toy.py DIRECTORY` writes it.

The kernels that compute tokens from logits are those of real models. The file is run as a program, because it
imports the compiler.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mlcbuild_format import program_json
from mlcbuild_format.abi import PAGE
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import PROGRAM, Launch, Program
from mlcbuild_format.signature import signature
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.call_sizes import FORKS, STEPS
from mlcbuild.compiler.gpu.kernels import logits, page_layout
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec, InputPlaces
from mlcbuild.compiler.gpu.launch_plan import GpuDecoder
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    bind,
    floating,
    kernel,
    local,
    number,
    put,
    when,
)
from tests.runtime import toy

CACHE = CacheSpec(heads=1, kv_heads=1, head_dim=1, half=False)
"""The layout of the toy model's KV cache: the key at each position is the token itself, and values are not
used."""
PARAMS = (("table", [toy.VOCAB, 4], "float32", "plain"),)


def append(name: str, inputs: InputPlaces) -> KernelBuilder:
    """Returns the GPU kernel that writes the new tokens of a step to their places in the KV cache."""
    with kernel(name) as k:
        block, pages = inputs.declare(k), CACHE.declare(k)
        table = k.buffer("table", (toy.VOCAB, 4))
        k.scalar("n")
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            slot = bind(block[inputs.slots + row])
            with when(tx == 0):
                put(pages, table[block[inputs.tokens + row], 0], slot // PAGE, slot % PAGE)
    return k


def total(name: str, inputs: InputPlaces) -> KernelBuilder:
    """Returns the GPU kernel that computes x[row] for each new token of a step: the sum over the tokens of
    its sequence up to its own position, each times (position mod 7) + 1."""
    with kernel(name) as k:
        block, pages = inputs.declare(k), CACHE.declare(k)
        x = k.buffer("x", (k.size("n"), 1))
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            total_of_thread = local(1)
            put(total_of_thread, number(0), 0)
            first = bind(block[inputs.first_page + row])
            with T.serial(bind(block[inputs.positions + row] + 1)) as place:
                page = bind(block[inputs.page_table + first + place // PAGE])
                put(
                    total_of_thread,
                    total_of_thread[0] + pages[page, place % PAGE] * floating(place % 7 + 1),
                    0,
                )
            with when(tx == 0):
                put(x, total_of_thread[0], row, 0)
    return k


def select(name: str, inputs: InputPlaces) -> KernelBuilder:
    """Returns the GPU kernel that copies the rows for which logits are computed: selected[r] = x[rows[r]],
    where `rows` are indices into x."""
    with kernel(name) as k:
        block, x = inputs.declare(k), k.buffer("x", (k.size("n"), 1))
        y = k.buffer("selected", (k.size("q"), 1))
        with k.launch(WORKGROUP, "q") as (row, _, tx), when(tx == 0):
            put(y, x[block[inputs.rows + row], 0], row, 0)
    return k


def head(name: str) -> KernelBuilder:
    """Returns the GPU kernel that computes logits from the token selected for each row: logits[r, v] = -((v -
    selected[r]) mod vocabulary) / 2, so that the selected token is the most likely one."""
    with kernel(name) as k:
        q = k.size("q")
        x, y = k.buffer("selected", (q, 1)), k.buffer("logits", (q, toy.VOCAB))
        with k.launch(WORKGROUP, -(-toy.VOCAB // WORKGROUP), "q") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            selected_token = bind(T.Cast("int32", x[row, 0]) % toy.VOCAB)
            with when(column < toy.VOCAB):
                distance = (column - selected_token + toy.VOCAB) % toy.VOCAB
                put(y, floating(distance) * number(-0.5), row, column)
    return k


def program(build: LaunchBuilder) -> Program:
    calls, emitter = build.calls, build.emitter
    emitter.buffer("inputs", 4 * calls.places.words, "inputs")
    emitter.buffer("pages.0", ("mul", "pages", 4 * CACHE.page_words), "cache")
    emitter.buffer("x", ("mul", "n", 4))
    parts = -(-toy.VOCAB // logits.PART)
    words = {"selected": 1, "logits": toy.VOCAB, "best": 2 * parts, "sampled": 1}
    for name, count in {**words, "top": 2 + 2 * logits.CANDIDATES}.items():
        emitter.buffer(name, ("mul", "q", 4 * count))
    emitter.buffer("history", 4 * STEPS * calls.mask_rows)
    emitter.buffer("masks", ("mul", "m", 4 * (1 + -(-toy.VOCAB // 32))))
    inputs_alone, cache = {"inputs": "inputs"}, {"inputs": "inputs", "pages": "pages.0"}
    sizes: dict[str, Any] = {"n": "n", "pages_count": "pages"}
    trunk: list[Launch] = [
        build.launch(append, (calls.places,), sizes, {**cache, "table": "table"}),
        build.launch(page_layout.fork, (CACHE, calls.places), {**sizes, "count": "f"}, cache),
        build.launch(total, (calls.places,), sizes, {**cache, "x": "x"}),
    ]
    chosen = {**inputs_alone, "x": "x", "selected": "selected"}
    rows = build.launch(select, (calls.places,), {"n": calls.sizes["n"], "q": "q"}, chosen)
    last = build.launch(head, (), {"q": "q"}, {"selected": "selected", "logits": "logits"})
    most = {"q": calls.logit_rows}
    emitter.function("decode", {0: ({"n": calls.decode_rows, "f": FORKS}, trunk)})
    prompt = {name: calls.sizes[name] for name in ("n", "t")}
    emitter.function("prefill", {0: (prompt, [trunk[0], trunk[2]])})
    emitter.function("select", {0: (most, [rows])})
    emitter.function("head", {0: (most, [rows, last])})
    GpuDecoder(build).emit_choice()
    tensors = tuple((name, tuple(shape), dtype, layout) for name, shape, dtype, layout in PARAMS)
    return Program(
        signature=signature(tensors),
        params=PARAMS,
        sizes=calls.sizes,
        kernels=emitter.shaders,
        buffers=emitter.buffers,
        inputs=calls.sections,
        ropes={},
        functions=emitter.functions,
    )


def main(out: Path) -> None:
    config: Any = SimpleNamespace(vocab_size=toy.VOCAB)
    build = LaunchBuilder(config, cast("Any", None), Limits(**toy.LIMITS))
    toy_program = program(build)
    (out / "kernels").mkdir(parents=True)
    (out / PROGRAM).write_bytes(program_json.to_bytes(toy_program))
    for name, text in build.emitter.texts.items():
        (out / name).write_text(text)
    toy.write(out, "webgpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
