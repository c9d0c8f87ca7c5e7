"""Builds ik_llama.cpp from a source directory, and a small library on top of it whose C functions
(ik_calls.c) the benchmark calls from Python.
"""

from __future__ import annotations

import os
from pathlib import Path

from engines import HERE, quietly

SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_CURL=OFF",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # for caches of other types than ours and its default, float16
)
NATIVE = ("-DGGML_NATIVE=ON",)
"""Options of CMake with which a build uses all instruction sets of this machine."""


def build(source: Path, place: Path, processor: tuple[str, ...] = NATIVE) -> Path:
    """Returns the path of the library of ik_calls.c, linked with the build of `source`; reuses builds in
    `place`, a directory that is created if it is missing. processor: CMake options that choose the
    instruction sets. Raises subprocess.CalledProcessError, whose `output` is the path of the log, if CMake or
    a compiler fails."""
    place.mkdir(parents=True, exist_ok=True)
    tree, library, log = place / "build", place / "ik_calls.so", place / "build.log"
    jobs = str(os.cpu_count() or 1)
    variables = dict(os.environ)
    quietly(["cmake", "-S", str(source), "-B", str(tree), *SETTINGS, *processor], variables, log)
    quietly(["cmake", "--build", str(tree), "--target", "llama", "-j", jobs], variables, log)
    headers = [f"-I{source / part}" for part in ("include", "ggml/include")]
    objects = [
        str(tree / part / f"lib{part_name}.so")
        for part, part_name in (("src", "llama"), ("ggml/src", "ggml"))
    ]
    paths = [f"-Wl,-rpath,{Path(path).parent}" for path in objects]
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-shared", "-fPIC", *headers, str(HERE / "ik_calls.c"), *objects, *paths]
    quietly([*command, "-o", str(library)], variables, log)
    return library
