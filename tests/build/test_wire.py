"""Tests of the messages between a run and its workers: a message is read back as it was written, and anything
else is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.build.cluster import wire
from mlcbuild.build.cluster.wire import Answer, Order, OrderInput, order
from mlcbuild.build.worker import Job, JobInput
from mlcbuild.canon import Entry, Tree
from mlcbuild.errors import (
    CheckpointError,
    InputError,
    MlcbuildError,
    Problem,
    StepError,
)
from mlcbuild.remotes import Remote
from mlcbuild.store.records import BuildInfo, Measured, Preimage, Record
from mlcbuild.store.store import Store
from tests.build.cluster_runs import an_order

FILES = (Entry("a/b.txt", "1" * 64, 7), Entry("c", "2" * 64, 0))
PREIMAGE = Preimage(
    "tests.actions:text", {"text": "é"}, {"m.py": "3" * 64}, {"tvm": "1"}, {"in": Tree.of(FILES)}
)
ORDER = Order(
    "run-1",
    PREIMAGE.key(),
    BuildInfo("a/step", PREIMAGE),
    {"in": OrderInput(FILES, None), "from": OrderInput((), "/data")},
    3,
    True,
    (Remote("https://host/x", "read", True, ("ed25519:k",)),),
)
RECORD = Record.create(PREIMAGE.key(), Tree.of(FILES), BuildInfo("a/step", PREIMAGE, Measured(1, 2, 3)))


def test_an_order_is_read_as_it_was_written() -> None:
    assert Order.decode(ORDER.encode()) == ORDER


def test_an_order_describes_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCBUILD_TOKEN_HOST", "s3cret")
    inputs = (JobInput("in", FILES, None), JobInput("from", (), tmp_path))
    job = Job("a/step", PREIMAGE.key(), PREIMAGE, inputs, 3, tmp_path, tmp_path, tmp_path / "log")
    sent = order(job, "run-1", ORDER.remotes, again=False)
    assert "s3cret" not in sent.encode(), "a worker has credentials of its own"
    assert sent.inputs == {"in": OrderInput(FILES, None), "from": OrderInput((), str(tmp_path))}
    assert (sent.run, sent.key, sent.cores, sent.again) == ("run-1", PREIMAGE.key(), 3, False)
    assert (sent.info.step, sent.info.preimage, sent.info.shared) == ("a/step", PREIMAGE, job.shared)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "mlcbuild-job/0"}, "has the format mlcbuild-job/0"),
        ({"cores": "3"}, "'cores' of the order must be int, not str"),
        ({"cores": True}, "'cores' of the order must be int, not bool"),
        ({"more": 1}, "has the unknown field 'more'"),
        ({"again": None}, "'again' of the order must be bool"),
        ({"inputs": {"in": ["/x"]}}, "the input 'in' of the order"),
        ({"inputs": {"in": [7, []]}}, "the input 'in' of the order"),
        ({"remotes": [3]}, "a remote of the order is not a JSON object"),
        ({"remotes": [{"url": "gopher://x", "mode": "read", "ci_only": False, "trust": []}]}, "not valid"),
        ({"remotes": [{"url": "https://x/y", "mode": "steal", "ci_only": False, "trust": []}]}, "not valid"),
        ({"remotes": [{"url": "https://x/y", "mode": "read", "ci_only": False, "trust": [1]}]}, "not valid"),
        ({"remotes": [{"url": "https://x/y", "mode": "read", "trust": []}]}, "lacks the field 'ci_only'"),
    ],
)
def test_what_is_no_order_is_refused(changes: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(ORDER.encode()), **changes})
    with pytest.raises(ValueError, match=words):
        Order.decode(text)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1, "format": 1}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    for decode in (Order.decode, Answer.decode):
        with pytest.raises(ValueError):
            decode(text)


def test_an_answer_is_read_as_it_was_written() -> None:
    whole = Answer(
        "w", RECORD, RECORD.key, "fault", "https://x", ("a",), None, ("b",), True, True, ("c", "d")
    )
    read = Answer.decode(whole.encode())
    assert read.record is not None and read.record.encode() == RECORD.encode()
    assert Answer.decode(Answer("w").encode()) == Answer("w")
    assert (read.unsent, read.lacking, read.warnings) == (("a",), ("b",), ("c", "d"))
    assert (read.fault, read.origin, read.same_store, read.stopped) == ("fault", "https://x", True, True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(CheckpointError("a"), CheckpointError), (StepError("a"), StepError), (InputError([]), StepError)],
)
def test_an_error_keeps_its_kind_where_a_message_is_all_it_has(
    error: MlcbuildError, kind: type[MlcbuildError]
) -> None:
    read = Answer.decode(Answer("w", error=error).encode()).error
    assert type(read) is kind and str(read) == str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": ["StepError"]}, "'error' of the answer"),
        ({"error": ["os.system", 1]}, "'error' of the answer"),
        ({"warnings": [1]}, "'warnings' of the answer must be a list of texts"),
        ({"record": "{}\n{}\n"}, "record|JSON|field"),
        ({"stopped": 0}, "'stopped' of the answer must be bool"),
    ],
)
def test_what_is_no_answer_is_refused(changes: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(Answer("w").encode()), **changes})
    with pytest.raises(ValueError, match=words):
        Answer.decode(text)


def test_no_name_of_an_error_reaches_other_classes() -> None:
    text = json.dumps({**json.loads(Answer("w").encode()), "error": ["did_you_mean", "x"]})
    assert type(Answer.decode(text).error) is StepError


def test_orders_and_answers_are_text_and_come_back_whole(tmp_path: Path) -> None:
    order = an_order(tmp_path)
    assert Order.decode(order.encode()) == order
    with pytest.raises(ValueError, match="the order has the format mlcbuild-job/0"):
        Order.decode(order.encode().replace(wire.FORMAT, "mlcbuild-job/0"))
    record = Store(tmp_path / "s").record("0" * 64)
    answer = Answer("w", record, "k", error=StepError("words"), lacking=("a", "b"), unsent=("u",))
    actual = Answer.decode(answer.encode())
    assert (type(actual.error), str(actual.error)) == (StepError, "words")
    assert replace(actual, error=None) == replace(answer, error=None)
    placed = Answer.decode(Answer("w", error=InputError([Problem("f", 1, 2, "m")])).encode())
    assert (type(placed.error), str(placed.error)) == (StepError, "f:1:2: m")


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("cores", "2", "'cores' of the order must be int, not str"),
        ("again", 1, "'again' of the order must be bool, not int"),
        ("extra", 1, "the order has the unknown field 'extra'"),
        ("remotes", [1], "a remote of the order is not a JSON object"),
        ("remotes", [{"url": "file:///x"}], "the order's remote lacks the field 'ci_only'"),
        (
            "remotes",
            [{"url": "ftp://x", "mode": "read", "ci_only": False, "trust": []}],
            "a remote of the order is not valid: 'ftp://x' must start with",
        ),
        (
            "remotes",
            [{"url": "file:///x", "mode": "all", "ci_only": False, "trust": []}],
            "a remote of the order is not valid: its mode or its trust",
        ),
        ("inputs", {"a": [1, []]}, "the input 'a' of the order must be a directory or null, and a list"),
        ("inputs", {"a": [None, [["x", "y", 1]]]}, "the digest or the size of 'x' in it is malformed"),
        ("info", {}, "lacks a field"),
    ],
)
def test_a_malformed_order_is_refused(name: str, value: object, complaint: str, tmp_path: Path) -> None:
    fields = json.loads(an_order(tmp_path).encode())
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Order.decode(json.dumps({**fields, name: value}))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("worker", None, "'worker' of the answer must be str, not NoneType"),
        ("error", ["StepError"], "'error' of the answer must be the name of an error and its message"),
        ("unsent", [1], "'unsent' of the answer must be a list of texts"),
        ("stopped", "no", "'stopped' of the answer must be bool, not str"),
    ],
)
def test_a_malformed_answer_is_refused(name: str, value: object, complaint: str) -> None:
    fields = json.loads(Answer("w").encode())
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Answer.decode(json.dumps({**fields, name: value}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "is not a JSON object"),
        ('{"format": 1, "format": 2}', "the key 'format' is there twice"),
        ('{"format": NaN}', "NaN is not JSON"),
        ("{", "Expecting property name"),
    ],
)
@pytest.mark.parametrize("message", [Order, Answer])
def test_a_message_is_strict_json(message: type[Order | Answer], text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        message.decode(text)


def test_the_record_of_an_answer_is_checked_as_any_other(tmp_path: Path) -> None:
    order = an_order(tmp_path)
    record = Record.create(order.key, Tree.of(()), order.info)
    right = Answer("w", record, order.key).encode()
    assert Answer.decode(right).record == record
    for wrong in (right.replace(r"\"x\"", r"\"y\""), right.replace("0,0,0", "0,0,-1")):
        assert wrong != right
        with pytest.raises(ValueError, match=r"does not follow|three whole numbers"):
            Answer.decode(wrong)
