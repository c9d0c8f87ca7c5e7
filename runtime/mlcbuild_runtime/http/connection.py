"""Handles HTTP over one connection: limits what a client may send, how fast, and how much of it is stored.

The parser receives bytes only up to the end of one request. Later bytes, at most a buffer of them, wait
unparsed, and nothing more is read until that request is answered. All connections receive into one buffer:
asyncio would allocate a new block of 256 KiB each time, which fragments the heap (the process grew by a tenth
over some 50,000 requests).
"""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio import BufferedProtocol
from typing import Any

import httptools
from mlcbuild_format.errors import RequestError
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mlcbuild_runtime.http.host_field import head_fault
from mlcbuild_runtime.http.request_input import HEAD_BYTES, HEAD_FIELDS, RequestInput
from mlcbuild_runtime.openai.chat_documents import error_document

HEAD_SECONDS, IDLE_SECONDS = 20.0, 75.0
"""HEAD_SECONDS is the maximum number of seconds for receiving a whole request head, counted from its first
byte or the connection's start; IDLE_SECONDS is the maximum between two requests. The connection is then
closed, with an error (408) if a part of a head has arrived."""
WRITE_SECONDS = 120.0
"""Maximum seconds for which a client may leave the server's write buffer full because it reads its answer
slowly or not at all, and for sending the rest of the last answer; then the connection is closed."""
LINGER_BYTES, LINGER_SECONDS = 1 << 20, 2.0
"""Maximum bytes and seconds of input that is still received and discarded after the last answer, if the
client may be sending: closing at once would reset the connection, and the client might lose the answer."""
SENDING_SECONDS = 0.05
"""Seconds between two checks whether the last answer has been passed to the operating system completely,
while the client reads slowly."""

_BUFFER = memoryview(bytearray(1 << 14))
"""The buffer of 16 KiB into which all connections receive. Its size limits how much is parsed for one client
before the next one: it takes 1 to 2 ms in the worst case, a body in chunks of one byte. It is used only
between a call of `get_buffer` and the following `buffer_updated`, which an event loop never interleaves, and
a process has one server."""
_BEGINNING = b"HTTP/1.1 "
"""The first bytes of every HTTP/1.1 response, which are the same for every status."""


class _Outlet(asyncio.Transport):
    """The transport that uvicorn writes to: it passes everything to the socket's transport, except `close`,
    which lets the connection decide when to close."""

    def __init__(self, wire: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._wire, self._connection, self._begun = wire, connection, False

    def begin(self) -> None:
        """Sends "HTTP/1.1 ", the first bytes of every HTTP answer, before the status of the answer is known:
        a client that has disconnected then resets the connection. The answer is later sent without these
        bytes."""
        if not self._begun:
            self._begun = True
            self._wire.write(_BEGINNING)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._wire.is_closing():  # asyncio would log a warning for each event that a stream still writes.
            return
        if self._begun:
            self._begun, data = False, bytes(data).removeprefix(_BEGINNING)
        self._wire.write(data)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.ended or self._wire.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._wire.resume_reading()


class _Flow(FlowControl):
    """Flow control of a connection's input. While `held` is True, from `hold` to `release`, reading is paused
    and calls of uvicorn to resume it are ignored; `release` resumes it."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()

    def hold(self) -> None:
        self.pause_reading()
        self.held = True

    def release(self) -> None:
        self.held = False
        self.resume_reading()


class Connection(HttpToolsProtocol, BufferedProtocol):
    ended = False
    """True once the connection accepts no more requests, because its last answer has ended or it is lost;
    further input is then discarded."""
    idle_since = 0.0
    """Value of the event loop's clock, in seconds, when the connection's last request ended or the connection
    began.
    """
    _wire: asyncio.Transport
    _outlet: _Outlet
    flow: _Flow
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _input: RequestInput
    _half_closed = _keeps_alive = False
    _drained = 0
    _refusal: RequestError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire, self._outlet, self._input = transport, _Outlet(transport, self), RequestInput()
        super().connection_made(self._outlet)
        self.flow = _Flow(self._outlet)
        self._rest(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._set_timer(None)
        self.resume_writing()
        super().connection_lost(exc)

    # Input

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended:
            self._drained += nbytes
            if self._drained > LINGER_BYTES:
                self._wire.abort()
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self._set_timer(HEAD_SECONDS)
        self._input.receive(bytes(_BUFFER[:nbytes]))
        self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn closes at once
        """Handles the end of a client's data; returns True to keep the connection open if a request waits for
        its answer, since the client may still read it. A client that has disconnected altogether looks the
        same until something is sent to it, so the answer's first bytes are sent. Returns False to close the
        connection if no request is running or its body is incomplete."""
        cycle = self._running
        if self.ended or cycle is None or cycle.more_body:
            return False
        self._half_closed = True
        if not cycle.response_started:
            self._outlet.begin()
            self._look_after(cycle, 0.01)
        return True

    def _look_after(self, cycle: RequestResponseCycle, delay: float) -> None:
        """Closes the connection if the client has reset it while a request runs, which the socket's error
        state shows; asyncio notices it only while it reads. Checks again after `delay` seconds, which double
        up to 1, until the answer is complete."""
        if self.ended or cycle.response_complete:
            return
        if self._wire.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._wire.abort()
            return
        self.loop.call_later(delay, self._look_after, cycle, min(2 * delay, 1.0))

    @property
    def _running(self) -> RequestResponseCycle | None:
        """Returns the request on the connection whose answer is not complete yet; None if there is none."""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _parse(self) -> None:
        while not (self.ended or self._input.is_parsed):
            cycle = self._running
            if cycle is not None and not cycle.more_body:
                self.flow.hold()
                return
            self._feed(self._input.take())
        if not self.ended:
            self._input.discard()
            self.flow.release()

    def _feed(self, part: bytes) -> None:
        if self._input.is_head_too_large:
            self._refuse(_too_large() if self._input.has_line else _too_long())
            return
        if not self._input.in_body:
            self._input.add_head(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
                self._refuse(RequestError("a request with a body cannot upgrade: leave out 'Upgrade'"))
        except httptools.HttpParserError as error:
            by_us = isinstance(error, httptools.HttpParserCallbackError)
            reason = "its target is not a path" if by_us else str(error)
            self._refuse(self._refusal or RequestError(f"this is not a valid HTTP request: {reason}"))
        if self._input.is_body_too_fragmented:
            self._refuse(_too_large())

    # Events of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._input.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._input.add_field():
            self._refusal = _too_large()
            raise ValueError
        if not self._input.in_body:  # Otherwise it is a trailer, which is ignored.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if fault := head_fault(self.url, self.headers, version, self._input.protocol):
            self._refusal = RequestError(fault)
            raise ValueError
        self._input.end_head(self.headers)
        self._set_timer(None)
        super().on_headers_complete()
        # If the answer precedes the end of the body, it is the connection's last: nobody reads the rest of
        # the body.
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._input.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        self._input.end()

    # Output

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_over:
            return
        self.idle_since = self.loop.time()
        if self._half_closed:
            self.end()
        elif not self._input.is_parsed:
            self._unset_keepalive_if_required()
            self._set_timer(HEAD_SECONDS)
            self.loop.call_soon(self._parse)

    @property
    def is_over(self) -> bool:
        return self.ended or self._wire.is_closing()

    @property
    def is_idle(self) -> bool:
        """Returns True if the connection is open and no request is running on it, so that it may be closed to
        make room."""
        return self._running is None and not self._wire.is_closing()

    def _refuse(self, error: RequestError) -> None:
        """Sends an error as the last answer and closes the connection, because its further input cannot be
        understood or is not wanted. A running request is cancelled; if its answer has begun, no error is
        sent."""
        if self.is_over:
            return
        cycle = self._running
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or not cycle.response_started:
            content = json.dumps(error_document(error)).encode()
            fields = [b"%s: %s" % field for field in self.server_state.default_headers]
            fields += [b"content-type: application/json", b"content-length: %d" % len(content)]
            head = b"\r\n".join([*fields, b"connection: close", b"", b""])
            self._outlet.write(STATUS_LINE[error.status] + head + content)
        self.end(unread=True)

    def end(self, unread: bool = False) -> None:
        """Closes the connection once everything is written, after 120 seconds at the latest. unread: True if
        the client may still be sending, which is also assumed after an incomplete request: its data is then
        received and discarded, and the connection is closed 2 seconds after this call, or after 1 MiB of
        data, at the latest, even if not everything is written."""
        if self.is_over:
            return
        self.ended = True
        unread |= not self._input.is_parsed or bool(self.cycle is not None and self.cycle.more_body)
        self._input.discard()
        self._unset_keepalive_if_required()
        self._set_timer(None)
        if unread and not self._half_closed:
            self.flow.release()
            self._timer = self.loop.call_later(LINGER_SECONDS, self._wire.abort)
            self._end_sending()
        else:
            self._wire.close()
            self._timer = self.loop.call_later(WRITE_SECONDS, self._wire.abort)

    def _end_sending(self) -> None:
        """Closes the sending half of the connection once everything is written, or the whole connection if
        the client has reset it. asyncio's `write_eof` is not used: after a reset it raises an exception in
        the event loop."""
        if self._wire.is_closing():
            return
        if self._wire.get_write_buffer_size():
            self.loop.call_later(SENDING_SECONDS, self._end_sending)
            return
        try:
            self._wire.get_extra_info("socket").shutdown(socket.SHUT_WR)
        except OSError:
            self._wire.abort()

    def shutdown(self) -> None:
        if self._running is None:
            self._wire.close()
        else:
            self._keeps_alive = False
            super().shutdown()

    def drop(self) -> None:
        """Closes the connection at once, to make room for another one; what is not sent yet is dropped."""
        self._wire.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self._wire.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Timers

    def _rest(self, seconds: float) -> None:
        self.idle_since = self.loop.time()
        self._set_timer(seconds)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """Closes the connection because the time limit for a request head, or between two requests, has
        passed; the client gets an error (408) if a part of a head has arrived."""
        if self._input.framing:
            text = f"the request's head did not arrive completely within {HEAD_SECONDS:g} s"
            self._refuse(RequestError(text, code="timeout", status=408))
        else:
            self._wire.close()


def _too_large() -> RequestError:
    return RequestError(
        f"a request may have {HEAD_FIELDS} header fields and {HEAD_BYTES} bytes of them: send fewer",
        code="header_too_large",
        status=431,
    )


def _too_long() -> RequestError:
    text = f"the request line has more than {HEAD_BYTES} bytes: move long values into the body"
    return RequestError(text, code="uri_too_long", status=414)
