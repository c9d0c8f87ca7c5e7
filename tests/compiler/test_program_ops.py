"""Tests that the CPU's backend has every method and property of the interface, with its parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.compiler.program.ops import NO_WINDOW, CacheLayout, Ops
from tests.compiler.toy_backend import ToyCache, ToyOps


def members(interface: type[Any]) -> list[str]:
    return [name for name in vars(interface) if not name.startswith("_")]


def has(implementation: type[Any], name: str) -> bool:
    """Returns True if a class has a method, a property or a field of this name."""
    return hasattr(implementation, name) or name in getattr(implementation, "__dataclass_fields__", ())


@pytest.mark.parametrize("backend", [CpuOps, ToyOps])
def test_a_backend_has_the_members_of_the_interface(backend: type[Any]) -> None:
    assert len(members(Ops)) > 20
    assert not [name for name in members(Ops) if not has(backend, name)]
    assert not [name for name in members(CacheLayout) if not has(ToyCache, name)]


def test_methods_have_the_parameters_of_the_interface() -> None:
    for name in members(Ops):
        member = vars(Ops)[name]
        if inspect.isfunction(member):
            expected = inspect.signature(member).parameters
            actual = inspect.signature(getattr(CpuOps, name)).parameters
            assert [*actual] == [*expected], name
            for parameter, required in expected.items():
                assert actual[parameter].default == required.default, (name, parameter)


def test_no_window_is_larger_than_any_context_and_an_int32() -> None:
    assert 1 << 27 < NO_WINDOW < 1 << 31
