"""Recipes: every fault has its place and its sentence; valid ones mean what recipes/README.md says."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlcbuild import host as this_machine
from mlcbuild import schema
from mlcbuild.document import Data, Place
from mlcbuild.errors import InputError
from mlcbuild.quant import SCHEMES
from mlcbuild.recipe import HubSource, Limits, LocalSource, Recipe, Variant, Verify, expand, load, outputs
from mlcbuild.targets import Target, read_preset, resolve

ROOT = Path(__file__).parent.parent

HEAD = """\
version: 1
models: {tiny: models/tiny}
quantizations: [q4f16_1]
targets: [x86-64-v3]
"""
"""A whole recipe, in flow style on four lines: faults are added from line 5 on."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Git checkout with one model and prompts, and the recipe's directory below its top."""
    home = tmp_path / "project"
    for directory in (".git", "recipes/models/tiny", "recipes/models/other", "shared"):
        (home / directory).mkdir(parents=True)
    (home / "recipes" / "prompts.txt").write_text("Hello\n")
    monkeypatch.chdir(home)
    return home


def read(
    text: str, name: str = "recipes/q.yaml", outside: bool = False, values: Mapping[str, str] | None = None
) -> Recipe:
    path = Path(name)
    path.write_bytes(text.encode())
    return load(path, values, outside)


def faults(text: str, **values: str) -> list[str]:
    """`line:column: message` of every problem."""
    with pytest.raises(InputError) as caught:
        read(text, values=values)
    problems = caught.value.problems
    assert {problem.file for problem in problems} == {"recipes/q.yaml"}
    assert str(caught.value) == "\n".join(map(str, problems))
    return [str(problem).removeprefix("recipes/q.yaml:") for problem in problems]


def changed(**sections: str) -> str:
    """HEAD with other values for some of its sections."""
    return "".join(
        f"{line.partition(':')[0]}: {sections.get(line.partition(':')[0], line.partition(': ')[2])}\n"
        for line in HEAD.splitlines()
    )


NAME_RULE = "must be letters, digits, '.', '_' and '-', not starting with '.'"

FAULTS: dict[str, tuple[str, list[str]]] = {
    # shape
    "a list": ("- version: 1\n", ["1:1: the file must be a mapping, not a list"]),
    "a word": ("hello\n", ["1:1: the file must be a mapping, not 'hello'"]),
    "nothing but a name": (
        "# a comment\nname: x\n",
        [
            "2:1: the file lacks the key 'models': the models by the names you give them",
            "2:1: the file lacks the key 'quantizations': names of built-in schemes as a list, or a mapping "
            "of names you give to built-in schemes or to schemes of your own",
            "2:1: the file lacks the key 'targets': names of presets (or 'host', this machine) as a list, or a "
            "mapping of names you give to presets or to targets of your own",
            "2:1: the file lacks the key 'version': version of the recipe format; this one is 1",
        ],
    ),
    "other version": (changed(version="2"), ["1:10: 'version' must be 1, not 2"]),
    "version as text": (changed(version="'1'"), ["1:10: 'version' must be 1, not '1'"]),
    "unknown section": (HEAD + "modles: {}\n", ["5:1: the key 'modles' is unknown in the file; did you mean 'models'?"]),
    "unknown key": (
        HEAD + "compile:\n  max_batch: 2\n  contextwindow: 1\n",
        ["7:3: the key 'contextwindow' is unknown in 'compile'; did you mean 'context_window'?"],
    ),
    "later sections": (
        HEAD + "bench: {}\npublish: [{to: x}]\ncache: {remotes: []}\n",
        [
            "5:1: 'bench' is not supported by this version of mlcbuild",
            "6:1: 'publish' is not supported by this version of mlcbuild",
            "7:1: 'cache' is not supported by this version of mlcbuild",
        ],
    ),
    "duplicate key": (HEAD + "name: a\nname: b\n", ["6:1: the key 'name' appears twice; first on line 5"]),
    "a second document and a wrong value": (
        HEAD + "compile: {max_batch: -1}\n---\n",
        [
            "5:22: 'max_batch' must be at least 1, not -1",
            "6:1: a second document starts here: a file holds one",
        ],
    ),
    "bad name of the recipe": (HEAD + "name: a b\n", [f"5:7: 'name' {NAME_RULE}, not 'a b'"]),
    "name that ends with a newline": (HEAD + 'name: "a\\n"\n', [f"5:7: 'name' {NAME_RULE}, not 'a\n'"]),
    # vars
    "vars that are no mapping": (HEAD + "vars: [a]\n", ["5:7: 'vars' must be a mapping, not a list"]),
    "var that holds a list": (
        HEAD + "vars: {a: [1]}\n",
        ["5:11: 'a' must be text or a number or true or false, not a list"],
    ),
    "bad name of a var": (
        HEAD + "vars: {1a: 2}\nname: ${1a}\n",
        ["5:8: the name '1a' must be letters, digits and '_', not starting with a digit"],
    ),
    "unused var": (HEAD + "vars: {a: 1}\n", ["5:8: variable 'a' is never used: write ${a} or remove it"]),
    "unknown var": (
        HEAD + "vars: {ctx: 64}\ncompile: {context_window: '${cxt}'}\n",
        ["6:27: variable 'cxt' is unknown; did you mean 'ctx'?"],
    ),
    "unknown var where there are none": (HEAD + "name: ${a}\n", ["5:7: variable 'a' is unknown; none is defined"]),
    "var without end": (
        HEAD + "vars: {a: b}\nname: '${a}${a'\n",
        ["6:7: '${' has no '}': write $${ for a literal ${"],
    ),
    "var in a var": (
        HEAD + "vars: {a: 1, b: 'x${a}'}\nname: ${b}\n",
        [
            "5:8: variable 'a' is never used: write ${a} or remove it",
            "5:17: variable 'b' holds a ${: a variable cannot use another",
            "6:7: 'name' " + NAME_RULE + ", not 'x${a}' (from ${b})",
        ],
    ),
    "var of the wrong kind": (
        HEAD + "vars: {a: many}\ncompile: {max_batch: '${a}'}\n",
        ["6:22: 'max_batch' must be a whole number, not 'many' (from ${a})"],
    ),
    # models
    "no models": (changed(models="{}"), ["2:9: 'models' must not be empty"]),
    "models as a list": (changed(models="[models/tiny]"), ["2:9: 'models' must be a mapping, not a list"]),
    "models left out": (changed(models=""), ["2:8: 'models' must be a mapping, not nothing"]),
    "model without source": (
        changed(models="{tiny: {}}"),
        ["2:16: 'tiny' lacks the key 'source': where the checkpoint is"],
    ),
    "model that is a number": (changed(models="{a: {source: 5}}"), ["2:22: there is no directory '5'"]),
    "model that is nothing": (changed(models="{a: }"), ["2:13: 'a' must be text or a mapping, not nothing"]),
    "empty source": (changed(models="{a: ''}"), ["2:13: 'a' must not be empty"]),
    "unsafe names of models": (
        changed(models="{../x: models/tiny, .y: models/tiny, a/b: models/tiny, ok: models/tiny}"),
        [
            f"2:10: the name '../x' {NAME_RULE}",
            f"2:29: the name '.y' {NAME_RULE}",
            f"2:46: the name 'a/b' {NAME_RULE}",
        ],
    ),
    "long name": (
        changed(models=f"{{{'a' * 65}: models/tiny}}"),
        [f"2:10: the name '{'a' * 57}...' must have at most 64 characters"],
    ),
    "no such directory": (
        changed(models="{tiny: ./models/tiyn}"),
        ["2:16: there is no directory './models/tiyn'; did you mean 'tiny'?"],
    ),
    "hub name without hf://": (
        changed(models="{a: Qwen/Qwen3-0.6B}"),
        ["2:13: there is no directory 'Qwen/Qwen3-0.6B'; for a model of the Hugging Face hub write hf://Qwen/Qwen3-0.6B"],
    ),
    "source that is a file": (
        changed(models="{a: prompts.txt}"),
        ["2:13: 'prompts.txt' is a file; a source is the directory of a checkpoint"],
    ),
    "hub source with too many parts": (
        changed(models="{a: 'hf://o/n/x'}"),
        ["2:13: source 'hf://o/n/x': 'o/n/x' is not the name of a repository; write hf://organisation/name@revision"],
    ),
    "hub source with a bad revision": (
        changed(models="{a: 'hf://o/n@<commit>', b: 'hf://o/n@a/../b'}"),
        [
            "2:13: source 'hf://o/n@<commit>': '<commit>' is not a branch, tag or commit; "
            "write hf://organisation/name@revision",
            "2:37: source 'hf://o/n@a/../b': 'a/../b' is not a branch, tag or commit; "
            "write hf://organisation/name@revision",
        ],
    ),
    "address of a page of the hub": (
        changed(models="{a: 'https://huggingface.co/Qwen/Qwen3-0.6B/tree/main'}"),
        [
            "2:13: source 'https://huggingface.co/Qwen/Qwen3-0.6B/tree/main' is a page of the Hugging Face hub; "
            "write hf://Qwen/Qwen3-0.6B"
        ],
    ),
    "other kind of source": (
        changed(models="{a: 's3://bucket/model'}"),
        [
            "2:13: source 's3://bucket/model': the scheme 's3' is unknown; "
            "write hf://organisation/name@revision, or a directory"
        ],
    ),
    "home directory": (
        changed(models="{a: ~/model}"),
        ["2:13: '~/model': '~' does not stand for a home directory here; write the path out"],
    ),
    # quantizations
    "unknown quantization": (
        changed(quantizations="[q4f61_1]"),
        ["3:17: quantization 'q4f61_1' is unknown; did you mean 'q4f16_1'?"],
    ),
    "quantization twice": (
        changed(quantizations="[q4f16_1, q0f32, q4f16_1]"),
        ["3:33: 'q4f16_1' stands twice in 'quantizations': it is item 1 too"],
    ),
    "unknown scheme under a name": (
        changed(quantizations="{a: q5, b: {scheme: q4f16}}"),
        [
            "3:20: quantization 'q5' is unknown; known: " + ", ".join(sorted(SCHEMES)),
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
            "3:20: 'a' lacks the key 'scheme': the built-in scheme of all parameters that no override matches",
            "3:21: the key 'bits' is unknown in 'a'; known: overrides, scheme",
            "3:42: item 1 of 'overrides' lacks the key 'match': one or more shell patterns joined by '|', compared "
            "with the parameter's name with and without '.weight'",
            "3:59: item 2 of 'overrides' lacks the key 'scheme': the built-in scheme of the parameters that match",
            "3:67: 'match' must not be empty",
        ],
    ),
    "overrides that cannot match": (
        changed(
            quantizations="{a: {scheme: q4f32_1, overrides: [{match: 'x|', scheme: q0f32}, "
            "{match: y, scheme: q8f32_1}, {match: y, scheme: q0f32}]}}"
        ),
        [
            "3:58: 'x|' holds an empty pattern beside a '|'",
            "3:117: 'y' stands in an earlier override, which decides",
        ],
    ),
    # targets
    "unknown target": (
        changed(targets="[x86-64-v3, aarch64]"),
        ["4:22: target 'aarch64' is unknown; did you mean 'aarch64-linux'?"],
    ),
    "target from a later version": (
        changed(targets="[cuda-sm90]"),
        [
            "4:11: target 'cuda-sm90' is unknown; known: aarch64-linux, host, macos-arm64, x86-64-v2, x86-64-v3, "
            "x86-64-v4, x86-64-v4-vnni"
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
        changed(targets="{a: {cpu: native, device: cuda, triple: x86_64-unknown-linux-gnu}, b: {cpu: 5}, c: [1]}"),
        [
            "4:20: 'native' is another processor on every machine: use the target 'host'",
            "4:36: 'device' must be 'cpu', not 'cuda'",
            "4:80: 'b' lacks the key 'triple'",
            "4:93: 'c' must be text or a mapping, not a list",
        ],
    ),
    # matrix
    "unknown names in the matrix": (
        HEAD + "matrix:\n  model: [tiyn]\n  exclude: [{target: x86-64-v4}]\n  include: [{quantization: q4}]\n",
        [
            "6:11: model 'tiyn' is unknown in this recipe; did you mean 'tiny'?",
            "7:22: target 'x86-64-v4' is unknown in this recipe; did you mean 'x86-64-v3'?",
            "8:28: quantization 'q4' is unknown in this recipe; known: q4f16_1",
        ],
    ),
    "unknown axis": (
        HEAD + "matrix: {exclude: [{modle: tiny}]}\n",
        ["5:21: the key 'modle' is unknown in item 1 of 'exclude'; did you mean 'model'?"],
    ),
    "empty entries": (
        HEAD + "matrix: {exclude: [{}], include: [{}]}\n",
        ["5:20: item 1 of 'exclude' must not be empty", "5:35: item 1 of 'include' must not be empty"],
    ),
    "exclude that matches nothing": (
        changed(models="{a: models/tiny, b: models/other}", quantizations="[q0f32, q0f16]")
        + "matrix:\n  model: [a]\n  exclude:\n    - {model: b}\n    - {model: a, quantization: q0f32}\n"
        "  include: [{model: b, quantization: q0f32, target: x86-64-v3}]\n",
        ["8:7: this entry excludes nothing: no combination agrees with it"],
    ),
    "include that makes nothing": (
        changed(models="{a: models/tiny, b: models/other}")
        + "matrix: {model: [a], include: [{model: b, compile: {max_batch: 2}}]}\n",
        ["5:32: this entry agrees with no combination; to make one it must name model, quantization and target"],
    ),
    "combination made twice": (
        changed(models="{a: models/tiny, b: models/other}")
        + "matrix:\n  model: [a]\n  include:\n"
        + 2 * "    - {model: b, quantization: q4f16_1, target: x86-64-v3}\n",
        ["9:7: an earlier include entry makes this combination already"],
    ),
    "name twice on an axis": (
        HEAD + "matrix: {model: [tiny, tiny]}\n",
        ["5:24: 'tiny' stands twice in 'model': it is item 1 too"],
    ),
    "empty matrix": (
        HEAD + "matrix: {exclude: [{model: tiny}]}\n",
        ["5:1: the matrix is empty: nothing would be built"],
    ),
    "names of no use": (
        changed(models="{a: models/tiny, b: models/other}", quantizations="[q0f32, q0f16]", targets="{v3: x86-64-v3}")
        + "matrix:\n  exclude: [{model: b}, {quantization: q0f16}]\n",
        [
            "2:26: model 'b' is in no combination that is built",
            "3:24: quantization 'q0f16' is in no combination that is built",
        ],
    ),
    "same names of variants": (
        changed(models="{a-b: models/tiny, a: models/other}", quantizations="{c: q0f32, b-c: q0f32}")
        + "bundle: {output: 'dist/{model}/{quantization}/{target}'}\n",
        [
            "2:28: a-b/c/x86-64-v3 and a/b-c/x86-64-v3 would both be called 'a-b-c-x86-64-v3': "
            "rename a model, a quantization or a target"
        ],
    ),
    # compile, verify
    "limits that are no counts": (
        HEAD + "compile:\n  context_window: 0\n  prefill_chunk: '8'\n  max_batch: 1.5\n",
        [
            "6:19: 'context_window' must be at least 1, not 0",
            "7:18: 'prefill_chunk' must be a whole number, not '8' (remove the quotes)",
            "8:14: 'max_batch' must be a whole number, not 1.5",
        ],
    ),
    "limits in other spellings": (
        HEAD + "compile: {context_window: 4_096, prefill_chunk: 0512, max_batch: yes}\n",
        [
            "5:27: 'context_window' must be a whole number, not '4_096' (write 4096)",
            "5:49: 'prefill_chunk' must be a whole number, not '0512' (write 512)",
            "5:66: 'max_batch' must be a whole number, not 'yes'",
        ],
    ),
    "limits that are truths or whole floats": (
        HEAD + "compile: {max_batch: true, context_window: 64.0}\n",
        [
            "5:22: 'max_batch' must be a whole number, not true",
            "5:44: 'context_window' must be a whole number, not 64.0",
        ],
    ),
    "huge limit": (
        HEAD + f"compile: {{max_batch: 99999999, context_window: {'9' * 5000}}}\n",
        [
            "5:22: 'max_batch' must be at most 16777216, not 99999999",
            f"5:48: 'context_window' must be a whole number, not '{'9' * 57}...'",
        ],
    ),
    "prefill beyond the context": (
        HEAD + "compile: {context_window: 256, prefill_chunk: 512}\n",
        ["5:47: prefill_chunk is 512 and must be at most context_window, which is 256"],
    ),
    "prefill beyond the context of one combination": (
        HEAD + "matrix: {include: [{model: tiny, compile: {context_window: 128}}]}\ncompile: {prefill_chunk: 256}\n",
        ["5:60: prefill_chunk is 256 and must be at most context_window, which is 128"],
    ),
    "verify without prompts": (
        HEAD + "verify:\n  max_kl: 1\n",
        ["5:1: 'verify' lacks the key 'prompts': a text file, or a list of prompts"],
    ),
    "verify of one combination without prompts": (
        HEAD + "matrix:\n  include:\n    - model: tiny\n      verify: {max_kl: 1}\n",
        ["8:7: 'verify' lacks the key 'prompts': a text file, or a list of prompts"],
    ),
    "no such prompts": (
        HEAD + "verify: {prompts: prompt.txt}\n",
        ["5:19: the prompts 'prompt.txt' must be a text file: it does not exist"],
    ),
    "prompts that are a directory": (
        HEAD + "verify: {prompts: models}\n",
        ["5:19: the prompts 'models' must be a text file: it is a directory"],
    ),
    "wrong prompts and limits": (
        HEAD + "verify: {prompts: [], max_kl: -1, min_top1: 95, max_perplexity_increase: low}\n",
        [
            "5:19: 'prompts' must not be empty",
            "5:31: 'max_kl' must be at least 0, not -1",
            "5:45: 'min_top1' must be at most 1, not 95",
            "5:74: 'max_perplexity_increase' must be a number, not 'low'",
        ],
    ),
    "not a number": (
        HEAD + "verify: {prompts: [a, ''], max_kl: .nan}\n",
        ["5:23: item 2 of 'prompts' must not be empty", "5:36: 'max_kl' must be a number, not '.nan'"],
    ),
    # outputs and paths
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
    "one output for two": (
        changed(quantizations="[q0f32, q0f16]") + "bundle: {output: 'dist/{model}'}\n",
        [
            "5:18: tiny/q0f32/x86-64-v3 and tiny/q0f16/x86-64-v3 have the same output 'dist/tiny'; "
            "use {model}, {quantization} and {target} in it"
        ],
    ),
    "one output for many": (
        changed(quantizations="[q0f32, q0f16, q4f32_1, q4f16_1, q8f32_1, q8f16_1]") + "bundle: {output: out}\n",
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
        ["5:18: the output 'models/tiny/x86-64-v3' lies in the model 'tiny'"],
    ),
    "output is the recipe's directory": (
        HEAD + "bundle: {output: '.'}\n",
        ["5:18: the output '.' would replace the recipe"],
    ),
    "lock file is the recipe": (HEAD + "lock: q.yaml\n", ["5:1: the lock file would replace the recipe: name another one"]),
    # several at once: a fault of shape hides no other one
    "everything at once": (
        "version: 3\nmodels: {tiny: models/tiyn, x: [1]}\nquantizations: [q4f61_1]\ntargets: 5\n"
        "vars: {a: 1}\nmatrix: {exclude: [{model: tin}]}\ncompile: {max_batch: none, context_window: 4096, prefill_chunk: 5000}\n"
        "bundle: {output: '{modle}', outptu: x}\nlock: ''\n",
        [
            "1:10: 'version' must be 1, not 3",
            "2:16: there is no directory 'models/tiyn'; for a model of the Hugging Face hub write hf://models/tiyn",
            "2:32: 'x' must be text or a mapping, not a list",
            "3:17: quantization 'q4f61_1' is unknown; did you mean 'q4f16_1'?",
            "4:10: 'targets' must be a list or a mapping, not 5",
            "5:8: variable 'a' is never used: write ${a} or remove it",
            "6:28: model 'tin' is unknown in this recipe; did you mean 'tiny'?",
            "7:22: 'max_batch' must be a whole number, not 'none'",
            "7:65: prefill_chunk is 5000 and must be at most context_window, which is 4096",
            "8:18: the placeholder '{modle}' is unknown; did you mean 'model'?",
            "8:29: the key 'outptu' is unknown in 'bundle'; did you mean 'output'?",
            "9:7: 'lock' must not be empty",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


def test_at_least_forty_faults() -> None:
    assert len(FAULTS) >= 40


# What valid recipes mean.


def test_the_smallest_recipe_and_its_defaults(project: Path) -> None:
    recipe = read(HEAD)
    here = project / "recipes"
    assert recipe.path == Path("recipes/q.yaml")
    assert (recipe.name, recipe.directory, recipe.lock) == ("q", here, here / "q.lock")
    (variant,) = expand(recipe)
    model = variant.model
    assert variant == Variant(
        "tiny-q4f16_1-x86-64-v3",
        model,
        "q4f16_1",
        SCHEMES["q4f16_1"],
        resolve("x86-64-v3"),
        Limits(None, 512, 8),
        None,
        here / "dist" / "tiny-q4f16_1-x86-64-v3",
    )
    assert (model.name, model.source) == ("tiny", LocalSource(here / "models/tiny"))
    assert model.place == Place("recipes/q.yaml", 2, 16)


def test_the_recipe_of_the_readme(project: Path) -> None:
    (text,) = [block for block in readme_recipes() if "name: assistants" in block]
    recipe = read(text)
    variants = {variant.name: variant for variant in expand(recipe)}
    assert list(variants) == [
        *(f"tiny-{scheme}-{name}" for scheme in ("q4", "mixed") for name in recipe.targets),
        *("qwen-q4-x86-64-v3", "qwen-q4-x86-64-v4-vnni"),
        *(f"qwen-mixed-{name}" for name in recipe.targets),
    ]
    assert recipe.models["qwen"].source == HubSource("Qwen/Qwen3-0.6B", "main")
    big = variants["tiny-mixed-x86-64-v3"]
    assert big.limits == Limits(4096, 512, 16)
    assert {v.limits for v in variants.values() if v is not big} == {Limits(4096, 512, 8)}
    assert big.verify == Verify(
        project / "recipes/prompts.txt", 0.05, 0.95, None, big.verify.place if big.verify else None
    )
    assert big.scheme.overrides == (("lm_head|embed*", SCHEMES["q8f32_1"]),)
    assert replace(big.scheme, name="q4f32_1", overrides=()) == SCHEMES["q4f32_1"]
    assert recipe.lock == project / "recipes/recipe.lock"


def readme_recipes() -> list[str]:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "recipes" / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if block.startswith("version:")]


@pytest.mark.parametrize("text", readme_recipes())
def test_every_example_of_the_readme_loads(project: Path, text: str) -> None:
    assert expand(read(text))


def test_every_recipe_of_the_readme_is_tried() -> None:
    assert len(readme_recipes()) == 6


def test_every_preset_example_of_the_targets_readme_is_right(project: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "targets" / "README.md").read_text(), re.DOTALL)
    preset, inline = blocks
    Path("p.yaml").write_text(preset)
    assert replace(read_preset(Path("p.yaml")), name="") == replace(resolve("x86-64-v4-vnni"), name="")
    assert len(expand(read(changed(targets="").replace("targets: \n", inline)))) == 2


def test_own_schemes_are_named_by_what_they_hold(project: Path) -> None:
    rule = "{scheme: q4f32_1, overrides: [{match: lm_head, scheme: q8f32_1}]}"
    other = "{scheme: q4f32_1, overrides: [{match: embed, scheme: q8f32_1}]}"
    text = changed(quantizations=f"{{a: {rule}, b: {rule}, c: {other}, d: {{scheme: q4f32_1}}, e: q4f32_1}}")
    schemes = read(text).schemes
    assert schemes["a"] == schemes["b"]
    assert schemes["a"].name != schemes["c"].name
    assert re.fullmatch("q4f32_1-[0-9a-f]{8}", schemes["a"].name)
    assert schemes["d"] == schemes["e"] == SCHEMES["q4f32_1"]
    # The name is in keys and bundles: a change of it is a conscious one.
    assert schemes["a"].name == "q4f32_1-91055f1f"


def test_targets_have_the_recipes_names(project: Path) -> None:
    text = changed(targets="{a: x86-64-v3, b: {extends: x86-64-v3, features: [+avxvnni]}, c: host}")
    found = read(text).targets
    assert found["a"] == replace(resolve("x86-64-v3"), name="a")
    assert found["b"].features == ("+avxvnni",)
    assert found["c"] == Target("c", *this_machine.host())
    assert [variant.target.name for variant in expand(read(text))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf://o/n", HubSource("o/n", "main")),
        ("hf://o/n@v1.0", HubSource("o/n", "v1.0")),
        ("hf://o/n@refs/pr/3", HubSource("o/n", "refs/pr/3")),
        ("hf://O-1/n.2_x@" + "a" * 40, HubSource("O-1/n.2_x", "a" * 40)),
    ],
)
def test_hub_sources(project: Path, text: str, source: HubSource) -> None:
    recipe = read(changed(models=f"{{a: '{text}', b: {{source: '{text}'}}}}"))
    assert [model.source for model in recipe.models.values()] == [source, source]
    assert source.is_pinned == (len(source.revision) == 40)
    assert str(source) == f"hf://{source.repo}@{source.revision}"


def test_names_are_what_was_written(project: Path) -> None:
    """No version of YAML's rules about plain words changes a name."""
    written = ["no", "1.10", "true", "007", "on", "1e3", "2024-01-01"]
    text = changed(models=f"{{{', '.join(f'{name}: models/tiny' for name in written)}}}")
    text += f"name: 1.50\nmatrix: {{model: [{', '.join(written[:-1])}]}}\n"
    recipe = read(
        text.replace("]}", "], include: [{model: 2024-01-01, quantization: q4f16_1, target: x86-64-v3}]}")
    )
    assert recipe.name == "1.50"
    assert list(recipe.models) == written
    assert [variant.model.name for variant in expand(recipe)] == written


def test_prompts_in_the_recipe(project: Path) -> None:
    recipe = read(HEAD + "verify: {prompts: [one, 'two\n\n  lines', 3], max_perplexity_increase: 0.5}\n")
    (variant,) = expand(recipe)
    assert variant.verify == Verify(
        ("one", "two\nlines", "3"), None, None, 0.5, Place("recipes/q.yaml", 5, 9)
    )


def test_settings_of_include_entries_replace_one_by_one(project: Path) -> None:
    text = changed(quantizations="[q0f32, q0f16, q4f32_1]") + (
        "verify: {prompts: prompts.txt, max_kl: 1, min_top1: 0.5}\n"
        "compile: {context_window: 1024}\n"
        "matrix:\n"
        "  quantization: [q0f32, q0f16]\n"
        "  include:\n"
        "    - {compile: {max_batch: 2, prefill_chunk: 64}}\n"
        "    - {quantization: q0f16, compile: {max_batch: 3}, verify: {max_kl: 0, prompts: [x]}}\n"
        "    - {model: tiny, quantization: q4f32_1, target: x86-64-v3, compile: {prefill_chunk: 1024}}\n"
    )
    first, second, third = expand(read(text))
    assert [v.quantization for v in (first, second, third)] == ["q0f32", "q0f16", "q4f32_1"]
    assert first.limits == Limits(1024, 64, 2)
    assert second.limits == Limits(1024, 64, 3)
    assert third.limits == Limits(1024, 1024, 8)
    assert first.verify and second.verify and third.verify
    assert (first.verify.max_kl, first.verify.min_top1) == (1.0, 0.5)
    assert (second.verify.prompts, second.verify.max_kl, second.verify.min_top1) == (("x",), 0.0, 0.5)
    assert second.verify.place == Place("recipes/q.yaml", 11, 62)
    assert replace(third.verify, place=None) == replace(first.verify, place=None)


def test_prompts_may_come_from_every_include_entry(project: Path) -> None:
    text = HEAD + "verify: {max_kl: 1}\nmatrix: {include: [{model: tiny, verify: {prompts: [x]}}]}\n"
    (variant,) = expand(read(text))
    assert variant.verify
    assert (variant.verify.prompts, variant.verify.max_kl) == (("x",), 1.0)


def test_a_small_context_lowers_the_default_prefill(project: Path) -> None:
    (variant,) = expand(read(HEAD + "compile: {context_window: 100}\n"))
    assert variant.limits == Limits(100, 100, 8)


# Variables.


def test_variables_keep_their_types(project: Path) -> None:
    text = changed(models="{m: 'models/${dir}'}") + (
        "name: 'v${version}-${flag}'\n"
        "vars: {dir: tiny, ctx: 128, version: 1.10, flag: true, kl: 0.5}\n"
        "compile: {context_window: '${ctx}'}\n"
        "verify: {prompts: ['costs $${5}', '${ctx}', 'a${ctx}b'], max_kl: '${kl}'}\n"
    )
    recipe = read(text)
    (variant,) = expand(recipe)
    assert recipe.name == "v1.10-true"
    assert variant.limits.context_window == 128
    assert variant.verify
    assert variant.verify.prompts == ("costs ${5}", "128", "a128b")
    assert variant.verify.max_kl == 0.5


VARIED = HEAD + (
    "vars: {ctx: 4096, kl: 0.5, who: x}\nname: '${who}'\ncompile: {context_window: '${ctx}'}\n"
    "verify: {prompts: [x], max_kl: '${kl}'}\n"
)


def test_settings_of_the_command_line(project: Path) -> None:
    recipe = read(VARIED, values={"ctx": "8192", "kl": "1", "who": "12"})
    (variant,) = expand(recipe)
    assert recipe.name == "12"
    assert variant.limits.context_window == 8192
    assert variant.verify
    assert variant.verify.max_kl == 1.0
    assert read(VARIED, values={"who": "yes"}).name == "yes"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ctxx": "1"}, "5:1: --set ctxx=1: this recipe has no variable 'ctxx'; did you mean 'ctx'?"),
        ({"ctx": "many"}, "5:13: --set ctx=many: variable 'ctx' is a number here, and 'many' is not"),
        ({"ctx": "true"}, "5:13: --set ctx=true: variable 'ctx' is a number here, and 'true' is not"),
        ({"ctx": ""}, "5:13: --set ctx=: variable 'ctx' is a number here, and '' is not"),
        ({"ctx": "1.5"}, "7:27: 'context_window' must be a whole number, not 1.5 (from ${ctx})"),
        ({"ctx": "0"}, "7:27: 'context_window' must be at least 1, not 0 (from ${ctx})"),
        ({"who": "../x"}, f"6:7: 'name' {NAME_RULE}, not '../x' (from ${{who}})"),
    ],
)
def test_wrong_settings_of_the_command_line(project: Path, values: Mapping[str, str], expected: str) -> None:
    assert faults(VARIED, **values) == [expected]


def test_a_truth_stays_a_truth(project: Path) -> None:
    text = HEAD + "vars: {flag: true}\nname: 'n${flag}'\n"
    assert read(text, values={"flag": "false"}).name == "nfalse"
    assert faults(text, flag="1") == [
        "5:14: --set flag=1: variable 'flag' is true or false here, and '1' is not"
    ]


def test_a_setting_without_vars_is_told_so(project: Path) -> None:
    assert faults(HEAD, a="1") == ["1:1: --set a=1: this recipe has no variable 'a'; none is defined"]


# Paths.


def test_paths_may_not_leave_the_project(project: Path) -> None:
    (project.parent / "outside").mkdir()
    (project.parent / "p.txt").write_text("x")
    rule = f"leaves the project {project.resolve()}; allow it with --allow-outside"
    absolute = project.parent / "outside"
    text = changed(models=f"{{a: ../../outside, b: '{absolute}', c: ../shared}}") + (
        "verify: {prompts: ../../p.txt}\nlock: ../../x.lock\nbundle: {output: '../../{model}'}\n"
    )
    assert faults(text) == [
        f"2:13: '../../outside' {rule}",
        f"2:31: '{absolute}' {rule}",
        f"5:19: '../../p.txt' {rule}",
        f"6:7: '../../x.lock' {rule}",
        f"7:18: '../../{{model}}' {rule}".replace("{model}", "x"),
    ]
    recipe = read(text, outside=True)
    assert [variant.output.resolve() for variant in expand(recipe)] == [
        project.parent / name for name in "abc"
    ]


def test_links_count_as_where_they_lead(project: Path) -> None:
    (project.parent / "outside").mkdir()
    Path("recipes/link").symlink_to(project.parent / "outside")
    Path("recipes/loop").symlink_to("loop")
    Path("recipes/inner").symlink_to("models/tiny")
    rule = f"leaves the project {project.resolve()}; allow it with --allow-outside"
    text = changed(models="{a: link, b: inner}") + "bundle: {output: 'link/{model}'}\n"
    assert faults(text) == [f"2:13: 'link' {rule}", f"5:18: 'link/x' {rule}"]
    read(text.replace("link/{model}", "d/{model}"), outside=True)
    assert faults(changed(models="{a: loop}")) == [f"2:13: 'loop' {rule}"]


def test_without_a_checkout_the_project_is_the_recipes_directory(project: Path) -> None:
    Path(".git").rmdir()
    assert faults(changed(models="{a: ../shared}"))[0].startswith("2:13: '../shared' leaves the project")
    Path(".git").write_text("gitdir: elsewhere\n")  # as in a worktree
    read(changed(models="{a: ../shared}"))


def test_outputs_through_a_link_do_not_hide_what_they_replace(project: Path) -> None:
    Path("recipes/alias").symlink_to("models")
    assert faults(changed(models="{m: models/tiny}") + "bundle: {output: 'alias/tiny'}\n") == [
        "5:18: the output 'alias/tiny' would replace the model 'm'"
    ]


def test_outputs_are_normalised(project: Path) -> None:
    recipe = read(
        changed(models="{m: models/tiny, n: models/tiny}") + "bundle: {output: './d//{target}/../{model}'}\n"
    )
    assert [v.output.relative_to(recipe.directory).as_posix() for v in expand(recipe)] == ["d/m", "d/n"]


def test_the_recipe_can_be_named_by_any_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(HEAD)
    monkeypatch.chdir(project / "recipes")
    second = load(Path("q.yaml"))
    third = load(project / "recipes" / "q.yaml")
    assert [variant.output for variant in expand(first)] == [variant.output for variant in expand(second)]
    assert expand(third)[0].output == expand(first)[0].output
    assert second.lock == third.lock == first.lock


def test_odd_file_names_give_usable_recipe_names(project: Path) -> None:
    assert read(HEAD, "recipes/my recipe!.yaml").name == "my-recipe-"
    assert read(HEAD, "recipes/.hidden").name == "-hidden"
    assert read(HEAD, "recipes/recipe.yaml").lock == project / "recipes/recipe.lock"
    with pytest.raises(InputError, match="the lock file would replace the recipe"):
        read(HEAD, "recipes/recipe.lock")


# The schema.


def test_the_schema_is_valid_and_explains_every_key() -> None:
    from jsonschema import Draft202012Validator

    found = schema.schema("recipe")
    Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    keys = list(_properties(found, "recipe"))
    assert len(keys) > 30
    for where, rule in keys:
        assert rule.get("description"), where
    assert not re.search(r'"\$ref": "(?!#)', str(found).replace("'", '"')), "complete in itself"


def _properties(rule: Data, where: str) -> list[tuple[str, dict[str, Data]]]:
    found: list[tuple[str, dict[str, Data]]] = []
    if isinstance(rule, dict):
        for key, value in rule.items():
            if key == "properties" and isinstance(value, dict):
                found += [(f"{where}.{name}", item) for name, item in value.items() if isinstance(item, dict)]
            found += _properties(value, f"{where}.{key}")
    elif isinstance(rule, list):
        for item in rule:
            found += _properties(item, where)
    return found


def test_the_published_schema_accepts_what_load_accepts() -> None:
    """Editors use it as it is, with variables where numbers are wanted."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema.schema("recipe"))
    for text in readme_recipes():
        validator.validate(yaml.safe_load(text))
    assert not validator.is_valid(yaml.safe_load(HEAD + "compile: {max_batch: 'x'}"))
    assert not validator.is_valid(yaml.safe_load(HEAD + "modles: {}"))


def test_examples_and_defaults_in_the_schema_are_true() -> None:
    from jsonschema import Draft202012Validator

    found = schema.schema("recipe")
    for where, rule in [*_properties(found, "recipe"), *_properties(schema.schema("target"), "target")]:
        whole = {**rule, "$defs": found["$defs"]}
        examples = rule.get("examples", [])
        assert isinstance(examples, list)
        for example in [*examples, *([rule["default"]] if "default" in rule else [])]:
            assert Draft202012Validator(whole).is_valid(example), (where, example)
    assert _default(found, "prefill_chunk") == Limits().prefill_chunk
    assert _default(found, "max_batch") == Limits().max_batch
    assert _default(found, "output", "bundle") == outputs.DEFAULT


def _default(found: dict[str, Data], key: str, parent: str = "compile") -> Data:
    (rule,) = [rule for where, rule in _properties(found, "") if where.endswith(f"{parent}.{key}")]
    return rule["default"]


# Any input at all.

_WORDS = st.sampled_from(
    "version models quantizations targets matrix include exclude model quantization target compile verify "
    "bundle output vars name lock context_window prefill_chunk max_batch prompts max_kl source scheme overrides "
    "match extends triple cpu features tiny q4f16_1 x86-64-v3 host models/tiny hf://a/b ${x} ${ a/../b ~ . .. "
    "{model} dist".split()
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=6),
    max_leaves=30,
)
_SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1) | _VALUES,
        "models": st.just({"tiny": "models/tiny"}) | _VALUES,
        "quantizations": st.just(["q4f16_1"]) | _VALUES,
        "targets": st.just(["x86-64-v3"]) | _VALUES,
        "vars": _VALUES,
        "matrix": _VALUES,
        "compile": _VALUES,
        "verify": _VALUES,
        "bundle": _VALUES,
        "lock": _VALUES,
    },
)
_FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@_FUZZ
@given(_SECTIONS)
def test_any_data_gives_a_recipe_or_problems(project: Path, value: dict[str, Data]) -> None:
    _load_or_fail(yaml.safe_dump(value, allow_unicode=True).encode())


@_FUZZ
@given(st.binary(max_size=100), st.integers(0, len(HEAD)), st.integers(0, 20))
def test_any_bytes_give_a_recipe_or_problems(project: Path, data: bytes, at: int, gone: int) -> None:
    _load_or_fail(HEAD.encode()[:at] + data + HEAD.encode()[at + gone :])


def _load_or_fail(data: bytes) -> None:
    Path("recipes/fuzz.yaml").write_bytes(data)
    try:
        recipe = load(Path("recipes/fuzz.yaml"))
    except InputError as error:
        assert error.problems
        assert all(problem.message and "\n\n" not in problem.message for problem in error.problems)
        return
    variants = expand(recipe)
    assert variants
    assert len({variant.name for variant in variants}) == len(variants)
    assert len({str(variant.output).lower() for variant in variants}) == len(variants)


_IDS = st.from_regex("[a-z][a-z0-9_]{0,3}", fullmatch=True)
_SETTINGS = st.fixed_dictionaries(
    {}, optional={"context_window": st.integers(600, 9000), "max_batch": st.integers(1, 99)}
)


@_FUZZ
@given(
    st.sets(_IDS, min_size=1, max_size=3),
    st.dictionaries(_IDS, st.sampled_from(sorted(SCHEMES)), min_size=1, max_size=3),
    st.dictionaries(_IDS, st.sampled_from(["x86-64-v2", "aarch64-linux"]), min_size=1, max_size=3),
    _SETTINGS,
)
def test_what_is_written_is_read(
    project: Path, models: set[str], schemes: dict[str, str], targets: dict[str, str], limits: dict[str, int]
) -> None:
    targets.pop("host", None)
    targets = targets or {"t": "x86-64-v2"}
    data = {
        "version": 1,
        "models": dict.fromkeys(sorted(models), "models/tiny"),
        "quantizations": schemes,
        "targets": targets,
        "compile": limits,
    }
    recipe = read(yaml.safe_dump(data, sort_keys=False))
    assert list(recipe.models) == sorted(models)
    assert {name: scheme.name for name, scheme in recipe.schemes.items()} == schemes
    assert {name: replace(item, name="") for name, item in recipe.targets.items()} == {
        name: replace(resolve(preset), name="") for name, preset in targets.items()
    }
    variants = expand(recipe)
    assert [(v.model.name, v.quantization, v.target.name) for v in variants] == [
        (model, scheme, target) for model in sorted(models) for scheme in schemes for target in targets
    ]
    assert {v.limits for v in variants} == {Limits(**limits)}


# Cost.


def test_a_large_recipe_is_read_fast(project: Path) -> None:
    lines = ["version: 1", "models:", *(f"  m{i}: {{source: models/tiny}}" for i in range(200))]
    lines += ["quantizations:", *(f"  s{i}: {name}" for i, name in enumerate([*SCHEMES, "q0f32"]))]
    lines += ["targets:", *(f"  t{i}: {{extends: x86-64-v3, features: [+avxvnni]}}" for i in range(12))]
    lines += [
        "matrix:",
        "  exclude:",
        *(f"    - {{model: m{i}, quantization: s{i % 8}}}" for i in range(200)),
    ]
    lines += [
        "  include:",
        *(f"    - {{model: m{i}, target: t0, compile: {{max_batch: {i + 1}}}}}" for i in range(200)),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    variants = expand(read("\n".join(lines)))
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    assert len(variants) == 200 * 12 * 7
    assert spent < 2


def test_reading_recipes_loads_nothing_heavy(project: Path) -> None:
    Path("recipes/q.yaml").write_text(HEAD)
    code = (
        "import sys; from pathlib import Path; import mlcbuild.recipe as r; before = set(sys.modules);"
        "r.expand(r.load(Path('recipes/q.yaml')));"
        "print([n for n in ('tvm', 'numpy', 'networkx', 'huggingface_hub') if n in sys.modules],"
        "      [n for n in ('jsonschema',) if n in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
