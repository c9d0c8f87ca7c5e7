"""Lists the GPUs of this machine through wgpu (Vulkan, Metal, D3D12), chooses one, and reads its limits.

wgpu is the one GPU library of the runtime, an optional dependency; only the modules gpu_*.py import it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mlcbuild_format.errors import SetupError
from mlcbuild_format.program import (
    DEVICE_VARIABLE,
    FEATURES,
    FEATURES_VARIABLE,
    GUARANTEED,
    PACKED_PRODUCTS,
    SHADER_F16,
    SUBGROUPS,
    DeviceLimits,
)

if TYPE_CHECKING:
    import wgpu

_LIMITS = {
    "max-storage-buffers-per-shader-stage": "storage_buffers",
    "max-storage-buffer-binding-size": "binding_bytes",
    "max-buffer-size": "buffer_bytes",
    "max-compute-invocations-per-workgroup": "threads",
    "max-compute-workgroup-storage-size": "shared_bytes",
    "max-compute-workgroups-per-dimension": "workgroups",
}
"""Name of a limit in wgpu -> field of DeviceLimits."""
_FEATURES = {SHADER_F16: "shader-f16", SUBGROUPS: "subgroup"}
"""Name of a device's optional feature in GPU programs -> its name in wgpu."""
_PREFERRED = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "CPU": 3}


def adapters() -> list[Any]:
    """Returns wgpu's adapters for the GPUs of this machine, those for OpenGL left out, the fastest kind
    first; [] if there is none. Raises SetupError if wgpu is not installed."""
    try:
        import wgpu
    except ImportError:
        raise SetupError(
            "GPU bundles need the Python package wgpu: install it with `pip install mlcbuild-runtime[gpu]`"
        ) from None
    present = [
        adapter for adapter in wgpu.gpu.enumerate_adapters_sync() if adapter.info["backend_type"] != "OpenGL"
    ]
    return sorted(present, key=lambda adapter: _PREFERRED.get(adapter.info["adapter_type"], 4))


def describe(adapter: Any) -> str:
    """Returns the name of a GPU adapter for messages, with the interface through which it is used, such as
    "NVIDIA H100 PCIe (Vulkan)"."""
    return f"{adapter.info['device']} ({adapter.info['backend_type']})"


def choose(name: str | None = None) -> Any:
    """Returns the first GPU adapter of which `name` is the number in the list of `adapters`, from 0, or a
    part of the name, in any case; None: the environment variable MLCBUILD_DEVICE is used instead, and if that
    is not set, the first adapter is returned. Raises SetupError if this machine has no adapter, none of them
    matches, or wgpu is not installed."""
    name = name if name is not None else os.environ.get(DEVICE_VARIABLE, "")
    present = adapters()
    if not present:
        raise SetupError(
            "this machine has no GPU adapter for Vulkan, Metal or D3D12: install the driver of its GPU"
            " (Debian: libvulkan1, and mesa-vulkan-drivers for a software one)"
        )
    if name.isdecimal():
        chosen = present[int(name) : int(name) + 1]
    else:
        chosen = [adapter for adapter in present if name.lower() in describe(adapter).lower()]
    if not chosen:
        names = "; ".join(f"{index}: {describe(adapter)}" for index, adapter in enumerate(present))
        raise SetupError(f"no GPU adapter is called '{name}'; this machine has {names}")
    return chosen[0]


def limits(adapter: Any) -> DeviceLimits:
    """Returns the limits of a GPU adapter; those that it does not report are what WebGPU guarantees. The
    alignment of offsets is always 256 bytes, which every device accepts."""
    values = {field: int(adapter.limits[name]) for name, field in _LIMITS.items() if name in adapter.limits}
    return DeviceLimits(**values, alignment=GUARANTEED.alignment)


def features(adapter: Any) -> frozenset[str]:
    """Returns the names, as GPU programs use them, of the optional features of a GPU adapter for which a
    bundle may have other source texts of its kernels. The environment variable MLCBUILD_DEVICE_FEATURES,
    names with commas between them, restricts them. Raises SetupError if it has a name that no feature has."""
    allowed = {name.strip() for name in os.environ.get(FEATURES_VARIABLE, ",".join(FEATURES)).split(",")} - {
        ""
    }
    unknown = sorted(allowed - set(FEATURES))
    if unknown:
        raise SetupError(
            f"{FEATURES_VARIABLE}: no feature is called '{unknown[0]}', only {', '.join(FEATURES)}"
        )
    present = {name for name, feature in _FEATURES.items() if feature in adapter.features}
    return frozenset(allowed & {*present, PACKED_PRODUCTS})  # wgpu has packed products on every device.


def open_device(adapter: Any) -> wgpu.GPUDevice:
    """Opens the device of a GPU adapter, with all limits and features that the adapter offers and that GPU
    programs use, and returns it. Raises SetupError if the driver refuses.
    """
    required = {name: adapter.limits[name] for name in _LIMITS if name in adapter.limits}
    names = [_FEATURES[name] for name in sorted(features(adapter)) if name in _FEATURES]
    try:
        return adapter.request_device_sync(required_limits=required, required_features=names)
    except Exception as error:  # Whatever the driver reports
        raise SetupError(f"{describe(adapter)}: the GPU cannot be opened: {error}") from None
