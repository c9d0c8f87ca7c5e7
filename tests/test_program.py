"""Tests of the format of GPU programs, and that an untrusted program cannot access memory outside of its
buffers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.program import (
    FEATURES,
    PACKED_PRODUCTS,
    SUBGROUPS,
    Alternative,
    Binding,
    BoundBuffer,
    Buffer,
    CallVariant,
    DeviceLimits,
    Launch,
    Program,
    RopeTable,
    Section,
    Shader,
    check,
    evaluate,
)
from mlcbuild_format.program_json import parse, to_bytes, to_json

from tests.program_interpreter import Bytes, Interpreter
from tests.runtime import mutations

COLUMNS = 4
LOOKUP = Shader(
    file="kernels/lookup.wgsl",
    entry="lookup",
    threads=64,
    shared_bytes=0,
    bindings=(
        Binding("inputs", False, ("mul", 4, ("add", 8, "n"))),
        Binding("rope", False, 16 * 2 * 2 * 4),
        Binding("table", False, 10 * COLUMNS * 4),
        Binding("x", True, ("mul", "n", COLUMNS * 4)),
    ),
    scalars=("n",),
    uniforms=0,
    grid=("n", 1),
)
DOUBLE = Shader(
    file="kernels/double.wgsl",
    entry="double",
    threads=64,
    shared_bytes=256,
    bindings=(
        Binding("x", False, ("mul", "rows", COLUMNS * 4)),
        Binding("y", True, ("mul", "rows", COLUMNS * 4)),
    ),
    scalars=("factor", "rows"),
    uniforms=1,
    grid=(("div", ("mul", "rows", COLUMNS), 64), ("min", "factor", 1)),
    alternatives=(
        Alternative((PACKED_PRODUCTS, SUBGROUPS), "kernels/double_packed.wgsl", 64),
        Alternative((SUBGROUPS,), "kernels/double_subgroups.wgsl", 128),
    ),
)
PROGRAM = Program(
    signature="0" * 64,
    params=(("embed.weight", [10, COLUMNS], "float32", "plain"),),
    sizes={"n": 8, "pages": 32},
    kernels={"lookup": LOOKUP, "double": DOUBLE},
    buffers={
        "in": Buffer("inputs", 4 * 16),
        "x": Buffer("workspace", ("mul", "n", COLUMNS * 4)),
        "y": Buffer("cache", ("mul", ("add", "n", "pages"), COLUMNS * 4)),
        "rope": Buffer("rope", 16 * 2 * 2 * 4),
    },
    inputs={"tokens": Section(0, "n"), "positions": Section(8, "n")},
    ropes={"rope": RopeTable(16, (1.0, 0.5), 2.0)},
    functions={
        "one": (
            CallVariant(
                {"n": 1},
                (
                    Launch(
                        "lookup",
                        (
                            BoundBuffer("in"),
                            BoundBuffer("rope"),
                            BoundBuffer("embed.weight"),
                            BoundBuffer("x"),
                        ),
                        ("n",),
                    ),
                ),
            ),
        ),
        "step": (
            CallVariant({"n": 2}, (Launch("double", (BoundBuffer("x"), BoundBuffer("y", 256)), (0, "n")),)),
            CallVariant(
                {"n": 8},
                (
                    Launch(
                        "lookup",
                        (
                            BoundBuffer("in"),
                            BoundBuffer("rope"),
                            BoundBuffer("embed.weight"),
                            BoundBuffer("x"),
                        ),
                        ("n",),
                    ),
                    Launch("double", (BoundBuffer("x"), BoundBuffer("y", 256)), (3, "n")),
                ),
            ),
        ),
    },
)


def lookup(bound: Mapping[str, Bytes], scalars: Mapping[str, int], grid: tuple[int, int]) -> None:
    words, table = bound["inputs"].view(np.int32), bound["table"].view(np.float32).reshape(-1, COLUMNS)
    rope = bound["rope"].view(np.float32).reshape(16, 4)
    rows = [table[words[row]] + rope[words[8 + row], 0] for row in range(grid[0])]
    bound["x"].view(np.float32)[:] = np.concatenate(rows)


def double(bound: Mapping[str, Bytes], scalars: Mapping[str, int], grid: tuple[int, int]) -> None:
    bound["y"].view(np.float32)[:] = bound["x"].view(np.float32) * np.float32(scalars["factor"])


def interpreter(program: Program) -> Interpreter:
    table = np.arange(40, dtype=np.float32)
    params = {"embed.weight": table.view(np.uint8)}
    return Interpreter(program, 32, {"lookup": lookup, "double": double}, params)


def test_a_program_computes_what_its_launches_say() -> None:
    machine = interpreter(PROGRAM)
    machine.write({"tokens": [3, 1, 0], "positions": [0, 2, 1]})
    assert machine.run("step", {"n": 3}) == 2
    cosines = 2 * np.cos(np.array([0, 2, 1], np.float32))
    expected = 3 * (np.arange(40, dtype=np.float32).reshape(10, 4)[[3, 1, 0]] + cosines[:, None])
    actual = machine.buffers["y"][256 : 256 + 48].view(np.float32).reshape(3, 4)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_launch_with_an_empty_grid_is_left_out() -> None:
    assert interpreter(PROGRAM).run("step", {"n": 2}) == 0


def test_no_variant_takes_more_than_its_sizes() -> None:
    assert PROGRAM.variant("step", {"n": 2}) is PROGRAM.functions["step"][0]
    assert PROGRAM.variant("step", {"n": 3}) is PROGRAM.functions["step"][1]
    with pytest.raises(ValueError, match=r"step takes no call of the sizes \{'n': 9\}"):
        PROGRAM.variant("step", {"n": 9})


def test_a_program_is_written_and_read_without_loss() -> None:
    data = to_bytes(PROGRAM)
    assert parse(parse_json(data)) == PROGRAM
    assert to_bytes(parse(parse_json(data))) == data


def test_a_device_gets_the_best_text_for_its_features() -> None:
    files = {
        features: PROGRAM.for_device(features).kernels["double"].file
        for features in (FEATURES, (SUBGROUPS,), (PACKED_PRODUCTS,), ())
    }
    assert list(files.values()) == [
        "kernels/double_packed.wgsl",
        "kernels/double_subgroups.wgsl",
        "kernels/double.wgsl",
        "kernels/double.wgsl",
    ]
    chosen = PROGRAM.for_device(FEATURES)
    assert chosen.kernels["double"].shared_bytes == 64
    assert not any(kernel.alternatives for kernel in chosen.kernels.values())
    assert chosen.functions == PROGRAM.functions


def test_expressions_round_quotients_up() -> None:
    sizes = {"n": 65}
    assert evaluate(("div", "n", 64), sizes) == 2
    assert evaluate(("max", ("min", "n", 3), ("add", 1, 1)), sizes) == 3


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(to_json(PROGRAM)))
    change(document)
    return document


def alternative(document: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = document["kernels"]["double"]["alternatives"][0]
    return first


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format="mlcbuild-program/1"), "'format' must be 'mlcbuild-program/2', found"),
    (lambda d: d.update(more=1), "unknown field 'more'"),
    (lambda d: (d["sizes"].pop("pages"), d["buffers"]["y"].update(size=640)), "'sizes.pages' is missing"),
    (lambda d: d["sizes"].update({"a b": 1}), "'sizes.name' must be a string of the form"),
    (lambda d: d.update(params={}), "'params' must be a list"),
    (lambda d: d["params"][0].pop(), r"'params' holds .*, not \[name, shape, dtype, layout\]"),
    (lambda d: d["kernels"]["lookup"]["grid"].pop(), "'kernels.lookup' has a grid of 1 dimensions, not 2"),
    (lambda d: d["kernels"]["lookup"].update(file="../x"), "'kernels.lookup.file' must be a string of the"),
    (lambda d: d["kernels"]["lookup"].update(scalars=["n", "n"]), "two scalars or two bindings of one name"),
    (lambda d: d["kernels"]["lookup"]["bindings"][0].update(written=1), "'written' must be true or false"),
    (lambda d: d["kernels"]["lookup"].update(grid=[["sub", "n", 1], 1]), "where an expression must stand"),
    (lambda d: d["kernels"]["lookup"].update(grid=[["div", "n", "n"], 1]), "divides by 'n', not by a whole"),
    (lambda d: d["kernels"]["lookup"].update(grid=["q", 1]), "has 'q' where an expression must stand"),
    (
        lambda d: d["kernels"]["lookup"].update(scalars=["n", *map("n{}".format, range(99))], uniforms=64),
        "'kernels.lookup.uniforms' must be an integer of at most 63, found 64",
    ),
    (lambda d: d["kernels"]["lookup"].update(grid=1), "'grid' must be a list, found 1"),
    (lambda d: d["kernels"]["lookup"].pop("alternatives"), "'alternatives' must be a list, found None"),
    (lambda d: alternative(d).update(features=["warp"]), "alternatives needs a feature of .*, found 'warp'"),
    (lambda d: alternative(d).update(features=[]), "alternatives needs a feature of .*, found none"),
    (lambda d: alternative(d).update(features="subgroups"), "features' must be a list of strings"),
    (lambda d: alternative(d).update(file="/etc/passwd"), "alternatives.file' must be a string of the form"),
    (lambda d: alternative(d).update(shared_bytes=-1), "alternatives.shared_bytes' must be an integer"),
    (lambda d: alternative(d).update(threads=64), "unknown field 'kernels.double.alternatives.threads'"),
    (lambda d: d["buffers"]["x"].update(kind="other"), "'buffers.x' is of kind 'other', not workspace"),
    (lambda d: d["buffers"].pop("in"), "must have one entry of kind inputs"),
    (lambda d: d["ropes"].clear(), "one of kind rope for each of 'ropes'"),
    (lambda d: d["ropes"]["rope"].update(rows=17), "'buffers.rope' must have 272 bytes"),
    (lambda d: d["ropes"]["rope"].update(inv_freq=["x"]), "must have numbers from 0 to 1e9"),
    (lambda d: d["ropes"]["rope"]["inv_freq"].__setitem__(0, True), "must have numbers from 0 to 1e9"),
    (lambda d: d["inputs"]["positions"].update(start=9), "'inputs.positions' ends at byte 68, beyond"),
    (lambda d: d["functions"].update(step={}), "'functions.step' must be a list of variants"),
    (lambda d: d["functions"]["one"][0]["sizes"].update(n=9), "size 'n' may be 9, more than the program has"),
    (lambda d: d["functions"]["one"][0]["launches"].append(3), r"holds 3, not \[kernel, buffers, scalars\]"),
    (lambda d: d["functions"]["one"][0]["launches"][0][1].append([3]), "binds \\[3\\], not a name or"),
    (lambda d: d["functions"]["one"][0]["launches"][0][1].append("x"), "has 5 buffers and 1 scalars"),
    (lambda d: d["functions"]["one"][0]["launches"][0].__setitem__(0, "z"), "kernel 'z', which 'kernels'"),
    (lambda d: d["functions"]["one"][0]["launches"][0][1].__setitem__(0, "z"), "binds 'z', which is no"),
    (lambda d: d["params"].append(["x", [1], "float32", "plain"]), "two entries of one name"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_program_that_makes_no_sense_is_refused_in_one_sentence(number: int) -> None:
    change, message = REFUSED[number]
    with pytest.raises(FieldError, match=message):
        parse(changed(change))


def with_launch(launch: Launch) -> Program:
    return replace(PROGRAM, functions={"step": (CallVariant({"n": 8}, (launch,)),)})


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("x")), (1, "n")),
            "writes 'x', which is bound to it twice",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("embed.weight")), (1, "n")),
            "writes 'embed.weight', which is c",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("rope")), (1, "n")),
            "writes 'rope', which is constant",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("y", 16)), (1, "n")),
            "bound at byte 16, no multiple of 256",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("y", 768)), (1, "n")),
            "128 bytes of 'y' from byte 768 on, wh",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("y")), (1, ("add", "n", 1))),
            "144 bytes of 'x' from byte 0 on",
        ),
        (
            Launch("double", (BoundBuffer("x"), BoundBuffer("y")), (1 << 31, "n")),
            "a scalar of kernel 'double' exceeds",
        ),
    ],
)
def test_a_launch_must_keep_within_its_buffers(launch: Launch, message: str) -> None:
    with pytest.raises(FieldError, match=rf"'functions.step\[0\].launches\[0\]': .*{message}"):
        check(with_launch(launch), 32)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (DeviceLimits(storage_buffers=3), "'kernels.lookup' needs 4 storage buffers, and the device has 3"),
        (DeviceLimits(threads=63), "'kernels.lookup' needs 64 threads, and the device has 63"),
        (DeviceLimits(shared_bytes=255), "needs 256 bytes of shared memory, and the device has 255"),
        (DeviceLimits(buffer_bytes=639), "'y' takes 640 bytes, and a buffer of the device 639"),
        (DeviceLimits(binding_bytes=255), "accesses 256 bytes of 'rope' at once, and the device allows 255"),
        (DeviceLimits(workgroups=7), "needs 8 workgroups in one dimension, and the device has 7"),
    ],
)
def test_a_program_beyond_the_device_is_refused(limits: DeviceLimits, message: str) -> None:
    check(PROGRAM, 32)
    with pytest.raises(FieldError, match=message):
        check(PROGRAM, 32, limits)


def mutated(rng: random.Random) -> Any:
    """Returns a copy of a GPU program in which one number or name is changed, or any JSON value is replaced,
    at random."""
    if rng.random() < 0.4:
        return parse_json(mutations.document(rng, to_json(PROGRAM)))
    document = changed(lambda document: None)
    mutations.change_value(rng, [document])
    return document


def test_a_thousand_mutated_programs_are_refused_or_keep_within_their_buffers() -> None:
    """Checks a thousand mutated GPU programs: each is refused, or the interpreter confirms that every kernel
    gets the bytes that it declares. The kernels here do nothing."""
    rng, ran = random.Random(7), 0
    for _ in range(1000):
        try:
            program = parse(mutated(rng))
            check(program, 32)
        except (FieldError, ValueError):
            continue
        if sum(program.buffer_bytes(32).values()) + sum(program.param_bytes().values()) > 1 << 24:
            continue  # within a device's limits, and no matter for this machine's memory
        nothing = dict.fromkeys(program.kernels, lambda bound, scalars, grid: None)
        machine = Interpreter(program, 32, nothing)
        for name, variants in program.functions.items():
            for variant in variants:
                machine.run(name, variant.sizes)
        ran += 1
    assert ran > 50, "most mutations must not be refused for their spelling alone"
