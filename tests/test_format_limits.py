"""Tests of the limits of a library, a single type for builder, manifest and runtime."""

from __future__ import annotations

from mlcbuild_format.limits import Limits


def test_pages_hold_whole_sequences() -> None:
    """Checks the number of KV cache pages that a bundle's limits imply: one sequence has whole pages for the
    context, and all sequences of a batch need as many each."""
    limits = Limits(context_window=33, prefill_chunk=8, max_batch=4)
    assert (limits.page_size, limits.sequence_pages, limits.pages) == (16, 3, 12)
    assert Limits(32, 8, 4).pages == 8
    assert Limits(33, 8, 4, page_size=33).pages == 4


def test_a_call_has_the_rows_of_a_chunk_or_of_a_batch() -> None:
    assert Limits(64, 8, 4).rows == 8
    assert Limits(64, 2, 4).rows == 4
