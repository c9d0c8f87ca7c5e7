"""Which device loads a bundle: a table by the device that the bundle was compiled for.

Devices are named by "module:function" and imported when a bundle needs them, so that a machine without a GPU
library serves CPU bundles and the engine imports no device.
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
"""(directory, manifest, threads, pages) -> executor; see `load`. Raises BundleError or SetupError."""

LOADERS: dict[str, str] = {"cpu": "mlcbuild_runtime.devices.cpu:load"}
"""Device of a bundle's target -> "module:function", the Loader. A further device adds one entry."""
CODE: dict[str, str] = {"cpu": "mlcbuild_runtime.devices.cpu_library"}
"""Device -> the module that loads code of a bundle, with `try_out` and VERSION. Devices without compiled code
have none."""


def load(
    path: Path | str,
    threads: int | None = None,
    pages: int | None = None,
    check: Callable[[Path, Manifest], None] = lambda path, manifest: None,
) -> Executor:
    """Loads the bundle in directory `path` on its device.

    threads: threads that compute, on a CPU (default: the physical cores that this process may use; the first
    load of a process decides).
    pages: pages of the KV cache (default: enough for max_batch sequences of full length).
    check: is called before code of the bundle is loaded; raises BundleError or SetupError.
    Raises BundleError or SetupError.
    """
    path = Path(path).absolute()
    manifest = bundle.read(path)
    device = manifest.machine.device
    if device not in LOADERS:
        here = ", ".join(f"'{name}'" for name in LOADERS)
        raise BundleError(
            f"{path}: the bundle is for the device '{device}', but this runtime has only {here}: build a"
            " bundle for one of these"
        )
    check(path, manifest)
    module, _, name = LOADERS[device].partition(":")
    loader: Loader = getattr(import_module(module), name)
    return loader(path, manifest, threads, pages)


def try_out(path: Path, manifest: Manifest) -> None:
    """Loads the code of a bundle, without weights. Damaged code may end the process. Raises BundleError or
    SetupError."""
    import_module(CODE[manifest.machine.device]).try_out(path, manifest)


def code_version(manifest: Manifest) -> str:
    """Returns the version of what loads a bundle's code."""
    return str(import_module(CODE[manifest.machine.device]).VERSION)
