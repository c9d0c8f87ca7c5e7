"""Tests of target presets: their names, their files, and targets in recipes that extend them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.documents import schema
from mlcbuild.documents.document import Document, parse
from mlcbuild.errors import InputError, Problems, UsageError
from mlcbuild.targets import host as this_machine
from mlcbuild.targets import presets
from mlcbuild.targets.target import Target
from tests.targets.machines import ARM, LINUX, ROOT


def inline(text: str) -> tuple[Target | None, list[str]]:
    """Reads a target that is written in a recipe. Returns (the target, or None if it is wrong; the messages
    of the problems that the JSON schema does not detect). text: the target as YAML."""
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


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"^target 'x86-64v3' is unknown; did you mean 'x86-64-v3'\?$"):
        presets.resolve("x86-64v3")
    with pytest.raises(
        UsageError, match="target 'pdp11' is unknown; known: aarch64-linux, aarch64-linux-i8mm, host, macos"
    ):
        presets.resolve("pdp11")


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


def test_documents_keep_what_was_written() -> None:
    document: Document = parse(b"cpu: 1.10\ntriple: true\nfeatures: [5]\n", "f")
    assert schema.typed(document, "target").data == {"cpu": "1.10", "triple": "true", "features": ["5"]}
