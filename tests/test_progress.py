"""Tests of reports of progress: which ones reach the listener, and when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from mlcbuild import progress


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, int, int, str]]]:
    """Yields a list to which every progress report that passes the rate limit is appended, as (time in
    seconds, done, total, unit). The clock is simulated and advances by 0.09 s each time it is read."""
    ticks = iter(range(1000))
    now = [0.0]

    def clock() -> float:
        now[0] = 100 + 0.09 * next(ticks)
        return now[0]

    monkeypatch.setattr("mlcbuild.progress.time.monotonic", clock)
    monkeypatch.setattr(progress, "_last", 0.0)
    arrived: list[tuple[float, int, int, str]] = []
    progress.listen(lambda done, total, unit: arrived.append((now[0], done, total, unit)))
    yield arrived
    progress.listen(None)


def test_reports_are_thinned_out_but_the_last_one_arrives(reports: list[tuple[float, int, int, str]]) -> None:
    for done in range(11):
        progress.report(done, 10, "B")
    counts = [done for _, done, _, _ in reports]
    assert counts[0] == 0 and counts[-1] == 10 and counts == [0, 3, 6, 9, 10]
    times = [time for time, *_ in reports[:-1]]
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(times))
    assert {report[2:] for report in reports} == {(10, "B")}


def test_nobody_listens(reports: list[tuple[float, int, int, str]]) -> None:
    progress.listen(None)
    progress.report(1, 1)
    assert not reports
