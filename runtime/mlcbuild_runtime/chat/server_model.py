"""Lets a chat use a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Self
from urllib.parse import urlsplit

from mlcbuild_format.errors import RequestError, ServingError, SetupError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.chat.chat_model import AnswerPart, Speed

TIMEOUT = 600.0
"""Seconds without a byte after which a request to a server fails. A long prompt can take minutes."""
_LARGEST = 16 << 20
"""Maximum size in bytes of a server's answer that is read as a whole, and of one line of a stream; a longer
one raises SetupError."""
_INTERIM = 10
"""Maximum number of interim responses (100 Continue) before the answer to one request. A server that sends
more raises SetupError."""


class _Response(HTTPResponse):
    """An HTTP response that raises BadStatusLine if too many interim responses (100 Continue) come before it:
    http.client would read them without end."""

    _interim = 0

    def _read_status(self) -> tuple[str, int, str]:
        if self._interim > _INTERIM:
            raise BadStatusLine("it sends interim responses without end")
        self._interim += 1
        status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
        return status


class ServerModel:
    """Answers the messages of a chat with a model behind an OpenAI-compatible HTTP server. Every request uses
    a new connection."""

    def __init__(self, url: str, key: str | None, name: str) -> None:
        self.url, self.name = url, name
        self._key = key
        self.speed = Speed()

    @classmethod
    def connect(cls, url: str, key: str | None = None, name: str | None = None) -> Self:
        """Returns an object through which a chat uses a model of the server at `url`, with or without /v1 at
        its end. key: the API key, or None; name: the name of the model, or None for the first model that the
        server lists. With a name, nothing is sent or checked. Without one, the list is requested: raises
        SetupError if the server cannot be reached or sends no JSON object, RequestError if it refuses or
        lists no model, or if `url` or the key is malformed."""
        url = url.rstrip("/").removesuffix("/v1")
        if name is not None:
            return cls(url, key, name)
        listed = cls(url, key, "")._document("/v1/models").get("data")
        names = (
            [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        )
        if not names or not isinstance(names[0], str):
            raise RequestError(f"{url} lists no model: name one with --model")
        return cls(url, key, names[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Does nothing at the end of the `with` block of a chat: no connection to the model's server is open
        between two requests."""

    @property
    def greeting(self) -> str:
        return ""

    def check(self, messages: list[Json], settings: Mapping[str, Json]) -> None:
        """Accepts any settings of a chat, such as the temperature, without a check: the model's server checks
        them when a request is sent, and refuses invalid ones then."""

    def answer(self, messages: list[Json], settings: Mapping[str, Json]) -> Generator[AnswerPart, None, None]:
        body: dict[str, Json] = {**settings, "model": self.name, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        self.speed = Speed()
        connection = self._connection()
        with closing(connection):
            response = self._send(connection, "POST", "/v1/chat/completions", body)
            try:
                with response:
                    yield from self._pieces(response)
            except (OSError, HTTPException, ValueError) as error:
                raise SetupError(f"{self.url}: the answer broke off: {_reason(error)}") from None

    def _pieces(self, response: HTTPResponse) -> Generator[AnswerPart, None, None]:
        """Yields the reasoning and the text of an answer in parts, as they arrive in a server's response, a
        stream of server-sent events. A stream that closes without its end mark, [DONE], ends the answer
        without an error. Raises SetupError if the response is no such stream, RequestError if an event states
        an error, OSError or HTTPException if the connection breaks."""
        has_event = False
        while line := response.readline(_LARGEST + 1):
            if len(line) > _LARGEST:
                raise SetupError(
                    f"{self.url} sends a line of more than {_LARGEST} bytes: is it a model's server?"
                )
            if not line.startswith(b"data:"):
                continue
            data, has_event = line.removeprefix(b"data:").strip(), True
            if data == b"[DONE]":
                return
            match document := _parsed(data):
                case {"error": error}:
                    raise RequestError(_message(error))
                case {"choices": [{"delta": dict(delta)}, *_]}:
                    yield from _parts(delta)
            self._count(document)
        if not has_event:
            raise SetupError(f"{self.url} answers without an event: is it an OpenAI-compatible server?")

    def _count(self, document: Mapping[str, Json]) -> None:
        """Updates the token counts and times of a server's answer from the fields `usage` and `timings` of
        `document`, a JSON object that the server sent. If one of the fields is absent or no object, the
        numbers that it would state stay as they are. A number that is missing within a field becomes 0
        (tokens) or None (seconds)."""
        usage, timings = document.get("usage"), document.get("timings")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.speed = replace(
                self.speed,
                prompt_tokens=_whole(usage.get("prompt_tokens")),
                cached_tokens=_whole(details.get("cached_tokens")) if isinstance(details, dict) else 0,
                answer_tokens=_whole(usage.get("completion_tokens")),
            )
        if isinstance(timings, dict):
            self.speed = replace(
                self.speed,
                prompt_seconds=_seconds(timings.get("prompt_ms")),
                answer_seconds=_seconds(timings.get("predicted_ms")),
            )

    def metrics(self) -> Mapping[str, object]:
        return dict(self._document("/health"))

    def _document(self, path: str) -> Mapping[str, Json]:
        """Returns the JSON object that the server sends for a GET request of `path`, which is appended to the
        path of the server's URL. Raises SetupError if the server cannot be reached or sends anything else or
        more than 16 MiB, RequestError if the server's status is not 200, or the address or the API key is
        malformed."""
        connection = self._connection()
        with closing(connection):
            response = self._send(connection, "GET", path, None)
            try:
                with response:
                    return _parsed(response.read(_LARGEST))
            except (OSError, HTTPException) as error:
                raise SetupError(f"{self.url}: the answer broke off: {_reason(error)}") from None

    def _connection(self) -> HTTPConnection:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise RequestError(f"'{self.url}' is not the address of a server") from None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: HTTPConnection = HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
        else:
            connection = HTTPConnection(host, port, timeout=TIMEOUT)
        connection.response_class = _Response
        return connection

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: Mapping[str, Json] | None
    ) -> HTTPResponse:
        """Sends an HTTP request to the server of a chat and returns its response. path: appended to the path
        of the server's URL; body: sent as JSON, None for a request without one. Raises SetupError if the
        server cannot be reached, RequestError for any status but 200, and for a key or an address that cannot
        be sent."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, urlsplit(self.url).path + path, data, headers)
            response = connection.getresponse()
            text = b""
            if response.status != 200:
                with response:
                    text = response.read(_LARGEST)
        except (OSError, HTTPException) as error:
            raise SetupError(f"{self.url} cannot be reached: {_reason(error)}") from None
        except ValueError:
            raise self._unsendable() from None
        if response.status == 401:
            raise RequestError(f"{self.url} requires a key: pass --api-key, or set MLCBUILD_API_KEY")
        if response.status != 200:
            raise RequestError(f"{self.url} answers {response.status}: {_refusal(text)}")
        return response

    def _unsendable(self) -> RequestError:
        """Returns the error for a request that http.client refuses to send, because of the key or the
        address."""
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            return RequestError(
                "the API key has a line break or a letter outside of ASCII, which a request cannot carry:"
                " correct --api-key or MLCBUILD_API_KEY"
            )
        return RequestError(f"'{self.url}' is not the address of a server")


def _parts(delta: Mapping[str, Json]) -> Generator[AnswerPart, None, None]:
    """Yields the parts of an answer in a delta, the change of the message that an event of a stream states:
    the reasoning, then the text. Servers name the reasoning `reasoning_content` or `reasoning`; if both are
    present, only the first is used."""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    for text, is_reasoning in ((reasoning, True), (delta.get("content"), False)):
        if isinstance(text, str) and text:
            yield AnswerPart(text.encode(errors="replace").decode(), is_reasoning)  # no unpaired surrogates


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _parsed(data: bytes) -> Mapping[str, Json]:
    """Returns the JSON object that a server sent as bytes. Raises SetupError for anything else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise SetupError("the server's answer is not a JSON object: is this an OpenAI-compatible server?")
    return document


def _refusal(data: bytes) -> str:
    """Returns the error message in the JSON object that a server sent with an error status; its field `error`
    as JSON if that holds no message; the first 200 bytes as text if they are no JSON object with that
    field."""
    with suppress(ServingError):
        error = _parsed(data).get("error")
        if error is not None:
            return _message(error)
    return data[:200].decode(errors="replace").strip() or "nothing more"


def _message(error: Json) -> str:
    match error:
        case {"message": str(text)} | str(text):
            return text
    return json.dumps(error)


def _whole(value: Json | None) -> int:
    return value if isinstance(value, int) else 0


def _seconds(value: Json | None) -> float | None:
    """Returns milliseconds converted to seconds; None for anything but a number."""
    return value / 1000 if isinstance(value, int | float) else None
