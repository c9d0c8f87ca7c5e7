"""Emits a loop of several decode steps, which is one call of a compiled library.

The caller's work between two steps is slow, because all weights of a model have passed through the caches and
evicted the caller's code and data. So a library has a loop over its function `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from mlcbuild_format import abi
from tvm import relax
from tvm.ir import GlobalVar
from tvm.relax.utils import copy_with_new_vars

from mlcbuild.compiler.program.ops import Variables

MakeVariables = Callable[[abi.Function], Variables]


def emit_steps(
    builder: relax.BlockBuilder,
    step: tuple[GlobalVar, Callable[[Variables], None]],
    variables: MakeVariables,
    attributes: Mapping[str, object],
) -> None:
    """Adds two exported functions to a library: `step_on` runs one decode step, changes its arguments in
    place into those of the next, and returns the logits; `steps` runs `step_on` once, and then again while
    the flag `continues`, an argument that each step sets, is true, drops the logits, and returns the flag.

    step: (GlobalVar of the library's function `step`; function of a mapping, argument name -> variable, that
    emits the change of the arguments). variables: function that returns name -> new variable for the
    arguments of an ABI function. attributes: attributes of the new functions, name -> value. Neither function
    copies pages of the KV cache."""
    function, next_inputs = step
    arguments = variables(abi.STEP_ON)
    inputs = {name: arguments[name] for name in abi.STEP.names if name in arguments}
    forks = relax.const(np.zeros((0, 3), np.int32))
    with builder.function(abi.STEP_ON.name, [*arguments.values()], {**attributes}, pure=False):
        call = abi.STEP.ordered({**inputs, "sampled": arguments["tokens"], "forks": forks})
        logits = builder.emit(relax.Call(function, call))
        next_inputs(arguments)
        one = builder.emit_func_output(logits)
    _emit_loop(builder, one, variables, attributes)


def _emit_loop(
    builder: relax.BlockBuilder, one: GlobalVar, variables: MakeVariables, attributes: Mapping[str, object]
) -> None:
    step_arguments = variables(abi.STEPS)
    arguments = [*step_arguments.values()]
    with builder.function("one_of_steps", arguments, {**attributes}, pure=False, private=True):
        # The memory of its logits is released when this function ends.
        builder.emit(relax.Call(one, arguments))
        inner = builder.emit_func_output(step_arguments["continues"])
    # The attribute keeps the builder from merging the copy with the original.
    first = copy_with_new_vars(builder.get()[inner]).with_attr("mlcbuild.steps", 1)
    rest, arguments = builder.add_func(first, "rest_of_steps"), [*variables(abi.STEPS).values()]
    with builder.function(abi.STEPS.name, arguments, {**attributes}, pure=False):
        continues = builder.emit(relax.Call(inner, arguments))
        steps = builder.emit_func_output(
            builder.emit(relax.If(continues, relax.Call(rest, arguments), continues))
        )
    # The function calls itself: TVM's virtual machine has no other form of loop.
    builder.update_func(rest, copy_with_new_vars(builder.get()[steps]).without_attr("global_symbol"))
