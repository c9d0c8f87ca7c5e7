"""Tests whether this machine can run programs for GPUs, without loading a GPU library into this process."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec

LABEL = "webgpu"
"""The label that a cluster worker has if its machine has a GPU adapter, and that steps which run GPU code
require."""
_SECONDS = 60
_COUNT = """import wgpu
print(sum(adapter.info["backend_type"] != "OpenGL" for adapter in wgpu.gpu.enumerate_adapters_sync()))"""


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Returns the reason why this machine cannot run GPU bundles, as part of an error message (no package
    wgpu, no answer from a driver, or no adapter other than OpenGL's); None if it can. The first call tests
    it, for up to a minute, in a child process, which a driver may crash; later calls return the same.
    """
    if find_spec("wgpu") is None:
        return "GPU bundles run with the package wgpu: pip install 'mlcbuild-runtime[gpu]'"
    try:
        process = subprocess.run(
            [sys.executable, "-c", _COUNT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "this machine's GPU driver does not answer"
    if process.returncode != 0 or not process.stdout.strip().isdigit() or int(process.stdout) == 0:
        return "this machine has no GPU adapter (Vulkan, Metal or D3D12)"
    return None
