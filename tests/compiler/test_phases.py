"""Tests of running compiler passes: which pass is blamed for a program that is not well-formed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import IRModule, relax

from mlcbuild.compiler import phases
from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.passes.operations import operations
from mlcbuild.errors import CompileError
from mlcbuild.targets import presets


def program() -> IRModule:
    """Returns a module with the function `main`, which reshapes a vector in one of two branches."""
    builder = relax.BlockBuilder()
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    vector = relax.Var("vector", relax.TensorType((4,), "float32"))
    with builder.function("main", [flag, vector]):
        reshaped = builder.normalize(relax.op.reshape(vector, (2, 2)))
        negated = builder.normalize(relax.op.reshape(relax.op.negative(vector), (2, 2)))
        builder.emit_func_output(builder.emit(relax.If(flag, reshaped, negated)))
    return builder.finalize()


def undefined(mod: IRModule) -> IRModule:
    """A pass that yields an ill-formed module: `main` returns a variable that nothing defines."""
    (name,) = mod.functions
    main = mod[name]
    other = relax.Var("other", relax.TensorType((2, 2), "float32"))
    return IRModule({name: relax.Function(main.params, other, other.ty, main.is_pure, main.attrs)})


def failing(mod: IRModule) -> IRModule:
    raise RuntimeError("the pass failed")


def same(mod: IRModule) -> IRModule:
    return mod


def run(*passes: Callable[[IRModule], IRModule]) -> tuple[IRModule, list[str]]:
    """Applies passes to `program`, each named after its function. Returns (result, marked names)."""
    marked: list[str] = []
    plan = [(step.__name__, lambda step=step: step) for step in passes]
    target = tvm_target(presets.resolve("x86-64-v3"))
    return phases.run(program(), tuple(plan), target, marked.append), marked


def test_passes_run_in_order_and_each_is_marked() -> None:
    result, marked = run(same, same)
    assert [str(name.name_hint) for name in result.functions] == ["main"]
    assert marked == ["same", "same"]


@pytest.mark.parametrize("after", [same, failing])
def test_the_pass_that_breaks_a_program_is_named(after: Callable[[IRModule], IRModule]) -> None:
    with pytest.raises(CompileError, match=r"the compiler's phase 'undefined' broke the program: .*other"):
        run(same, undefined, after)


def test_the_failure_of_a_pass_on_a_sound_program_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="the pass failed"):
        run(same, failing)


def test_operations_in_branches_are_listed() -> None:
    main = program()["main"]
    assert sorted(name for name, _ in operations(main)) == [
        "relax.negative",
        "relax.reshape",
        "relax.reshape",
    ]
    var = relax.Var("inner", relax.FuncType([], relax.ObjectType()))
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, main)])], relax.Tuple([]))
    outer = relax.Function([], body, relax.TupleType([]))
    assert [n for n, _ in operations(outer)] == [n for n, _ in operations(main)], "of an inner function, too"
