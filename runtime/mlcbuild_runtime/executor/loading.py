"""Loads a bundle on the device that it was compiled for.

Devices are named "module:function" in a table and imported when a bundle needs them, so that a machine
without a GPU library serves CPU bundles and the engine imports no device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from mlcbuild_format import bundle
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError

from mlcbuild_runtime.executor.executor import Executor

Loader = Callable[[Path, Manifest, int | None, int | None], Executor]
"""Function that loads a bundle on one kind of device: (directory, manifest, number of threads or None, number
of KV cache pages or None) -> executor. It raises BundleError for a bundle that is damaged or for another
machine, SetupError if the machine lacks something."""

LOADERS: dict[str, str] = {
    "cpu": "mlcbuild_runtime.devices.cpu:load",
    "webgpu": "mlcbuild_runtime.devices.gpu:load",
}
"""Device of a bundle's target -> "module:function" of the function that loads such bundles. A new device adds
one entry."""
CODE: dict[str, str] = {"cpu": "mlcbuild_runtime.devices.cpu_library"}
"""Device -> name of the Python module that loads a bundle's compiled code for it; the module has a function
`try_out` and a VERSION. Devices without compiled code are not listed."""


def load(
    path: Path | str,
    threads: int | None = None,
    pages: int | None = None,
    check: Callable[[Path, Manifest], None] = lambda path, manifest: None,
) -> Executor:
    """Loads the bundle in directory `path` on its device, and returns its executor. Raises BundleError for a
    damaged bundle or one for another device or processor, SetupError if this machine lacks something else
    that loading needs, such as a GPU.

    threads: number of computing threads on a CPU (default: the physical cores that this process may use; the
    first load of a process decides). pages: number of pages of the KV cache (default: enough for max_batch
    sequences of full length). check: called after the bundle's files were checked and before its code is
    loaded; it may raise BundleError or SetupError.
    """
    path = Path(path).absolute()
    manifest = bundle.read(path)
    device = manifest.machine.device
    if device not in LOADERS:
        devices = ", ".join(f"'{name}'" for name in LOADERS)
        raise BundleError(
            f"{path}: the bundle is for the device '{device}', but this runtime has only {devices}: build a"
            " bundle for one of these"
        )
    check(path, manifest)
    module, _, name = LOADERS[device].partition(":")
    loader: Loader = getattr(import_module(module), name)
    return loader(path, manifest, threads, pages)


def try_out(path: Path, manifest: Manifest) -> None:
    """Loads the compiled code of a bundle for CPUs, without weights, to see whether it can be loaded. It
    should run in a child process, because damaged code may end the process that loads it. Raises BundleError
    for a damaged bundle or one for another processor, SetupError if the machine lacks something else that
    loading needs."""
    import_module(CODE[manifest.machine.device]).try_out(path, manifest)


def code_version(manifest: Manifest) -> str:
    """Returns the version of the Python package that loads the compiled code of a bundle for CPUs."""
    return str(import_module(CODE[manifest.machine.device]).VERSION)
