"""Tests of the messages about faults of a recipe as a whole: each has its position and hides no other fault.

The faults of a section are tested in the file that has the name of the module which reads the section.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import HEAD, NAME_RULE, changed, faults, project

__all__ = ["project"]

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
            "2:1: the file lacks the key 'targets': names of presets (or 'host', this machine) as a list, "
            "or a "
            "mapping of names you give to presets or to targets of your own",
            "2:1: the file lacks the key 'version': version of the recipe format; this one is 1",
        ],
    ),
    "other version": (changed(version="2"), ["1:10: 'version' must be 1, not 2"]),
    "version as text": (changed(version="'1'"), ["1:10: 'version' must be 1, not '1'"]),
    "unknown section": (
        HEAD + "modles: {}\n",
        ["5:1: the key 'modles' is unknown in the file; did you mean 'models'?"],
    ),
    "misspelt required keys": (
        HEAD.replace("models:", "modles:").replace("version:", "verison:"),
        [
            "1:1: the key 'verison' is unknown in the file; did you mean 'version'?",
            "2:1: the key 'modles' is unknown in the file; did you mean 'models'?",
        ],
    ),
    "a misspelt key beside another missing one": (
        HEAD + "verify: {promtps: [a], max_kl: 1}\nbench: {prompt_tokn: 3}\n",
        [
            "5:10: the key 'promtps' is unknown in 'verify'; did you mean 'prompts'?",
            "6:9: the key 'prompt_tokn' is unknown in 'bench'; did you mean 'prompt_tokens'?",
        ],
    ),
    "unknown key": (
        HEAD + "compile:\n  max_batch: 2\n  contextwindow: 1\n",
        ["7:3: the key 'contextwindow' is unknown in 'compile'; did you mean 'context_window'?"],
    ),
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
    "unknown var where there are none": (
        HEAD + "name: ${a}\n",
        ["5:7: variable 'a' is unknown; none is defined"],
    ),
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
    # several at once: a fault of shape hides no other one
    "everything at once": (
        "version: 3\nmodels: {tiny: models/tiyn, x: [1]}\nquantizations: [q4f61_1]\ntargets: 5\n"
        "vars: {a: 1}\nmatrix: {exclude: [{model: tin}]}\n"
        "compile: {max_batch: none, context_window: 4096, prefill_chunk: 5000}\n"
        "bundle: {output: '{modle}', outptu: x}\nlock: ''\n",
        [
            "1:10: 'version' must be 1, not 3",
            "2:16: there is no directory 'models/tiyn'; for a model of the Hugging Face hub write "
            "hf://models/tiyn",
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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected
