"""Fixtures of the runtime's tests: bundles and servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.sampling_params import Sample

from . import shared, toy
from .forked_trial import forked_trials
from .greedy_reference import GreedyReference
from .shared import Server

__all__ = ["forked_trials"]  # a fixture


def needs(package: str) -> None:
    """Skips the test if a package is not installed. Where only the runtime is installed, no bundles can be
    built."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


loading.LOADERS["numpy"] = f"{__package__}.numpy_executor:load"


@pytest.fixture(scope="session")
def webgpu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) for the
    device webgpu. Tests must not change it."""
    return _real(tmp_path_factory, "tiny", "webgpu")


@pytest.fixture(scope="session")
def numpy_toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the toy bundle (a trivial model whose answers follow from a formula) for the
    executor in numpy_executor.py. Tests must not change it."""
    return shared.once(tmp_path_factory, "numpy_toy", lambda out: toy.write(out, "numpy"))


@pytest.fixture(scope="session")
def webgpu_toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the toy bundle (a trivial model whose answers follow from a formula) for GPUs,
    as gpu_toy.py writes it. Tests must not change it. It runs on this machine's GPU adapter, which may be one
    in software."""
    needs("mlcbuild")
    needs("wgpu")

    def build(out: Path) -> None:
        from tests import compiler_process

        compiler_process.run_program("tests.runtime.gpu_toy", str(out))

    return shared.once(tmp_path_factory, "webgpu_toy", build)


@pytest.fixture(scope="session")
def toy_bundle(request: pytest.FixtureRequest) -> Path:
    """Returns the directory of the toy bundle: a bundle with a trivial model whose answers follow from a
    formula. Tests must not change it (`toy_copy` returns a copy). Test modules that run on several devices
    override this fixture."""
    bundle: Path = request.getfixturevalue(shared.TOYS[0])
    return bundle


@pytest.fixture(scope="session")
def light_toy_bundle(request: pytest.FixtureRequest) -> Path:
    """Returns the directory of the toy bundle (a bundle with a trivial model whose answers follow from a
    formula) for tests to which the device does not matter. It is that of the NumPy device, unless
    MLCBUILD_TEST_DEVICE names another device."""
    bundle: Path = request.getfixturevalue(shared.TOYS[-1])
    return bundle


@pytest.fixture(scope="session")
def webgpu_real_toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a GPU bundle, written by real_toy.py, in which a real model replaces the toy
    model of the tests. Makes `toy.expected`, the answers that tests expect, return this model's answers.
    Tests must not change the bundle."""
    needs("mlcbuild")
    needs("wgpu")

    def build(out: Path) -> None:
        from tests import compiler_process

        compiler_process.run_program("tests.runtime.real_toy", str(out), "webgpu")

    bundle = shared.once(tmp_path_factory, "webgpu_real_toy", build)
    toy.reference = GreedyReference(bundle).answer
    return bundle


@pytest.fixture(scope="session")
def cpu_toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the toy bundle (a trivial model whose answers follow from a formula), compiled
    for this machine's CPU. Tests must not change it."""

    needs("mlcbuild")

    def build(out: Path) -> None:
        from tests import compiler_process

        compiler_process.run_program("tests.runtime.toy", str(out))

    return shared.once(tmp_path_factory, "toy", build)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) with 4-bit
    weights, for this machine's CPU. Tests must not change it."""
    return _real(tmp_path_factory, "tiny")


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) without
    the last of its five layers: a smaller model with the same vocabulary. Tests must not change it."""
    return _real(tmp_path_factory, "small", changes={"num_hidden_layers": 4})


@pytest.fixture(scope="session")
def window_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) in which
    every layer has an attention window of 32 tokens. Tests must not change it."""
    names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return _real(tmp_path_factory, "window", changes={**names, "sliding_window": 32})


def _real(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    device: str = shared.DEVICE,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Returns the directory of a bundle of the small model in the repository (recipes/models/tiny) with 4-bit
    weights, built at the first call. name: part of the directory's name; device: "cpu" for this machine's
    CPU, or "webgpu"; changes: fields of config.json to replace."""
    needs("mlcbuild")

    def build(out: Path) -> None:
        from mlcbuild.targets import presets
        from tests import compiler_process

        from . import real

        target = presets.HOST if device == "cpu" else device
        with pytest.MonkeyPatch.context() as patch:
            compiler_process.preloaded(patch)
            real.build("q4f16_1", out, changes or {}, target)

    return shared.once(tmp_path_factory, f"{name}-{device}", build)


@pytest.fixture(scope="session")
def sample(cpu_toy_bundle: Path) -> Sample:
    """Returns the sampling function of a compiled library: it samples one token from each row of logits. The
    library is that of the toy model for this machine's CPU."""
    return CpuExecutor.load(cpu_toy_bundle).sample


@pytest.fixture
def toy_copy(toy_bundle: Path, tmp_path: Path) -> Path:
    """Returns the directory of a copy of the toy bundle (a trivial model whose answers follow from a formula)
    that the test may damage."""
    return Path(shutil.copytree(toy_bundle, tmp_path / "toy"))


@pytest.fixture(scope="module")
def server(toy_bundle: Path) -> Iterator[Server]:
    """Yields a server process of the toy bundle (a trivial model whose answers follow from a formula). All
    tests of a module share it."""
    with shared.serving(toy_bundle) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
