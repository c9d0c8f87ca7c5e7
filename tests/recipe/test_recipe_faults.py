"""Every fault of a recipe has its place and its sentence, and hides no other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.quant.schemes import SCHEMES
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
    "bench": (
        HEAD + "bench: {prompts: 3, prompt_tokens: 0, generate_tokens: many}\n",
        [
            "5:9: the key 'prompts' is unknown in 'bench'; did you mean 'prompt_tokens'?",
            "5:36: 'prompt_tokens' must be at least 1, not 0",
            "5:56: 'generate_tokens' must be a whole number, not 'many'",
        ],
    ),
    # publish
    "wrong destinations": (
        HEAD + "publish:\n  - {to: ftp://x}\n  - {to: 'oci://host/{modell}:v1'}\n  - {to: 'oci://host/x'}\n"
        "  - {to: 'oci://host/x:{model}'}\n  - {to: 'oci://host/x:{model}'}\n  - {}\n",
        [
            "6:10: 'ftp://x' must start with oci:// (a registry) or hf:// (a model hub)",
            "7:10: the placeholder '{modell}' is unknown; did you mean 'model'?",
            "8:10: 'oci://host/x' lacks a tag: add ':' and one",
            "10:10: 'oci://host/x:{model}' is named twice",
            "11:5: item 6 of 'publish' lacks the key 'to': oci://host/repository:tag (an artifact of a "
            "registry) or hf://organisation/name@branch (a repository of a model hub)",
        ],
    ),
    "one destination for two": (
        changed(quantizations="[q4f16_1, q0f32]") + "publish: [{to: 'hf://team/{model}'}]\n",
        [
            "5:16: tiny/q4f16_1/x86-64-v3 and tiny/q0f32/x86-64-v3 would both be 'hf://team/tiny'; use "
            "{model}, {quantization} and {target} in it",
        ],
    ),
    # cache
    "remotes of unknown kinds": (
        HEAD
        + "cache:\n  remotes:\n"
        + "".join(
            f"    - {{url: '{url}'}}\n"
            for url in (
                "ftp://a/b",
                "https://me:secret@host/x",
                "https:///x",
                "https://h/x?y=1",
                "file://host/x",
                "http://h:x/",
            )
        ),
        [
            "7:13: 'ftp://a/b' must start with https://, http://, s3://, oci:// or file:///",
            "8:13: a URL must not hold a user name or password: put them into netrc or the environment "
            "(MLCBUILD_TOKEN_<HOST>, MLCBUILD_LOGIN_<HOST>)",
            "9:13: 'https:///x' names no host",
            "10:13: 'https://h/x?y=1' must be an address alone, without '?', '#' and spaces",
            "11:13: 'file://host/x' must name a directory of this machine: file:///path",
            "12:13: the URL cannot be parsed",
        ],
    ),
    "remotes that contradict": (
        HEAD
        + "cache:\n  remotes:\n    - {url: 'https://h/x', mode: read, write: ci-only}\n"
        + "    - {url: 'https://h/x/', mode: both, trust: [ed25519:short]}\n    - {mode: read}\n",
        [
            "7:47: 'write' says when results are sent, but 'mode: read' sends none",
            "8:13: https://h/x is named twice",
            "8:35: 'mode' must be 'read' or 'write' or 'readwrite', not 'both'",
            "8:49: item 1 of 'trust' must be 'ed25519:' and 43 characters, as `mlcbuild keys show` prints "
            "them, not 'ed25519:short'",
            "9:7: item 3 of 'remotes' lacks the key 'url': file:///directory, https://host/path, "
            "s3://bucket/prefix or oci://host/repository, without credentials: those come from netrc, "
            "MLCBUILD_TOKEN_<HOST> or MLCBUILD_LOGIN_<HOST>",
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
    "name that ends with a newline": (HEAD + 'name: "a\\n"\n', [f"5:7: 'name' {NAME_RULE}, not 'a\\n'"]),
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
        [
            "2:13: there is no directory 'Qwen/Qwen3-0.6B'; for a model of the Hugging Face hub write "
            "hf://Qwen/Qwen3-0.6B"
        ],
    ),
    "source of a file that is missing": (
        changed(models="{tiny: downloads/absent.gguf}"),
        ["2:16: there is no file 'downloads/absent.gguf'"],
    ),
    "source that is a file": (
        changed(models="{a: prompts.txt}"),
        ["2:13: 'prompts.txt' is a file; a source is the directory of a checkpoint, or a GGUF file"],
    ),
    "hub source with too many parts": (
        changed(models="{a: 'hf://o/n/x'}"),
        [
            "2:13: source 'hf://o/n/x': 'o/n/x' is not the name of a repository; write "
            "hf://organisation/name@revision"
        ],
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
            "2:13: source 'https://huggingface.co/Qwen/Qwen3-0.6B/tree/main' is a page of the Hugging "
            "Face hub; "
            "write hf://Qwen/Qwen3-0.6B"
        ],
    ),
    "page of a GGUF file": (
        changed(models="{a: 'https://huggingface.co/o/n/blob/main/q4/m.gguf'}"),
        [
            "2:13: source 'https://huggingface.co/o/n/blob/main/q4/m.gguf' is a page of the Hugging Face "
            "hub; write hf://o/n/q4/m.gguf"
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
            "3:21: the key 'bits' is unknown in 'a'; known: candidates, max_kl, max_size, overrides, scheme, "
            "target_bits",
            "3:42: item 1 of 'overrides' lacks the key 'match': one or more shell patterns joined by '|', "
            "compared "
            "with the parameter's name with and without '.weight'",
            "3:59: item 2 of 'overrides' lacks the key 'scheme': the built-in scheme of the parameters "
            "that match",
            "3:67: 'match' must not be empty",
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
    "budgets": (
        changed(
            quantizations="{a: {}, b: {target_bits: 5, max_kl: 0.1}, c: {max_size: 8 apples}, "
            "d: {scheme: q4a8_1, max_kl: 0.1, candidates: [q0f32, q0f16]}}"
        ),
        [
            "3:20: 'a' needs the key 'scheme', or a budget: target_bits, max_size or max_kl",
            "3:44: 'max_kl' and 'target_bits' are two budgets; give each a quantization of its own",
            "3:72: 'max_size' must be a size such as 8GB or 512MiB, found '8 apples'",
            "3:103: 'max_kl' belongs to a budget, which chooses scheme and overrides itself; remove either",
            "3:116: 'candidates' belongs to a budget, which chooses scheme and overrides itself; remove "
            "either",
        ],
    ),
    "candidates of budgets": (
        changed(
            quantizations="{a: {target_bits: 0}, b: {max_kl: 0.1, candidates: [q4a8_1]}, "
            "c: {max_kl: 0.1, candidates: [q4a8_1, as-is, q4a81]}}"
        ),
        [
            "3:34: 'target_bits' must be at least 1, not 0",
            "3:67: a budget chooses among at least two candidates, found 1",
            "3:116: candidate 'as-is' is no built-in scheme; known: " + ", ".join(sorted(SCHEMES)),
            "3:123: candidate 'q4a81' is no built-in scheme; did you mean 'q4a8_1'?",
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
    # matrix
    "unknown names in the matrix": (
        HEAD + "matrix:\n  model: [tiyn]\n  exclude: [{target: x86-64-v4}]\n"
        "  include: [{quantization: q4}]\n",
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
        [
            "5:32: this entry agrees with no combination; to make one it must name model, quantization and "
            "target"
        ],
    ),
    "combination made twice": (
        changed(models="{a: models/tiny, b: models/other}")
        + "matrix:\n  model: [a]\n  include:\n"
        + 2 * "    - {model: b, quantization: q4f16_1, target: x86-64-v3}\n",
        ["9:7: an earlier include entry makes this combination already"],
    ),
    "name twice on an axis": (
        HEAD + "matrix: {model: [tiny, tiny]}\n",
        ["5:24: 'tiny' appears twice in 'model': it is item 1 too"],
    ),
    "matrix of a million": (
        changed(
            models=f"{{{', '.join(f'm{i}: models/tiny' for i in range(500))}}}",
            quantizations=f"{{{', '.join(f'q{i}: q0f32' for i in range(100))}}}",
            targets=f"{{{', '.join(f't{i}: x86-64-v2' for i in range(20))}}}",
        )
        + "matrix: {}\n",
        ["5:1: the matrix has 1000000 combinations; at most 100000 are allowed"],
    ),
    "empty matrix": (
        HEAD + "matrix: {exclude: [{model: tiny}]}\n",
        ["5:1: the matrix is empty: nothing would be built"],
    ),
    "names of no use": (
        changed(models="{a: models/tiny, b: models/other}", quantizations="[q0f32, q0f16]")
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
        HEAD + "matrix: {include: [{model: tiny, compile: {context_window: 128}}]}\n"
        "compile: {prefill_chunk: 256}\n",
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
        ["5:19: the prompts 'models' must be a text file: it is a directory, not a regular file"],
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


def test_at_least_forty_faults() -> None:
    assert len(FAULTS) >= 40
