"""Tests of the executor of GPU programs on this machine's adapter. test_gpu_blocks.py tests all kinds of
models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format import abi, program_json
from mlcbuild_format.errors import SetupError
from mlcbuild_format.fields import parse_json
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import FEATURES, GUARANTEED
from mlcbuild_runtime.devices import gpu, gpu_adapter, host_sampling
from mlcbuild_runtime.devices.gpu import GpuExecutor
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import forward, score
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, SamplingRow

from mlcbuild.bundles import reference
from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.compiler.gpu import program_library
from mlcbuild.compiler.gpu.kernels import logits as logit_kernels
from mlcbuild.compiler.gpu.support import unsupported
from mlcbuild.errors import CompileError
from mlcbuild.models import Dense
from mlcbuild.targets import presets
from tests import gpu_harness, gpu_kernels
from tests.libharness import EVERY, golden, pack, unpacked
from tests.opencl_program import through_opencl
from tests.schemes import GPU_SCHEMES as SCHEMES

# One process builds the program that most tests run, and software adapters compile its kernels for minutes.
pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(1200)]
GREEDY: SamplingRow = (0.0, -np.inf, 1.0, 0.0, 0.0)
MIXED = ["q4a8_2"]
if EVERY:
    MIXED = list(SCHEMES)


def worst(logits: Floats, expected: Floats) -> float:
    """Returns the largest difference between two arrays of logits, as a fraction of the range of
    `expected`."""
    return float(np.abs(logits - expected).max() / (expected.max() - expected.min()))


@pytest.fixture(scope="module", params=MIXED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuExecutor]:
    """Yields the executor of a small model with grouped-query attention, in a scheme that stores float16."""
    gpu_harness.needs_adapter()
    qwen, scheme = golden("qwen3"), SCHEMES[request.param]
    library = gpu_harness.compiled(tmp_path_factory.mktemp("gpu"), qwen.config, scheme)
    executor = gpu_harness.loaded(library, qwen.config, scheme, qwen.weights)
    yield executor
    executor.close()


def test_a_scheme_computes_what_its_stored_weights_stand_for(model: GpuExecutor) -> None:
    qwen, scheme = golden("qwen3"), SCHEMES[str(model.manifest.scheme["name"])]
    weights = unpacked(qwen.config, scheme, pack(qwen.config, scheme, qwen.weights))
    expected = reference.logits(qwen.config, weights, qwen.tokens, dtype=np.float64)
    limit = 1e-4 if scheme.dtype == "float32" else 2e-2
    limit = 5e-2 if scheme.activation_bits else limit  # activations are rounded to 8 bits
    assert worst(score(model, qwen.tokens), expected) < limit
    assert worst(score(model, qwen.tokens, chunk=1), expected) < limit


@pytest.fixture(scope="module")
def plain(model: GpuExecutor) -> Iterator[GpuExecutor]:
    """Yields the GPU executor of the test model on a device which wgpu restricts to the limits that WebGPU
    guarantees on every adapter, and for which optional features are switched off."""
    required = {name: getattr(GUARANTEED, limit) for name, limit in gpu_adapter._LIMITS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLCBUILD_DEVICE_FEATURES", "")
        patch.setattr(
            gpu_adapter, "open_device", lambda adapter: adapter.request_device_sync(required_limits=required)
        )
        patch.setattr(gpu_adapter, "limits", lambda adapter: GUARANTEED)
        executor = gpu.load(model.path, model.manifest, None, None)
    yield executor
    executor.close()


def sequences(count: int) -> list[tuple[list[int], int, range]]:
    """Returns (tokens, length, pages) of prompts with different lengths, each with separate pages of the KV
    cache."""
    qwen, parts = golden("qwen3").tokens, []
    for number in range(count):
        tokens = qwen[number : number + 9 + 4 * number]
        parts.append((tokens, len(tokens), range(4 * number, 4 * number + 4)))
    return parts


def test_the_bits_of_a_row_do_not_depend_on_its_batch(model: GpuExecutor) -> None:
    parts = sequences(4)
    alone = [forward(model, ModelStep.of([part])) for part in parts]
    together = forward(model, ModelStep.of(parts))
    assert np.array_equal(together, np.concatenate(alone))
    following = [([7 + number], length + 1, pages) for number, (_, length, pages) in enumerate(parts)]
    steps = [forward(model, ModelStep.of([part]))[0] for part in following]
    for count in (2, 3, 4):
        assert np.array_equal(forward(model, ModelStep.of(following[:count])), np.stack(steps[:count]))
    drafts = [([5, 6, 7, 8, 9, 10, 11], 16, parts[0][2])]
    rows = forward(model, ModelStep.of(drafts, [7], prompt=False))
    single = [
        forward(model, ModelStep.of([([5 + index], 10 + index, parts[0][2])], prompt=False))[0]
        for index in range(7)
    ]
    assert np.array_equal(rows, np.stack(single))


def test_steps_in_one_submit_draw_what_single_steps_draw(model: GpuExecutor) -> None:
    parts = sequences(3)
    first = model.step(ModelStep.of(parts), [GREEDY] * 3).tokens
    start = ModelStep.of(
        [([token], length + 1, pages) for token, (_, length, pages) in zip(first, parts, strict=True)]
    )
    expected, step = list[list[int]](), start
    for _ in range(10):
        expected.append(model.step(step, [GREEDY] * 3).tokens)
        step = step._replace(tokens=expected[-1], lengths=[length + 1 for length in step.lengths])
    following = FollowingSteps([[0.0] * 3] * 9, [False] * 3, ())
    assert model.steps(start, [GREEDY] * 3, following) == expected
    ended = FollowingSteps([[0.0] * 3] * 9, [False, True, False], {expected[2][1]})
    actual = model.steps(start, [GREEDY] * 3, ended)
    assert actual == expected[: next(i for i, row in enumerate(expected) if row[1] == expected[2][1]) + 1]
    model.interrupt()
    assert len(model.steps(start, [GREEDY] * 3, following)) == 1, "an interrupted executor makes one step"
    model.resume()


def test_the_same_program_gives_the_same_tokens_through_opencl(plain: GpuExecutor) -> None:
    """Checks that a GPU program executed through OpenCL, which compiles the kernels anew and has its own host
    code, computes the same tokens as wgpu on this machine's adapter, and logits that differ little."""
    model = plain
    qwen, scheme = golden("qwen3"), SCHEMES[str(model.manifest.scheme["name"])]
    other = through_opencl(model, qwen.config, scheme)
    assert worst(score(other, qwen.tokens), score(model, qwen.tokens)) < 5e-3
    assert worst(score(other, qwen.tokens, chunk=1), score(model, qwen.tokens, chunk=1)) < 5e-3
    drawn = list[list[list[int]]]()
    for executor in (model, other):
        parts = sequences(3)
        first = executor.step(ModelStep.of(parts), [GREEDY] * 3).tokens
        start = ModelStep.of(
            [([token], length + 1, pages) for token, (_, length, pages) in zip(first, parts, strict=True)]
        )
        following = FollowingSteps([[0.0] * 3] * 9, [False] * 3, ())
        drawn.append([first, *executor.steps(start, [GREEDY] * 3, following)])
    other.close()
    assert drawn[0] == drawn[1]


def test_masks_leave_the_tokens_that_they_allow(model: GpuExecutor) -> None:
    parts = sequences(2)
    plain = forward(model, ModelStep.of(parts))
    mask = np.zeros(-(-model.manifest.vocab_size // 32), np.int32)
    mask[1] = 0b1001
    result = model.step(ModelStep.of(parts), [GREEDY, GREEDY], [(1, mask)])
    logits = result.logits()
    assert result.tokens == [int(plain[0].argmax()), 32 if plain[1, 32] > plain[1, 35] else 35]
    assert np.array_equal(logits[0], plain[0])
    assert set(np.flatnonzero(np.isfinite(logits[1]))) == {32, 35}
    nothing = np.zeros_like(mask)
    assert model.step(ModelStep.of(parts), [GREEDY, SKIP], [(0, nothing)]).tokens == [
        abi.INVALID_TOKEN,
        abi.NO_TOKEN,
    ]


def test_rows_that_are_not_numbers_have_no_token() -> None:
    """Checks the kernels that choose each row's most likely token, with rows of two parts."""
    rows = np.zeros((6, 5000), np.float32)
    rows[1] = -np.inf
    rows[:, 4500] = [3, -np.inf, np.inf, np.nan, -np.nan, 3]
    arrays = {"logits": rows.view(np.int32), "best": np.zeros((6, 4), np.int32)}
    best = gpu_kernels.on_adapter(logit_kernels.best_of_parts, (5000,), {"q": 6}, arrays)["best"]
    row_arrays = {"best": best, "sampled": np.zeros(6, np.int32)}
    sampled = gpu_kernels.on_adapter(logit_kernels.best_of_row, (5000,), {"q": 6}, row_arrays)["sampled"]
    assert sampled.tolist() == [4500, *[abi.INVALID_TOKEN] * 4, 4500]


def test_forks_copy_the_beginnings_of_pages(model: GpuExecutor) -> None:
    """Checks that a branch of draft tokens uses copies of the cached tokens before it, even of tokens that
    are computed in the same step."""
    tokens = golden("qwen3").tokens[:9]
    model.step(ModelStep.of([(tokens, 9, [0])]), [GREEDY])
    straight = forward(model, ModelStep.of([([3, 4, 5], 12, [0])], [3], prompt=False))
    branches = ModelStep.of([([3, 4], 11, [0]), ([5], 12, [1])], [2, 1], prompt=False)
    actual = forward(model, branches._replace(forks=[(0, 1, 11)]))
    assert np.array_equal(actual, straight)


def test_hidden_states_are_those_before_the_logits(model: GpuExecutor) -> None:
    qwen = golden("qwen3")
    states = model.hidden_states(ModelStep.of([(qwen.tokens, len(qwen.tokens), range(4))]))
    scheme = SCHEMES[str(model.manifest.scheme["name"])]
    weights = unpacked(qwen.config, scheme, pack(qwen.config, scheme, qwen.weights))
    expected, _ = reference.hidden(reference.Reference(qwen.config, weights, np.float64), qwen.tokens)
    assert worst(states, expected) < 5e-2


def test_sampling_on_the_gpu_draws_what_the_whole_row_gives(model: GpuExecutor) -> None:
    parts = sequences(1)
    for number in (0.03, 0.4, 0.77, 0.999):
        for row in (
            (1.0, -np.inf, 1.0, 5.0, number),
            (1.3, -1.5, 1.0, 0.0, number),
            (1.0, -np.inf, 0.3, 0.0, number),
        ):
            result = model.step(ModelStep.of(parts), [row])
            assert result.tokens == [host_sampling.draw(result.logits()[0], row)]


def test_calls_of_a_function_with_different_sizes_are_submitted_apart(model: GpuExecutor) -> None:
    launches = model.device.launches
    with pytest.raises(
        ValueError, match="two calls of 'mask' with different sizes cannot be submitted together"
    ):
        model.device.run([("mask", {"m": 1}), ("mask", {"m": 2})])
    assert model.device.launches == launches
    model.device.run([("mask", {"m": 1}), ("mask", {"m": 1})])


def test_a_token_of_a_layer_takes_seven_launches_and_a_loop_uploads_nothing(model: GpuExecutor) -> None:
    layers = len(golden("qwen3").config.layers)
    start = ModelStep.of([([3], 10, [0])])
    model.steps(start, [GREEDY], FollowingSteps([[0.0]] * 3, [False], ()))
    launches, uploads = model.device.launches, model.device.uniform_uploads
    assert len(model.steps(start, [GREEDY], FollowingSteps([[0.0]] * 7, [False], ()))) == 8
    around = 6  # embedding, last norm, output matrix, two of the choice, the next inputs
    assert model.device.launches - launches == 8 * (7 * layers + around)
    assert model.device.uniform_uploads == uploads


def test_a_program_is_the_same_in_every_directory(model: GpuExecutor, tmp_path: Path) -> None:
    qwen, scheme = golden("qwen3"), SCHEMES[str(model.manifest.scheme["name"])]
    again = gpu_harness.compiled(tmp_path, qwen.config, scheme)
    files = {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert len(files) > 30
    assert all((model.path / name).read_bytes() == data for name, data in files.items())
    program = program_json.parse(parse_json(files[Path("program.json")]))
    assert max(len(shader.bindings) for shader in program.kernels.values()) <= 8


def test_the_memory_of_a_library_is_what_its_executor_allocates(model: GpuExecutor) -> None:
    """Checks that the memory which a library states equals what its executor allocates: plans use the number
    before there is a device."""
    program, memory = model.device.program, model.manifest.memory
    allocated = sum(program.param_bytes().values()) + sum(program.buffer_bytes(model.pages).values())
    assert model.pages == model.limits.pages
    assert allocated == model.device.allocated_bytes
    assert abs(memory.total - allocated) <= 0.01 * allocated


def test_a_device_with_the_guaranteed_limits_and_no_features_is_enough(
    model: GpuExecutor, plain: GpuExecutor
) -> None:
    """Checks that a GPU program runs on a device with the limits that WebGPU guarantees. wgpu enforces the
    limits with which a device is opened."""
    qwen, limits = golden("qwen3"), plain.device.device.limits
    assert limits["max-storage-buffers-per-shader-stage"] == GUARANTEED.storage_buffers
    scheme = SCHEMES[str(model.manifest.scheme["name"])]
    weights = unpacked(qwen.config, scheme, pack(qwen.config, scheme, qwen.weights))
    expected = reference.logits(qwen.config, weights, qwen.tokens, dtype=np.float64)
    for chunk in (None, 1):
        assert worst(score(plain, qwen.tokens, chunk=chunk), expected) < 5e-3
    files = [{kernel.file for kernel in own.device.program.kernels.values()} for own in (model, plain)]
    assert not any("_subgroups" in name or "_shader_f16" in name for name in files[1])
    if gpu_adapter.features(gpu_adapter.choose()) == set(FEATURES):
        assert sum("_packed_subgroups" in name for name in files[0]) >= 8
        assert any("_shader_f16" in name for name in files[0])


def test_features_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_harness.needs_adapter()
    monkeypatch.setenv("MLCBUILD_DEVICE_FEATURES", "subgroups, warp")
    with pytest.raises(
        SetupError, match=r"^MLCBUILD_DEVICE_FEATURES: no feature is called 'warp', only pack"
    ):
        gpu_adapter.features(gpu_adapter.choose())


def test_blocks_without_kernels_are_named() -> None:
    config = golden("qwen3").config

    class Router(Dense):
        pass

    layer = config.layers[0]
    other = replace(config, layers=(replace(layer, feed_forward=Router(8)), *config.layers[1:]))
    assert unsupported(config) == []
    assert unsupported(other) == [
        "the device 'webgpu' has no kernels for the block 'Router': build this model for a CPU target"
    ]
    odd = replace(layer, mixer=replace(layer.mixer, head_dim=257))
    assert "heads of 257 dimensions" in unsupported(replace(config, layers=(odd,)))[0]
    request = CompileRequest(config, SCHEMES["q4f16_1"], presets.resolve("webgpu"), Limits(64, 32, 1), "int8")
    with pytest.raises(CompileError, match=r"^compile.kv_cache is int8, which only CPUs have: leave it out$"):
        program_library.build(request.to_json(), Path(), lambda phase: None)


@pytest.mark.skipif(not EVERY, reason="MLCBUILD_TEST_EVERY is not set: this builds one more program")
def test_a_context_that_no_device_is_sure_to_hold_is_refused(tmp_path: Path) -> None:
    qwen = golden("qwen3")
    config = replace(qwen.config, max_position=1 << 21)
    with pytest.raises(
        CompileError, match=r"exceeds what every GPU can do: .*smaller compile.context_window"
    ):
        gpu_harness.compiled(tmp_path, config, SCHEMES["q0f32"], context_window=1 << 21)
