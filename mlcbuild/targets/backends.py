"""A table of the properties of each kind of device that a build needs. It imports no backend and no TVM.

Functions of backends are named by "module:function" and imported when they run, so that a step's key depends
only on the sources of the step's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Scheme, Storage, storage
from mlcbuild.targets import gpus, requirements
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class Backend:
    """The properties of one kind of device for which models are compiled."""

    action: str
    """The function, as "module:function", that compiles a library in a build step; all source files that it
    imports enter the library's key."""
    tools: str
    """The function, as "module:function", that lists the programs which determine a library's bytes, such as
    compiler and linker. It accepts a target and returns name of a program -> version, or raises SetupError if
    a program is missing."""
    layout: Callable[[Scheme], str]
    """Function from a quantization scheme to the name of the physical layout, such as "plain", "row" or
    "x16", that the device's kernels read. It is also called for the scheme of each override and of each
    candidate of a choice. It raises UsageError for a format without kernels."""
    runtime_files: tuple[str, ...]
    """Names, without .so or .dylib, of the shared libraries that a bundle must include to run its compiled
    library, such as "libtvm_runtime".
    """
    can_run: Callable[[Target, Target], str | None]
    """Function of (target, host) that returns the reason why the machine `host` cannot run code for `target`;
    None if it can run it.
    """
    labels: Callable[[Target], tuple[str, ...]]
    """Function from a target to the labels, such as "linux x86_64" and "avx2", that a cluster worker must
    have to run code for the target."""
    kernels: str = ""
    """Python package with the device's kernels for stored formats, with one module `<format>_kernel` each; a
    library's key covers only the modules of the formats that it uses. "" stands for no such package, and the
    function that compiles a library imports the kernels of all formats."""
    executor: tuple[str, ...] = ()
    """Dotted names of the runtime's Python modules that run compiled code on this kind of device. Their
    source files, and those that they import, enter the keys of build steps that run such code."""
    int8_cache: bool = False
    """True if the device can keep keys and values of earlier tokens in 8 bits."""
    faults: str = ""
    """Function, as "module:function", from a model config to error messages, one for each sort of block of
    the model that the device cannot compute ([] if there is none); "": the device computes every block.
    """

    def storage(self, scheme: Scheme) -> Storage:
        """Returns a quantization scheme with the layout in which the device's kernels read its formats.
        Raises UsageError for a format without kernels. The scheme's overrides and candidates get layouts,
        too.
        """
        return storage(scheme, self.layout)

    def kernel_modules(self, scheme: Storage) -> tuple[str, ...]:
        """Returns dotted names of the Python modules with the device's kernels, one for each stored format
        that a quantization scheme or one of its overrides and candidates names; () if the compiler imports
        the kernels of all formats.
        """
        return tuple(f"{self.kernels}.{name}_kernel" for name in scheme.formats if self.kernels)

    def tool_versions(self, target: Target) -> Mapping[str, str]:
        """Returns the mapping name -> version of the programs, such as the compiler, that determine the bytes
        of a library compiled for `target`. Raises SetupError if a program is missing."""
        module, _, name = self.tools.partition(":")
        versions: Mapping[str, str] = getattr(import_module(module), name)(target)
        return versions

    def check(self, config: ModelConfig) -> None:
        """Raises UsageError if the device lacks kernels for a block of the model; the message names all such
        blocks."""
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
    "q3l": "x16",
    "q4l": "x16",
    "q5l": "x16",
    "q6l": "x16",
    "q4_0": "x16",
    "q4_1": "x16",
    "q5_0": "x16",
    "q5_1": "x16",
    "q8_0": "x16",
    "q8_1": "x16",
    "mxfp4": "x16",
    "nvfp4": "x16",
    "q2_k": "x16",
    "q3_k": "x16",
    "q4_k": "x16",
    "q5_k": "x16",
    "q6_k": "x16",
    "q8_k": "x16",
    "iq4_nl": "x16",
    "iq4_xs": "x16",
    "e4m3": "row",
    "e5m2": "row",
}
"""Name of a format -> the physical layout that CPU kernels read, "plain", "row" or "x16"; each format has a
file in mlcbuild/compiler/cpu/formats/."""


def _cpu_layout(scheme: Scheme) -> str:
    if scheme.format not in CPU_LAYOUTS:
        raise UsageError(
            f"scheme {scheme.name}: CPUs have no kernels for format '{scheme.format}'; they have some for "
            f"{', '.join(CPU_LAYOUTS)}: choose a scheme with one of these"
        )
    return CPU_LAYOUTS[scheme.format]


_GPU_ROWS = (
    *("q4f32", "q4f16", "q8f32", "q8f16", "q4s", "q5s", "q8s", "q3l", "q4l", "q5l", "q6l"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "nvfp4"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k", "iq4_nl", "iq4_xs"),
    *("e4m3", "e5m2"),
)
GPU_LAYOUTS: Mapping[str, str] = {"f32": "plain", "f16": "plain", **dict.fromkeys(_GPU_ROWS, "row")}
"""Name of a format -> the physical layout that GPU kernels read, "plain" or "row": `stored_as` in
mlcbuild/compiler/gpu/kernels/storage.py describes those that are stored by rows. If CPU kernels read the same
layout, both share weights.
"""


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
        can_run=requirements.why_not,
        labels=requirements.labels,
        kernels="mlcbuild.compiler.cpu.formats",
        executor=("mlcbuild_runtime.devices.cpu",),
        int8_cache=True,
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
"""Kind of device, such as "cpu" or "webgpu" (the field `device` of a target) -> its properties. A new kind of
device adds one entry."""


def backend(target: Target) -> Backend:
    """Returns the properties of a target's device. Raises UsageError if the device does not exist."""
    if target.device not in BACKENDS:
        hint = did_you_mean(target.device, BACKENDS)
        raise UsageError(f"target '{target.name}': no backend compiles for device '{target.device}'; {hint}")
    return BACKENDS[target.device]
