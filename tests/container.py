"""A builder of container images without a daemon (buildah, as root), and a base image made of this machine's
own Python, since tests load nothing from registries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("sh", "rm", "useradd")
"""Names of the programs, besides Python and pip, that are copied into the tests' base image because the
Dockerfile runs them."""
LIBRARIES = ("libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")
"""File names of shared libraries that are copied into the tests' base image. No program in it needs them, but
Python's official images have them and wheels rely on that."""
LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "_tkinter*", "turtledemo", "config-*", "lib2to3")


@dataclass(frozen=True)
class Builder:
    """The image builder buildah, with a storage directory of its own, so that tests share no images with the
    machine."""

    area: Path

    def run(self, *words: str | Path) -> str:
        """Runs a command of buildah and returns its stdout without the last newline."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    def command(self, *words: str | Path) -> list[str]:
        places = ["--root", str(self.area / "storage"), "--runroot", str(self.area / "run")]
        return ["buildah", "--storage-driver", "vfs", *places, *map(str, words)]


@contextmanager
def builder(area: Path) -> Iterator[Builder]:
    """Returns a context with a builder whose images and containers are removed at its end."""
    one = Builder(area)
    try:
        yield one
    finally:
        one.run("rm", "--all")
        one.run("rmi", "--all", "--force")


def refusal(area: Path) -> str:
    """Returns why images cannot be built here, as text; "" if they can."""
    if shutil.which("buildah") is None:
        return "buildah is not installed"
    if os.geteuid() != 0:
        return "buildah without user namespaces needs root"
    root = area / "root"
    copy_system(root, python=False)
    with builder(area) as one:
        one.run("from", "--name", "trial", "scratch")
        one.run("add", "-q", "trial", root, "/")
        trial = one.command("run", "--isolation", "chroot", "trial", "--", "/usr/bin/sh", "-c", ":")
        done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"buildah runs nothing here: {done.stderr.strip()[-300:]}"


def make_base(one: Builder, area: Path, image: str, project: Path) -> None:
    """Makes a base image of this machine's Python, with pip and wheels of what a project needs.

    image: name of the image, which a Dockerfile's FROM finds; project: path of a pyproject.toml, whose
    dependencies pip then installs without a network.
    """
    root = area / "root"
    copy_system(root, python=True)
    data = tomllib.loads(project.read_text())
    needed = [*data["build-system"]["requires"], *data["project"]["dependencies"]]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d"]
    subprocess.run([*command, str(root / "wheels"), *needed], check=True)
    one.run("from", "--name", "base", "scratch")
    one.run("add", "-q", "base", root, "/")
    shutil.rmtree(root)
    one.run("run", "--isolation", "chroot", "base", "--", "/usr/local/bin/python3", "-m", "ensurepip")
    variables = ("PATH=/usr/local/bin:/usr/bin", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/wheels")
    one.run("config", *(word for variable in variables for word in ("--env", variable)), "base")
    one.run("commit", "-q", "base", image)


def copy_system(root: Path, *, python: bool) -> None:
    """Copies a shell and, if `python` is true, Python with its library and useradd into the new directory
    `root`, with all shared libraries that they load.
    """
    for name in ("etc", "tmp", "home", "root", "proc", "sys", "dev", "usr/bin", "usr/local/bin"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    programs = {root / "usr/bin" / name: Path(shutil.which(name) or name) for name in PROGRAMS}
    extensions: Sequence[Path] = ()
    if python:
        library = Path(sysconfig.get_path("stdlib"))
        base = Path(sys.base_prefix, "bin", library.name)
        programs[root / "usr/local/bin/python3"] = base
        (root / "usr/local/bin/python").symlink_to("python3")
        (root / "usr/local/bin/pip").symlink_to("pip3")
        ignored = shutil.ignore_patterns(*LEFT_OUT, "__pycache__")
        shutil.copytree(library, root / "usr/local/lib" / library.name, ignore=ignored, symlinks=True)
        extensions = [*(root / "usr/local/lib" / library.name / "lib-dynload").glob("*.so")]
    for place, program in programs.items():
        shutil.copy(program.resolve(), place)
    _copy_libraries(root, [*programs.values(), *extensions])


def _copy_libraries(root: Path, files: Sequence[Path]) -> None:
    """Copies the shared libraries that programs and extension modules load into `root`: the loader to its own
    path, all others beside the C library.
    """
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    paths = {*re.findall(r"(/\S+\.so\S*) \(", listed)}
    (c_library,) = (Path(path) for path in paths if path.endswith("/libc.so.6"))
    paths |= {str(c_library.with_name(name)) for name in LIBRARIES}
    for path in paths:
        place = Path(path) if "/ld-" in path else c_library.with_name(Path(path).name)
        target = root / place.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(path).resolve(), target)
