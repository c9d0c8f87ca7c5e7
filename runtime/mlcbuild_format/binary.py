"""Validates a shared library, ELF or Mach-O, before the system's loader maps it. Raises BundleError for one
that is damaged.

The loader maps and reads what the headers declare: a damaged file would end the process with a signal instead
of an error message. Source of the Mach-O layout: <mach-o/loader.h>."""

from __future__ import annotations

import struct
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.elf_image import Image, ImageError
from mlcbuild_format.errors import BundleError

MAX_LIBRARY = 2 << 30
"""The largest library file that is read, in bytes. A larger one is refused with a BundleError."""
MODEL_SYMBOL = b"__tvm_ffi__library_bin"
"""The symbol that a model's library exports: the serialised functions of TVM's virtual machine."""
MACHO_CPUS = {0x01000007: "x86_64", 0x0100000C: "aarch64"}


def check(path: Path) -> tuple[str, str]:
    """Returns (operating system, architecture) of a shared library after checking its headers, for example
    ("linux", "x86_64") or ("macos", "aarch64"); an architecture that it does not know is named by its number,
    such as "machine 8" or "cpu 7". Raises BundleError for a file that cannot be read, has more than 2 GiB, is
    damaged, or is of another kind."""
    return _check(path, model=False)


def check_model(path: Path) -> tuple[str, str]:
    """Returns (operating system, architecture) of a model's shared library after checking its headers, for
    example ("linux", "x86_64").

    Raises BundleError for a file that cannot be read, has more than 2 GiB, is damaged, or is of another kind,
    and for a library without the symbol that every model's library exports, because loading such a library
    would end the process. In a Mach-O file the symbol's name is only searched for, not its export."""
    return _check(path, model=True)


def _check(path: Path, model: bool) -> tuple[str, str]:
    data = files.read_bytes(path, MAX_LIBRARY)
    try:
        if data[:4] == b"\x7fELF":
            image = Image(data)
            platform, exports = ("linux", image.machine), image.exports
        elif data[:4] == b"\xcf\xfa\xed\xfe":
            platform, exports = ("macos", _macho(data)), lambda: frozenset({MODEL_SYMBOL})
        else:
            raise ImageError(f"begins with {data[:4]!r}")
        # This is checked first: most other libraries also break a rule for model libraries, and that message
        # would mislead.
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
    return platform


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
