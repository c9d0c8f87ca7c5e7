"""Tests that a recipe is refused if it names an output directory for bundles that is not allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.errors import (
    InputError,
)
from mlcbuild.recipe import load
from mlcbuild.recipe.reading import LONGEST_NAME
from tests.recipes import HEAD, changed, faults, project

__all__ = ["project"]

LONG = "a" * (LONGEST_NAME + 1)


PATHS = {
    "a long name": (
        f"dist/{LONG}",
        f"'dist/{LONG}' has the part '{LONG[:40]}...' of {len(LONG)} bytes; "
        f"at most {LONGEST_NAME} are allowed",
    ),
    "bytes count, not letters": (
        f"dist/{'é' * 121}",
        f"'dist/{'é' * 121}' has the part '{'é' * 40}...' of 242 bytes; at most {LONGEST_NAME} are allowed",
    ),
    "a line break": (
        '"dist/a\\nb"',
        "'dist/a\\nb' holds an invisible character; a path has visible letters and spaces only",
    ),
    "an escape": (
        '"dist/\\xa0{model}"',
        "'dist/\\xa0x' holds an invisible character; a path has visible letters and spaces only",
    ),
    "backslashes": (
        "dist\\..\\x",
        "'dist\\..\\x' holds a '\\': write '/' between the parts of a path",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_outputs_that_cannot_be(project: Path, case: str) -> None:
    written, words = PATHS[case]
    quoted = written if written.startswith('"') else f"'{written}'"
    assert faults(HEAD + f"bundle: {{output: {quoted}}}\n") == [f"5:18: {words}"]


def test_outputs_that_names_make_too_long(project: Path) -> None:
    name = "m" * 64
    text = changed(models=f"{{{name}: models/tiny}}")
    (line,) = faults(text + f"bundle: {{output: 'd/{'{model}' * 4}'}}\n")
    assert line.startswith(f"5:18: the output 'd/{name * 4}' of {name}/q4f16_1/x86-64-v3 has the part '")
    assert line.endswith(f"of 256 bytes; at most {LONGEST_NAME} are allowed; shorten it")
    (line,) = faults(text + f"bundle: {{output: '{'{model}/' * 70}x'}}\n")
    assert " bytes long below " in line


def test_an_output_that_stands_in_the_way(project: Path) -> None:
    Path("recipes/dist").write_text("")
    (line,) = faults(HEAD)
    assert line == (
        "1:1: the output 'dist/tiny-q4f16_1-x86-64-v3' lies below "
        f"{project.resolve()}/recipes/dist, which is a regular file"
    )
    Path("recipes/out").mkdir()
    Path("recipes/out/tiny").write_text("")
    assert faults(HEAD + "bundle: {output: 'out/{model}'}\n") == [
        "5:18: the output 'out/tiny' is a regular file; move it away, or choose another output"
    ]


def test_a_long_name_of_the_recipe_makes_a_longer_lock(project: Path) -> None:
    path = Path("recipes") / f"{'r' * 252}.y"
    path.write_text(HEAD)
    with pytest.raises(InputError, match=f"of 257 bytes; at most {LONGEST_NAME} are allowed"):
        load(path)


FAULTS: dict[str, tuple[str, list[str]]] = {
    "endless paths": (
        changed(models=f"{{a: {'x/' * 600}, b: {{source: {'y/' * 600}}}}}") + f"lock: {'z/' * 600}\n",
        [
            f"2:13: 'a' must have at most 1024 characters, not '{('x/' * 600)[:57]}...'",
            f"2:1227: 'source' must have at most 1024 characters, not '{('y/' * 600)[:57]}...'",
            f"5:7: 'lock' must have at most 1024 characters, not '{('z/' * 600)[:57]}...'",
        ],
    ),
    "unknown placeholder": (
        HEAD + "bundle: {output: 'dist/{modle}-{quantisation}'}\n",
        [
            "5:18: the placeholder '{modle}' is unknown; did you mean 'model'?",
            "5:18: the placeholder '{quantisation}' is unknown; did you mean 'quantization'?",
        ],
    ),
    "open placeholder": (
        HEAD + "bundle: {output: 'dist/{model'}\n",
        ["5:18: 'dist/{model' has a '{' or '}' without its partner"],
    ),
    "output without quotes": (
        HEAD + "bundle:\n  output: {model}\n",
        ["6:11: 'output' must be text, not a mapping (put it in quotes: \"{model}\")"],
    ),
    "one output for two": (
        changed(quantizations="[q0f32, q0f16]") + "bundle: {output: 'dist/{model}'}\n",
        [
            "5:18: tiny/q0f32/x86-64-v3 and tiny/q0f16/x86-64-v3 have the same output 'dist/tiny'; "
            "use {model}, {quantization} and {target} in it"
        ],
    ),
    "one output for many": (
        changed(quantizations="[q0f32, q0f16, q4f32_1, q4f16_1, q8f32_1, q8f16_1]")
        + "bundle: {output: out}\n",
        [
            "5:18: and 2 more like these",
            *(
                f"5:18: tiny/q0f32/x86-64-v3 and tiny/{name}/x86-64-v3 have the same output 'out'; "
                "use {model}, {quantization} and {target} in it"
                for name in ("q0f16", "q4f16_1", "q4f32_1")
            ),
        ],
    ),
    "outputs that differ in case": (
        changed(models="{tiny: models/tiny, Tiny: models/other}"),
        [
            "1:1: tiny/q4f16_1/x86-64-v3 and Tiny/q4f16_1/x86-64-v3 have the same output "
            "'dist/Tiny-q4f16_1-x86-64-v3' when upper and lower case count the same; "
            "use {model}, {quantization} and {target} in it"
        ],
    ),
    "output of a model in the project's way": (
        HEAD + "bundle: {output: models}\n",
        ["5:18: the output 'models' would replace the model 'tiny'"],
    ),
    "output inside a model": (
        HEAD + "bundle: {output: 'models/tiny/{target}'}\n",
        ["5:18: the output 'models/tiny/x86-64-v3' lies in the model 'tiny'; choose one outside"],
    ),
    "output is the recipe's directory": (
        HEAD + "bundle: {output: '.'}\n",
        ["5:18: the output '.' would replace the recipe"],
    ),
    "lock file is the recipe": (
        HEAD + "lock: q.yaml\n",
        ["5:1: the lock file would replace the recipe: name another one"],
    ),
}


@pytest.mark.parametrize("directory", ["a", "b"])
def test_prompt_files_of_one_name_are_both_protected(project: Path, directory: str) -> None:
    for name in ("a", "b"):
        Path("recipes", name).mkdir()
        Path("recipes", name, "p.txt").write_text("Hello\n")
    text = (
        changed(quantizations="{small: {scheme: q4a8_2, calibrate: a/p.txt}}")
        + "verify: {prompts: b/p.txt}\n"
    )
    assert faults(text + f"bundle: {{output: {directory}}}\n") == [
        f"6:18: the output '{directory}' would replace the prompts {project}/recipes/{directory}/p.txt"
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected
