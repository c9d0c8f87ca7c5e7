"""Targets: the machine a library is compiled for, spelled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """Nothing here depends on the machine that reads it: `host` is resolved before a Target exists."""

    name: str
    """Display name; never part of a key."""
    triple: str
    """LLVM triple, for example x86_64-unknown-linux-gnu."""
    cpu: str
    """LLVM's name of the processor or level, for example x86-64-v3, cascadelake, cortex-a72."""
    features: tuple[str, ...] = ()
    """LLVM features with their sign, sorted, for example +dotprod."""
    device: Literal["cpu"] = "cpu"
    output: Literal["shared", "object"] = "shared"
    """A shared library, or an object file to be linked elsewhere."""

    @property
    def architecture(self) -> str:
        """First part of the triple: x86_64, aarch64, arm64 ..."""
        return self.triple.partition("-")[0]

    @property
    def system(self) -> Literal["linux", "macos", "windows", "none"]:
        if "linux" in self.triple:
            return "linux"
        if "darwin" in self.triple or "macos" in self.triple:
            return "macos"
        return "windows" if "windows" in self.triple else "none"
