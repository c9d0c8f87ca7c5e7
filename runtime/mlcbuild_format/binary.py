"""Looks at a shared library before the system loads it.

The loader maps what the headers promise and touches it: a damaged file would end the process by a signal,
where a Python program wants one sentence. Layout of Mach-O: <mach-o/loader.h>.
"""

from __future__ import annotations

import struct
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.elf_image import Image, ImageError
from mlcbuild_format.errors import BundleError

MAX_LIBRARY = 2 << 30
"""Bytes."""
MODEL_SYMBOL = b"__tvm_ffi__library_bin"
"""What a model's library exports: the functions of the virtual machine."""
MACHO_CPUS = {0x01000007: "x86_64", 0x0100000C: "aarch64"}


def check(path: Path) -> tuple[str, str]:
    """("linux" | "macos", architecture) of a shared library. Raises BundleError when it is not whole."""
    return _check(path, model=False)


def check_model(path: Path) -> tuple[str, str]:
    """As `check`, for the library of a model. Another one would end the process that initialises it."""
    return _check(path, model=True)


def _check(path: Path, model: bool) -> tuple[str, str]:
    data = files.read_bytes(path, MAX_LIBRARY)
    try:
        if data[:4] == b"\x7fELF":
            image = Image(data)
            found, exports = ("linux", image.machine), image.exports
        elif data[:4] == b"\xcf\xfa\xed\xfe":
            found, exports = ("macos", _macho(data)), lambda: frozenset({MODEL_SYMBOL})
        else:
            raise ImageError(f"begins with {data[:4]!r}")
        # Asked first, because most other libraries break a rule that is made for those of models.
        if model and (MODEL_SYMBOL not in data or MODEL_SYMBOL not in exports()):
            raise BundleError(
                f"{path}: a shared library, but not one of a model: it exports no {MODEL_SYMBOL.decode()};"
                " build the bundle again"
            )
    except (ImageError, struct.error) as error:
        fault = error if isinstance(error, ImageError) else "is truncated"
        raise BundleError(
            f"{path}: not a whole shared library (it {fault}); build the bundle again"
        ) from None
    return found


def _macho(data: bytes) -> str:
    cpu, _subtype, kind, count = struct.unpack_from("<IIII", data, 4)
    if kind not in (6, 8):
        raise ImageError("is a Mach-O file of another kind")
    place = 32
    for _ in range(count):
        command, length = struct.unpack_from("<II", data, place)
        if command == 0x19:
            offset, size = struct.unpack_from("<QQ", data, place + 40)
            if offset + size > len(data):
                raise ImageError("is truncated")
        if length < 8:
            raise ImageError("has damaged load commands")
        place += length
    if place > len(data):
        raise ImageError("is truncated")
    return MACHO_CPUS.get(cpu, f"cpu {cpu}")
