"""What a build needs to know of each kind of device, as a table that imports no backend and no TVM.

Functions of backends are named by "module:function" and imported where they run, so the key of a step holds
the sources of its own backend only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.quant import Scheme
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class Backend:
    action: str
    """The step that compiles a library: its import closure enters the library's key."""
    tools: str
    """Target -> name and version of each program that decides the library's bytes. Raises SetupError."""
    layout: Callable[[Scheme], str]
    """How weights of a scheme are stored for this device."""
    runtime_files: tuple[str, ...]
    """Shared libraries, without their ending, that a bundle brings along for its library to run."""
    can_run: Callable[[Target, Target], str | None]
    """(target, host) -> None, or why the machine `host` cannot run what is compiled for `target`."""
    labels: Callable[[Target], tuple[str, ...]]
    """What a worker must have to run what is compiled for a target."""

    def tool_versions(self, target: Target) -> Mapping[str, str]:
        """Calls `tools`. Raises SetupError."""
        module, _, name = self.tools.partition(":")
        versions: Mapping[str, str] = getattr(import_module(module), name)(target)
        return versions


def _scheme_layout(scheme: Scheme) -> str:
    return scheme.layout


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        action="mlcbuild.compiler.cpu.action:compile_library",
        tools="mlcbuild.compiler.cpu.action:tools",
        layout=_scheme_layout,
        runtime_files=("libtvm_runtime",),
        can_run=targets.why_not,
        labels=targets.labels,
    )
}
"""Kind of device (`device` of a target) -> its backend. A further backend adds one entry."""


def backend(target: Target) -> Backend:
    """Returns the backend of a target's device. Raises UsageError if there is none."""
    if target.device not in BACKENDS:
        hint = did_you_mean(target.device, BACKENDS)
        raise UsageError(f"target '{target.name}': no backend compiles for device '{target.device}'; {hint}")
    return BACKENDS[target.device]
