"""Tests of linking: which linker is used, the message if there is none, and that the bytes depend on the
input only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.compiler.cpu import elf, toolchain
from mlcbuild.errors import CompileError, SetupError
from mlcbuild.targets.presets import resolve
from mlcbuild.targets.target import Target

LINUX = Target("linux", "x86_64-unknown-linux-gnu", "x86-64-v3")
OBJECT = Target("object", "x86_64-unknown-linux-gnu", "x86-64-v3", output="object")
MAC = Target("mac", "arm64-apple-macosx12.3", "apple-m1")
ARM = Target("arm", "aarch64-unknown-linux-gnu", "generic")
WINDOWS = Target("windows", "x86_64-pc-windows-msvc", "x86-64-v3")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clears the cached choice of linkers before and after a test, because tests change which programs are on
    PATH."""
    toolchain.forget()
    yield
    toolchain.forget()


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Removes all programs from PATH and the package ziglang from the import path, and returns the empty
    directory on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    return tmp_path


def objects(directory: Path, calls: str = "") -> list[Path]:
    """Returns two object files made by LLVM. calls: name of an external function that they call; "" for
    none."""
    import tvm
    from tvm.script.ir_builder import tirx as T

    from mlcbuild.compiler.cpu.isa import tvm_target
    from mlcbuild.compiler.cpu.kernels.floats import kernel

    directory.mkdir(exist_ok=True)
    created = []
    for name in ("first", "second"):
        with kernel(name) as function:
            x = function.tensor("x", (4,))
            with function.body():
                value = T.call_extern("float32", calls, x[0]) if calls else x[0] * T.float32(2)
                T.buffer_store(x, value, [0])
        mod = tvm.IRModule({name: function.func.with_attr("global_symbol", name)})
        created.append(directory / f"{name}.o")
        tvm.tirx.build(mod, tvm_target(LINUX)).write_to_file(str(created[-1]))
    return created


def test_a_library_is_the_same_wherever_it_is_linked(tmp_path: Path) -> None:
    results = []
    for name in ("one", "another-directory"):
        out = tmp_path / f"{name}.so"
        toolchain.link(objects(tmp_path / name), out, LINUX)
        results.append(out.read_bytes())
    assert results[0] == results[1]
    for trace in (b"build-id", str(tmp_path).encode(), b"GCC", b"first.o"):
        assert trace not in results[0]


def test_a_library_needs_the_runtime_only(tmp_path: Path) -> None:
    out = tmp_path / "model.so"
    toolchain.link(objects(tmp_path / "in"), out, LINUX)
    assert elf.undefined(out.read_bytes()) <= toolchain.ALLOWED
    assert b"GLIBC" not in out.read_bytes()


def test_symbols_that_a_process_may_lack_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match=r"x86_64-unknown-linux-gnu needs cblas_sgemm, which a serving process"
    ):
        toolchain.link(objects(tmp_path / "in", "cblas_sgemm"), tmp_path / "model.so", LINUX)


def test_an_object_is_one_file_that_can_be_linked(tmp_path: Path) -> None:
    whole = tmp_path / "model.o"
    toolchain.link(objects(tmp_path / "in"), whole, OBJECT)
    assert whole.read_bytes()[16:18] == b"\x01\x00"  # ET_REL
    toolchain.link([whole], tmp_path / "model.so", LINUX)


def test_what_the_linker_says_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.o"
    broken.write_bytes(b"no object")
    with pytest.raises(
        CompileError, match=r"could not link the library for x86_64-unknown-linux-gnu:\n.*broken\.o"
    ):
        toolchain.link([broken], tmp_path / "model.so", LINUX)


def test_identity_names_program_and_version() -> None:
    identity = toolchain.linker_identity(resolve("host"))
    assert identity == toolchain.linker_identity(resolve("host"))
    name, _, version = identity.partition(": ")
    assert "/" not in name and any(character.isdigit() for character in version)


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (LINUX, r"no linker for x86_64-unknown-linux-gnu was found: install `binutils"),
        (ARM, r"install `binutils-aarch64-linux-gnu` \(apt\), `lld`, or `ziglang`"),
        (MAC, r"install `ziglang` \(pip install ziglang\) or, on a Mac, Xcode's command line tools"),
        (WINDOWS, r"shared libraries are made for linux and macos; use `output: object`"),
        (replace(WINDOWS, output="object"), r"install `binutils-mingw-w64-x86-64` \(apt\)"),
    ],
)
def test_a_missing_linker_is_named_with_what_to_install(
    target: Target, advice: str, no_programs: Path
) -> None:
    with pytest.raises(SetupError, match=advice):
        toolchain.linker_identity(target)


def test_a_linker_that_cannot_start_is_an_error_of_the_machine(no_programs: Path, tmp_path: Path) -> None:
    program = no_programs / "ld.lld"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(SetupError, match=r"the linker ld\.lld cannot be run: "):
        toolchain.linker_identity(LINUX)


def test_elf_reader_agrees_with_the_system(tmp_path: Path) -> None:
    """Checks that our ELF reader lists the same undefined symbols as the program `nm`, for a library and for
    libc."""
    out = tmp_path / "model.so"
    toolchain.link(objects(tmp_path / "in"), out, LINUX)
    try:
        result = subprocess.run(
            ["nm", "-D", "--undefined-only", out], capture_output=True, text=True, check=True
        )
    except OSError:
        pytest.skip("no nm here")
    listed = {line.split()[-1].partition("@")[0] for line in result.stdout.splitlines() if " U " in line}
    assert elf.undefined(out.read_bytes()) == listed
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        elf.undefined(b"MZ")
