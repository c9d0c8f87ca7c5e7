"""Tests of the compile step: what it writes, that the same inputs give the same bytes, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from mlcbuild_format.limits import Limits
from mlcbuild_format.signature import signature
from tvm.tirx import PrimFunc

from mlcbuild import models, progress, quant
from mlcbuild.canon import Json
from mlcbuild.compiler import action, phases
from mlcbuild.compiler.cpu import child
from mlcbuild.compiler.cpu.action import compile_library, tools
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.compiler.cpu.toolchain import linker_identity
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.errors import CheckpointError, CompileError, SetupError
from mlcbuild.models import Attention, Dense, LatentAttention, LayerSpec, ModelConfig, Norms, RmsNorm
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target
from tests import compiler_process
from tests.compiler.test_decoder import SMALL
from tests.configs import rope, with_attention, with_feed_forward, with_windows
from tests.libharness import EVERY, HERE, Session, compiled, golden, pack, random_weights
from tests.schemes import SCHEMES

FAMILIES = ["gemma2", "llama-llama3-gqa", "mistral-window", "phi3-longrope-long", "qwen2-window", "qwen3"]
REPEATED = list(SCHEMES) if EVERY else ["q4a8_1"]
SURROUNDINGS = {"PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"}


def request(
    scheme: str | quant.Storage = "q0f32", target: str | Target = "host", **limits: int
) -> dict[str, Json]:
    actual = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    resolved = presets.resolve(target) if isinstance(target, str) else target
    defaults = {"context_window": 128, "prefill_chunk": 64, "max_batch": 4}
    return {
        "scheme": cast(Json, quant.to_json(actual)),
        "target": cast(Json, targets.to_json(resolved)),
        "limits": cast(Json, {**defaults, **limits}),
    }


def build(directory: Path, config: ModelConfig, params: Mapping[str, Json]) -> Path:
    """Compiles the library of a model in a child process, in the new directories `in` and `out` of
    `directory`, and returns `out`, which contains the library. params: parameters of the compile step."""
    (directory / "in").mkdir(parents=True)
    (directory / "in" / "config.json").write_text(json.dumps(models.to_json(config)))
    out = directory / "out"
    out.mkdir()
    compile_library(params, {"config": directory / "in"}, out)
    return out


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_library_describes_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    scheme = SCHEMES["q4a8_1"]
    library = compiled(tmp_path_factory, SMALL, scheme)
    assert sorted(path.name for path in library.iterdir()) == ["library.json", "model.so"]
    about = json.loads((library / "library.json").read_text())
    session = Session(library / "model.so", pack(SMALL, scheme, random_weights(SMALL)))
    assert json.loads(session.vm["_metadata"]()) == about
    assert about["format"] == "mlcbuild-library/2"
    assert models.from_json(about["config"]) == SMALL
    assert about["scheme"] == quant.describe(scheme)
    assert targets.from_json(about["target"]) == replace(presets.resolve("host"), name="")
    assert about["limits"] == {"context_window": 128, "prefill_chunk": 64, "max_batch": 4, "page_size": 16}
    stored = quant.stored_parameters(models.parameters(SMALL), scheme)
    assert about["params"] == [[t.name, list(t.shape), t.dtype, t.layout] for t in stored]
    assert about["signature"] == signature((t.name, t.shape, t.dtype, t.layout) for t in stored)
    assert set(about["kernels"]) == {
        *("attention", "attention.decode", "attn.o.weight", "attn.qkv.weight", "embed.lookup"),
        *("lm_head.weight", "mlp.down.weight", "mlp.gate_up.weight"),
    }
    assert about["kernels"]["mlp.down.weight"].startswith("w4a8.")
    page = 2 * 2 * 2 * 16 * 16 * 2  # layers, keys and values, heads, tokens, dimensions, bytes
    assert about["memory"]["kv_page"] == page
    assert about["memory"]["kv_cache"] == page * 8 * 4
    assert about["memory"]["weights"] == quant.stored_bytes(models.parameters(SMALL), scheme)


def test_an_object_for_linking_elsewhere_and_slow_kernels_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_process.preloaded(monkeypatch)
    target = Target("old", "x86_64-unknown-linux-gnu", "x86-64", output="object")
    if not linkable(target):
        pytest.skip("no linker for x86-64 here")
    out = build(tmp_path, SMALL, request(target=target))
    assert sorted(path.name for path in out.iterdir()) == ["library.json", "model.o"]
    about = json.loads((out / "library.json").read_text())
    assert "slow: attn.o.weight: no vector instructions" in capsys.readouterr().err
    assert set(about["fallbacks"]) == {name for name in about["kernels"] if name.endswith(".weight")}
    assert all(reason.startswith("no vector instructions") for reason in about["fallbacks"].values())


def test_what_tile_registers_cannot_take_is_named() -> None:
    """Checks which parts of a model the compiler lists as unsuitable for x86 tile registers (AMX), and the
    stated reasons: attention heads of 16 values, and feed-forward products whose rows are too short."""
    target = presets.resolve("x86-64-v4-amx")

    def fallbacks(config: ModelConfig) -> dict[str, str]:
        return CpuOps(config, SCHEMES["q4a8_1"], target).kernel_names()[1]

    actual = fallbacks(SMALL)
    assert set(actual) == {"attention.prompt", "mlp.down.weight"}
    assert actual["attention.prompt"].startswith("heads of 16 values")
    assert "too short" in actual["mlp.down.weight"]
    assert not fallbacks(with_feed_forward(with_attention(SMALL, head_dim=32), size=352))
    assert "bias" in fallbacks(with_feed_forward(SMALL, bias=True))["mlp.down.weight"]


@pytest.mark.skipif(not EVERY, reason="MLCBUILD_TEST_EVERY is not set: this compiles six more libraries")
@pytest.mark.parametrize("variant", FAMILIES)
def test_the_same_bytes_for_every_family(
    variant: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden(variant)
    first = compiled(tmp_path_factory, case.config, SCHEMES["q0f32"], context_window=case.context_window)
    for name, value in SURROUNDINGS.items():
        monkeypatch.setenv(name, value)
    again = build(tmp_path / "elsewhere", case.config, request(context_window=case.context_window))
    assert files(first) == files(again)


@pytest.mark.parametrize("scheme", REPEATED)
def test_the_same_bytes_for_every_scheme(
    scheme: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(tmp_path_factory, SMALL, SCHEMES[scheme])
    for name, value in SURROUNDINGS.items():
        monkeypatch.setenv(name, value)
    reports: list[tuple[int, int, str]] = []
    monkeypatch.setattr(progress, "_PERIOD", 0.0)
    progress.listen(lambda *report: reports.append(report))
    try:
        again = build(tmp_path / "elsewhere", SMALL, request(scheme))
    finally:
        progress.listen(None)
    assert files(first) == files(again)
    kernels = kernel_count(again / "model.so")
    assert {report[1:] for report in reports} == {(kernels, "functions")}
    counts = list(dict.fromkeys(done for done, _, _ in reports))
    assert counts == sorted(counts) and counts[-1] == kernels and len(counts) >= 3, counts


def kernel_count(library: Path) -> int:
    """Returns the number of kernels in a library, by its symbols."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    return len(re.findall(r" T __tvm_ffi_(?!_)", listed.stdout))


def smol(layers: int) -> ModelConfig:
    """Returns a config with the sizes of SmolLM2-135M and `layers` layers."""
    norm = RmsNorm(1e-5)
    return ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        max_position=8192,
        layers=(LayerSpec(Attention(9, 3, 64, 0.125), Dense(1536), Norms(norm)),) * layers,
        ropes=(rope(64, 100000.0),),
        norm=norm,
        tie_embeddings=True,
    )


def test_layers_share_their_kernels() -> None:
    """Checks that a program of 12 layers has the same kernels as one of 2 layers, so that it takes little
    longer to compile."""

    def kernels(layers: int) -> set[str]:
        config = with_windows(SMALL, *[None] * (layers - 1), 11)
        ops = CpuOps(config, SCHEMES["q4f16_1"], presets.resolve("host"))
        program = functions.build(Decoder(ops, Limits(128, 64, 4)))
        for passes in (ops.plan, ops.lower):
            program = phases.run(program, passes, ops.target, lambda phase: None)
        return {name.name_hint for name, item in program.functions.items() if isinstance(item, PrimFunc)}

    assert len(kernels(2)) > 10
    assert kernels(12) == kernels(2)


MEASURE = """
import json, os, sys
import numpy as np
from pathlib import Path
from tests.libharness import Session, tensor
out = Path(sys.argv[1])
about = json.loads((out / "library.json").read_text())
stored = {n: np.zeros(s, d) for n, s, d, _ in about["params"]}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
limits = about["limits"]
tensor(np.zeros(1))  # loads the runtime
before = resident()
pages = limits["max_batch"] * limits["context_window"] // 16
session = Session(out / "model.so", stored, num_pages=pages, dirty=False)
for start in range(0, limits["context_window"], limits["prefill_chunk"]):
    for sequence in range(limits["max_batch"]):
        session.prefill((sequence, [1] * limits["prefill_chunk"]), rows=[0])
        if sequence and not start:
            session.lengths[sequence] -= 1
            session.decode((sequence, 1))
print(json.dumps(resident() - before))
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc"
)
def test_memory_is_what_was_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_process.preloaded(monkeypatch)
    config = replace(with_windows(smol(1), None, 200, None, 200), vocab_size=16000)
    out = build(tmp_path, config, request("q0f16", context_window=1024, prefill_chunk=512, max_batch=4))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", MEASURE, str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    about = json.loads((out / "library.json").read_text())["memory"]
    estimate = about["weights"] + about["kv_cache"] + about["workspace"]
    assert json.loads(result.stdout) == pytest.approx(estimate, rel=0.12)


def test_the_parent_never_loads_tvm(tmp_path: Path) -> None:
    code = (
        "import sys; from mlcbuild.compiler.cpu.action import compile_library, tools;"
        "from mlcbuild.targets import presets;"
        "print(sorted(tools(presets.resolve('host')))); assert not {'tvm', 'numpy'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "['apache-tvm', 'linker', 'llvm']", result.stderr


def test_tools_are_versions_not_places() -> None:
    for name, version in tools(presets.resolve("host")).items():
        assert version and "/" not in version, name


def linkable(target: Target) -> bool:
    try:
        linker_identity(target)
    except SetupError:
        return False
    return True


def test_libraries_for_macos_are_linked_elsewhere(tmp_path: Path) -> None:
    """Checks a library for macOS, which is linked on this machine. tests/cli/test_run.py checks one for a
    Linux machine of another architecture."""
    target = presets.resolve("macos-arm64")
    if not linkable(target):
        pytest.skip(f"no linker for {target.architecture} {target.system} is here")
    out = build(tmp_path, SMALL, request("q4a8_1", target))
    about = json.loads((out / "library.json").read_text())
    assert about["target"]["triple"] == target.triple
    assert (out / action.library_name(target)).read_bytes().startswith(b"\xcf\xfa\xed\xfe")


def refused(tmp_path: Path, params: Mapping[str, Json]) -> str:
    with pytest.raises(CompileError) as caught:
        build(tmp_path, SMALL, params)
    return str(caught.value)


def test_limits_are_checked_all_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, request(context_window=4096, prefill_chunk=0, max_batch=-1))
    assert message.splitlines() == [
        "compile.prefill_chunk must be at least 1, found 0",
        "compile.max_batch must be at least 1, found -1",
        "compile.context_window is 4096, but the model was made for 128 positions: use at most that",
    ]


def test_latents_are_not_kept_in_8_bits(tmp_path: Path) -> None:
    layer = replace(SMALL.layers[0], mixer=LatentAttention(4, 6, 4, 2, 3, 1.0, 1e-6))
    with pytest.raises(CompileError, match=r"^compile.kv_cache is int8, but this model caches latents, "):
        build(tmp_path, replace(SMALL, layers=(layer,), ropes=(rope(2),)), {**request(), "kv_cache": "int8"})


def test_a_system_without_shared_libraries_is_refused(tmp_path: Path) -> None:
    target = Target("board", "aarch64-unknown-none-elf", "cortex-a72")
    assert refused(tmp_path, request(target=target)) == (
        "a shared library for aarch64-unknown-none-elf cannot be made: use `output: object`"
    )


def test_overrides_must_match_something(tmp_path: Path) -> None:
    scheme = replace(SCHEMES["q4f32_1"], overrides=(("router*", SCHEMES["q0f32"]),))
    assert "router*" in refused(tmp_path, request(scheme))


def prepared(tmp_path: Path, **changes: Json) -> Path:
    """Writes request.json, the description of a library to compile that a compiler process reads, to
    `tmp_path`, and returns that directory. changes: fields of the request to replace."""
    data = {**request(), "config": models.to_json(SMALL), **changes}
    (tmp_path / "request.json").write_text(json.dumps(data))
    return tmp_path


def test_a_compiler_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^the compiler did not finish in 0.4 s; it was at 'start"):
        action.run_child(prepared(tmp_path), 0.4, child.__name__)


def test_the_compiler_writes_only_below_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the compiler writes below the step's output directory only, so that files which a killed
    step leaves behind are removed with it."""
    areas: list[Path] = []

    def killed(directory: Path, seconds: float, module: str) -> None:
        areas.append(directory)
        raise CompileError("killed")

    monkeypatch.setattr(action, "run_child", killed)
    with pytest.raises(CompileError, match="killed"):
        build(tmp_path, SMALL, request())
    assert [area.parent for area in areas] == [tmp_path / "out"]
    assert not list((tmp_path / "out").iterdir())


def test_a_crash_names_signal_and_phase(tmp_path: Path) -> None:
    """Checks that the error for a crashed compiler process names the signal. Here a limit of CPU time ends
    the process."""
    code = (
        "import sys; from pathlib import Path; from mlcbuild.compiler import action;"
        "action.run_child(Path(sys.argv[1]), 300, 'mlcbuild.compiler.cpu.child')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        "sh",
        "-c",
        'ulimit -t 1; exec "$0" -c "$1" "$2"',
        sys.executable,
        code,
        str(prepared(tmp_path)),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "CompileError: the compiler was ended by SIG" in result.stderr
    assert " at '" in result.stderr.splitlines()[-1]


def test_errors_with_a_meaning_come_through(tmp_path: Path) -> None:
    config = {**models.to_json(SMALL), "hidden_size": 0}
    with pytest.raises(CheckpointError, match="hidden_size"):
        compiler_process.run_child(prepared(tmp_path, config=cast(Json, config)), 300, child.__name__)


def test_a_defect_shows_its_traceback_and_phase(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiler_process.run_child(prepared(tmp_path, limits={}), 300, child.__name__)
    assert str(caught.value).startswith("the compiler stopped with exit code 1 at 'start the compiler':")
    assert "TypeError: Limits.__init__() missing 3 required" in str(caught.value)


def test_what_has_no_kernel_is_named() -> None:
    import tvm
    from tvm import relax

    from mlcbuild.compiler.passes.kernels_only import kernels_only

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("forward", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    loops = tvm.te.create_prim_func([tvm.te.placeholder((4,), name="a")])
    mod = builder.finalize()
    mod.update_func(tvm.ir.GlobalVar("loops"), loops)
    with pytest.raises(CompileError) as caught:
        kernels_only(mod)
    assert str(caught.value) == (
        "the compiler made a library that would be slow: function 'forward' uses relax.exp, for which there"
        " is no kernel; kernel 'loops' has no schedule"
    )
