"""Tests of the loop of decode steps in a library: its functions are interpreted in Python, not compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlcbuild_format import abi
from tvm import IRModule, relax

from mlcbuild.compiler.program.decode_loop import emit_steps
from mlcbuild.compiler.program.ops import Variables
from tests.runtime import toy


def emitted() -> tuple[IRModule, list[Variables]]:
    """Builds the loop of decode steps around a function `step` that returns the positions it receives.
    Returns (TVM module with the loop; the variables with which the callback that emits the next step's inputs
    was called, one mapping per call)."""
    builder, calls = relax.BlockBuilder(), list[Variables]()
    arguments = toy._variables(abi.STEP)
    with builder.function("step", [*arguments.values()], pure=False):
        step = builder.emit_func_output(arguments["positions"])

    def next_inputs(variables: Variables) -> None:
        calls.append(variables)
        advance = relax.ExternFunc("advance")
        builder.emit(relax.Call(advance, [variables["state"]], ty_args=[relax.TupleType([])]))

    emit_steps(builder, (step, next_inputs), toy._variables, {"mark": 7})
    return builder.get(), calls


class Flag:
    """A stand-in for the boolean argument `continues` of an interpreted loop. Each time that its truth is
    tested it returns the next of `values`; IndexError after the last one."""

    def __init__(self, *values: bool) -> None:
        self.values = list(values)

    def __bool__(self) -> bool:
        return self.values.pop(0)


class Interpreter:
    """Interprets the Relax functions of a TVM module in Python. Calls of the function `step` and of external
    functions are not executed but appended to a log, as (name, arguments)."""

    def __init__(self, mod: IRModule) -> None:
        self.mod, self.log = mod, list[tuple[str, list[Any]]]()

    def call(self, name: str, arguments: list[Any]) -> Any:
        function = self.mod[name]
        values = dict(zip(function.params, arguments, strict=True))
        return self._value(function.body, values)

    def _value(self, expression: Any, values: dict[Any, Any]) -> Any:
        if isinstance(expression, relax.SeqExpr):
            for block in expression.blocks:
                for binding in block.bindings:
                    values[binding.var] = self._value(binding.value, values)
            return self._value(expression.body, values)
        if isinstance(expression, relax.If):
            chosen = expression.true_branch if values[expression.cond] else expression.false_branch
            return self._value(chosen, values)
        if isinstance(expression, relax.Call):
            arguments = [self._value(argument, values) for argument in expression.args]
            if isinstance(expression.op, relax.ExternFunc):
                self.log.append((str(expression.op.global_symbol), arguments))
                return None
            if expression.op.name_hint == "step":
                self.log.append(("step", arguments))
            return self.call(expression.op.name_hint, arguments)
        return values[expression] if isinstance(expression, relax.Var) else expression.value.numpy()


def test_one_step_is_followed_by_its_next_inputs() -> None:
    mod, calls = emitted()
    (variables,) = calls
    assert tuple(variables) == abi.STEP_ON.names
    interpreter = Interpreter(mod)
    assert interpreter.call("step_on", [*abi.STEP_ON.names]) == "positions"
    (step, arguments), (advance, state) = interpreter.log
    assert (step, advance, state) == ("step", "advance", ["state"])
    by_name = dict(zip(abi.STEP.names, arguments, strict=True))
    forks = by_name.pop("forks")
    assert (forks.shape, forks.dtype) == ((0, 3), np.int32)
    # Each sampled token replaces the token that the step has read.
    assert by_name.pop("sampled") == "tokens"
    assert by_name == {name: name for name in by_name}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_steps_are_repeated_while_the_flag_is_true(count: int) -> None:
    interpreter = Interpreter(emitted()[0])
    flag = Flag(*[True] * (count - 1), False)
    arguments = [flag if name == "continues" else name for name in abi.STEPS.names]
    assert interpreter.call("steps", arguments) is flag
    assert [name for name, _ in interpreter.log] == ["step", "advance"] * count and not flag.values


def test_only_functions_of_the_interface_are_exported() -> None:
    functions = {name.name_hint: function for name, function in emitted()[0].functions.items()}
    exported = {name for name, function in functions.items() if "global_symbol" in (function.attrs or {})}
    assert exported == {"step", "step_on", "steps"} and len(functions) == 5
    assert all(int(function.attrs["mark"]) == 7 for name, function in functions.items() if name != "step")
