"""Tests of the memory of weights and of the KV cache."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import SetupError
from mlcbuild_runtime.devices import tensors


def test_aligned() -> None:
    room = np.zeros(1000, np.uint8)
    for start in range(64):
        actual = tensors.aligned(room[start : start + 400])
        assert actual.ctypes.data % 64 == 0
        assert np.shares_memory(actual, room) == (room[start:].ctypes.data % 64 == 0)


def test_memory_is_made_ready_by_zeros_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "BACKED", 3)
    tensor = np.full((2, 10, 5), 7, np.float32)
    steps = tensors.back(tensor, 2, 9)
    assert [next(steps) for _ in range(4)] == [2, 2, 5, 5]  # a part counts when all layers have it
    assert not tensor[0, 2:8].any() and not tensor[1, 2:5].any() and (tensor[1, 5:] == 7).all()
    assert list(steps)[-1] == 9
    assert not tensor[:, 2:9].any()
    assert (tensor[:, :2] == 7).all() and (tensor[:, 9:] == 7).all()
    assert list(tensors.back(tensor, 9, 9)) == list(tensors.back(tensor, 9, 4)) == []


def test_weights_that_the_system_does_not_map_are_named(
    light_toy_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    manifest = bundle.read(light_toy_bundle)
    monkeypatch.setattr(mmap, "mmap", fail)
    message = rf"{manifest.weights[0]}: cannot be mapped into memory: {os.strerror(errno.ENODEV)}; raise"
    with pytest.raises(SetupError, match=message):
        tensors.load(light_toy_bundle, manifest.weights, ())
