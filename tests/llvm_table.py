"""Prints cpus.json: the names that TVM's LLVM knows. Run it when the pinned apache-tvm changes:

    python tests/llvm_table.py > runtime/mlcbuild_format/cpus.json

Beside each processor stand the x86-64 level it reaches and the checkable features it has beyond that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import tvm
import tvm_ffi
from mlcbuild_format.processors import CHECKABLE, X86_LEVELS

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}

UNLISTED_CPUS = {"x86_64": (), "aarch64": ("apple-m1", "apple-m2", "apple-m3")}
"""Name of a processor architecture -> names of processors that LLVM accepts although its list of processors
omits them."""

UNLISTED_FEATURES = {
    "x86_64": "avx10.1 avx10.2 prefer-128-bit retpoline rtm soft-float",
    "aarch64": "cmpbr crypto f32mm f64mm outline-atomics reserve-x18 sme2p2 sme-f8f16 sme-f8f32 sme-fa64 "
    "ssve-fp8dot2 sve2-aes sve2-bitperm sve2-sha3 sve2-sm4 sve2p1 sve2p2 v8.9a v9.4a v9.5a",
}
"""Name of a processor architecture -> names, separated by spaces, of CPU features that LLVM accepts but that
none of its listed processors has. The script that reads this fails if LLVM refuses one of them."""


def main() -> None:
    table: dict[str, Any] = {"llvm": _function("target.llvm_version_major")(), "architectures": {}}
    for architecture in TRIPLES:
        cpus = {name: _features(architecture, name) for name in _cpus(architecture)}
        extra = UNLISTED_FEATURES[architecture].split()
        _refuse_unknown(architecture, extra)
        table["architectures"][architecture] = {
            "cpus": {
                name: _folded(actual & CHECKABLE[architecture]) for name, actual in sorted(cpus.items())
            },
            "features": sorted(set(extra).union(*cpus.values())),
        }
    sys.stdout.write(json.dumps(table, indent=1) + "\n")


def _cpus(architecture: str) -> list[str]:
    listed = _function("target.llvm_get_cpu_archlist")(_target(architecture, {}))
    names = [str(name) for name in listed if "_" not in str(name)]
    if architecture == "x86_64":
        names = [name for name in names if "64bit" in _features(architecture, name)]
    return [*names, *UNLISTED_CPUS[architecture]]


def _features(architecture: str, cpu: str) -> frozenset[str]:
    target = _target(architecture, {"mcpu": cpu})
    return frozenset(str(name) for name in _function("target.llvm_get_cpu_features")(target))


def _folded(features: frozenset[str]) -> str:
    reached: list[str] = []
    covered: set[str] = set()
    for level, added in X86_LEVELS.items():
        if not features.issuperset(added):
            break
        reached, covered = [level], covered | set(added)
    return " ".join(reached + sorted(features - covered))


def _refuse_unknown(architecture: str, features: Iterable[str]) -> None:
    """Raises an error for a feature that LLVM does not know; LLVM only prints a line about it on the standard
    error stream."""
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            target = _target(architecture, {"mattr": [f"+{name}" for name in features]})
            _function("target.llvm_get_cpu_features")(target)
        finally:
            os.dup2(kept, 2)
        caught.seek(0)
        said = caught.read().decode()
    if "not a recognized" in said:
        raise SystemExit(said)


def _target(architecture: str, options: dict[str, object]) -> object:
    return tvm.target.Target({"kind": "llvm", "mtriple": TRIPLES[architecture], **options})


def _function(name: str) -> Callable[..., Any]:
    actual: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return actual


if __name__ == "__main__":
    main()
