"""Tests of choosing a scheme for a model that names none, by the model's size, the memory and the
processor."""

from __future__ import annotations

import pytest

from mlcbuild.installed.default_scheme import SMALL, choose_scheme

GIB = 1 << 30
AVX512, AMX, OLD, ARM = (
    "linux x86-64-v4",
    "linux x86-64-v4 +amx-bf16",
    "linux x86-64-v2",
    "linux generic +dotprod",
)


@pytest.mark.parametrize(
    ("words", "count", "memory", "scheme"),
    [
        (AVX512, SMALL - 1, 16 * GIB, "q8a8_1"),
        (AVX512, SMALL, 16 * GIB, "q4a8_2"),
        (AMX, SMALL, 16 * GIB, "q4a8_1"),
        (ARM, SMALL - 1, 16 * GIB, "q8a8_1"),
        (OLD, SMALL - 1, 16 * GIB, "q8f16_1"),
        (OLD, SMALL, 16 * GIB, "q4f16_1"),
        (AVX512, 600_000_000, GIB, "q6a8_2"),
        (OLD, 600_000_000, GIB, "q4f16_1"),
        (AVX512, 600_000_000, 900 << 20, "q5a8_2"),
        (OLD, 600_000_000, 900 << 20, "q4f16_1"),
        (AVX512, 600_000_000, 700 << 20, "q4a8_2"),
    ],
)
def test_the_scheme_fits_model_and_machine(words: str, count: int, memory: int, scheme: str) -> None:
    choice = choose_scheme(words, count, memory)
    assert choice.scheme == scheme
    assert "smaller" in choice.reason or "loses less" in choice.reason


def test_a_model_that_is_too_large_is_announced() -> None:
    choice = choose_scheme(AVX512, 70 * SMALL, 16 * GIB)
    assert (choice.scheme, choice.reason) == (
        "q4a8_2",
        "the smallest; it may be too large for this machine's memory",
    )


def test_a_model_of_unknown_size_gets_the_scheme_that_always_fits() -> None:
    choice = choose_scheme(ARM)
    assert choice.scheme == "q4a8_2" and choice.reason.startswith("which fits this CPU; q8a8_1")
