"""Tests of `mlcbuild bench`: load on real servers, healthy and faulty ones; the statistics that it prints,
compared with NumPy; and the speed of a bundle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socketserver
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.bench import generator
from mlcbuild.cli import main
from tests.conftest import ROOT
from tests.runtime import shared

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def url(tiny_bundles: Path) -> Iterator[str]:
    with shared.serving(tiny_bundles / "dist" / "tiny-q4a8_1-host", "--api-key", "key") as running:
        yield running.url


def bench(out: Out, code: int, *arguments: str) -> tuple[str, str]:
    assert main(["bench", "serve", *arguments]) == code, out.readouterr()
    stdout, stderr = out.readouterr()
    return stdout, stderr


SHORT = ("--api-key", "key", "--prompt-tokens", "uniform:20,40", "--tokens", "6", "--warmup", "1")


def test_a_closed_loop(url: str, capsys: Out, tmp_path: Path) -> None:
    picture = tmp_path / "load.svg"
    slo = ("--slo", "tpot=60", "--slo", "ttft=0.0000001")
    load = ("--clients", "1,3", "--requests", "6", "--plot", str(picture), *slo)
    stdout, _ = bench(capsys, 0, f"{url}/v1/", *SHORT, *load, "--json")
    document = json.loads(stdout)
    one, three = document["loads"]
    assert (one["load"], three["load"]) == ("1 client", "3 clients")
    for actual in (one, three):
        assert (actual["requests"], actual["failed"], actual["errors"]) == (6, 0, {})
        assert actual["answer_tokens"] == 36, "ignore_eos makes answers as long as they were ordered"
        assert 15 < actual["prompt_tokens_mean"] < 50, "words were counted in tokens first"
        assert (
            0 < actual["ttft"]["p50"] <= actual["ttft"]["p90"] <= actual["ttft"]["max"] < actual["e2e"]["max"]
        )
        # An engine this fast may send six tokens at once.
        tpot, itl = actual["tpot"], actual["itl"]
        assert (tpot is None) == (itl is None)
        assert tpot is None or tpot["mean"] <= itl["mean"] + 2e-6, "both are rounded to microseconds"
        assert actual["goodput_per_second"] == 0, "no answer begins after 100 ns"
        assert 0 < actual["generator"]["cpu_share"] < 1
    assert three["e2e"]["mean"] < actual["seconds"] <= 6 * three["e2e"]["max"]
    ET.parse(picture)
    assert "3 clients" in picture.read_text()


def test_an_open_loop_does_not_wait_for_answers(
    url: str, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that an open-loop load sends requests without waiting for answers: here no request reaches the
    server before all of them have begun."""
    ask, begun = generator._ask, 0

    async def together(*arguments: Any) -> Any:
        nonlocal begun
        begun += 1
        async with asyncio.timeout(shared.WAIT):
            while begun < 8:
                await asyncio.sleep(0.001)
        return await ask(*arguments)

    monkeypatch.setattr(generator, "_ask", together)
    load = ("--rate", "40", "--arrivals", "constant", "--requests", "8", "--chat", "--slo", "e2e=600")
    stdout, _ = bench(capsys, 0, url, *SHORT, *load, "--warmup", "0")
    _, *lines = stdout.splitlines()
    table = dict(line.rsplit(maxsplit=1) for line in lines)
    assert (table["requests"], table["failed"]) == ("8", "0")
    assert table["goodput/s"] == table["requests/s"]
    assert float(table["generator late, s"]) >= 0


def test_the_seconds_of_a_load(url: str, capsys: Out) -> None:
    """Checks the option `--seconds` of a load: requests begin until the time has passed. Without the option
    neither of these loads would end."""
    for load in (("--clients", "2"), ("--rate", "20", "--arrivals", "constant")):
        stdout, _ = bench(capsys, 0, url, *SHORT, *load, "--seconds", "0.32", "--json")
        (actual,) = json.loads(stdout)["loads"]
        assert actual["failed"] == 0 < actual["requests"]
        if "--rate" in load:
            assert actual["requests"] == 7


def test_prompts_of_token_ids(url: str, capsys: Out) -> None:
    exact = ("--prompt-tokens", "33", "--token-ids", "300", "--requests", "2", "--json")
    (actual,) = json.loads(bench(capsys, 0, url, *SHORT, *exact)[0])["loads"]
    assert actual["prompt_tokens_mean"] == 33


def test_a_server_that_wants_a_key(url: str, capsys: Out) -> None:
    assert main(["bench", "serve", url]) == 1
    stderr = capsys.readouterr().err
    assert "/v1/models answered with status 401: " in stderr
    assert "this server needs a key" in stderr
    assert stderr.count("\n") == 1


def test_failures_are_counted_and_told(url: str, capsys: Out) -> None:
    """Checks that failed requests are counted and reported by kind of error: some prompts are longer than the
    context, so that the server refuses them."""
    long = ("--prompt-tokens", "uniform:10,1100", "--requests", "12", "--warmup", "0", "--json")
    stdout, stderr = bench(capsys, 0, url, "--api-key", "key", "--tokens", "2", *long)
    (actual,) = json.loads(stdout)["loads"]
    assert actual["errors"] == {"http 400": actual["failed"]}
    assert 0 < actual["failed"] < 12
    assert f"1 client: {actual['failed']} x http 400: the prompt has " in stderr
    assert stderr.count("\n") == 1


@contextmanager
def scripted(answers: Sequence[bytes | None]) -> Iterator[str]:
    """Yields the URL of a server that sends one of `answers`, the raw bytes of an HTTP response, to each
    connection and closes it: in order, the last one again and again. None: it sends nothing and closes after
    1.5 seconds."""
    turn = iter(answers)

    class Talk(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while line := self.rfile.readline().strip():
                if line.startswith(b"Content-Length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            answer = next(turn, answers[-1])
            if answer is None:
                time.sleep(1.5)
            with contextlib.suppress(OSError):
                self.wfile.write(answer or b"")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def plain(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def stream(*documents: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(document)}\r\n\r\n" for document in documents]
    return b"HTTP/1.1 200 OK\r\n\r\n" + "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def patience(answer: bytes | None) -> str:
    """Returns the value of the benchmark's option --timeout, in seconds: 1 if the simulated server never
    answers (`answer` is None), otherwise 60, because a busy machine is slow."""
    return "1.0" if answer is None else "60"


MODELS = plain(b'{"data": [{"id": "m"}]}')
SAID = {"choices": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (plain(b'{"error": {"message": "full"}}', "503 Busy"), "http 503: full"),
        (plain(b"<html>oops\n</html>", "502 Bad Gateway"), "http 502: <html>oops"),
        (stream(SAID, done=False), "cut"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nshort", "cut: 127.0.0.1:"),
        (plain(b"")[:-6], "cut: 127.0.0.1:"),
        (b"", "cut: 127.0.0.1:"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "malformed: 127.0.0.1:"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {]\n\n", "malformed: an event is not JSON"),
        (stream([1]), "malformed: an event is not an object"),
        (stream(SAID, {"error": {"message": "the model has failed"}}), "stream: the model has failed"),
        (None, "timeout"),
    ],
)
def test_bad_servers(answer: bytes | None, error: str, capsys: Out) -> None:
    with scripted([MODELS, answer]) as url:
        options = ("--token-ids", "9", "--warmup", "0", "--requests", "2", "--timeout", patience(answer))
        stdout, stderr = bench(capsys, 1, url, *options)
    assert ["failed", "2"] in [line.split() for line in stdout.splitlines()]
    assert f"1 client: 2 x {error}" in stderr


def test_a_server_that_counts_nothing(capsys: Out) -> None:
    """Checks a server that reports no usage: each piece of text then counts as one token of the answer, and
    the number of prompt tokens is unknown."""
    answers = [MODELS, plain(b"{}"), stream({"choices": [{"text": ""}]}, SAID, SAID, SAID)]
    with scripted(answers) as url:
        stdout, _ = bench(capsys, 0, url, "--warmup", "0", "--requests", "1", "--json")
    (actual,) = json.loads(stdout)["loads"]
    assert (actual["answer_tokens"], actual["prompt_tokens_mean"]) == (3, None)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (
            [plain(b"no")],
            "/v1/models must answer with a JSON object; is it a server of the OpenAI API? Found: no",
        ),
        ([plain(b"{}", "404 Not Found")], "/v1/models answered with status 404: {}"),
        ([None], "/v1/models has not answered after 1 s; raise --timeout"),
        ([MODELS, plain(b"ignore_eos?", "400 Bad")], "/v1/completions answered with status 400: ignore_eos?"),
    ],
)
def test_servers_that_cannot_be_measured(answers: Sequence[bytes | None], sentence: str, capsys: Out) -> None:
    with scripted(answers) as url:
        _, stderr = bench(capsys, 1, url, "--timeout", patience(answers[-1]))
    assert sentence in stderr
    assert stderr.count("\n") == 1


def test_nobody_there(capsys: Out) -> None:
    with scripted([MODELS]) as url:
        pass
    assert "cannot be reached: " in bench(capsys, 1, url)[1]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("serve", "the server's URL is missing"),
        ("serve localhost:8000", "'localhost:8000' is not a URL such as http://127.0.0.1:8000"),
        ("serve http://h:x", "'http://h:x' is not a URL"),
        ("serve http://h --clients 0", "--clients takes whole numbers from 1 to 10000, such as 1,4,16"),
        ("serve http://h --clients 1.5", "--clients takes whole numbers"),
        ("serve http://h --rate x", "--rate takes numbers from 0.001 to 100000"),
        (
            "serve http://h --rate 1 --clients 1",
            "--clients is a closed loop, --rate an open one: choose one of them",
        ),
        (
            "serve http://h --arrivals constant",
            "--arrivals applies to --rate only: add --rate, or leave --arrivals out",
        ),
        ("serve http://h --chat --token-ids 9", "messages of --chat are text, --token-ids are none"),
        ("serve http://h --slo ttft", "--slo ttft: write NAME=SECONDS, with one of ttft, tpot, e2e"),
        ("serve http://h --slo itl=1", "--slo itl=1: write NAME=SECONDS"),
        ("serve http://h --plot nowhere/x.svg", "nowhere/x.svg: cannot be written: No such file"),
        ("serve http://h --seconds -1", "--seconds: must be a number of seconds, found '-1'"),
        ("serve http://h --warmup x", "--warmup: must be a whole number of at least 0, found 'x'"),
        ("serve http://h --api-key a\x07", "the key has characters that no header can have"),
        ("bundle http://h", "write mlcbuild bench serve URL, or mlcbuild bench BUNDLE"),
        ("bundle --clients 4", "--clients applies to bench serve: leave it out to measure a bundle"),
        ("bundle --token-ids 9", "--token-ids applies to bench serve"),
        ("bundle --slo ttft=1", "--slo applies to bench serve"),
        ("bundle --no-ignore-eos", "--no-ignore-eos applies to bench serve"),
        ("bundle --api-key k", "--api-key applies to bench serve"),
        ("bundle --warmup 3", "--warmup applies to bench serve"),
        ("bundle --timeout 300", "--timeout applies to bench serve"),
        ("bundle --seed 0", "--seed applies to bench serve"),
        ("serve http://h --threads 2", "--threads applies to a bundle: set it where the server starts"),
        (
            "bundle --tokens uniform:1,2",
            "--prompt-tokens and --tokens must be single numbers when a bundle is measured",
        ),
    ],
)
def test_wrong_usage(command: str, sentence: str, capsys: Out) -> None:
    assert main(["bench", *command.split(" ")]) == 2
    stdout, stderr = capsys.readouterr()
    assert not stdout
    assert sentence in stderr.splitlines()[-1]


def test_the_speed_of_a_bundle(tiny_bundles: Path, capsys: Out) -> None:
    bundle = str(tiny_bundles / "dist" / "tiny-q4a8_1-host")
    start = time.monotonic()
    short = ("--prompt-tokens", "20", "--tokens", "4", "--threads", "1")
    assert main(["bench", bundle, *short, "--json"]) == 0
    wall = time.monotonic() - start
    document = json.loads(capsys.readouterr().out)
    assert document["threads"] == 1
    for name, tokens in (("prefill", 20), ("decode 1", 4), ("decode 8", 32)):
        figure = document[name]
        assert figure["tokens"] == tokens
        assert figure["slowest"] <= figure["tokens_per_second"] <= figure["fastest"]
        assert tokens / figure["slowest"] < wall
    assert main(["bench", bundle, *short]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["prefill", "decode", "decode"]


def test_a_bundle_that_cannot_be_measured(tiny_bundles: Path, tmp_path: Path, capsys: Out) -> None:
    assert main(["bench", str(tmp_path)]) == 1
    assert "there is no bundle.json in it" in capsys.readouterr().err
    assert main(["bench", str(tiny_bundles / "dist" / "tiny-q4a8_1-host"), "--tokens", "500"]) == 2
    assert "do not fit the bundle's context of 512" in capsys.readouterr().err


ON_THE_FRONT_PAGE = ("cpu", "serve", "accuracy", "weights", "build")


@pytest.mark.parametrize(
    "script",
    sorted(path.name for path in (ROOT / "ci" / "bench").iterdir() if path.is_file() and not path.suffix),
)
def test_the_scripts_for_long_measurements_start(script: str) -> None:
    """Checks that each script for long measurements, which people run by hand, can be imported and prints its
    help, and that the scripts whose results the project's front page shows have the option --json."""
    command = [sys.executable, str(ROOT / "ci" / "bench" / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert result.stdout.startswith("usage: ")
    assert script not in ON_THE_FRONT_PAGE or "--json DIR" in result.stdout
