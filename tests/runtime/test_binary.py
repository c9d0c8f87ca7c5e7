"""Tests of headers of shared libraries: systems and processors are recognized, damage is refused."""

from __future__ import annotations

import _ctypes
import platform
import struct
import sys
from pathlib import Path

import pytest
from mlcbuild_format import binary
from mlcbuild_format.errors import BundleError


def macho(cpu: int, *commands: tuple[int, int, int], kind: int = 6) -> bytes:
    """Returns the bytes of a Mach-O file. cpu: number of its processor type; commands: (type of load command,
    file offset, size in bytes) of each segment; kind: type of the file, by default a dynamic library."""
    body = b""
    for command, offset, size in commands:
        body += struct.pack("<II", command, 72) + bytes(32) + struct.pack("<QQ", offset, size) + bytes(16)
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, cpu, 0, kind, len(commands), len(body), 0, 0)
    return head + body + bytes(64)


@pytest.mark.skipif(sys.platform != "linux", reason="another system")
def test_a_library_of_this_machine() -> None:
    assert binary.check(Path(_ctypes.__file__)) == ("linux", platform.machine())
    with pytest.raises(
        BundleError, match=f"not one of a model: it exports no {binary.MODEL_SYMBOL.decode()}"
    ):
        binary.check_model(Path(_ctypes.__file__))


@pytest.mark.parametrize(("cpu", "name"), [*binary.MACHO_CPUS.items(), (12, "cpu 12")])
def test_libraries_of_macs(tmp_path: Path, cpu: int, name: str) -> None:
    path = tmp_path / "a.dylib"
    path.write_bytes(macho(cpu, (0x19, 0, 50), (0x32, 0, 0)))
    assert binary.check(path) == ("macos", name)
    with pytest.raises(BundleError, match="exports no"):
        binary.check_model(path)
    path.write_bytes(macho(cpu, (0x19, 0, 50)) + binary.MODEL_SYMBOL)
    assert binary.check_model(path) == ("macos", name)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "begins with b''"),
        (b"MZ\x90\x00", "begins with b'MZ"),
        (b"\x7fELF", "is truncated"),
        (macho(0x0100000C, (0x19, 0, 10_000)), "is truncated"),
        (macho(0x0100000C, kind=2), "is a Mach-O file of another kind"),
        (macho(0x0100000C, (0x19, 0, 5))[:40], "is truncated"),
        (macho(0x0100000C, (0x19, 0, 5)).replace(struct.pack("<II", 0x19, 72), struct.pack("<II", 2, 0)),
         "has damaged load commands"),
        (macho(0x0100000C, (0x2, 0, 5)).replace(struct.pack("<II", 2, 72), struct.pack("<II", 2, 9999)),
         "is truncated"),
    ],
)  # fmt: skip
def test_damaged_libraries_are_refused(tmp_path: Path, data: bytes, fault: str) -> None:
    path = tmp_path / "model.so"
    path.write_bytes(data)
    for check in (binary.check, binary.check_model):
        with pytest.raises(BundleError) as caught:
            check(path)
        assert f"not a whole shared library (it {fault}" in str(caught.value)
        assert str(caught.value).endswith("build the bundle again")
