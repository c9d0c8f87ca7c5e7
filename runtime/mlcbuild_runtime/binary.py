"""Looks at a shared library's headers before the system loads it.

The loader maps what the headers promise and touches it: a truncated file would end the process by a signal,
where a Python program wants one sentence. Layouts: System V ABI (ELF), <mach-o/loader.h>.
"""

from __future__ import annotations

import struct
from pathlib import Path

from mlcbuild_runtime.errors import BundleError

ELF_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 40: "arm"}
MACHO_CPUS = {0x01000007: "x86_64", 0x0100000C: "aarch64"}


def check(path: Path) -> tuple[str, str]:
    """("linux" | "macos", architecture) of a shared library. Raises BundleError when it is not whole."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if data[:4] == b"\x7fELF":
            return "linux", _elf(path, data)
        if data[:4] == b"\xcf\xfa\xed\xfe":
            return "macos", _macho(path, data)
    except struct.error:
        raise _broken(path, "is truncated") from None
    raise _broken(path, f"begins with {data[:4]!r}")


def _elf(path: Path, data: bytes) -> str:
    bits, order = data[4], data[5]
    kind, machine = struct.unpack_from("<HH", data, 16)
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    if (bits, order, kind) != (2, 1, 3) or program_size != 56 or not program_count:
        raise _broken(path, "is an ELF file of another kind")
    if sections + section_size * section_count > len(data):
        raise _broken(path, "is truncated")
    for i in range(program_count):
        offset, _address, _physical, length = struct.unpack_from("<QQQQ", data, programs + 56 * i + 8)
        if offset + length > len(data):
            raise _broken(path, "is truncated")
    return ELF_MACHINES.get(machine, f"machine {machine}")


def _macho(path: Path, data: bytes) -> str:
    cpu, _subtype, kind, count = struct.unpack_from("<IIII", data, 4)
    if kind not in (6, 8):
        raise _broken(path, "is a Mach-O file of another kind")
    place = 32
    for _ in range(count):
        command, length = struct.unpack_from("<II", data, place)
        if command == 0x19:
            offset, size = struct.unpack_from("<QQ", data, place + 40)
            if offset + size > len(data):
                raise _broken(path, "is truncated")
        if length < 8:
            raise _broken(path, "has damaged load commands")
        place += length
    if place > len(data):
        raise _broken(path, "is truncated")
    return MACHO_CPUS.get(cpu, f"cpu {cpu}")


def _broken(path: Path, fault: str) -> BundleError:
    return BundleError(f"{path}: not a whole shared library (it {fault}); build the bundle again")
