"""Tests of the checks that a compiled library makes when it is called, and of those that were removed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from mlcbuild_format import abi
from mlcbuild_format.limits import Limits
from tvm import relax, tirx
from tvm.relax import transform as R

from mlcbuild.compiler import phases as pipeline
from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.compiler.passes.trusted_calls import trusted_calls
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.targets import presets
from tests.libharness import Session, compiled, golden, pack, tensor
from tests.schemes import SCHEMES

SCHEME = SCHEMES["q0f32"]
ENTRIES = {function.name for function in vars(abi).values() if isinstance(function, abi.Function)}
ENTRIES -= {abi.METADATA.name}


def calls() -> dict[str, list[str]]:
    """Returns function name -> names of the runtime functions that it calls, in order, for the functions of a
    library that is compiled from a small model."""
    target = presets.resolve("host")
    decoder = Decoder(CpuOps(golden("qwen3").config, SCHEME, target), Limits(64, 32, 2))
    phases = (*pipeline.PLAN, *pipeline.LOWER)
    mod = pipeline.run(functions.build(decoder), phases, tvm_target(target), lambda name: None)
    return {
        name.name_hint: [
            str(binding.value.op.global_symbol)
            for block in function.body.blocks
            for binding in block.bindings
            if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, relax.ExternFunc)
        ]
        for name, function in mod.functions.items()
        if isinstance(function, relax.Function)
    }


def test_only_entries_check_types_and_nothing_checks_weights() -> None:
    actual = calls()
    checks = {
        name: sum(call.startswith("vm.builtin.check_") for call in created)
        for name, created in actual.items()
    }
    assert {name for name, count in checks.items() if count} == ENTRIES
    assert checks["batch_prefill_to_last_hidden_states"] == 8  # its tensors without the weights
    assert checks["embed"] == 1


def test_a_layer_costs_few_steps_of_the_virtual_machine() -> None:
    assert len(calls()["layer"]) < 30


def test_entries_refuse_wrong_tensors(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = golden("qwen3")
    library = compiled(tmp_path_factory, case.config, SCHEME) / "model.so"
    session = Session(library, pack(case.config, SCHEME, case.weights))
    with pytest.raises(Exception, match="ErrorContext\\(fn=embed"):
        session.vm["embed"](tensor(np.zeros(3, np.int64)), session.params)
    arguments = session.step_arguments([(0, [1, 2])])
    arguments["positions"] = tensor(np.zeros(3, np.int32))  # one position too many
    with pytest.raises(Exception, match="ErrorContext\\(fn=step_prefill"):
        session.vm["step_prefill"](*abi.STEP_PREFILL.ordered(arguments))


def called(mod: tvm.IRModule) -> dict[str, list[str]]:
    """Returns, for each function of a Relax module, name -> its operations in program order: for a call the
    name of the called function, otherwise the class of the syntax node."""
    operations: dict[str, list[str]] = {}
    for name, function in mod.functions.items():
        values = [binding.value for block in function.body.blocks for binding in block.bindings]
        operations[name.name_hint] = [
            str((value.args[0] if hasattr(value.op, "name") else value.op).global_symbol).rpartition(".")[2]
            if isinstance(value, relax.Call)
            else type(value).__name__
            for value in values
        ]
    return operations


def test_checks_remain_for_the_tensors_of_exported_functions_only() -> None:
    """Checks which argument checks the compiler removes from two equal functions that receive a tensor [n, 4]
    and a tuple of weights. The exported one keeps the check of the tensor, but not that of the weights; the
    private one keeps none."""
    builder = relax.BlockBuilder()
    for name, private in (("entry", False), ("inner", True)):
        x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4), "float32"))
        weights = relax.Var("weights", relax.TupleType([relax.TensorType((2,), "float32")]))
        with builder.function(name, [x, weights], private=private, pure=False):
            builder.emit_func_output(builder.emit(relax.TupleGetItem(weights, 0)))
    mod = R.VMShapeLower()(builder.get())
    before = called(mod)
    assert before["entry"] == before["inner"] and before["inner"].count("check_tensor_info") == 2
    assert called(trusted_calls(mod)) == {
        "entry": ["alloc_shape_heap", "check_tensor_info", "match_shape", "TupleGetItem"],
        "inner": ["TupleGetItem"],
    }
