"""Divides the bytes received on a connection into HTTP requests, and holds those that are not parsed yet.

The parser is fed up to the end of one request, so that the next one waits unparsed. Where a request ends
shows only in its bytes: an empty line ends its head and a chunked body, and a body with a Content-Length ends
after as many bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

HEAD_BYTES, HEAD_FIELDS = 64 << 10, 100
"""HEAD_BYTES is the maximum number of bytes of an HTTP request's head, and HEAD_FIELDS the maximum number of
its header fields. A chunked body may have at most HEAD_FIELDS trailers, and with its chunk sizes, line ends
and trailers at most HEAD_BYTES plus 8 bytes for each byte of content. A request beyond that is refused (431,
or 414 for a long request line)."""

_END = re.compile(rb"\n\r?\n")
"""Regular expression that matches the end of a request's head or of a chunked body. The data of a chunk may
match, too: the parser then merely gets the body in more parts."""
_LINE_END = len(b" HTTP/1.1\r\n")
"""Number of bytes that are kept of the end of a request line: enough for its protocol with the version, such
as "HTTP/1.1", and the line break."""


class RequestInput:
    """Divides the bytes that arrive on one connection into HTTP requests, so that the parser gets one request
    at a time."""

    def __init__(self) -> None:
        self.in_body = False
        """True while the body of an HTTP request is being read: from the end of the request's head to the end
        of the request."""
        self.has_line = False
        """True once the first line of the HTTP request has arrived completely."""
        self._line_end = b""
        """The last bytes, at most _LINE_END (11), of the HTTP request's first line, as far as it has arrived,
        with its line break. The property `protocol` reads the HTTP version from them."""
        self.framing = 0
        """Number of bytes passed to the parser so far of the request's head or, after it, of a chunked body,
        with its content, chunk sizes, line ends and trailers."""
        self._ahead, self._at = b"", 0
        """The received bytes of the connection (`_ahead`), and the index among them of the first byte that
        has not been parsed (`_at`)."""
        self._tail = b""
        """The last two bytes that were parsed, where a blank line may end the head or the body of a request:
        with the next bytes they show a blank line that arrives in two parts. Bytes of a body with a
        Content-Length are not included."""
        self._payload = self._fields = 0
        """Two counts of the HTTP request that is being read: bytes of its body's content so far, and header
        fields so far or, in its body, trailers."""
        self._left = 0
        """Number of bytes of a request body with a Content-Length that have not been passed to the parser
        yet; 0 for any other body, and while the head is read."""

    def receive(self, data: bytes) -> None:
        """Appends received bytes to the buffer of bytes that are not parsed yet."""
        self._ahead, self._at = self._ahead[self._at :] + data, 0

    def discard(self) -> None:
        """Drops all received bytes that are not parsed yet."""
        self._ahead, self._at = b"", 0

    @property
    def is_parsed(self) -> bool:
        return self._at >= len(self._ahead)

    def take(self) -> bytes:
        """Returns the next received bytes that are not parsed yet, and counts them as parsed. While the head
        of an HTTP request is being parsed, they reach at most to the end of the head, and later at most to
        the end of the request; bytes after that are returned by a later call."""
        part = self._ahead[self._at : self._at + self._size()]
        self._at += len(part)
        if self._left:
            self._left -= len(part)
        else:
            self._tail = (self._tail + part[-2:])[-2:]
            self.framing += len(part)
        return part

    def _size(self) -> int:
        if self._left:
            return min(self._left, len(self._ahead) - self._at)
        seam = self._tail + self._ahead[self._at : self._at + 2]
        if (end := _END.search(seam)) and end.end() > len(self._tail):
            return end.end() - len(self._tail)
        end = _END.search(self._ahead, self._at)
        return (end.end() if end else len(self._ahead)) - self._at

    @property
    def is_head_too_large(self) -> bool:
        return not self.in_body and self.framing > HEAD_BYTES

    @property
    def is_body_too_fragmented(self) -> bool:
        # A chunk of one byte is framed by five bytes.
        return self.in_body and self.framing > HEAD_BYTES + 8 * self._payload

    # Events of the parser

    def begin(self) -> None:
        """Resets the counts of the HTTP request's header fields and of its body's bytes, when the parser has
        reached the first byte of the next request."""
        self.in_body, self._payload, self._fields, self._left = False, 0, 0, 0

    def add_head(self, part: bytes) -> None:
        """Reads the next part of the HTTP request's head: stores the end of the request line, from which
        `protocol` is read, and records when that line is complete. Empty lines before it, which the parser
        skips, are not part of it."""
        self.has_line |= b"\n" in part
        if not self._line_end.endswith(b"\n"):
            begun = self._line_end + part if self._line_end else part.lstrip(b"\r\n")
            line, line_break, _ = begun.partition(b"\n")
            self._line_end = (line + line_break)[-_LINE_END:]

    @property
    def protocol(self) -> str:
        """Returns the last word of the request line as text, such as "HTTP/1.1"; it is called once the line
        has arrived."""
        return self._line_end.rpartition(b" ")[2].strip().decode("latin-1")

    def add_field(self) -> bool:
        """Counts a header field or trailer of the HTTP request; returns False if there are more than 100."""
        self._fields += 1
        return self._fields <= HEAD_FIELDS

    def end_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Records that the head of the request is complete, and reads the length of the body from it: 0
        without a Content-Length, which the parser has checked. headers: the fields, as (name in lower case,
        value)."""
        self.in_body, self._tail = True, b""
        self.framing, self._fields = 0, 0
        self._left = next((int(value) for name, value in headers if name == b"content-length"), 0)

    def add_body(self, size: int) -> None:
        """Adds `size` to the number of content bytes of the request body that were received so far."""
        self._payload += size

    def end(self) -> None:
        """Records that the request, body included, is complete."""
        self.in_body = self.has_line = False
        self.framing, self._left, self._tail, self._line_end = 0, 0, b"", b""
