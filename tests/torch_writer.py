"""Writes files in torch.save's format, pickles of protocol 2 in zip files, following the descriptions of
these formats."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping

from tests.checkpoint_files import Entry

STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "U8": "ByteStorage",
    "I8": "CharStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
}


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


EMPTY = b"ccollections\nOrderedDict\n)R"


def tensor(code: str, member: str, shape: tuple[int, ...], steps: tuple[int, ...], offset: int = 0) -> bytes:
    """Returns pickle opcodes that push a tensor on the stack. code: its dtype; member: name of the file in
    the archive with its values; steps: strides."""
    count = number(math.prod(shape) + offset)
    storage = b"(" + text("storage") + b"ctorch\n" + STORAGES[code].encode() + b"\n"
    storage += text(member) + text("cpu") + count + b"tQ"
    arguments = storage + number(offset) + numbers(shape) + numbers(steps) + b"\x89" + EMPTY
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def pickled(items: Mapping[str, bytes]) -> bytes:
    """Returns the pickle of a mapping. items: key -> opcodes that push its value on the stack."""
    return b"\x80\x02" + EMPTY + b"(" + b"".join(text(name) + code for name, code in items.items()) + b"u."


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def torch_file(content: Mapping[str, Entry], extra: Mapping[str, bytes] | None = None) -> bytes:
    """Returns the bytes of a file with these tensors in torch.save's format. extra: name -> opcodes of
    additional entries."""
    items, members = {}, {}
    for i, (name, (code, array)) in enumerate(content.items()):
        items[name] = tensor(code, str(i), array.shape, strides(array.shape))
        members[f"archive/data/{i}"] = array.tobytes()
    pickle = pickled({**items, **(extra or {})})
    return zipped({"archive/data.pkl": pickle, "archive/byteorder": b"little", **members})
