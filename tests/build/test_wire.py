"""Messages between a run and its workers: what is sent is read back, and nothing else is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.build.cluster.wire import Answer, Order, OrderInput, order
from mlcbuild.build.worker import Job, JobInput
from mlcbuild.canon import Entry, Tree
from mlcbuild.errors import CheckpointError, InputError, MlcbuildError, StepError
from mlcbuild.remotes import Remote
from mlcbuild.store.records import BuildInfo, Measured, Preimage, Record

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
