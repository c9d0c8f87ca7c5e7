"""A transport for HTTP: `GET`, `HEAD` and `PUT` of `<url>/ac/<64 hex>` and `<url>/cas/<64 hex>`.

This is the protocol of Bazel's HTTP cache, which any WebDAV server speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.auth import authorization, refusal
from mlcbuild.remotes.client import Client, Response, status_words
from mlcbuild.remotes.transport import TIMEOUT, Body, whole_number


class Http:
    """The transport for a remote cache on a web server. Creating it raises RemoteError for credentials in the
    environment or netrc, or a certificate file or a proxy in the environment, that cannot be used."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        self._client = Client(url, timeout)
        self._path = quote(parts.path.rstrip("/"), safe="/%")
        credentials = authorization(self._client.host)
        self._headers = {"Authorization": credentials} if credentials else {}

    def open(self, name: str, start: int = 0) -> Body | None:
        response = self._ask("GET", name, {"Range": f"bytes={start}-"} if start else {})
        if response.status == 416:  # The object is shorter than expected: it is read from the beginning.
            self._client.end(response)
            response = self._ask("GET", name)
        if self._client.is_missing(response):
            return None
        self._demand(response, 200, 206)
        return self._client.body(response, start)

    def size(self, name: str) -> int | None:
        response = self._ask("HEAD", name)
        self._client.end(response)
        if self._client.is_missing(response):
            return None
        self._demand(response, 200)
        return whole_number(response.headers.get("Content-Length", ""))

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        headers = {"Content-Length": str(size)}
        response = self._ask("PUT", name, headers, source)
        if response.status == 409:  # Some servers require the collection to exist.
            self._client.end(response)
            self._client.end(self._ask("MKCOL", name.partition("/")[0] + "/"))
            response = self._ask("PUT", name, headers, source)
        self._client.end(response)
        self._demand(response, 200, 201, 204)

    def close(self) -> None:
        self._client.close()

    def _ask(
        self, method: str, name: str, headers: Mapping[str, str] | None = None, source: BinaryIO | None = None
    ) -> Response:
        return self._client.ask(method, f"{self._path}/{name}", {**self._headers, **(headers or {})}, source)

    def _demand(self, response: Response, *accepted: int) -> None:
        if response.status in accepted:
            return
        self._client.discard(response)
        if response.status in (401, 403):
            words = refusal(self._client.host, response.status, authorized=bool(self._headers))
            raise RemoteError(words)
        raise RemoteError(status_words(response.status))
