"""Targets: presets, inline ones, this machine, what can run, and that LLVM accepts every name."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlcbuild_format import processors

from mlcbuild.canon import canonical
from mlcbuild.documents import schema
from mlcbuild.documents.document import Document, parse
from mlcbuild.errors import InputError, Problems, SetupError, UsageError
from mlcbuild.targets import host as this_machine
from mlcbuild.targets import presets, requirements
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target

ROOT = Path(__file__).parent.parent.parent
LINUX = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"

# The flags of real machines, shortened to those that are looked at and a few others.
V2 = "sse3_is_pni pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
X86 = {
    "core2": ("pni cx16 ssse3 lahf_lm", "x86-64", ("+cx16", "+sahf", "+sse3", "+ssse3")),
    "nehalem": (V2, "x86-64-v2", ()),
    "sandybridge": (f"{V2} avx xsave", "x86-64-v2", ("+avx", "+xsave")),
    "haswell": (V3, "x86-64-v3", ()),
    "haswell without lzcnt in a virtual machine": (
        V3.replace(" abm", ""),
        "x86-64-v2",
        ("+avx", "+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+movbe", "+xsave"),
    ),
    "knl": (f"{V3} avx512f avx512cd avx512_vnni", "x86-64-v3", ()),
    "alderlake": (f"{V3} avx_vnni gfni vpclmulqdq", "x86-64-v3", ("+avxvnni", "+gfni", "+vpclmulqdq")),
    "skylake-avx512": (V4, "x86-64-v4", ()),
    "cascadelake": (f"{V4} avx512_vnni", "x86-64-v4", ("+avx512vnni",)),
    "cooperlake": (f"{V4} avx512_vnni avx512_bf16", "x86-64-v4", ("+avx512bf16", "+avx512vnni")),
    "sierraforest": (
        f"{V3} avx_vnni avx_vnni_int8 gfni vpclmulqdq",
        "x86-64-v3",
        ("+avxvnni", "+avxvnniint8", "+gfni", "+vpclmulqdq"),
    ),
}
ARMS = {
    "Raspberry Pi 4": ("fp asimd evtstrm crc32 cpuid", ()),
    "Raspberry Pi 5": (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
        ("+dotprod", "+fullfp16", "+lse", "+rdm"),
    ),
    "Graviton 3": (
        "fp asimd atomics fphp asimdhp asimdrdm asimddp sve asimdfhm svei8mm i8mm bf16",
        ("+bf16", "+dotprod", "+fp16fml", "+fullfp16", "+i8mm", "+lse", "+rdm", "+sve"),
    ),
}


def cpuinfo(flags: str, label: str = "flags") -> str:
    return f"processor\t: 0\n{label}\t\t: {flags}\nbogomips\t: 5000\n\nprocessor\t: 1\n{label}\t\t: {flags}\n"


def inline(text: str) -> tuple[Target | None, list[str]]:
    """Returns an inline target, and problems beyond its shape."""
    problems = Problems()
    target = presets.parse(parse(text.encode(), "r.yaml"), (), "mine", problems)
    return target, [str(problem).removeprefix("r.yaml:") for problem in sorted(problems)]


def test_presets_are_what_their_names_say() -> None:
    assert {name: (t.triple, t.cpu, t.features, t.output) for name, t in presets.presets().items()} == {
        "aarch64-linux": (ARM, "generic", ("+dotprod",), "shared"),
        "aarch64-linux-i8mm": (ARM, "generic", ("+dotprod", "+i8mm"), "shared"),
        "macos-arm64": ("arm64-apple-macosx11.0.0", "apple-m1", (), "shared"),
        "macos-arm64-m2": ("arm64-apple-macosx11.0.0", "apple-m2", (), "shared"),
        "x86-64-v2": (LINUX, "x86-64-v2", (), "shared"),
        "x86-64-v3": (LINUX, "x86-64-v3", (), "shared"),
        "x86-64-v3-vnni": (LINUX, "x86-64-v3", ("+avxvnni",), "shared"),
        "x86-64-v4": (LINUX, "x86-64-v4", (), "shared"),
        "x86-64-v4-amx": (
            LINUX,
            "x86-64-v4",
            ("+amx-bf16", "+amx-tile", "+avx512fp16", "+avx512vbmi", "+avx512vnni"),
            "shared",
        ),
        "x86-64-v4-vnni": (LINUX, "x86-64-v4", ("+avx512vnni",), "shared"),
        "webgpu": ("wgsl-unknown-unknown", "generic", (), "program"),
    }
    assert list(presets.presets()) == sorted(presets.presets())
    assert all(target.name == name for name, target in presets.presets().items())


def test_every_preset_is_spelled_out_and_listed() -> None:
    readme = (ROOT / "targets" / "README.md").read_text()
    for path in (ROOT / "targets").glob("*.yaml"):
        data = parse(path.read_bytes(), path.name).data
        assert isinstance(data, dict)
        assert list(data) == ["triple", "cpu", "features", "device", "output"]
        assert f"| `{path.stem}` |" in readme
        first, about = path.read_text().splitlines()[:2]
        assert first == "# yaml-language-server: $schema=../mlcbuild/schema/target.schema.json"
        assert about.startswith("# ")


def test_systems_and_architectures() -> None:
    by_name = {name: (target.architecture, target.system) for name, target in presets.presets().items()}
    assert by_name["x86-64-v3"] == ("x86_64", "linux")
    assert by_name["aarch64-linux"] == ("aarch64", "linux")
    assert by_name["macos-arm64"] == ("arm64", "macos")
    assert Target("", "x86_64-pc-windows-msvc", "generic").system == "windows"
    assert Target("", "aarch64-unknown-none-elf", "generic").system == "none"


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"^target 'x86-64v3' is unknown; did you mean 'x86-64-v3'\?$"):
        presets.resolve("x86-64v3")
    with pytest.raises(
        UsageError, match="target 'pdp11' is unknown; known: aarch64-linux, aarch64-linux-i8mm, host, macos"
    ):
        presets.resolve("pdp11")


def test_json_is_canonical_and_has_no_name() -> None:
    target = presets.resolve("x86-64-v4-vnni")
    data = targets.to_json(target)
    assert canonical(data) == (
        b'{"cpu":"x86-64-v4","device":"cpu","features":["+avx512vnni"],"output":"shared",'
        b'"triple":"x86_64-unknown-linux-gnu"}'
    )
    assert targets.from_json(json.loads(canonical(data)), "x86-64-v4-vnni") == target
    with pytest.raises(TypeError, match="features must be a list"):
        targets.from_json({**data, "features": "+x"})
    with pytest.raises(KeyError):
        targets.from_json({"cpu": "generic"})


_NAMES = st.text("abc-+", max_size=5)


@given(st.builds(Target, _NAMES, _NAMES, _NAMES, st.lists(_NAMES).map(tuple)))
def test_json_round_trip(target: Target) -> None:
    assert targets.from_json(targets.to_json(target), target.name) == target


def test_inline_targets() -> None:
    actual, problems = inline(f"triple: {LINUX}\ncpu: haswell\nfeatures: [+avxvnni, -fma]\n")
    assert not problems
    assert actual == Target("mine", LINUX, "haswell", ("+avxvnni", "-fma"))
    actual, problems = inline(f"{{triple: {ARM}, cpu: cortex-a72, device: cpu, output: object}}")
    assert not problems
    assert actual == Target("mine", ARM, "cortex-a72", output="object")


def test_extends_keeps_what_is_not_given() -> None:
    actual, problems = inline("{extends: aarch64-linux, cpu: cortex-a76}")
    assert not problems
    assert actual == Target("mine", ARM, "cortex-a76", ("+dotprod",))
    actual, problems = inline("{extends: x86-64-v4-vnni, features: [-avx512vnni, +avxvnni], output: object}")
    assert not problems
    assert actual == Target("mine", LINUX, "x86-64-v4", ("+avxvnni", "-avx512vnni"), output="object")
    actual, problems = inline("{extends: host}")
    assert not problems
    assert actual == Target("mine", *this_machine.host())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{extends: x86-64}", ["1:11: target 'x86-64' is unknown; did you mean 'x86-64-v4'?"]),
        ("triple: riscv64-unknown-linux-gnu\ncpu: generic", [
            "1:9: architecture 'riscv64' is unknown; known: aarch64, arm64, x86_64"
        ]),
        ("triple: x86-64-linux-gnu\ncpu: generic", [
            "1:9: architecture 'x86' is unknown; did you mean 'x86_64'?"
        ]),
        ("triple: x86_64-pc-windows-msvc\ncpu: generic", [
            "1:9: a shared library can be made for linux and macosx only; set output: object"
        ]),
        (f"triple: {LINUX}\ncpu: native", [
            "2:6: 'native' is another processor on every machine: use the target 'host'"
        ]),
        (f"triple: {LINUX}\ncpu: x86-64-v5", [
            "2:6: LLVM knows no x86_64 processor 'x86-64-v5'; did you mean 'x86-64-v4'?"
        ]),
        (f"triple: {LINUX}\ncpu: cortex-a76\nfeatures: [+dotprod]", [
            "2:6: LLVM knows no x86_64 processor 'cortex-a76'; it is one of aarch64",
            "3:12: LLVM knows no x86_64 feature 'dotprod'; mlcbuild_format/cpus.json lists those it knows",
        ]),
        (f"triple: {LINUX}\ncpu: haswell\nfeatures:\n  - +avx512vnii\n  - +fma\n  - -fma", [
            "4:5: LLVM knows no x86_64 feature 'avx512vnii'; did you mean 'avx512vnni'?",
            "6:5: 'fma' is both added and removed",
        ]),
        ("{extends: aarch64-linux, cpu: haswell}", [
            "1:31: LLVM knows no aarch64 processor 'haswell'; it is one of x86_64"
        ]),
    ],
)  # fmt: skip
def test_bad_names(text: str, expected: list[str]) -> None:
    actual, problems = inline(text)
    assert actual is None
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


def test_preset_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    cases = {
        "cpu: generic\ntripel: x\n": [
            "1:1: the file lacks the key 'triple'",
            "2:1: the key 'tripel' is unknown in the file; did you mean 'triple'?",
        ],
        "extends: x86-64-v3\n": ["1:1: a preset must state all of its properties: it cannot extend another"],
        f"triple: {LINUX}\ncpu: 8\ncpu: generic\nfeatures: avx\ndevice: gpu\noutput: [x]\n": [
            "2:6: LLVM knows no x86_64 processor '8'; did you mean 'k8'?",
            "3:1: the key 'cpu' appears twice; first on line 2",
            "4:11: 'features' must be a list, not 'avx'",
            "5:9: 'device' must be 'cpu' or 'webgpu', not 'gpu'",
            "6:9: 'output' must be 'shared' or 'object' or 'program', not a list",
        ],
        f"triple: {LINUX}\ncpu: x86-64-v3\ndevice: webgpu\noutput: shared\n": [
            "4:9: output of the device webgpu must be 'program', found 'shared'",
        ],
        f"triple: {LINUX}\ncpu: x86-64-v3\noutput: program\n": [
            "3:9: output of the device cpu must be 'shared' or 'object', found 'program'",
        ],
        f"triple: x86\ncpu: generic\nfeatures: [avx, +fma, +fma]\nextend: {LINUX}": [
            "1:9: 'triple' must be architecture-vendor-system or architecture-vendor-system-environment, not",
            "3:12: item 1 of 'features' must be '+' or '-' and the name of a feature, such as",
            "3:23: '+fma' appears twice in 'features': it is item 2 too",
            "4:1: the key 'extend' is unknown in the file; did you mean 'extends'?",
        ],
    }  # fmt: skip
    for text, expected in cases.items():
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            presets.read_preset(path)
        results = [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]
        assert len(results) == len(expected), results
        assert all(item.startswith(start) for item, start in zip(results, expected, strict=True)), results
    path.write_text(f"triple: {LINUX}\ncpu: znver4\n")
    assert presets.read_preset(path) == Target("mine", LINUX, "znver4")
    path.write_text("triple: wgsl-unknown-unknown\ncpu: generic\ndevice: webgpu\n")
    assert presets.read_preset(path).output == "program", "the only one of GPUs"


@pytest.mark.parametrize("machine", X86)
def test_x86_levels_from_cpuinfo(machine: str) -> None:
    flags, cpu, features = X86[machine]
    assert this_machine.x86_cpu(cpuinfo(flags)) == (cpu, features)


@pytest.mark.parametrize("machine", ARMS)
def test_arm_features_from_cpuinfo(machine: str) -> None:
    flags, features = ARMS[machine]
    assert this_machine.arm_features(cpuinfo(flags, "Features")) == features


def test_a_feature_counts_only_when_every_processor_has_it() -> None:
    mixed = cpuinfo(f"{V3} avx_vnni") + "\n" + cpuinfo(V3)
    assert this_machine.x86_cpu(mixed) == ("x86-64-v3", ())
    assert this_machine.x86_cpu("") == ("x86-64", ())
    assert this_machine.arm_features("") == ()


def test_arm_features_from_the_auxiliary_vector() -> None:
    """Where /proc/cpuinfo is that of the machine below an emulator."""
    hwcap, hwcap2 = (1 << 20) | (1 << 8), 1 << 13
    values = {16: hwcap, 26: hwcap2}
    assert processors.auxiliary_features(values.__getitem__) == {"dotprod", "lse", "i8mm"}
    every = processors.auxiliary_features(lambda entry: -1)
    assert every == processors.CHECKABLE["aarch64"]


def test_apple_features_from_sysctl() -> None:
    m1 = {f"hw.optional.arm.FEAT_{name}": "1" for name in ("DotProd", "FP16", "FHM", "LSE", "RDM")}
    m2 = m1 | {"hw.optional.arm.FEAT_I8MM": "1", "hw.optional.arm.FEAT_BF16": "1"}
    own = ("+dotprod", "+fp16fml", "+fullfp16", "+lse", "+rdm")
    off = {"hw.optional.arm.FEAT_I8MM": "0"}
    assert this_machine.apple_features(lambda name: (m1 | off).get(name, "")) == own
    assert this_machine.apple_features(lambda name: m2.get(name, "")) == tuple(
        sorted((*own, "+bf16", "+i8mm"))
    )


def test_unknown_machines_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    this_machine.host.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(SetupError) as caught:
        presets.resolve("host")
    assert str(caught.value) == (
        "the target 'host' is not known on Linux s390x: it works on Linux (x86-64, aarch64) and macOS "
        "(arm64); describe this machine in the recipe instead, with triple, cpu and features"
    )
    assert inline("{extends: host}")[1] == [f"1:11: {caught.value}"]
    monkeypatch.undo()
    this_machine.host.cache_clear()


def test_this_machine_runs_what_is_made_for_it() -> None:
    host = presets.resolve("host")
    assert host.name == "host"
    assert host.cpu not in ("native", "host", "")
    assert requirements.why_not(host, host) is None
    assert requirements.missing_features(host, host) == ()


@pytest.mark.parametrize(
    ("target", "host", "reason"),
    [
        ("x86-64-v3", ("x86_64", V3), None),
        ("x86-64-v2", ("x86_64", V4), None),
        ("x86-64-v4", ("x86_64", V3), "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"),
        ("x86-64-v4-vnni", ("x86_64", V4), "avx512vnni"),
        ("x86-64-v4-vnni", ("x86_64", f"{V4} avx512_vnni"), None),
        ("x86-64-v4-amx", ("x86_64", f"{V4} avx512_vnni avx512vbmi avx512_fp16"), "amx-bf16, amx-tile"),
        ("x86-64-v3", ("x86_64", V3.replace(" fma", "")), "fma"),
        ("aarch64-linux", ("aarch64", "asimd"), "dotprod"),
        ("aarch64-linux", ("aarch64", "asimd asimddp i8mm"), None),
    ],
)
def test_what_a_machine_can_run(target: str, host: tuple[str, str], reason: str | None) -> None:
    architecture, flags = host
    if architecture == "x86_64":
        machine = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(flags)))
    else:
        machine = Target("host", ARM, "generic", this_machine.arm_features(cpuinfo(flags, "Features")))
    expected = reason and f"this needs {reason}, which this CPU lacks"
    assert requirements.why_not(presets.resolve(target), machine) == expected
    missing = tuple(reason.split(", ")) if reason else ()
    assert requirements.missing_features(presets.resolve(target), machine) == missing


def test_named_processors_are_compared_by_what_they_have() -> None:
    cascadelake = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(X86["cascadelake"][0])))
    haswell = Target("host", LINUX, *this_machine.x86_cpu(cpuinfo(X86["haswell"][0])))
    assert requirements.why_not(Target("", LINUX, "cascadelake"), cascadelake) is None
    assert requirements.missing_features(Target("", LINUX, "skylake-avx512"), haswell) == (
        "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl",
    )  # fmt: skip
    assert requirements.missing_features(Target("", LINUX, "icelake-server", ("-gfni",)), cascadelake) == (
        "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "vpclmulqdq",
    )  # fmt: skip
    # Tuning is not compared.
    assert requirements.missing_features(Target("", LINUX, "haswell", ("+prefer-256-bit",)), haswell) == ()


def test_other_systems_architectures_and_objects_do_not_run() -> None:
    linux, mac = presets.resolve("aarch64-linux"), presets.resolve("macos-arm64")
    assert requirements.why_not(mac, linux) == "this is for macos aarch64, and this machine is linux aarch64"
    assert requirements.why_not(presets.resolve("x86-64-v2"), linux) == (
        "this is for linux x86_64, and this machine is linux aarch64"
    )
    assert requirements.why_not(Target("", ARM, "generic", output="object"), linux) == (
        "an object file must be linked into a program before it can run"
    )
    assert requirements.why_not(mac, mac) is None
    assert requirements.missing_features(Target("", "pdp11-dec-none", "pdp11"), linux) == ()


def test_the_schema_is_valid_and_explains_every_key() -> None:
    from jsonschema import Draft202012Validator

    actual = schema.schema("target")
    Draft202012Validator.check_schema(actual)
    properties = actual["properties"]
    assert isinstance(properties, dict)
    assert set(properties) == {"extends", "triple", "cpu", "features", "device", "output"}
    for rule in properties.values():
        assert isinstance(rule, dict)
        assert rule["title"]
        assert rule["description"]


def test_reading_targets_loads_no_compiler() -> None:
    code = (
        "import sys, mlcbuild.targets.presets as t; t.resolve('host'); t.presets();"
        "print([name for name in ('tvm', 'numpy', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_llvm_accepts_every_name() -> None:
    """cpus.json is what the pinned LLVM says, and it says nothing about presets and this machine."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "llvm_table.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout == (ROOT / "runtime" / "mlcbuild_format" / "cpus.json").read_text()
    machines = [(LINUX, cpu, features) for _, cpu, features in X86.values()]
    machines += [(ARM, "generic", features) for _, features in ARMS.values()]
    cpus = [target for target in presets.presets().values() if target.device == "cpu"]
    machines += [(item.triple, item.cpu, item.features) for item in cpus]
    machines.append(this_machine.host())
    code = (
        "import json, sys, tvm, tvm_ffi\n"
        "features = tvm_ffi.get_global_func('target.llvm_get_cpu_features')\n"
        "for triple, cpu, given in json.loads(sys.argv[1]):\n"
        "    options = {'kind': 'llvm', 'mtriple': triple, 'mcpu': cpu, 'mattr': given}\n"
        "    known = set(map(str, features(tvm.target.Target(options))))\n"
        "    assert known >= {name[1:] for name in given if name[0] == '+'}, (cpu, given)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(machines)], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_a_wheel_carries_presets_and_schemas(tmp_path: Path) -> None:
    """An installed package has presets inside it, and no checkout around it."""
    (tmp_path / "mlcbuild").mkdir()
    for path in (ROOT / "mlcbuild").rglob("*"):
        if path.suffix in (".py", ".json") and "compiler" not in path.parts:
            to = tmp_path / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    code = "import mlcbuild.targets.presets as t; print(t.__file__); print(*t.presets())"

    def run() -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    assert "SetupError: the target presets of mlcbuild are missing: install it again" in run().stderr
    directory = tmp_path / "mlcbuild" / "presets"
    directory.mkdir()
    for path in (ROOT / "targets").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    where, names = run().stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert names.split() == list(presets.presets())


def test_documents_keep_what_was_written() -> None:
    document: Document = parse(b"cpu: 1.10\ntriple: true\nfeatures: [5]\n", "f")
    assert schema.typed(document, "target").data == {"cpu": "1.10", "triple": "true", "features": ["5"]}
