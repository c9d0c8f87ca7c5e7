"""Tests of trying constraints in a child process with limits of time and memory, and of the cache of compiled
constraints, which is limited in bytes."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_format.errors import RequestError, SetupError, StoppingError
from mlcbuild_runtime.constraints import trial
from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.constraints.stages import Trials

from . import shared
from .grammars import GRAMMARS, RULES, SIZE, TOKENIZERS
from .shared import Server


def test_a_trial_survives_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = trial.Trial(GRAMMARS["json"]._tokens, 2.0)
    try:
        assert actual.run('start: "a"').error == ""
        assert actual._child.process is not None
        actual._child.process.kill()
        actual._child.process.wait()
        assert "nothing" in actual.run("start: nothing").error
        actual._child.end()
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(SetupError, match=r"that tries constraints cannot start: .*/nowhere/python"):
            actual.run('start: "a"')
        monkeypatch.undo()
        monkeypatch.setattr(actual._child, "_module", "nowhere")
        with pytest.raises(SetupError, match="has failed: see the lines above"):
            actual.run('start: "a"')
    finally:
        actual.close()


def test_a_trial_ends_with_its_grammars() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    grammars.compiled(Constraint("regex", "a", "x"), message=False)
    child = grammars._trials.tries[0].trial._child.process
    assert child is not None and child.poll() is None
    del grammars
    gc.collect()
    assert child.poll() is not None


def test_constraints_of_a_server_that_stops() -> None:
    """Checks that a constraint that is compiled on trial while the server stops, and later ones, are refused
    for this reason, which is not cached, and that those that are compiled already can still be used."""
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    cached = Constraint("regex", "a", "x")
    slow = Constraint("json_schema", '{"type": "integer", "multipleOf": 999983}', "x")
    grammars.compiled(cached, message=False)
    trials = grammars._trials
    timer = threading.Timer(0.1, grammars.close)
    timer.start()
    for constraint in (slow, slow, Constraint("regex", "b", "x")):
        with pytest.raises(RequestError, match=r"^the server is stopping: use another server$") as caught:
            grammars.compiled(constraint, message=False)
        assert (caught.value.code, caught.value.status) == ("stopping", 503)
    timer.join()
    grammars.compiled(cached, message=False)
    with pytest.raises(StoppingError):
        trials.passed("b", 'start: "b"', lambda _: "")
    assert len(trials._outcomes) == 1


def test_no_constraint_is_tried_after_the_server_stops() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    grammars.close()
    with pytest.raises(StoppingError):
        grammars.compiled(Constraint("regex", "a", "x"), message=False)
    assert "_trials" not in vars(grammars), "the vocabulary was not loaded"


def test_a_trial_takes_no_more_than_its_time_and_memory() -> None:
    actual = trial.Trial(GRAMMARS["json"]._tokens, 0.2)
    try:
        for multiple in (999983, 1999993):  # the second reaches its memory first
            actual._seconds = 0.2 if multiple < 1_000_000 else 60.0
            with pytest.raises(trial.TooCostlyError):
                actual.run(f'start: %json {{"type": "integer", "multipleOf": {multiple}}}')
        assert actual.run('start: "a"').error == ""
    finally:
        actual.close()


def test_a_short_trial_takes_a_multiple_of_a_plain_schema() -> None:
    """Checks that compiling a constraint on trial is limited by a fixed CPU time, and also by a multiple of
    the CPU time for a plain JSON schema. With a small vocabulary the multiple is the smaller limit, so that
    slow constraints do not delay others."""
    tokens = GRAMMARS["json"]._tokens
    slow = 'start: %json {"type": "integer", "multipleOf": 999983}'
    for seconds, multiple in ((60.0, 20.0), (0.2, None), (0.2, 1e9)):
        actual = trial.Trial(tokens, seconds, multiple=multiple)
        try:
            assert actual.run(trial.PLAIN).error == ""
            with pytest.raises(trial.TooCostlyError):
                actual.run(slow)
        finally:
            actual.close()
    tokenizer = tokens.tokenizer()
    assert 0 < trial._plain(tokens, tokenizer) < 60


NICENESS_AT_LOADING = """
import os, sys
from mlcbuild_runtime.constraints import trial

class Tokens(trial.Tokens):
    def __init__(self, *vocabulary):
        print(os.nice(0), file=sys.stderr)
        super().__init__(*vocabulary)

trial.Tokens = Tokens
print(os.nice(0), file=sys.stderr)
trial.work()
"""
"""A program that runs the child process of a trial, and prints its niceness at its start and when it loads
the vocabulary."""


def test_a_later_stage_has_its_priority_before_it_loads() -> None:
    """Checks that a child process lowers its priority before it loads the vocabulary, since that takes CPU
    time from requests that run meanwhile."""
    hello = {"tokens": ["a", "b"], "special": [1], "ends": [1], "niceness": 5, "multiple": None}
    command = [sys.executable, "-c", NICENESS_AT_LOADING]
    result = subprocess.run(command, input=json.dumps(hello), capture_output=True, text=True, check=True)
    before, loading = map(int, result.stderr.split())
    assert loading == min(before + 5, 19)


def test_each_stage_has_its_priority() -> None:
    trials: Trials[str] = Trials(GRAMMARS["json"]._tokens)
    for each in trials.tries:
        assert each.trial.run('start: "a"').error == ""
        process = each.trial._child.process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(os.nice(0) + each.stage.niceness, 19)
        each.trial.close()
    assert trials.tries[-1].stage.niceness > 0


def test_a_slow_mask_hides_no_other_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that an error of llguidance is reported in preference to a slow mask: llguidance counts its
    work, so its error is the same each time, while CPU time varies."""
    tokens = GRAMMARS["json"]._tokens
    tokenizer = tokens.tokenizer()
    monkeypatch.setattr("mlcbuild_runtime.constraints.guidance.STEP_SECONDS", 0.0)
    for grammar, error in (
        (f'start: "{"x" * 250_000}"', "it is too complex"),
        ('start: "a" start?', "to see which tokens may come next"),
    ):
        outcome = trial._tried(tokens, tokenizer, grammar)
        assert outcome is not None and error in outcome["error"]


def test_constraints_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    constraints = [Constraint("regex", f"number {i}", "x") for i in range(20)]
    first = grammars.compiled(constraints[0], message=False)
    monkeypatch.setattr("mlcbuild_runtime.constraints.grammar.KEPT_BYTES", 3 * first.bytes + first.bytes // 2)
    assert grammars.compiled(constraints[0], message=False) is first
    for constraint in constraints:
        grammars.compiled(constraint, message=False)
    assert 2 <= len(grammars._kept) <= 4
    assert grammars.compiled(constraints[-1], message=False) is not first
    assert grammars.compiled(constraints[0], message=False) is not first


LATE = "[a-z]{40}(a{1000}){1000}"
"""A regular expression whose masks llguidance can compute for the first 40 letters of an answer only;
afterwards it fails because the expression is too complex."""


def test_a_constraint_that_fails_is_forgotten_with_its_memory() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    constraint = Constraint("regex", LATE, "x")
    compiled = weakref.ref(grammars.compiled(constraint, message=False))
    actual = compiled()
    assert actual is not None
    matcher, letter = actual.matcher(), TOKENIZERS["json"].vocabulary.token_id("a")
    del actual
    with pytest.raises(RequestError, match="the constraint cannot be followed: it is too complex"):
        for _ in range(60):
            matcher.mask()
            matcher.take(letter or 0)
    assert not grammars._kept
    del matcher
    assert compiled() is None


def test_outcomes_of_trials_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the outcome of a constraint's trial is cached, even if the constraint was refused or its
    compiled form was dropped from the cache."""
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    expected = Constraint("regex", "quick", "x")
    first = grammars.compiled(expected, message=False)
    for _ in range(3):
        with pytest.raises(RequestError, match="it is too complex"):
            grammars.compiled(Constraint("regex", "(a{1000}){1000}", "x"), message=False)
        grammars.close()
        grammars._kept.clear()
        assert grammars.compiled(expected, message=False) is not first
    monkeypatch.setattr("mlcbuild_runtime.constraints.stages.KEPT", 1)
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    for source in ("one", "two"):
        grammars.compiled(Constraint("regex", source, "x"), message=False)
    assert list(grammars._trials._outcomes) == [("regex", "two", False)]


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def form(kind: str, source: str) -> dict[str, Any]:
    return {"type": kind, kind: source}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


COSTLY = 40 if "MLCBUILD_TEST_EVERY" in os.environ else 2
"""Number of expensive constraints that the test sends at once; to compile each takes a large part of a CPU
second."""
FAST = 40 if "MLCBUILD_TEST_EVERY" in os.environ else 12
"""Number of constraints of medium cost that the test sends at once; to compile each takes less than an
expensive one does."""


ATTACKS: dict[str, list[dict[str, Any]]] = {
    "counts": [form("regex", f"(a{{{1000 - i}}}){{1000}}") for i in range(COSTLY)],
    "late counts": [form("regex", f"[a-z]{{{20 + i}}}(a{{1000}}){{1000}}") for i in range(FAST)],
    "texts": [of_schema({"const": "x" * (250_000 - i)}) for i in range(COSTLY)],
    "shorter texts": [of_schema({"const": "x" * (20_000 - i)}) for i in range(COSTLY)],
    "enums": [of_schema({"enum": [f"{i} {j}" for j in range(6000)]}) for i in range(FAST)],
    "multiples": [of_schema({"type": "integer", "multipleOf": 99991 + i}) for i in range(COSTLY)],
    "rules": [form("grammar", f"start: r0\n{RULES}\nx{i}: 'x'") for i in range(FAST)],
}


@pytest.fixture(scope="module")
def at_rest(server: Server) -> int:
    """Returns the resident memory of a server, in bytes, after it has served one request with a constraint,
    and before the expensive ones."""
    ask(server, form("regex", "[a-z]{3}"))
    return resident(server.process.pid)


def ask(server: Server, expected: dict[str, Any] | None, timeout: float = shared.WAIT) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 60, "response_format": expected}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout, verify=shared.PLAIN)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_constraints_do_not_take_a_servers_memory(server: Server, at_rest: int, attack: str) -> None:
    """Checks that a server answers other requests while it receives many expensive constraints at once, and
    that afterwards its resident memory is at most 400 MiB larger than before."""
    with ThreadPoolExecutor(30) as pool:
        asked = [pool.submit(ask, server, expected, 4 * shared.WAIT) for expected in ATTACKS[attack]]
        answered, began = 0, time.monotonic()
        while not all(each.done() for each in asked):
            assert ask(server, None).status_code == 200
            # Where many processes share the cores, it may have to try again.
            assert ask(server, form("regex", "[a-z]{3}")).status_code in (200, 503)
            answered += 1
            time.sleep(0.05)  # the rest of the time is the attack's
        ends_soon = time.monotonic() - began < shared.WAIT / 20
        for each in asked:
            response = each.result()
            assert response.status_code in (200, 400, 503), response.text
        server.wait_idle()
        assert answered > 1 or ends_soon, "nobody waits for the end of an attack"
        assert resident(server.process.pid) - at_rest < 400 << 20
