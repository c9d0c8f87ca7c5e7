"""Tests of untrusted GPU programs on a real adapter: a program that is accepted never accesses memory outside
of its buffers."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_format import bundle, program_json
from mlcbuild_format.errors import BundleError, EngineError
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.program import Program, scalar_values
from mlcbuild_runtime.devices import gpu_adapter, gpu_program
from mlcbuild_runtime.devices.gpu_program import DeviceProgram

from . import mutations
from .test_gpu import has_adapter

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(1200)]
COUNT = 1000 if "MLCBUILD_TEST_EVERY" in os.environ else 60
SEED = int(os.environ.get("MLCBUILD_TEST_SEED", "11"))
GUARD = np.full(256, 0xA5, np.uint8)
PAGES, LONGEST = 8, 1 << 16
"""Two limits of these tests: PAGES is the number of pages in the KV cache. LONGEST is the largest value of a
kernel's scalar argument with which the kernel is still executed, because the lengths of loops depend on
scalars."""


class Guarded:
    """A device that adds a guard area, which no kernel may change, behind each buffer, and that compiles each
    kernel only once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pipelines: dict[object, Any] = {}
        self.buffers: list[tuple[Any, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def create_buffer(self, *, size: int, usage: int) -> Any:
        buffer = self._device.create_buffer(size=size + GUARD.size, usage=usage)
        if usage & 0x80:  # storage
            self._device.queue.write_buffer(buffer, size, GUARD)
            self.buffers.append((buffer, size))
        return buffer

    def create_bind_group_layout(self, *, entries: list[Any]) -> Any:
        self._kinds = tuple(entry["buffer"]["type"] for entry in entries)
        return self._device.create_bind_group_layout(entries=entries)

    def create_shader_module(self, *, code: str) -> str:
        return code

    def create_compute_pipeline(self, *, layout: Any, compute: Mapping[str, Any]) -> Any:
        key = (self._kinds, *compute.values())
        if key not in self._pipelines:
            module = self._device.create_shader_module(code=compute["module"])
            parts = {**compute, "module": module}
            self._pipelines[key] = self._device.create_compute_pipeline(layout=layout, compute=parts)
        return self._pipelines[key]

    def destroy(self) -> None:
        """Does nothing in place of releasing the GPU device, because the next program uses the same
        device."""

    def is_intact(self) -> bool:
        return all(
            bytes(self._device.queue.read_buffer(buffer, size, GUARD.size)) == GUARD.tobytes()
            for buffer, size in self.buffers
        )


def mutated(rng: random.Random, document: Any) -> Any:
    """Returns a copy of a GPU program in which one number or name is changed at random."""
    document = parse_json(program_json.to_bytes(document))
    parts = [document[name] for name in ("sizes", "kernels", "buffers", "inputs", "functions")]
    mutations.change_value(rng, parts)
    return document


def executed(program: Program, device: DeviceProgram, rng: random.Random) -> bool:
    """Executes every function of a GPU program at its largest sizes with random inputs, and returns True.
    Returns False, without executing anything, if a kernel's loops would take too long."""
    calls = [(name, variant) for name, variants in program.functions.items() for variant in variants]
    for _, variant in calls:
        for launch in variant.launches:
            shader = program.kernels[launch.kernel]
            sizes = {**program.sizes, **variant.sizes, "pages": PAGES}
            if max(scalar_values(shader, launch, sizes).values(), default=0) > LONGEST:
                return False
    (block,) = (name for name, spec in program.buffers.items() if spec.kind == "inputs")
    words = program.buffer_bytes(PAGES)[block] // 4
    noise = np.random.default_rng(rng.randrange(1 << 30)).integers(-300, 300, words)
    device.write(block, noise.astype(np.int32))
    for name, variant in calls:
        device.run([(name, {size: most for size, most in variant.sizes.items() if size != "pages"})])
    return True


def test_mutated_programs_are_refused_or_keep_within_their_buffers(
    webgpu_toy_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    adapter, manifest = gpu_adapter.choose(), bundle.manifest(webgpu_toy_bundle)
    guarded = Guarded(gpu_adapter.open_device(adapter))
    monkeypatch.setattr(gpu_adapter, "open_device", lambda adapter: guarded)
    original = gpu_program.read(webgpu_toy_bundle, manifest)
    rng, ran = random.Random(SEED), 0
    for number in range(COUNT):
        guarded.buffers.clear()
        try:
            program = program_json.parse(mutated(rng, original) if number else program_json.to_json(original))
            if sum(program.buffer_bytes(PAGES).values()) > 1 << 26:
                continue  # within a device's limits, and no matter for this machine's memory
            device = DeviceProgram(webgpu_toy_bundle, manifest, adapter, program, PAGES)
        except (FieldError, ValueError, BundleError):
            assert number, "the program as it was built runs"
            continue
        with suppress(EngineError):  # the driver refuses what the host did not
            ran += executed(program, device, rng)
        assert guarded.is_intact()
        device.close()
    assert ran > COUNT // 20, "most mutations must not be refused for their spelling alone"
