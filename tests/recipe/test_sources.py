"""Tests of the messages about faults in the section `models` of a recipe, each with its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import NAME_RULE, changed, faults, project

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected
