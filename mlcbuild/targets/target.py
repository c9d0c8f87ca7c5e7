"""A target: the complete description of a machine that libraries are compiled for.

presets.py reads targets from YAML; requirements.py compares one with a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from mlcbuild_format import processors

from mlcbuild.canon import Json

Output = Literal["shared", "object", "program"]

CPU = "cpu"
"""The name, "cpu", of the device for which LLVM compiles libraries. For all other devices, the compiled
result is a program of GPU kernels."""


@dataclass(frozen=True)
class Target:
    """A machine for which libraries are compiled. It does not depend on the machine that reads the recipe:
    the name `host` has been resolved.
    """

    name: str
    """The target's name in messages, which is never part of a cache key."""
    triple: str
    """LLVM triple, for example x86_64-unknown-linux-gnu."""
    cpu: str
    """LLVM's name of the processor or level, for example x86-64-v3, cascadelake, cortex-a72."""
    features: tuple[str, ...] = ()
    """LLVM features with their sign, sorted, for example +dotprod."""
    device: str = "cpu"
    """The kind of device, such as "cpu", which is a key of backends.BACKENDS."""
    output: Output = "shared"
    """The kind of compiled file: "shared", a shared library; "object", an object file that is linked
    elsewhere; or "program", a GPU program."""

    @property
    def architecture(self) -> str:
        """Returns the first part of the target's triple, such as x86_64, aarch64 or arm64."""
        return self.triple.partition("-")[0]

    @property
    def system(self) -> processors.System:
        return processors.system(self.triple)

    @property
    def family(self) -> str:
        """Returns the target's architecture in lower case, under one name on all systems: aarch64 also for
        arm64, x86_64 also for amd64."""
        return processors.family(self.architecture)


def to_json(target: Target) -> dict[str, Json]:
    """Returns a target as a JSON object, in the form that enters keys and bundles: its triple, cpu, features,
    device and output, without its name."""
    return {
        "triple": target.triple,
        "cpu": target.cpu,
        "features": list(target.features),
        "device": target.device,
        "output": target.output,
    }


def from_json(data: Mapping[str, Json], name: str = "") -> Target:
    """Parses the JSON object of a target that `to_json` returned. name: the target's name for display. Raises
    KeyError if a field is missing, TypeError if the features are not a list; other values are not checked.
    """
    features = data["features"]
    if not isinstance(features, list):
        raise TypeError(f"features must be a list, not {features!r}")
    return Target(
        name,
        str(data["triple"]),
        str(data["cpu"]),
        tuple(str(feature) for feature in features),
        str(data["device"]),
        cast(Output, data["output"]),
    )
