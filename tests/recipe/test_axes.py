"""Tests of reading the sections `quantizations` and `targets` of a recipe, and of the messages about their
faults, each with its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.quant import as_is
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe.axes import read_schemes, read_targets
from mlcbuild.targets import presets
from mlcbuild.targets.target import Target
from tests.recipes import changed, faults, project, reading, reported

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "unknown quantization": (
        changed(quantizations="[q4f61_1]"),
        ["3:17: quantization 'q4f61_1' is unknown; did you mean 'q4f16_1'?"],
    ),
    "swapped letters": (
        changed(quantizations="[q4f61]"),
        ["3:17: quantization 'q4f61' is unknown; did you mean 'q4f16_1'?"],
    ),
    "quantization twice": (
        changed(quantizations="[q4f16_1, q0f32, q4f16_1]"),
        ["3:33: 'q4f16_1' appears twice in 'quantizations': it is item 1 too"],
    ),
    "unknown scheme under a name": (
        changed(quantizations="{a: q5, b: {scheme: q4f16}}"),
        [
            "3:20: quantization 'q5' is unknown; known: " + ", ".join(sorted([*SCHEMES, "as-is"])),
            "3:36: quantization 'q4f16' is unknown; did you mean 'q4f16_1'?",
        ],
    ),
    "own name of a built-in scheme": (
        changed(quantizations="{q4f16_1: q8f16_1}"),
        ["3:17: 'q4f16_1' is a built-in scheme: give your own quantization another name"],
    ),
    "quantization without scheme": (
        changed(quantizations="{a: {bits: 4, overrides: [{scheme: q0f32}, {match: ''}]}}"),
        [
            "3:20: 'a' needs the key 'scheme', the scheme of all other parameters",
            "3:21: the key 'bits' is unknown in 'a'; known: calibrate, candidates, max_kl, max_size, "
            "overrides, scheme, target_bits",
            "3:42: item 1 of 'overrides' lacks the key 'match': one or more shell patterns joined by '|', "
            "compared "
            "with the parameter's name with and without '.weight'",
            "3:59: item 2 of 'overrides' lacks the key 'scheme': the built-in scheme of the parameters "
            "that match",
            "3:67: 'match' must not be empty",
        ],
    ),
    "calibration": (
        changed(
            quantizations="{a: {scheme: q4a8_1, calibrate: [x]}, b: {max_kl: 0.1, calibrate: [x]}, "
            "c: {scheme: q4a8_2, calibrate: none.txt}, d: {scheme: as-is, calibrate: [x]}, "
            "e: {scheme: q4a8_2, calibrate: []}}"
        ),
        [
            "3:37: no scheme of this quantization can be calibrated; those that can are q3a8_2, q4a8_2, "
            "q5a8_2, q6a8_2",
            "3:71: a budget measures schemes without calibration; calibrate the fragment that it writes",
            "3:119: the prompts 'none.txt' must be a text file: it does not exist",
            "3:149: no scheme of this quantization can be calibrated; those that can are q3a8_2, q4a8_2, "
            "q5a8_2, q6a8_2",
            "3:197: 'calibrate' must not be empty",
        ],
    ),
    "overrides that cannot match": (
        changed(
            quantizations="{a: {scheme: q4f32_1, overrides: [{match: 'x|', scheme: q0f32}, "
            "{match: y, scheme: q8f32_1}, {match: y, scheme: q0f32}]}}"
        ),
        [
            "3:58: 'x|' has an empty pattern next to a '|'",
            "3:117: 'y' is in an earlier override, which has precedence",
        ],
    ),
    "unknown target": (
        changed(targets="[x86-64-v3, aarch64]"),
        ["4:22: target 'aarch64' is unknown; did you mean 'aarch64-linux'?"],
    ),
    "target from a later version": (
        changed(targets="[cuda-sm90]"),
        [
            "4:11: target 'cuda-sm90' is unknown; known: aarch64-linux, aarch64-linux-i8mm, host, "
            "macos-arm64, macos-arm64-m2, webgpu, x86-64-v2, x86-64-v3, x86-64-v3-vnni, "
            "x86-64-v4, x86-64-v4-amx, x86-64-v4-vnni"
        ],
    ),
    "own name of a preset": (
        changed(targets="{x86-64-v3: x86-64-v4, host: {extends: x86-64-v2}}"),
        [
            "4:11: 'x86-64-v3' is a preset: give your own target another name",
            "4:33: 'host' is this machine: give your own target another name",
        ],
    ),
    "inline target": (
        changed(
            targets="{a: {cpu: any, device: cuda, triple: x86_64-unknown-linux-gnu}, b: {cpu: 5}, c: [1],"
            " d: {cpu: native, triple: x86_64-unknown-linux-gnu}}"
        ),
        [
            "4:33: 'device' must be 'cpu' or 'webgpu', not 'cuda'",
            "4:77: 'b' lacks the key 'triple'",
            "4:90: 'c' must be text or a mapping, not a list",
            "4:104: 'native' is another processor on every machine: use the target 'host'",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


def test_listed_schemes_are_the_built_in_ones() -> None:
    recipe = reading("quantizations: [q8f32_1, as-is, q5, q4a8_1]")
    schemes = read_schemes(recipe)
    assert schemes == {
        "q8f32_1": SCHEMES["q8f32_1"],
        "as-is": as_is.AS_IS,
        "q4a8_1": SCHEMES["q4a8_1"],
    }
    assert list(schemes) == ["q8f32_1", "as-is", "q4a8_1"]
    (problem,) = reported(recipe)
    assert problem.startswith("1:33: quantization 'q5' is unknown")


OVERRIDES = "{scheme: q4a8_1, overrides: [{match: '*.down', scheme: q8a8_1}, {match: a|b, scheme: q0f32}]}"


def test_a_scheme_with_overrides_is_named_by_its_contents() -> None:
    other = OVERRIDES.replace("a|b", "a")
    recipe = reading(
        f"quantizations:\n  mine: {OVERRIDES}\n  same: {OVERRIDES}\n  other: {other}\n  plain: q0f16"
    )
    schemes = read_schemes(recipe)
    assert not reported(recipe)
    assert schemes["plain"] == SCHEMES["q0f16"]
    mine = schemes["mine"]
    assert mine.overrides == (("*.down", SCHEMES["q8a8_1"]), ("a|b", SCHEMES["q0f32"]))
    assert (mine.format, mine.activation_bits) == (SCHEMES["q4a8_1"].format, 8)
    assert mine.name.startswith("q4a8_1-") and mine == schemes["same"]
    assert schemes["other"].name not in (mine.name, "q4a8_1")


def test_calibration_leaves_a_scheme_its_name() -> None:
    recipe = reading("quantizations: {a: {scheme: q4a8_2, calibrate: [one, two]}}")
    scheme = read_schemes(recipe)["a"]
    assert (scheme.name, scheme.calibration) == ("q4a8_2", ("one", "two")) and not reported(recipe)


def test_targets_have_the_names_of_the_recipe() -> None:
    recipe = reading(
        "targets:\n  mine: x86-64-v3\n  board: {triple: aarch64-unknown-linux-gnu, cpu: cortex-a72}\n"
        "  odd: x87\n"
    )
    targets = read_targets(recipe)
    preset = presets.presets()["x86-64-v3"]
    assert targets["mine"] == Target("mine", preset.triple, preset.cpu, preset.features)
    assert targets["board"] == Target("board", "aarch64-unknown-linux-gnu", "cortex-a72")
    assert list(targets) == ["mine", "board"]
    (problem,) = reported(recipe)
    assert problem.startswith("4:8: target 'x87' is unknown")
    listed = read_targets(reading("targets: [x86-64-v4, webgpu]"))
    assert {name: (target.name, target.device) for name, target in listed.items()} == {
        "x86-64-v4": ("x86-64-v4", "cpu"),
        "webgpu": ("webgpu", "webgpu"),
    }
