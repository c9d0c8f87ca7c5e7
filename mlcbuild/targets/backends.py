"""The properties of each kind of device that a build needs, as a table that imports no backend and no TVM.

Functions of backends are named by "module:function" and imported when they run, so that the key of a step
holds the sources of its own backend only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Scheme, Storage, storage
from mlcbuild.targets import gpus
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class Backend:
    """The properties of one kind of device."""

    action: str
    """The action that compiles a library; its import closure enters the library's key."""
    tools: str
    """Function that maps a target to name -> version of each program that determines the library's bytes.
    Raises SetupError."""
    layout: Callable[[Scheme], str]
    """Maps a scheme to the physical layout that the device's kernels read; also called for each override.

    Raises UsageError for a format without kernels.
    """
    runtime_files: tuple[str, ...]
    """Shared libraries, without suffix, that a bundle includes to run its library."""
    can_run: Callable[[Target, Target], str | None]
    """Maps (target, host) to the reason why the machine `host` cannot run code for `target`, or None."""
    labels: Callable[[Target], tuple[str, ...]]
    """Maps a target to the labels that a worker needs to run code for it."""
    executor: tuple[str, ...] = ()
    """Modules of the runtime that run compiled code; they enter the keys of steps that run it."""
    faults: str = ""
    """"module:function" of model config -> a sentence for each block of its layers that the device cannot
    compute; "": it computes every block."""

    def storage(self, scheme: Scheme) -> Storage:
        """Returns a scheme as the device stores it. Raises UsageError for a format without kernels."""
        return storage(scheme, self.layout)

    def tool_versions(self, target: Target) -> Mapping[str, str]:
        """Calls `tools`. Raises SetupError."""
        module, _, name = self.tools.partition(":")
        versions: Mapping[str, str] = getattr(import_module(module), name)(target)
        return versions

    def check(self, config: ModelConfig) -> None:
        """Raises UsageError for a model with blocks that the device cannot compute."""
        module, _, name = self.faults.partition(":")
        faults: list[str] = getattr(import_module(module), name)(config) if module else []
        if faults:
            raise UsageError("; ".join(faults))


CPU_LAYOUTS: Mapping[str, str] = {
    "f32": "plain",
    "f16": "plain",
    "q4f32": "row",
    "q4f16": "row",
    "q8f32": "row",
    "q8f16": "row",
    "q4s": "x16",
    "q5s": "x16",
    "q8s": "x16",
}
"""Format -> layout that CPU kernels read; its keys are those of KERNELS in the CPU's compiler."""


def _cpu_layout(scheme: Scheme) -> str:
    if scheme.format not in CPU_LAYOUTS:
        raise UsageError(
            f"scheme {scheme.name}: CPUs have no kernels for format '{scheme.format}'; they have some for "
            f"{', '.join(CPU_LAYOUTS)}: choose a scheme with one of these"
        )
    return CPU_LAYOUTS[scheme.format]


GPU_LAYOUTS: Mapping[str, str] = {
    name: layout for name, layout in CPU_LAYOUTS.items() if layout in ("plain", "row")
}
"""Format -> the layout that the kernels of GPUs read: the one that CPUs read, so that both share weights."""


def _gpu_layout(scheme: Scheme) -> str:
    if scheme.format not in GPU_LAYOUTS:
        raise UsageError(
            f"scheme {scheme.name}: GPUs have no kernels for format '{scheme.format}'; they have some for "
            f"{', '.join(GPU_LAYOUTS)}: choose a scheme with one of these"
        )
    return GPU_LAYOUTS[scheme.format]


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        action="mlcbuild.compiler.cpu.action:compile_library",
        tools="mlcbuild.compiler.cpu.action:tools",
        layout=_cpu_layout,
        runtime_files=("libtvm_runtime",),
        can_run=targets.why_not,
        labels=targets.labels,
        executor=("mlcbuild_runtime.devices.cpu",),
    ),
    "webgpu": Backend(
        action="mlcbuild.compiler.gpu.gpu_action:compile_library",
        tools="mlcbuild.compiler.gpu.gpu_action:tools",
        layout=_gpu_layout,
        runtime_files=(),
        can_run=lambda target, host: gpus.why_not(),
        labels=lambda target: (gpus.LABEL,),
        executor=("mlcbuild_runtime.devices.gpu",),
        faults="mlcbuild.compiler.gpu.support:unsupported",
    ),
}
"""Kind of device (`device` of a target) -> its backend. A further backend adds one entry."""


def backend(target: Target) -> Backend:
    """Returns the backend of a target's device. Raises UsageError if there is none."""
    if target.device not in BACKENDS:
        hint = did_you_mean(target.device, BACKENDS)
        raise UsageError(f"target '{target.name}': no backend compiles for device '{target.device}'; {hint}")
    return BACKENDS[target.device]
