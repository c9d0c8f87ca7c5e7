"""Links object files to a shared library, or to one object, without a C library and with the same bytes on
every run.

A library needs only symbols of the TVM runtime and a few of the C and mathematics libraries, which every
process has, so a bare linker is enough. The linker is part of a library's cache key.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlcbuild.compiler.cpu import elf
from mlcbuild.errors import CompileError, SetupError
from mlcbuild.targets.target import Target

_GNU_EMULATION = {"x86_64": "elf_x86_64", "aarch64": "aarch64linux", "riscv64": "elf64lriscv"}
_SECONDS = 120

_C_LIBRARY = "memcpy memmove memset sinf cosf sincosf expf exp2f logf powf tanhf sqrtf nearbyintf"
ALLOWED = frozenset(
    [*_C_LIBRARY.split(), "TVMFFIErrorSetRaisedFromCStrParts", "TVMFFIErrorSetRaisedFromCStr"]
)
"""Names of the symbols that a shared library for Linux may leave undefined, because Python and libtvm_runtime
provide them."""


@dataclass(frozen=True)
class Linker:
    """A linker program of this machine, and the style of its options."""

    command: tuple[str, ...]
    flavour: str
    """The style of the command line: "gnu" for the options of GNU ld, "lld-macho" for those of Apple's ld,
    "clang-macho" for a compiler driver.
    """
    name: str
    """The linker's name in cache keys: a program's name, never a path."""


def linker_identity(target: Target) -> str:
    """Returns "name: version" of the linker for a target, for the cache key of libraries. The version is the
    first line that the linker prints about it, "unknown" if it prints nothing. Raises SetupError if this
    machine has no linker for the target, or if the linker cannot be run or takes more than 120 s."""
    linker = _linker(target)
    return f"{linker.name}: {_version(linker.command)}"


def link(objects: Sequence[Path], out: Path, target: Target) -> None:
    """Links object files, all in one directory, to the file `out`: a shared library, or one object if the
    target's output is "object".

    Raises SetupError if this machine has no linker for the target or it cannot be run or takes more than 120
    s, CompileError if linking fails or if a shared library for Linux would need symbols that are not in
    ALLOWED; in the last case `out` is left in place.
    """
    linker = _linker(target)
    where = objects[0].parent
    names = [path.name for path in objects]  # relative paths, so that no directory's name enters the result
    command = [*linker.command, *_options(linker, target), "-o", str(out.absolute()), *names]
    done = _run(command, where)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise CompileError(f"{linker.name} could not link the library for {target.triple}:\n{tail}")
    if target.output == "shared" and target.system == "linux":
        missing = sorted(elf.undefined(out.read_bytes()) - ALLOWED)
        if missing:
            raise CompileError(
                f"the library for {target.triple} needs {', '.join(missing)}, which a serving process may"
                " not have: this is a fault of mlcbuild's kernels for this processor"
            )


def _options(linker: Linker, target: Target) -> list[str]:
    if linker.flavour == "gnu":
        if target.output == "object":
            return ["-r", "--strip-debug"]
        return [
            "-shared",
            "--build-id=none",
            "--strip-all",
            "--hash-style=gnu",
            "-z",
            "noexecstack",
            "-z",
            "relro",
        ]
    if linker.flavour == "lld-macho":
        if target.output == "object":
            return ["-r", "-arch", "arm64"]
        version = _macos_version(target)
        platform_version = ["-platform_version", "macos", version, version]
        return [
            "-dylib",
            "-arch",
            "arm64",
            *platform_version,
            "-undefined",
            "dynamic_lookup",
            "-no_uuid",
            "-S",
        ]
    if target.output == "object":
        return ["-r", "-nostdlib"]
    # zig's linker derives the identifier from the content; with Apple's it can only be left out.
    strip = ["-s"] if "zig" in linker.name else ["-Wl,-no_uuid", "-Wl,-S"]
    return ["-dynamiclib", "-undefined", "dynamic_lookup", "-install_name", "@rpath/model.dylib", *strip]


def _macos_version(target: Target) -> str:
    """Returns the macOS version at the end of the target's triple as "major.minor", such as "11.0" for
    arm64-apple-macosx11.0.0; "11.0" if the triple has none.
    """
    digits = target.triple.rpartition("macosx")[2].split(".")
    return ".".join([*digits, "0"][:2]) if digits[0].isdigit() else "11.0"


@cache
def _linker(target: Target) -> Linker:
    for candidate in _candidates(target):
        if _works(candidate, target):
            return candidate
    raise SetupError(_missing(target))


def _candidates(target: Target) -> Iterator[Linker]:
    """Yields the linkers for a target that are installed on this machine, best first: programs on PATH before
    the one in the Python package ziglang, and for macOS, on a Mac, clang before ld64.lld. Those on PATH may
    lack support for the target's processor."""
    if target.system == "macos":
        yield from _macho_candidates(target)
        return
    for name in programs(target):
        if path := shutil.which(name):
            yield Linker((path,), "gnu", name)
    if target.system != "windows" and (command := _zig()):
        yield Linker((*command, "ld.lld"), "gnu", "ziglang ld.lld")


def programs(target: Target) -> tuple[str, ...]:
    """Returns the names of the programs that may be looked up on PATH as linkers for a target, best first.
    For macOS they always include clang, although it is looked up only if this machine is a Mac.
    """
    if target.system == "macos":
        return ("clang", "ld64.lld")
    if target.system == "windows":
        return (f"{target.architecture}-w64-mingw32-ld",)
    return (f"{target.architecture}-linux-gnu-ld", "ld", "ld.lld") if sys.platform == "linux" else ("ld.lld",)


def _macho_candidates(target: Target) -> Iterator[Linker]:
    if sys.platform == "darwin" and (path := shutil.which("clang")):
        yield Linker(
            (path, "-arch", "arm64", f"-mmacosx-version-min={_macos_version(target)}"), "clang-macho", "clang"
        )
    if path := shutil.which("ld64.lld"):
        yield Linker((path,), "lld-macho", "ld64.lld")
    if command := _zig():
        yield Linker((*command, "cc", "-target", "aarch64-macos", "-nostdlib"), "clang-macho", "ziglang cc")


def forget() -> None:
    """Clears the cached linkers and their versions. It is called when this process's PATH has changed."""
    _linker.cache_clear()
    _version.cache_clear()


def _zig() -> tuple[str, ...] | None:
    if importlib.util.find_spec("ziglang") is None:
        return None
    return (sys.executable, "-m", "ziglang")


def _works(linker: Linker, target: Target) -> bool:
    """Returns True if a linker supports a target's processor. Only the program `ld` is run to find out, since
    it is built for some architectures only; all others are assumed to support it. Raises SetupError if `ld`
    cannot be run or takes more than 120 s."""
    if linker.name != "ld":
        return True
    emulation = _GNU_EMULATION.get(target.architecture)
    return emulation is not None and emulation in _run([*linker.command, "-V"]).stdout.split()


@cache
def _version(command: tuple[str, ...]) -> str:
    done = _run([*command[:3], "version"] if "ziglang" in command else [*command, "--version"])
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return lines[0].strip() if lines else "unknown"


def _run(command: Sequence[str], where: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0", "ZERO_AR_DATE": "1"}
    try:
        return subprocess.run(
            list(command),
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"the linker {Path(command[0]).name} cannot be run: {error}") from None


def _missing(target: Target) -> str:
    where = f"no linker for {target.triple} was found"
    if target.system == "macos":
        return f"{where}: install `ziglang` (pip install ziglang) or, on a Mac, Xcode's command line tools"
    if target.system != "linux" and target.output == "shared":
        return f"{where}: shared libraries are made for linux and macos; use `output: object` for others"
    if target.system == "windows":
        package = f"binutils-mingw-w64-{target.architecture.replace('_', '-')}"
        return f"{where}: install `{package}` (apt)"
    package = f"binutils-{target.architecture.replace('_', '-')}-linux-gnu"
    host = platform.machine() == target.architecture
    local = "binutils" if host else package
    return f"{where}: install `{local}` (apt), `lld`, or `ziglang` (pip install ziglang)"
