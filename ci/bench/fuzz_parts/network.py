"""Fuzzing targets that send mutated HTTP requests and JSON bodies to a server and check its answers."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from fuzz_parts.mutate import ODD_TEXTS, Json, dumped, mutated_bytes, mutated_json

from tests.runtime import shared, toy

PATIENCE = 40.0
"""Seconds that a client waits for the next bytes from the server; then the answer counts as missing."""


class Served:
    """Starts a server of a toy model for fuzzing. After mutated requests, `well` sends it a valid request
    from time to time and returns a reason if the answer is not the same as at the start."""

    def __init__(self, place: Path) -> None:
        if not (place / "toy").exists():
            toy.write(place / "toy")
        self.stack = ExitStack()
        self.server = self.stack.enter_context(shared.serving(place / "toy"))
        host, _, port = self.server.url.removeprefix("http://").rpartition(":")
        self.address = host, int(port)
        self.text = self._honest()
        self.start, self.cases = self._resident(), 0

    def close(self) -> None:
        self.stack.close()

    def _resident(self) -> int:
        """Returns the server's resident memory in bytes; 0 if the system does not report it."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.server.process.pid}/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        return 0

    def _honest(self) -> object:
        return self._post("/v1/completions", b'{"prompt": [5, 6], "max_tokens": 8}')[1]["choices"][0]["text"]

    def _post(self, path: str, body: bytes) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        kind = answer.getheader("Content-Type", "")
        return answer.status, json.loads(data) if kind.startswith("application/json") else data

    def well(self) -> str | None:
        """Returns the reason why the server no longer works as before the attack: it has ended, does not
        answer an honest client as before, or has grown by more than 512 MiB. None if it works. Each call
        counts as one case; answers and memory are checked only at every 20th."""
        if self.server.process.poll() is not None:
            return f"the server has ended with {self.server.process.returncode}"
        self.cases += 1
        if self.cases % 20:
            return None
        try:
            if self._honest() != self.text:
                return "an honest client gets another answer"
        except (OSError, http.client.HTTPException) as error:
            return f"an honest client gets no answer: {type(error).__name__}: {error}"
        if self._resident() > self.start + (512 << 20):
            return f"the server grew from {self.start >> 20} to {self._resident() >> 20} MiB"
        return None


class Requests(Served):
    """A fuzzing target: sends a server mutated HTTP requests, and checks that it answers with HTTP, never
    with a status of 500 or more other than 501, 503 and 505, and still works afterwards. A case is all bytes
    that a client sends on one connection."""

    BODY = b'{"prompt": [5], "max_tokens": 2}'
    WHOLE = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(BODY), BODY),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b"10\r\n%s\r\n10\r\n%s\r\n0\r\n\r\n" % (BODY[:16], BODY[16:]),
        b"GET /v1/models?a=%20b HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nAuthorization: Bearer x\r\n\r\n"
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nExpect: 100-continue\r\n"
        b"Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n",
        b"DELETE /v1/responses/resp_1 HTTP/1.0\r\nHost: x\r\n\r\n",
    )
    WORDS = (
        *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b": ", b" ", b"\t", b"\x00", b"\xff", b"HTTP/1.1", b"HTTP/2.0"),
        *(
            b"Content-Length: 5\r\n",
            b"Content-Length: -1\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"ffffffffffffffff",
        ),
        *(
            b"Host: a\r\nHost: b\r\n",
            b"Upgrade: websocket\r\n",
            b"Expect: x\r\n",
            b"%00",
            b"%zz",
            b"/../..",
            b"//",
        ),
        *(
            b"a: " + b"b" * 9000 + b"\r\n",
            b"x: y\r\n" * 200,
            b"CONNECT ",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ),
    )

    def make(self, random: Random) -> bytes:
        whole = random.choice(self.WHOLE)
        return mutated_bytes(random, whole, self.WORDS)

    def check(self, case: bytes) -> str | None:
        answer = b""
        with (
            suppress(ConnectionError),
            socket.create_connection(self.address, timeout=PATIENCE) as connection,
        ):
            connection.sendall(case)
            connection.settimeout(0.05)  # An incomplete request is never answered, so waiting is useless.
            with suppress(TimeoutError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]
        if bad := [status for status in statuses if status >= 500 and status not in (501, 503, 505)]:
            return f"status {bad[0]}: {answer[-200:]!r}"
        if answer and not answer.startswith(b"HTTP/1."):
            return f"an answer that is not HTTP: {answer[:100]!r}"
        return self.well()


LARGEST_BODY = 8 << 20
"""Largest body in bytes that the server accepts by default."""


class Bodies(Served):
    """A fuzzing target: sends a server requests with mutated JSON bodies, and checks that each has a complete
    answer, never with a status of 500 or more other than 501 and 503, that errors have a message, and that
    the server still works afterwards. A case is the path of the request, a line break, and the body."""

    TOOL: ClassVar[Json] = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    MESSAGES: ClassVar[Json] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    BLOCKS: ClassVar[Json] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "b"}]},
    ]
    CALLS: ClassVar[Json] = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "a", "tool_name": "f"},
    ]
    COMMON: ClassVar[Json] = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "stream": False}
    SEEDS: ClassVar[tuple[tuple[str, Json], ...]] = (
        (
            "/v1/completions",
            {"prompt": [5, 6], "max_tokens": 3, "n": 2, "logprobs": 1, "echo": True, **COMMON},
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 3, "logit_bias": {"5": 1}, "min_p": 0.1, "top_k": 3},
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 9, "response_format": {"type": "regex", "regex": "[a-c]{2}"}},
        ),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 3, "tools": [TOOL], "tool_choice": "auto", **COMMON},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "max_completion_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "chat_template_kwargs": {"a": 1},
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
                    },
                },
            },
        ),
        (
            "/v1/responses",
            {
                "input": MESSAGES,
                "max_output_tokens": 3,
                "metadata": {"a": "b"},
                "instructions": "c",
                "store": True,
            },
        ),
        (
            "/v1/messages",
            {"max_tokens": 3, "messages": BLOCKS, "system": "a", "stop_sequences": ["x"], "stream": True},
        ),
        ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": [{"name": "f", "input_schema": {}}]}),
        (
            "/api/chat",
            {
                "messages": CALLS,
                "tools": [TOOL],
                "options": {"num_predict": 3, "stop": ["x"]},
                "think": False,
            },
        ),
        ("/api/generate", {"prompt": "a", "raw": True, "format": "json", "options": {"num_predict": 3}}),
        ("/api/embed", {"input": ["a", "b"], "truncate": True, "dimensions": 2}),
        ("/completion", {"prompt": ["a", [5]], "n_predict": 3, "json_schema": {"type": "null"}}),
        ("/apply-template", {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}),
        ("/v1/embeddings", {"input": ["a", [5, 6]], "encoding_format": "float"}),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    )

    ENDS = (b"data: [DONE]", b'"error"', b"response.", b"message_stop", b'"stop":true')
    """The ends of a stream: each complete answer to a streaming request contains at least one of these byte
    strings."""

    def make(self, random: Random) -> bytes:
        path, document = random.choice(self.SEEDS)
        if random.random() < 0.9:
            body = dumped(mutated_json(random, document))
        else:
            words = tuple(text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS)
            body = mutated_bytes(random, json.dumps(document).encode(), words)
        return path.encode() + b"\n" + body

    def check(self, case: bytes) -> str | None:
        path, _, body = case.partition(b"\n")
        begun = time.monotonic()
        try:
            status, answer = self._post(path.decode(), body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, ConnectionError) and len(body) > LARGEST_BODY:
                return self.well()  # The request was refused before it was sent completely.
            return f"no whole answer in {time.monotonic() - begun:.0f} s: {type(error).__name__}: {error}"
        if status >= 500 and status not in (501, 503):
            return f"status {status}: {str(answer)[:300]}"
        if isinstance(answer, bytes) and answer.startswith(b"data: "):
            ended = any(mark in answer for mark in self.ENDS)
            return self.well() if ended else f"a stream without an end: {answer[-200:]!r}"
        error = answer.get("error") if isinstance(answer, dict) else None  # Ollama's is a text.
        if status >= 400 and not (error.get("message") if isinstance(error, dict) else error):
            return f"status {status} without a message: {str(answer)[:300]}"
        return self.well()
