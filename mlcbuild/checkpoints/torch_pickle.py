"""Reads the pickle in a file of torch.save, which must be a mapping of names to tensors and nothing else.

A pickle is a program for a stack machine that may call any function. This machine imports and calls nothing:
it gives a fixed meaning to the few names that torch.save writes for tensors, and refuses all others. Opcodes:
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlcbuild_format.fields import printable

MOST_OPCODES = 1_000_000
"""Maximum number of opcodes of a pickle that are executed; a pickle with more is refused. A pickled tensor
takes about 35."""
LARGEST = 32 << 20
"""Maximum size in bytes of the pickle in a PyTorch file; a larger one is refused."""

_TYPED_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "BoolStorage": "BOOL",
}
_NEW_DTYPES: Mapping[str, str] = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""PyTorch's name of a dtype that has no storage class of its own -> the dtype's name in safetensors."""
_MAPPING = "collections OrderedDict"
_TENSOR, _NEW_TENSOR = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"
_PARAMETER = "torch._utils _rebuild_parameter"
_UNTYPED = "torch.storage UntypedStorage"
_NAMES = frozenset(
    {
        *(_MAPPING, _TENSOR, _NEW_TENSOR, _PARAMETER, _UNTYPED),
        *(f"torch {name}" for name in (*_TYPED_STORAGES, *_NEW_DTYPES)),
    }
)


class PickleError(ValueError):
    """The error for a pickle in a PyTorch file that is damaged, or holds more than tensors. Its message does
    not name the file.
    """


@dataclass(frozen=True)
class PickledStorage:
    """A member of a PyTorch file (a zip file), which holds the numbers of one or more tensors."""

    dtype: str
    """The safetensors name of the dtype of the numbers in a member of a PyTorch file, such as "F16"; "" if
    each tensor states its dtype.
    """
    member: str
    """Name, below `data/` in a PyTorch file (a zip file), of the member that holds the tensor's numbers."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as the pickle in a PyTorch file describes it: its storage, dtype, shape, and offset and
    strides in elements."""

    storage: PickledStorage
    dtype: str
    offset: int
    """Number of elements of the PyTorch storage that precede the tensor's first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """A function or class that a pickle refers to, as "module name"."""

    text: str


def read(data: bytes) -> dict[str, PickledTensor]:
    """Returns tensor name -> tensor for the pickle in a PyTorch file. data: the bytes of the pickle. Raises
    PickleError for a damaged pickle, or one with objects other than tensors.
    """
    try:
        value = _Machine(data).run()
    except (IndexError, struct.error, UnicodeDecodeError):
        raise PickleError("its pickle is damaged") from None
    if not isinstance(value, dict):
        raise PickleError("it holds no mapping of names to tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, PickledTensor):
            raise PickleError(f"its entry '{printable(name)[:200]}' is no tensor")
    return value


class _Machine:
    """A stack machine that executes the opcodes of one pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        """For each open MARK of the pickle's stack machine, outermost first, the list of values below the
        mark.
        """
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MOST_OPCODES):
            code = self._take(1)
            if code == b".":
                return self._stack.pop()
            action = _ACTIONS.get(code)
            if action is None:
                raise PickleError(f"its pickle has the opcode {code!r}, which no tensors need")
            action(self)
        raise PickleError(f"its pickle has more than {MOST_OPCODES} opcodes")

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise PickleError("its pickle is truncated")
        self._at += size
        return part

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise PickleError("its pickle is truncated")
        return self._take(end + 1 - self._at)[:-1].decode()

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_number(self, form: str) -> None:
        self.push(self._number(form))

    def push_long(self) -> None:
        self.push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def push_text(self, form: str) -> None:
        self.push(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def skip(self, size: int) -> None:
        self._take(size)

    def mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        """Removes the topmost mark from the pickle machine's stack, and returns the values above it. Raises
        IndexError if there is no mark.
        """
        values, self._stack = self._stack, self._marked.pop()
        return values

    def push_tuple(self, size: int | None) -> None:
        values = self.since_mark() if size is None else [self._stack.pop() for _ in range(size)][::-1]
        self.push(tuple(values))

    def put(self, form: str) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, form: str) -> None:
        number = self._number(form)
        if number not in self._memo:
            raise PickleError("its pickle is damaged")
        self.push(self._memo[number])

    def global_line(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or f"{module} {name}" not in _NAMES:
            text = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "no text"
            raise PickleError(
                f"its pickle names '{printable(text)[:200]}', which belongs to no tensor and is not executed"
            )
        self.push(_Name(f"{module} {name}"))

    def set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleError("its pickle is damaged")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise PickleError("it has an entry whose name is no text")
            target[key] = value

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def append(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise PickleError("its pickle is damaged")
        self._stack[-1].extend(values)

    def build(self) -> None:
        """Executes the pickle opcode BUILD: discards the attributes of a mapping, in which PyTorch's
        state_dict() stores versions of modules. Raises PickleError for attributes of anything else.
        """
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise PickleError("its pickle sets attributes of something other than a mapping")

    def storage(self) -> None:
        match self._stack.pop():
            case ("storage", _Name(text), str(member), str(), int(), *_) if text == _UNTYPED:
                self.push(PickledStorage("", member))
            case ("storage", _Name(text), str(member), str(), int(), *_) if dtype := _TYPED_STORAGES.get(
                text.removeprefix("torch ")
            ):
                self.push(PickledStorage(dtype, member))
            case _:
                raise PickleError("its pickle refers to something other than a storage")

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if isinstance(function, _Name) and isinstance(arguments, tuple):
            match function.text, arguments:
                case "collections OrderedDict", ():
                    return self.push({})
                case "torch._utils _rebuild_parameter", (PickledTensor() as tensor, *_):
                    return self.push(tensor)
                case (
                    "torch._utils _rebuild_tensor_v2",
                    (PickledStorage(dtype) as storage, int(offset), tuple(shape), tuple(strides), *_),
                ) if dtype:
                    return self.push(_tensor(storage, dtype, offset, shape, strides))
                case (
                    "torch._utils _rebuild_tensor_v3",
                    (
                        PickledStorage("") as storage,
                        int(offset),
                        tuple(shape),
                        tuple(strides),
                        _,
                        _,
                        _Name(text),
                        *_,
                    ),
                ) if text.removeprefix("torch ") in _NEW_DTYPES:
                    dtype = _NEW_DTYPES[text.removeprefix("torch ")]
                    return self.push(_tensor(storage, dtype, offset, shape, strides))
        raise PickleError("its pickle calls a function with other arguments than torch.save writes")


def _tensor(
    storage: PickledStorage, dtype: str, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]
) -> PickledTensor:
    if not all(type(item) is int and 0 <= item < 1 << 62 for item in (offset, *shape, *strides)):
        raise PickleError("its pickle has a tensor with an impossible shape")
    if len(shape) != len(strides) or len(shape) > 8:
        raise PickleError("its pickle has a tensor with an impossible shape")
    return PickledTensor(storage, dtype, offset, shape, strides)


_ACTIONS: Mapping[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda machine: machine.skip(1),  # PROTO
    b"\x95": lambda machine: machine.skip(8),  # FRAME
    b"(": _Machine.mark,
    b"c": _Machine.global_line,
    b"\x93": _Machine.stack_global,
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"}": lambda machine: machine.push({}),
    b"]": lambda machine: machine.push([]),
    b")": lambda machine: machine.push(()),
    b"t": lambda machine: machine.push_tuple(None),
    b"\x85": lambda machine: machine.push_tuple(1),
    b"\x86": lambda machine: machine.push_tuple(2),
    b"\x87": lambda machine: machine.push_tuple(3),
    b"K": lambda machine: machine.push_number("<B"),
    b"M": lambda machine: machine.push_number("<H"),
    b"J": lambda machine: machine.push_number("<i"),
    b"\x8a": _Machine.push_long,
    b"X": lambda machine: machine.push_text("<I"),
    b"\x8c": lambda machine: machine.push_text("<B"),
    b"q": lambda machine: machine.put("<B"),
    b"r": lambda machine: machine.put("<I"),
    b"\x94": _Machine.memoize,
    b"h": lambda machine: machine.get("<B"),
    b"j": lambda machine: machine.get("<I"),
    b"a": lambda machine: machine.append([machine._stack.pop()]),
    b"e": lambda machine: machine.append(machine.since_mark()),
    b"s": _Machine.set_item,
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"b": _Machine.build,
    b"Q": _Machine.storage,
    b"R": _Machine.call,
}
"""Opcode of a pickle, one byte -> function that executes the opcode on the _Machine (the stack machine that
reads the pickle), its only argument.
"""
