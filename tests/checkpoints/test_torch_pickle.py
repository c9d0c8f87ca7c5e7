"""Tests of reading the pickle of a PyTorch file, with pickles that Python's own module writes."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest

from mlcbuild.checkpoints import torch_pickle
from mlcbuild.checkpoints.torch_pickle import PickledStorage, PickledTensor, PickleError, read

PROTOCOLS = (2, 3, 4, 5)
"""Versions of the pickle format that torch.save may write; its default is 2."""


class Stored:
    """A stand-in for a PyTorch storage, which torch.save pickles as a reference to a member of its zip file.
    kind: class name of the storage; member: the member's name; count: number of elements."""

    def __init__(self, kind: str, member: str, count: int = 9) -> None:
        self.kind, self.member, self.count = kind, member, count


class Called:
    """An object that is pickled as the call of a function of PyTorch."""

    def __init__(self, module: str, name: str, *arguments: object) -> None:
        self.module, self.name, self.arguments = module, name, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return getattr(sys.modules[self.module], self.name), self.arguments


class Writer(pickle._Pickler):  # The module's version in Python looks up its opcodes by type, as C does.
    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, Stored):
            kind = getattr(
                sys.modules["torch.storage" if item.kind == "UntypedStorage" else "torch"], item.kind
            )
            return "storage", kind, item.member, "cpu", item.count
        return None


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creates modules with the names of PyTorch's functions and classes, which pickles only refer to."""
    names = {
        "torch": ["FloatStorage", "BFloat16Storage", "BoolStorage", "float8_e4m3fn", "uint16", "load"],
        "torch._utils": ["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"],
        "torch.storage": ["UntypedStorage"],
    }
    for module_name, members in names.items():
        module = ModuleType(module_name)
        for name in members:
            member = type(name, (), {"__module__": module_name, "__qualname__": name})
            setattr(module, name, member)
        monkeypatch.setitem(sys.modules, module_name, module)


def tensor(kind: str, member: str, offset: int, shape: Any, strides: Any, *more: object) -> Called:
    arguments = (Stored(kind, member), offset, shape, strides, False, OrderedDict(), *more)
    return Called("torch._utils", "_rebuild_tensor_v2", *arguments)


def new_tensor(dtype: str, *arguments: object) -> Called:
    """Returns an object that is pickled as PyTorch pickles a tensor of a newer dtype, one for which it has no
    storage class. dtype: name of the dtype in the module torch; arguments: the first arguments of the
    function that rebuilds the tensor."""
    named = getattr(sys.modules["torch"], dtype)
    return Called("torch._utils", "_rebuild_tensor_v3", *arguments, False, OrderedDict(), named)


def pickled(value: object, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    Writer(out, protocol).dump(value)
    return out.getvalue()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mapping", [dict, OrderedDict])
def test_tensors_are_read_as_python_pickles_them(protocol: int, mapping: type[dict[str, object]]) -> None:
    first = tensor("FloatStorage", "0", 0, (2, 3), (3, 1))
    state = mapping(
        {
            "a": first,
            "b" * 300: tensor("BFloat16Storage", "archive/1", 70000, (1 << 40,), (1,)),
            "c": Called("torch._utils", "_rebuild_parameter", first, True, OrderedDict()),
            "é": tensor("BoolStorage", "2", 255, (), ()),
            "d": new_tensor("float8_e4m3fn", Stored("UntypedStorage", "3"), 4, (5,), (1,)),
            "e": new_tensor("uint16", Stored("UntypedStorage", "3"), 0, (5,), (1,)),
        }
    )
    floats = PickledStorage("F32", "0")
    expected = PickledTensor(floats, "F32", 0, (2, 3), (3, 1))
    untyped = PickledStorage("", "3")
    assert read(pickled(state, protocol)) == {
        "a": expected,
        "b" * 300: PickledTensor(PickledStorage("BF16", "archive/1"), "BF16", 70000, (1 << 40,), (1,)),
        "c": expected,
        "é": PickledTensor(PickledStorage("BOOL", "2"), "BOOL", 255, (), ()),
        "d": PickledTensor(untyped, "F8_E4M3", 4, (5,), (1,)),
        "e": PickledTensor(untyped, "U16", 0, (5,), (1,)),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_attributes_of_a_mapping_are_ignored(protocol: int) -> None:
    """Checks pickles of a state_dict(): the attribute in which PyTorch stores versions of modules is ignored,
    and 70 tensors are read, after which references to earlier objects in the pickle need four bytes."""
    state = OrderedDict((f"w{i}", tensor("FloatStorage", str(i), 0, (1,), (1,))) for i in range(70))
    state._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": [1, None]}})  # type: ignore[attr-defined]
    actual = read(pickled(state, protocol))
    assert len(actual) == 70 and actual["w69"].storage == PickledStorage("F32", "69")


Z = tensor("FloatStorage", "0", 0, (1,), (1,))
FAULTS: dict[str, tuple[object, str]] = {
    "list": ([Z], "it holds no mapping of names to tensors"),
    "number": ({"a": Z, "b\n": 5}, r"its entry 'b\\n' is no tensor"),
    "nested": ({"a": {"b": Z}}, "its entry 'a' is no tensor"),
    "name": ({5: Z}, "it has an entry whose name is no text"),
    "set": ({"a": {1}}, "(names 'builtins.set'|names '__builtin__.set')"),
    "bytes": ({"a": b"x"}, "names '_codecs.encode', which belongs to no tensor and is not executed"),
    "float": ({"a": 0.5}, "has the opcode b'G', which no tensors need"),
    "function": ({"a": print}, "its pickle names '(__builtin__|builtins).print', which belongs to no tensor"),
    "path": ({"a": io.open}, "its pickle names 'io.open'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_anything_but_tensors_is_refused_and_nothing_is_called(name: str) -> None:
    value, message = FAULTS[name]
    with pytest.raises(PickleError, match=message) as caught:
        read(pickled(value))
    assert "\n" not in str(caught.value)


def test_calls_of_other_forms_are_refused() -> None:
    storage = Stored("FloatStorage", "0")
    untyped = Stored("UntypedStorage", "0")
    rebuild = "torch._utils", "_rebuild_tensor_v2"
    for value in (
        Called(*rebuild, storage, 0, (1,)),
        Called(*rebuild, storage, "0", (1,), (1,)),
        Called(*rebuild, storage, 0, [1], (1,)),
        Called(*rebuild, untyped, 0, (1,), (1,)),
        Called(*rebuild, Z, 0, (1,), (1,)),
        new_tensor("float8_e4m3fn", storage, 0, (1,), (1,)),
        new_tensor("FloatStorage", untyped, 0, (1,), (1,)),
        Called("torch._utils", "_rebuild_parameter", storage),
        Called("torch", "FloatStorage"),
    ):
        with pytest.raises(PickleError, match=r"with other arguments than torch\.save writes"):
            read(pickled({"a": value}))
    with pytest.raises(PickleError, match=r"names 'torch\.load', which belongs to no tensor"):
        read(pickled({"a": Called("torch", "load")}))


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (1,), (-1,)),
        (True, (1,), (1,)),
        (0, (1 << 62,), (1,)),
        (0, (1, 1), (1,)),
        (0, (1,) * 9, (1,) * 9),
    ],
)
def test_impossible_shapes_are_refused(offset: int, shape: Any, strides: Any) -> None:
    with pytest.raises(PickleError, match="a tensor with an impossible shape"):
        read(pickled({"a": tensor("FloatStorage", "0", offset, shape, strides)}))
    (largest,) = read(pickled({"a": tensor("FloatStorage", "0", 0, (2**62 - 1,) * 8, (0,) * 8)})).values()
    assert largest.shape == (2**62 - 1,) * 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_truncated_pickle_is_damaged(protocol: int) -> None:
    data = pickled({"a": Z}, protocol)
    for size in range(len(data)):
        with pytest.raises(PickleError, match=r"its pickle is (truncated|damaged)"):
            read(data[:size])


def test_the_number_of_opcodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickled({})
    monkeypatch.setattr(torch_pickle, "MOST_OPCODES", 100)
    assert read(data) == {}
    monkeypatch.setattr(torch_pickle, "MOST_OPCODES", 3)
    with pytest.raises(PickleError, match="more than 3 opcodes"):
        read(data)
