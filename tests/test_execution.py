"""Tests of converting a user's options for a run to those of the build engine."""

from __future__ import annotations

import pytest

from mlcbuild.errors import UsageError
from mlcbuild.execution import HERE, Execution, options


def test_defaults_run_in_worker_processes_of_this_machine() -> None:
    chosen = options(HERE, (), ())
    assert (chosen.executor, chosen.jobs, chosen.memory, chosen.keep_going) == ("pool", 0, 0, False)


def test_everything_that_is_set_reaches_the_engine() -> None:
    execution = Execution(jobs=3, memory=7, keep_going=True, executor="inline", tls="d", handle_signals=True)
    chosen = options(execution, ("a",), ("b",))
    assert (chosen.executor, chosen.jobs, chosen.memory) == ("inline", 3, 7)
    assert (chosen.keep_going, chosen.tls, chosen.handle_signals) == (True, "d", True)
    assert (chosen.force, chosen.outputs) == (("a",), ("b",))


def test_a_cluster_is_named_by_its_address() -> None:
    assert options(Execution(executor="dask://host:8786"), (), ()).executor == "dask://host:8786"


@pytest.mark.parametrize("name", ["threads", "dask", ""])
def test_an_unknown_executor_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="must be processes, inline, or dask://HOST:PORT"):
        options(Execution(executor=name), (), ())
