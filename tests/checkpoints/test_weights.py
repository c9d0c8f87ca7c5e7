"""Tests of converting checkpoints: exact weights, and files that are equal byte for byte."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format.signature import signature
from mlcbuild_format.weights import read_header
from safetensors import safe_open

from mlcbuild import models, progress, quant
from mlcbuild.checkpoints import conversion, exact_weights, headers
from mlcbuild.checkpoints.mapping import locate
from mlcbuild.errors import CheckpointError, StepError, UsageError
from mlcbuild.models import action, parsing
from mlcbuild.quant import Storage
from tests.checkpoint_files import CONFIG, HF, PIECES, content, entry, sharded, single, tensors, wide, write
from tests.schemes import SCHEMES, pack, unpack

ROOT = Path(__file__).resolve().parent.parent.parent
STORY = ROOT.parent / "shared" / "models" / "story"
GOLDEN = sorted(path.parent for path in (ROOT / "tests" / "golden").glob("*/config.json"))
EVERY = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
NORM = "model.norm.weight"


@pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
def test_q0f32_is_exact(code: str, tmp_path: Path) -> None:
    checkpoint = single(tmp_path / "hf", tensors(code))
    out = write(checkpoint, tmp_path / "out", SCHEMES["q0f32"])
    original, stored = (
        exact_weights.checkpoint(checkpoint, CONFIG, parsing.tensor_names(CONFIG)),
        conversion.read(out),
    )
    assert set(stored) == set(original)
    assert all(stored[name].tobytes() == original[name].tobytes() for name in original)


@EVERY
@pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
def test_tensors_are_what_pack_makes(scheme: Storage, code: str, tmp_path: Path) -> None:
    checkpoint = single(tmp_path / "hf", tensors(code))
    stored = conversion.read(write(checkpoint, tmp_path / "out", scheme, cores=2))
    back = conversion.unpacked(tmp_path / "out", CONFIG, scheme)
    original = exact_weights.checkpoint(checkpoint, CONFIG, parsing.tensor_names(CONFIG))
    for param in models.parameters(CONFIG):
        names = [tensor.name for tensor in quant.stored(param, scheme)]
        if len(names) == 1:
            expected = original[param.name].astype(scheme.dtype)
            assert np.array_equal(stored[names[0]], expected)
            assert np.array_equal(back[param.name], expected.astype(np.float32))
        else:
            parts = pack(original[param.name], scheme)
            assert all(np.array_equal(stored[name], part) for name, part in zip(names, parts, strict=True))
            rows, columns = param.shape
            assert np.array_equal(back[param.name], unpack(parts, scheme, (rows, columns)))


@EVERY
def test_bytes_depend_on_nothing_but_checkpoint_and_scheme(
    scheme: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = single(tmp_path / "single", tensors())
    parts = sharded(tmp_path / "sharded", tensors())
    expected = content(write(whole, tmp_path / "a", scheme))
    assert content(write(parts, tmp_path / "b", scheme)) == expected
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 1)
    assert content(write(whole, tmp_path / "c", scheme, cores=1)) == expected
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 1000)
    assert content(write(parts, tmp_path / "d", scheme, cores=5)) == expected


def test_whole_blocks_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that weights are written in whole blocks, each by one call: systems use huge pages for a file
    only where one call writes enough."""
    written = []

    def pwrite(file: int, data: memoryview, at: int) -> int:
        written.append((at, len(data)))
        return original(file, data, at)

    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 4096)
    out = write(single(tmp_path / "hf", tensors()), tmp_path / "out", SCHEMES["q4f16_1"], cores=2)
    size = (out / "weights-00001-of-00001.safetensors").stat().st_size
    assert size > 4 * 4096
    assert sorted(written) == [(at, min(4096, size - at)) for at in range(0, size, 4096)]


def test_pieces_of_different_dtypes(tmp_path: Path) -> None:
    mixed = tensors("F32")
    name = "model.layers.1.self_attn.k_proj.weight"
    mixed[name] = entry(wide(mixed[name]), "F16")
    plain = {**mixed, name: entry(wide(mixed[name]), "F32")}
    scheme = SCHEMES["q4a8_1"]
    actual = content(write(single(tmp_path / "a", mixed), tmp_path / "out-a", scheme))
    assert actual == content(write(single(tmp_path / "b", plain), tmp_path / "out-b", scheme))


@EVERY
def test_files_follow_the_contract(scheme: Storage, tmp_path: Path) -> None:
    out = write(single(tmp_path / "hf", tensors()), tmp_path / "out", scheme)
    (path,) = out.iterdir()
    assert path.name == "weights-00001-of-00001.safetensors"
    expected = quant.stored_parameters(models.parameters(CONFIG), scheme)
    header = headers.read_header(path)
    assert header.metadata == {
        "format": "mlcbuild-weights/1",
        "signature": signature(
            (tensor.name, tensor.shape, tensor.dtype, tensor.layout) for tensor in expected
        ),
        "scheme": scheme.name,
    }
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 64 == 0
    assert min(tensor.start for tensor in header.tensors) == start
    assert all(tensor.start % 64 == 0 for tensor in header.tensors if tensor.size % 64 == 0)
    assert sum(tensor.size for tensor in header.tensors) == quant.stored_bytes(
        models.parameters(CONFIG), scheme
    )
    # Two other readers agree: the runtime's, and the safetensors library.
    by_name = {tensor.name: tensor for tensor in read_header(path).tensors}
    ours = conversion.read(out)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(by_name) == set(ours) == {tensor.name for tensor in expected}
        for tensor in expected:
            assert (by_name[tensor.name].dtype, by_name[tensor.name].shape) == (tensor.dtype, tensor.shape)
            array = file.get_tensor(tensor.name)
            assert array.dtype == tensor.dtype
            assert array.shape == tensor.shape
            assert np.array_equal(array, ours[tensor.name])


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = single(tmp_path / "hf", tensors())
    whole = conversion.read(write(checkpoint, tmp_path / "one", SCHEMES["q4f16_1"]))
    monkeypatch.setattr(conversion, "SHARD_BYTES", 3000)
    out = write(checkpoint, tmp_path / "many", SCHEMES["q4f16_1"], cores=3)
    paths = sorted(out.iterdir())
    assert [path.name for path in paths] == [
        f"weights-{i:05}-of-{len(paths):05}.safetensors" for i in range(1, len(paths) + 1)
    ]
    assert len(paths) > 3
    for path in paths:
        sizes = [tensor.size for tensor in headers.read_header(path).tensors]
        assert sum(sizes) <= 3000 or len(sizes) == 1
    actual = conversion.read(out)
    assert set(actual) == set(whole)
    assert all(np.array_equal(actual[name], whole[name]) for name in whole)
    paths[-1].unlink()
    with pytest.raises(CheckpointError, match=rf"of its weights files only {len(paths) - 1} are there"):
        conversion.read(out)


def test_arrays_are_aligned_and_read_only(tmp_path: Path) -> None:
    actual = conversion.read(write(single(tmp_path / "hf", tensors()), tmp_path / "out", SCHEMES["q4f16_1"]))
    assert all(array.flags.aligned for array in actual.values())
    with pytest.raises(ValueError, match="read-only"):
        actual["embed.q_weight"][0, 0] = 1


def test_overrides(tmp_path: Path) -> None:
    checkpoint = single(tmp_path / "hf", tensors())
    chosen = (("embed|lm_head", "q8f32_1"), ("*.qkv", "q0f32"), ("*.o", "q4a8_1"), ("*norm", "q0f32"))
    scheme = replace(SCHEMES["q4f16_1"], overrides=tuple((match, SCHEMES[name]) for match, name in chosen))
    stored = conversion.read(write(checkpoint, tmp_path / "out", scheme))
    original = exact_weights.checkpoint(checkpoint, CONFIG, parsing.tensor_names(CONFIG))
    back = conversion.unpacked(tmp_path / "out", CONFIG, scheme)
    assert np.array_equal(back["layers.1.attn.qkv.weight"], original["layers.1.attn.qkv.weight"])
    assert stored["norm.weight"].dtype == np.float32
    assert stored["layers.0.attn.o.bias"].dtype == np.float16
    for name, format_name in (
        ("lm_head", "q8f32_1"),
        ("layers.0.attn.o", "q4a8_1"),
        ("layers.0.mlp.down", "q4f16_1"),
    ):
        parts = pack(original[f"{name}.weight"], SCHEMES[format_name])
        assert np.array_equal(stored[f"{name}.q_weight"], parts[0])
        assert np.array_equal(stored[f"{name}.q_scale"], parts[1])


def convert(root: Path, scheme: Storage, out: Path) -> None:
    """Runs the action that converts weights, as a build would. root: directory with a transformers
    config.json and its tensors; out: the new directory for the weights."""
    action.normalise({}, {"checkpoint": root}, out.parent / "config")
    inputs = {"config": out.parent / "config", "checkpoint": root}
    conversion.convert({"scheme": quant.to_json(scheme)}, inputs, out)


@pytest.mark.parametrize("root", GOLDEN, ids=lambda path: path.name)
def test_every_family_converts(root: Path, tmp_path: Path) -> None:
    convert(root, SCHEMES["q8f16_1"], tmp_path / "out")
    config = models.from_json(json.loads((tmp_path / "config" / "config.json").read_bytes()))
    original = exact_weights.checkpoint(root, config, parsing.tensor_names(config))
    actual = conversion.unpacked(tmp_path / "out", config, SCHEMES["q8f16_1"])
    assert list(actual) == list(original)
    for name, array in original.items():
        assert np.abs(actual[name] - array).max() <= np.abs(array).max() * 0.0041


@pytest.mark.skipif(not STORY.is_dir(), reason="../shared/models/story is not there")
def test_a_trained_model_converts(tmp_path: Path) -> None:
    for scheme in SCHEMES.values():
        convert(STORY, scheme, tmp_path / scheme.name)
        config = models.from_json(json.loads((tmp_path / "config" / "config.json").read_bytes()))
        original = exact_weights.checkpoint(STORY, config, parsing.tensor_names(config))
        actual = conversion.unpacked(tmp_path / scheme.name, config, scheme)
        worst = max(
            float(np.sqrt(np.mean((actual[name] - array) ** 2) / np.mean(array**2)))
            for name, array in original.items()
        )
        # Root mean square error relative to the weights', of the worst parameter.
        assert worst < {0: 4e-4, 8: 0.008, 6: 0.03, 5: 0.065, 4: 0.125, 3: 0.25}[scheme.bits]


def test_progress_and_granted_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = single(tmp_path / "hf", tensors())
    (root / "config.json").write_text(json.dumps(HF))
    monkeypatch.setenv("MLCBUILD_CORES", "3")
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 1)
    monkeypatch.setattr(progress, "_PERIOD", 0)
    observed: list[tuple[int, int, str]] = []
    progress.listen(lambda *report: observed.append(report))
    try:
        convert(root, SCHEMES["q4f16_1"], tmp_path / "out")
    finally:
        progress.listen(None)
    size = sum(array.nbytes for _, array in tensors().values())
    assert observed == sorted(observed)
    assert observed[-1] == (size, size, "B")
    assert len(observed) > 40


def test_the_checkpoint_is_only_read(tmp_path: Path) -> None:
    root = sharded(tmp_path / "hf", tensors())
    before = content(root)
    times = {path.name: path.stat().st_mtime_ns for path in root.iterdir()}
    for path in root.iterdir():
        path.chmod(0o444)
    root.chmod(0o555)
    try:
        write(root, tmp_path / "out", SCHEMES["q4f16_1"])
    finally:
        root.chmod(0o755)
    assert content(root) == before
    assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == times


PEAK = """
import resource, sys
from pathlib import Path
from mlcbuild import quant
from mlcbuild.checkpoints import conversion as weights
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.backends import BACKENDS
root = Path(sys.argv[1])
inputs = {"config": root / "config", "checkpoint": root / "hf"}
scheme = BACKENDS["cpu"].storage(SCHEMES["q4f16_1"])
weights.convert({"scheme": quant.to_json(scheme)}, inputs, root / "out")
status = Path("/proc/self/status")
if status.exists():  # where getrusage counts from the parent's peak
    print(next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if "VmHWM" in line))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Checks that converting a 200 MB checkpoint, a sparse file of zeros, takes much less memory than that.
    It runs in a separate process."""
    vocabulary = 1_250_000
    config = {**HF, "vocab_size": vocabulary}
    root = tmp_path / "hf"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    action.normalise({}, {"checkpoint": root}, tmp_path / "config")
    parsed, header, end = parsing.parse(config), {}, 0
    for param in models.parameters(parsed):
        names = [piece.tensor for piece in parsing.tensor_names(parsed).sources[param.name]]
        for name, rows in zip(names, PIECES.get(len(names), param.shape[:1]), strict=True):
            size = rows * math.prod(param.shape[1:]) * 2
            header[name] = {
                "dtype": "BF16",
                "shape": [rows, *param.shape[1:]],
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header).encode()
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    child = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True)
    assert end > 200_000_000
    assert int(child.stdout) < 120_000_000


@EVERY
def test_weights_that_no_format_can_hold_are_all_named(scheme: Storage, tmp_path: Path) -> None:
    actual = tensors("F32")
    for name, value in (("model.layers.1.self_attn.v_proj.weight", np.nan), (NORM, np.inf)):
        actual[name][1].reshape(-1)[-1] = value
    actual["model.layers.0.self_attn.q_proj.bias"][1][3] = -7e4
    with pytest.raises(CheckpointError) as caught:
        write(single(tmp_path / "hf", actual), tmp_path / "out", scheme, cores=2)
    lines = str(caught.value).splitlines()
    if scheme.dtype == "float16":
        assert lines.pop(0) == (
            "layers.0.attn.qkv.bias (model.layers.0.self_attn.q_proj.bias, "
            "model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.bias): "
            "it holds 70000, beyond the largest float16, 65504; store this parameter in float32: "
            "use a scheme such as q0f32 or q4f32_1, or an override for it"
        )
    assert len(lines) == 2
    assert lines[0].startswith("layers.1.attn.qkv.weight (model.layers.1.self_attn.q_proj.weight,")
    assert lines[1].startswith(f"norm.weight ({NORM}): it holds infinite or NaN weights")


def test_a_float32_override_holds_what_float16_cannot(tmp_path: Path) -> None:
    actual = tensors("F32")
    actual[NORM][1][3] = 1e6
    root = single(tmp_path / "hf", actual)
    scheme = replace(SCHEMES["q4f16_1"], overrides=(("norm", SCHEMES["q0f32"]),))
    assert conversion.read(write(root, tmp_path / "out", scheme))["norm.weight"][3] == 1e6


def test_overrides_that_match_nothing_stop_the_conversion(tmp_path: Path) -> None:
    root = single(tmp_path / "hf", tensors())
    (root / "config.json").write_text(json.dumps(HF))
    scheme = replace(SCHEMES["q4f16_1"], overrides=(("lmhead", SCHEMES["q0f16"]),))
    with pytest.raises(UsageError, match="the override 'lmhead' matches no parameter"):
        convert(root, scheme, tmp_path / "out")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "weights-00001-of-00001.safetensors").symlink_to("/dev/full")
    with pytest.raises(
        StepError, match=r"out: the weights cannot be written \(No space left on device\); they need"
    ):
        write(single(tmp_path / "hf", tensors()), out, SCHEMES["q0f16"])


def test_a_limit_on_file_size_is_one_sentence(tmp_path: Path) -> None:
    """Checks the error message if the disk accepts the header of a weights file and then refuses data that a
    worker thread writes."""
    root = single(tmp_path / "hf", tensors())
    (root / "config.json").write_text(json.dumps(HF))
    action.normalise({}, {"checkpoint": root}, tmp_path / "config")
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))" + PEAK
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert child.stderr.splitlines()[-1].startswith(
        f"mlcbuild.errors.StepError: {tmp_path / 'out'}: the weights"
    )
    assert "(File too large)" in child.stderr


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    root = single(tmp_path / "hf", tensors())
    sources = locate(root, CONFIG, parsing.tensor_names(CONFIG))
    os.truncate(root / "model.safetensors", 20_000)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: it became shorter while it was read; run again"
    ):
        conversion.write(sources, SCHEMES["q0f32"], tmp_path / "out")


def test_reading_what_is_no_weights_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds no weights files"):
        conversion.read(tmp_path)
    root = single(tmp_path / "hf", tensors())
    with pytest.raises(
        CheckpointError, match="its format must be mlcbuild-weights/1, found None; build it again"
    ):
        conversion.read(root / "model.safetensors")
