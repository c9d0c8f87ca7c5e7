"""Tests of loading and calling libraries on the CPU: the toy library is compared with exact numbers, a
compiled model with itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format.errors import BundleError, SetupError
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.executor.batch import ModelStep

from . import shared, toy


@pytest.fixture(scope="module")
def model(toy_bundle: Path) -> CpuExecutor:
    return CpuExecutor.load(toy_bundle)


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path) -> CpuExecutor:
    return CpuExecutor.load(tiny_bundle)


def test_score_gives_every_position(model: CpuExecutor) -> None:
    prompt = [(7 * i) % 256 for i in range(100)]
    logits = model.score(prompt)
    assert logits.shape == (100, toy.VOCAB)
    expected = [toy.expected(prompt[: i + 1], 1)[0] for i in range(100)]
    assert logits.argmax(-1).tolist() == expected
    assert (model.score(prompt, chunk=1) == logits).all()
    assert (model.score(prompt, chunk=7) == logits).all()


@pytest.mark.parametrize("tokens", [[], [1] * 257])
def test_sequences_that_do_not_fit(model: CpuExecutor, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit a context of 256"):
        model.score(tokens)


def test_a_cache_that_cannot_be_allocated_is_refused_at_load(
    toy_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 1 << 43
    with pytest.raises(SetupError) as caught:
        CpuExecutor.load(toy_bundle, pages=pages)
    assert str(caught.value) == (
        f"{toy_bundle}: its KV cache of {pages} pages needs 1125.9 TB of memory, which cannot be allocated"
        " (std::bad_alloc): choose fewer with --max-pages, or raise this process's limits"
    )

    def fail(pages: object) -> None:
        raise MemoryError

    model = CpuExecutor.load(toy_bundle, pages=1)
    monkeypatch.setattr(model._library, "create_cache", fail)
    with pytest.raises(SetupError, match=r"cannot be allocated \(MemoryError\): choose fewer"):
        model._new_cache()


def test_tokens_outside_the_vocabulary(model: CpuExecutor) -> None:
    with pytest.raises(ValueError, match="token 260 is outside the vocabulary of 260 tokens"):
        model.score([1, 260])


def test_logits_stay_after_later_calls(model: CpuExecutor) -> None:
    first = model.forward(ModelStep.of([([1, 2], 2, [0])]))
    kept = first.copy()
    for i in range(5):
        model.forward(ModelStep.of([([i, 3], 2, [1])]))
    assert (first == kept).all()


def test_weights_that_are_not_aligned_are_copied(toy_copy: Path) -> None:
    path = toy_copy / "weights-00001-of-00001.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * 5
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    document = json.loads((toy_copy / "bundle.json").read_bytes())
    file = toy.describe(path)
    document["files"][path.name] = {"blake3": file.blake3, "size": file.size}
    (toy_copy / "bundle.json").write_text(json.dumps(document))
    prompt = [3, 1, 4, 1, 5]
    assert CpuExecutor.load(toy_copy).score(prompt).argmax(-1)[-1] == toy.expected(prompt, 1)[0]


def test_the_cache_can_be_smaller(toy_bundle: Path) -> None:
    model = CpuExecutor.load(toy_bundle, pages=3)
    assert model.pages == 3
    with pytest.raises(ValueError, match="49 tokens do not fit"):
        model.score([1] * 49)


PROGRAM = """
import sys
from mlcbuild_runtime.devices.cpu import CpuExecutor
try:
    model = CpuExecutor.load(sys.argv[1], threads=int(sys.argv[2]) if len(sys.argv) > 2 else None)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(model.threads, *(name for name in ("tvm", "torch", "mlcbuild") if name in sys.modules))
"""


def load(bundle: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return shared.run("-c", PROGRAM, str(bundle), *arguments, extra=extra)


def test_threads(toy_bundle: Path) -> None:
    assert load(toy_bundle, "3").stdout == "3\n"
    assert load(toy_bundle, TVM_NUM_THREADS="5").stdout == "5\n"
    assert load(toy_bundle, TVM_NUM_THREADS="many").stderr.startswith("SetupError: TVM_NUM_THREADS is 'many'")


IDLE = """
import sys, time
from mlcbuild_runtime.devices import machine
from mlcbuild_runtime.devices.cpu import CpuExecutor
if len(sys.argv) > 2:  # both threads, whatever runs beside
    machine.FreeCores = lambda: lambda enough: None
model = CpuExecutor.load(sys.argv[1], threads=2)
model.score(list(range(3, 20)))
before = time.process_time()
time.sleep(0.5)
idle = time.process_time() - before
before, end = time.process_time(), time.monotonic() + 0.5
while time.monotonic() < end:
    pass
print(idle / (time.process_time() - before))
"""


def test_threads_without_work_leave_the_cores_to_others(tiny_bundle: Path) -> None:
    def share(*more: str, **extra: str) -> float:
        """Returns the CPU time that a process with a loaded, idle model uses, as a fraction of the CPU time
        of a loop which never sleeps. more: further arguments of the process; extra: environment variables."""
        return float(shared.run("-c", IDLE, str(tiny_bundle), *more, extra=extra).stdout)

    assert share() < 0.1
    try:  # so the measure can fail
        assert any(share("spin", TVM_THREAD_POOL_SPIN_COUNT="1000000") > 0.1 for _ in range(10))
    except subprocess.TimeoutExpired:
        pytest.skip("the machine is too busy for two threads that wait for each other")


COUNTS = """
import sys
import tvm_ffi
from mlcbuild_runtime.devices.cpu import CpuExecutor
model = CpuExecutor.load(sys.argv[1], threads=3)
tokens = list(range(3, 60))
found = set()
for count in (3, 1, 2, 3):
    tvm_ffi.get_global_func("runtime.config_threadpool")(1, count)
    assert tvm_ffi.get_global_func("runtime.NumThreads")() == count
    found |= {model.score(tokens).tobytes(), model.score(tokens, chunk=1).tobytes()}
print(len(found))
"""


def test_how_many_threads_compute_does_not_show(tiny_bundle: Path) -> None:
    """Checks that the logits have the same bits with any number of threads, for prompts and for decode
    steps."""
    assert int(shared.run("-c", COUNTS, str(tiny_bundle)).stdout) <= 2


def test_the_first_load_decides_the_threads(toy_bundle: Path) -> None:
    threads = CpuExecutor.load(toy_bundle).threads
    assert CpuExecutor.load(toy_bundle, threads=threads + 1).threads == threads


def test_where_the_tvm_runtime_comes_from(toy_bundle: Path, toy_copy: Path, tmp_path: Path) -> None:
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    result = load(toy_bundle, MLCBUILD_TVM_RUNTIME="/no/such/file")
    assert result.stderr == "SetupError: MLCBUILD_TVM_RUNTIME is '/no/such/file', which is not a file\n"
    spec = find_spec("tvm")
    assert spec is not None and spec.submodule_search_locations is not None
    original = Path(spec.submodule_search_locations[0], "lib", name)
    assert load(toy_bundle, MLCBUILD_TVM_RUNTIME=str(original)).returncode == 0
    (tmp_path / name).write_bytes(original.read_bytes()[:100_000])
    result = load(toy_bundle, MLCBUILD_TVM_RUNTIME=str(tmp_path / name))
    assert "not a whole shared library (it is truncated)" in result.stderr
    (toy_copy / "lib").mkdir()
    shutil.copy(original, toy_copy / "lib")
    document = json.loads((toy_copy / "bundle.json").read_bytes())
    file = toy.describe(original)
    document["files"][f"lib/{name}"] = {"blake3": file.blake3, "size": file.size}
    (toy_copy / "bundle.json").write_text(json.dumps(document))
    assert load(toy_copy, MLCBUILD_TVM_RUNTIME="/no/such/file").returncode == 0


def test_a_library_without_its_functions(toy_copy: Path) -> None:
    data = (toy_copy / "model.so").read_bytes().replace(b"step_prefill", b"step_premill")
    (toy_copy / "model.so").write_bytes(data)
    document = json.loads((toy_copy / "bundle.json").read_bytes())
    file = toy.describe(toy_copy / "model.so")
    document["files"]["model.so"] = {"blake3": file.blake3, "size": file.size}
    (toy_copy / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(BundleError, match="has no function 'step_prefill'"):
        CpuExecutor.load(toy_copy)


def test_decoding_and_prefill_agree(tiny: CpuExecutor) -> None:
    tokens = [1, *range(20, 120)]
    logits = tiny.score(tokens)
    assert np.isfinite(logits).all()
    scale = np.abs(logits).max()
    assert np.abs(tiny.score(tokens, chunk=1) - logits).max() < 0.02 * scale
    assert np.abs(tiny.score(tokens, chunk=13) - logits).max() < 0.02 * scale


def test_a_batch_gives_what_each_gives_alone(tiny: CpuExecutor) -> None:
    """Checks that a batch gives the same logits as each of its sequences alone: prompts of different lengths
    on scattered pages, then decode steps in another order."""
    prompts = [[1, *range(30 + 9 * i, 41 + 20 * i)] for i in range(4)]
    pages = [[20 + i, 3 * i, 40 - i, 12 + i, 60 + i, 80 + i] for i in range(4)]
    alone = [tiny.score([*prompt, 25])[-2:] for prompt in prompts]
    parts = [(prompt, len(prompt), pages[i]) for i, prompt in enumerate(prompts)]
    assert sum(len(prompt) for prompt in prompts[:2]) <= tiny.limits.prefill_chunk
    first = np.concatenate([tiny.forward(ModelStep.of(parts[:2])), tiny.forward(ModelStep.of(parts[2:3])),
                            tiny.forward(ModelStep.of(parts[3:]))])  # fmt: skip
    order = [2, 0, 3, 1]
    second = tiny.forward(ModelStep.of([([25], len(prompts[i]) + 1, pages[i]) for i in order]))
    for i, expected in enumerate(alone):
        scale = np.abs(expected).max()
        assert np.abs(first[i] - expected[0]).max() < 0.02 * scale
        assert np.abs(second[order.index(i)] - expected[1]).max() < 0.02 * scale


def test_weights_are_mapped_and_not_copied(tiny_bundle: Path) -> None:
    model = CpuExecutor.load(tiny_bundle)
    first = model._weights.arrays[0]
    ranges = [np.frombuffer(mapped, np.uint8) for mapped in model._weights.maps]
    assert any(np.shares_memory(first, part) for part in ranges)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this system has no large pages to ask for",
)
def test_weights_and_cache_ask_for_large_pages(tiny_bundle: Path) -> None:
    model = CpuExecutor.load(tiny_bundle)
    cache, file = np.from_dlpack(model._cache), np.frombuffer(model._weights.maps[0], np.uint8)
    areas = re.split(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for array in (cache, file):
        middle = array.ctypes.data + array.nbytes // 2
        (actual,) = [
            output
            for start, end, output in zip(areas[1::3], areas[2::3], areas[3::3], strict=True)
            if int(start, 16) <= middle < int(end, 16)
        ]
        assert re.search(r"^VmFlags:.* hg ", actual, re.MULTILINE)
