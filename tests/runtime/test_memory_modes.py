"""Tests of how much of a machine's memory a bundle may use, by memory mode and by command-line options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mlcbuild_format import memory, sizes
from mlcbuild_format.bundle import Manifest, Memory, Model
from mlcbuild_format.errors import SetupError
from mlcbuild_format.limits import Limits
from mlcbuild_runtime.engine import memory_modes
from mlcbuild_runtime.engine.memory_modes import LimitOverrides

MB = 1_000_000


def described() -> Manifest:
    """Returns the manifest of a bundle that needs 100 MB: for its weights, its workspace, and eight sequences
    of 16 pages each."""
    limits = Limits(context_window=256, prefill_chunk=64, max_batch=8)
    memory = Memory(weights=30 * MB, kv_cache=64 * MB, workspace=6 * MB, total=100 * MB)
    return Manifest("m", Model("m", "llama", {}), {}, {}, limits, "model.so", ("w",), "s", {}, memory)


def test_modes() -> None:
    manifest = described()
    each = 256 // 16
    fixed = manifest.memory.weights + manifest.memory.workspace
    page = manifest.memory.kv_cache // (each * 8)

    def chosen(mode: memory_modes.Mode, **more: int) -> memory_modes.ChosenLimits:
        return memory_modes.choose(LimitOverrides(mode, **more), manifest)

    server = chosen("server")
    assert (server.max_batch, server.pages, server.prefill_chunk) == (8, 8 * each, 64)
    assert server.memory == manifest.memory.total
    local, single = chosen("local"), chosen("interactive")
    assert (local.max_batch, local.pages) == (4, 4 * each)
    assert (single.max_batch, single.pages) == (1, each)
    assert chosen("interactive", max_batch=2, prefill_chunk=32) == replace(
        single, max_batch=2, pages=2 * each, prefill_chunk=32, memory=single.memory + each * page
    )
    assert chosen("server", max_pages=20).pages == 20
    # The cache takes the room that is left, and at least one context.
    assert chosen("server", memory=fixed + 3 * each * page).pages == 3 * each
    with pytest.raises(SetupError, match=r"needs .* but the memory for bundles is .*: give it more"):
        chosen("server", memory=fixed + page)
    assert chosen("server", memory=fixed + page, max_pages=1).pages == 1
    long = replace(manifest, limits=replace(manifest.limits, prefill_chunk=2048))
    assert memory_modes.choose(LimitOverrides("server"), long).prefill_chunk == 256
    assert memory_modes.choose(LimitOverrides("interactive"), long).prefill_chunk == 2048


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "3000000"}, 3 * MB),
        ("0::/of/the/host", {"sys/fs/cgroup/memory.max": "2000000"}, 2 * MB),
        (
            "4:memory:/a\n1:cpu:/\n0::/",
            {
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 62),
            },
            MB,
        ),
        ("nothing\n", {}, None),
    ],
)
def test_control_groups_limit_memory(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    whole_machine = memory.available(tmp_path / "nowhere")
    assert memory.available(tmp_path) == (limit or whole_machine)


def test_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 100 * MB < memory.available() < 1 << 50
    monkeypatch.setattr(memory, "available", lambda: 1000 * MB)
    assert [LimitOverrides(mode).budget // MB for mode in memory_modes.MODES] == [500, 500, 900]
    assert LimitOverrides(memory=7).budget == 7
    assert [sizes.show(n) for n in (999, 1500, 2 * MB, 3 << 50)] == [
        "999 B",
        "1.5 kB",
        "2.0 MB",
        "3377.7 TB",
    ]
