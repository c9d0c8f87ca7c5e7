"""Tests of the access log and the trace of a real server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_runtime.engine.trace import Trace
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared


@dataclass(frozen=True)
class Watched:
    """The output of a server with an access log and a trace, which has answered several kinds of requests:
    lines of the log as JSON objects, the log's text, events of the trace, and the request ids of the
    answers."""

    lines: list[dict[str, Any]]
    text: str
    trace: list[dict[str, Any]]
    ids: list[str]


SECRET = "the prompt nobody may read"
BODY = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True}


def ask(url: str) -> list[str]:
    """Sends requests of several kinds to a server with an API key: complete and streamed ones, a faulty one,
    one without the key, and one that is cancelled. Returns the X-Request-ID headers of the answers."""
    key = {"Authorization": "Bearer sesame"}
    with httpx.Client(base_url=url, timeout=shared.WAIT) as client:
        answers = [
            client.post("/v1/completions", json=BODY, headers={**key, "X-Request-ID": "mine"}),
            client.post("/v1/completions?key=sesame", json={**BODY, "stream": True, "n": 2}, headers=key),
            client.post("/v1/completions", json={**BODY, "temperature": 9}, headers=key),
            client.post("/v1/completions", json=BODY, headers={"X-Request-ID": "a b"}),
            client.get("/health"),
        ]
        with client.stream(
            "POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}, headers=key
        ) as left:
            next(left.iter_lines())
        answers.append(left)
    return [answer.headers["x-request-id"] for answer in answers]


@pytest.fixture(scope="module")
def watched(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    place = tmp_path_factory.mktemp("watched")
    log, trace = place / "access.jsonl", place / "trace.json"
    log.write_text('{"earlier": true}\n')
    options = ("--api-key", "sesame", "--access-log", str(log), "--trace", str(trace))
    with shared.serving(tiny_bundle, *options) as server:
        ids = ask(server.url)
        server.wait_idle()
        assert server.stop() == 0
    text = log.read_text()
    first, *lines = [json.loads(line) for line in text.splitlines()]
    assert first == {"earlier": True}, "lines are added"
    yield Watched(lines, text, json.loads(trace.read_text()), ids)


def test_every_request_has_a_line(watched: Watched) -> None:
    asked = [line for line in watched.lines if line["path"] != "/health"]
    assert [line["status"] for line in asked] == [200, 200, 400, 401, 200]
    assert sorted(line["id"] for line in watched.lines if line["id"] in watched.ids) == sorted(watched.ids)
    assert asked[0]["id"] == "mine" and asked[3]["id"] != "a b"
    for line in watched.lines:
        datetime.fromisoformat(line["time"])
        assert line["client"] == "127.0.0.1"
        assert line["method"] in ("GET", "POST")
        assert line["seconds"] >= 0


def test_lines_say_what_the_model_did(watched: Watched, tiny_bundle: Path) -> None:
    whole, two, wrong, _, left = (line for line in watched.lines if line["path"] != "/health")
    size = len(Tokenizer.load(tiny_bundle).encode(SECRET))
    for line, stream in ((whole, False), (two, True), (left, True)):
        assert (line["model"], line["stream"]) == ("tiny-q4f16_1", stream)
        assert line["prompt_tokens"] == size
        assert 0 < line["ttft"] <= line["seconds"]
    assert (whole["answer_tokens"], whole["finish"]) == (5, ["length"])
    assert (two["answer_tokens"], two["finish"]) == (10, ["length", "length"])
    assert whole["cached_tokens"] == 0 < two["cached_tokens"]
    assert left["finish"] == [None] and left["answer_tokens"] < 200
    assert "model" not in wrong


def test_nothing_secret_is_logged(watched: Watched) -> None:
    assert SECRET not in watched.text
    assert "sesame" not in watched.text


def test_the_trace_has_every_step_and_every_request(watched: Watched) -> None:
    events = watched.trace
    assert {event["ph"] for event in events} == {"M", "X", "C", "b", "n", "e"}
    for event in events:
        assert isinstance(event["ts"], float) and event["ts"] >= 0
        assert {"name", "cat", "pid", "tid"} <= event.keys()
    steps = [event for event in events if event["ph"] == "X" and "batch" in event.get("args", {})]
    prefilled = sum(sum(s["args"]["tokens"]) for s in steps if s["name"].startswith("prefill"))
    used = [line for line in watched.lines if "model" in line]
    cached = [event["args"]["cached_tokens"] for event in events if event["ph"] == "e"]
    prompts = [event["args"]["prompt_tokens"] for event in events if event["ph"] == "b"]
    assert prefilled == sum(prompts) - sum(cached)
    assert len(prompts) == len(cached) == 4
    decoded = sum(sum(s["args"]["tokens"]) for s in steps if s["name"].startswith("decode"))
    assert decoded >= sum(line["answer_tokens"] for line in used) - 4
    for number in range(4):
        phases = [event["ph"] for event in events if event.get("id") == number]
        assert phases == ["b", "n", "e"]
    ends = [event["args"]["end"] for event in events if event["ph"] == "e"]
    assert sorted(ends) == ["cancelled", "length", "length", "length"]


def test_the_parts_of_a_step_are_within_it(watched: Watched) -> None:
    slices = [event for event in watched.trace if event["ph"] == "X"]
    for step, model, tokens in zip(slices[::3], slices[1::3], slices[2::3], strict=True):
        assert (model["name"], tokens["name"]) == ("model", "tokens")
        assert step["ts"] == model["ts"]
        assert model["dur"] + tokens["dur"] == pytest.approx(step["dur"], abs=0.5)
        assert tokens["ts"] == pytest.approx(model["ts"] + model["dur"], abs=0.5)


def test_the_log_may_be_standard_output(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--access-log", "-") as server:
        httpx.get(f"{server.url}/v1/models", timeout=shared.WAIT)
        assert json.loads(server.output.readline())["path"] == "/v1/models"


@pytest.mark.parametrize("form", ["text", "json", "auto"])
def test_lines_on_standard_error(toy_bundle: Path, tmp_path: Path, form: str) -> None:
    """Checks the log lines on a server's standard error for each value of the option --log. With `auto` there
    are none, because standard error is not a terminal."""
    command = [sys.executable, "-m", "mlcbuild_runtime", str(toy_bundle), "--port", "0", "--log", form]
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=shared.environment()
        ) as process,
    ):
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = re.search(r"http://\S+", ready)
        assert url is not None and ready.startswith("{" if form == "json" else "mlcbuild-serve: ")
        for path in ("/health", "/v1/nowhere%1b"):
            httpx.get(f"{url[0]}{path}", timeout=shared.WAIT)
        answer = httpx.post(f"{url[0]}/v1/completions", json=BODY, timeout=shared.WAIT)
        size = answer.json()["usage"]["prompt_tokens"]
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    lines = errors.read_text().splitlines()
    if form == "json":
        *requests, last = map(json.loads, lines)
        assert [request["status"] for request in requests] == [200, 404, 200]
        assert (last["level"], last["message"]) == ("INFO", "stopped") and json.loads(ready)[
            "level"
        ] == "INFO"
    elif form == "text":
        unknown, completion, last = lines
        assert last == "mlcbuild-serve: stopped"
        assert re.fullmatch(r"\d\d:\d\d:\d\d 404 GET /v1/nowhere\\x1b in [\d.]+ s", unknown)
        assert re.search(rf" 200 POST /v1/completions in .* s, \S+: {size} \+ 5 tokens$", completion)
    else:
        assert not lines


def test_every_line_of_a_json_log_is_an_object(toy_bundle: Path, tmp_path: Path) -> None:
    """Checks warnings, Python's warnings, failures of requests and of threads, and the reason why a server
    does not start."""
    script = """if True:
        import sys, threading, warnings
        from mlcbuild_runtime.http import handling, server
        from mlcbuild_runtime.__main__ import main

        def health(*_): raise ValueError("a\\x1b[31mb\\nc")
        original = server.create_app

        def create_app(*arguments):
            warnings.warn("old\\nthing")
            thread = threading.Thread(target=health)
            thread.start()
            thread.join()
            return original(*arguments)

        server.create_app = create_app
        sys.exit(main(sys.argv[1:]))
    """
    errors = tmp_path / "errors"
    command = [sys.executable, "-c", script, str(toy_bundle), "--port", "0", "--log", "json", "--lenient"]
    with (
        errors.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=shared.environment()
        ) as process,
    ):
        assert process.stdout is not None
        url = re.search(r"http://\S+", json.loads(process.stdout.readline())["message"])
        assert url is not None
        body = {**BODY, "odd\x1b": 1}
        assert httpx.post(f"{url[0]}/v1/completions", json=body, timeout=shared.WAIT).status_code == 200
        process.send_signal(signal.SIGINT)
    lines = [json.loads(line) for line in errors.read_text().splitlines()]
    events = [line for line in lines if "level" in line]
    assert [line["level"] for line in events] == ["WARNING", "CRITICAL", "WARNING", "INFO"]
    assert "old\nthing" in events[0]["message"] and "odd\x1b" in events[2]["message"]
    assert events[1]["traceback"].startswith("Traceback") and "a\x1b[31mb\nc" in events[1]["traceback"]
    assert [line["status"] for line in lines if "status" in line] == [200]
    nowhere = str(tmp_path / "nowhere")
    refused = shared.run("-m", "mlcbuild_runtime", nowhere, "--port", "0", "--log", "json")
    assert refused.returncode == 1
    assert json.loads(refused.stderr)["message"].startswith(f"{nowhere}: does not exist")
    misused = shared.run("-m", "mlcbuild_runtime", nowhere, "--log=json", "--port", "x")
    assert misused.returncode == 2
    assert json.loads(misused.stderr)["message"].startswith("mlcbuild-serve: error: argument --port")


@pytest.mark.parametrize(("option", "what"), [("--access-log", "the access log"), ("--trace", "the trace")])
def test_files_that_cannot_be_written(toy_bundle: Path, tmp_path: Path, option: str, what: str) -> None:
    path = tmp_path / "nowhere" / "file"
    result = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), "--port", "0", option, str(path))
    assert result.returncode == 3
    assert result.stderr == f"mlcbuild-serve: {what} {path} cannot be written: No such file or directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_no_request(toy_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shared.serving(toy_bundle, "--access-log", "/dev/full") as server:
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=shared.WAIT)
            assert answer.json()["usage"]["completion_tokens"] == 5
    trace = Trace("/dev/full")
    for _ in range(1000):
        trace.counters({"running": 1})
    trace.close()
    assert "the trace cannot be written any more: [Errno 28]" in caplog.text
