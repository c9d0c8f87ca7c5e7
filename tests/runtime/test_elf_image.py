"""Tests that libraries which would crash the process are refused after their headers were read."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from mlcbuild_format import binary
from mlcbuild_format.elf_image import Image
from mlcbuild_format.errors import BundleError
from mlcbuild_runtime import untrusted

from tests.runtime.refusals import Damage, refusal, started

from . import shared
from .test_bundle import reseal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory, which does not exist yet, in which the runtime records the files that a child
    process has loaded successfully."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


def elf(place: int, value: int, width: int = 8) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray((path / "model.so").read_bytes())
        data[place : place + width] = value.to_bytes(width, "little")
        (path / "model.so").write_bytes(data)
        reseal(path)

    return damage


def segment(kind: int, field: int, value: int) -> Damage:
    """Returns a function that damages the ELF library of a bundle: it sets the four bytes at offset `field`
    of the first program header of type `kind` to `value`."""

    def damage(path: Path) -> None:
        data = (path / "model.so").read_bytes()
        count = int.from_bytes(data[56:58], "little")
        places = [64 + 56 * i for i in range(count)]
        (place, *_) = [p for p in places if int.from_bytes(data[p : p + 4], "little") == kind]
        elf(place + field, value)(path)

    return damage


def four_bytes(path: Path) -> None:
    (path / "model.so").write_bytes(b"\x7fELF")
    reseal(path)


def the_runtime(path: Path) -> None:
    shutil.copyfile(find_runtime(), path / "model.so")
    reseal(path)


def find_runtime() -> Path:
    from mlcbuild.bundles.assemble import tvm_runtime

    actual = tvm_runtime()
    assert actual is not None
    return actual


_DYNAMIC, _RELRO, _INIT = 2, 0x6474E552, 12
LIBRARIES: list[tuple[str, Damage, str]] = [
    ("four bytes", four_bytes, "it is truncated"),
    ("headers far away", elf(32, 1 << 63), "it is truncated"),
    ("sections far away", elf(40, (1 << 64) - 1), "it is truncated"),
    ("no headers", elf(56, 0, 2), "an ELF file of another kind"),
    ("dynamic section far away", segment(_DYNAMIC, 16, 1 << 40), "points outside of what is loaded"),
    ("dynamic section too long", segment(_DYNAMIC, 32, 1 << 20), "is truncated|outside of what is loaded"),
    ("relro far away", segment(_RELRO, 16, 1 << 40), "points outside of what is loaded"),
    ("relro too long", segment(_RELRO, 40, 1 << 30), "points outside of what is loaded"),
    ("memory for nobody", segment(1, 40, 1 << 60), "segments that overlap|claims"),
    ("the TVM runtime", the_runtime, "a shared library, but not one of a model: it exports no __tvm_ffi"),
]


@pytest.mark.parametrize(("damage", "message"), [c[1:] for c in LIBRARIES], ids=[c[0] for c in LIBRARIES])
def test_libraries_that_would_end_the_process(toy_copy: Path, damage: Damage, message: str) -> None:
    if (toy_copy / "model.so").read_bytes()[:4] != b"\x7fELF":
        pytest.skip("not a Linux library")
    damage(toy_copy)
    assert re.search(message, refusal(toy_copy))
    assert re.search(message, started(toy_copy))


def test_a_library_that_ends_its_process_is_a_sentence(toy_copy: Path) -> None:
    """Checks a library whose headers are valid but whose first function is not executable code: only loading
    it in a child process reveals that."""
    data = bytearray((toy_copy / "model.so").read_bytes())
    if data[:4] != b"\x7fELF" or _INIT not in Image(bytes(data))._values:
        pytest.skip("not a Linux library with a function that the loader calls by its address")
    image = Image(bytes(data))
    address = image._values[_INIT]
    (place,) = [s.offset + address - s.address for s in image._loads if s.holds(address, 8, in_file=True)]
    data[place : place + 16] = bytes(16)
    (toy_copy / "model.so").write_bytes(data)
    reseal(toy_copy)
    message = r"its library is not usable: the process that loads it is ended by SIG(SEGV|ILL)"
    assert re.search(message, started(toy_copy))
    result = shared.run("-m", "mlcbuild_runtime.chat", str(toy_copy), stdin="hello\n")
    assert result.returncode == 1 and re.search(message, result.stderr) and result.stderr.count("\n") == 1
    with pytest.raises(BundleError, match=message):
        untrusted.load(toy_copy)


def test_libraries_of_this_machine_are_whole() -> None:
    """Checks that the libraries of installed packages, which a linker wrote, are all accepted."""
    import numpy

    items = list(Path(numpy.__file__).parent.rglob("*.so"))
    assert items and all(binary.check(path) for path in items)
