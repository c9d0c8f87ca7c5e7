"""Tests of the messages about faults in the sections `compile`, `verify` and `bench` of a recipe, each with
its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import HEAD, faults, project

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "bench": (
        HEAD + "bench: {prompts: 3, prompt_tokens: 0, generate_tokens: many}\n",
        [
            "5:9: the key 'prompts' is unknown in 'bench'; did you mean 'prompt_tokens'?",
            "5:36: 'prompt_tokens' must be at least 1, not 0",
            "5:56: 'generate_tokens' must be a whole number, not 'many'",
        ],
    ),
    "limits that are no counts": (
        HEAD + "compile:\n  context_window: 0\n  prefill_chunk: '8'\n  max_batch: 1.5\n",
        [
            "6:19: 'context_window' must be at least 1, not 0",
            "7:18: 'prefill_chunk' must be a whole number, not '8' (remove the quotes)",
            "8:14: 'max_batch' must be a whole number, not 1.5",
        ],
    ),
    "a KV cache of an unknown kind": (
        HEAD + "compile: {kv_cache: int4}\n",
        ["5:21: 'kv_cache' must be 'auto' or 'int8', not 'int4'"],
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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected
