"""The OCI distribution protocol: reads and writes blobs and manifests of one repository.

It uses https; for this machine, or with `?plain-http=true`, http. Credentials come from auth.py, which also
reads Docker's and Podman's files (config.json and its helpers). Specification:
https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import BinaryIO, Protocol
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import auth, token_service
from mlcbuild.remotes.client import Client, Response, status_words
from mlcbuild.remotes.oci_reference import RegistryAddress
from mlcbuild.remotes.transport import TIMEOUT, Body, SlowError, quoted

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
EMPTY = b"{}"
"""The contents, an empty JSON object, of the config blob in OCI manifests that have no config."""
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
LARGEST = 4 << 20
"""Maximum size of an OCI manifest in bytes, a limit of registries."""
PIECE = 64 << 20
"""Bytes of a blob that one upload request sends, and so at most the bytes that are sent again when a
connection breaks."""
_WHOLE = ("gcr.io", ".pkg.dev")
"""Ends of the host names of registries that accept a blob only in one request: Google's, according to
https://cloud.google.com/artifact-registry/docs/reference/docker-api."""
_UPLOADS = ("/v2/", "/artifacts-uploads/")
"""Beginnings of the paths to which registries let clients upload; the second is Google's."""
_ATTEMPTS = 3
_REDIRECTS = 5
_ADDRESSES = 256
"""Maximum number of servers to which one registry may redirect clients in one run."""


class UploadSource(Protocol):
    """A readable, seekable stream of bytes to upload."""

    def read(self, count: int = -1, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


class Registry:
    """A client of one repository in an OCI registry. Thread-safe. Methods raise RemoteError on failure; so
    does creating it, for credentials, a certificate file or a proxy that cannot be used."""

    def __init__(self, place: RegistryAddress, timeout: float = TIMEOUT) -> None:
        self.place = place
        self._timeout = timeout
        self._clients = {place.address: Client(place.address, timeout)}
        self._guard = threading.Lock()
        self._login = auth.login(place.host)
        self._authorization: dict[str, str] = {}
        """Authorization scope -> value of the Authorization header."""

    # Reading

    def manifest(self, reference: str) -> tuple[str, bytes] | None:
        """Downloads a manifest by tag or digest, and returns (digest, bytes); None if the registry does not
        have it. Raises RemoteError if it is too large, the request fails, or the bytes do not have the
        requested digest (for a tag, the digest that the registry states, if it states one)."""
        response = self._ask("GET", f"manifests/{reference}", {"Accept": MANIFEST})
        if self._home.is_missing(response):
            return None
        self._demand(response, 200)
        with self._home.body(response, 0) as body:
            data = bytearray()
            while piece := body.read():
                data += piece
                if len(data) > LARGEST:
                    raise RemoteError(f"the manifest {reference} has more than {LARGEST} bytes")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        stated = response.headers.get("Docker-Content-Digest", digest)
        if digest != (reference if reference.startswith("sha256:") else stated):
            raise RemoteError(f"the manifest {reference} has other bytes than its digest states")
        return digest, bytes(data)

    def blob(self, digest: str, start: int = 0) -> Body | None:
        """Opens a blob, and returns a stream of its bytes from `start` on, or from 0 (see `Body.start`) if
        the blob is shorter or the registry ignores the range; None if the registry does not have the blob.
        The digest of the bytes is not checked. Raises RemoteError on failure."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        client, response = self._follow("GET", f"blobs/{digest}", headers)
        if response.status == 416:  # The blob is shorter than expected: it is read from the beginning.
            client.end(response)
            client, response = self._follow("GET", f"blobs/{digest}", {})
        if client.is_missing(response):
            return None
        self._demand(response, 200, 206, client=client)
        return client.body(response, start)

    def has(self, digest: str) -> bool:
        client, response = self._follow("HEAD", f"blobs/{digest}", {})
        client.end(response)
        if client.is_missing(response):
            return False
        self._demand(response, 200, client=client)
        return True

    # Writing

    def mount(self, digest: str, repository: str) -> bool:
        """Makes a blob of another repository of the same registry available in this one without an upload,
        and returns True; returns False if the registry answers otherwise and the blob must be uploaded.
        digest: the blob's, as sha256:<64 hex>; repository: the other one. Raises RemoteError if the registry
        does not answer or refuses the credentials."""
        query = urlencode({"mount": digest, "from": repository})
        response = self._ask("POST", f"blobs/uploads/?{query}", {"Content-Length": "0"}, mounts=repository)
        self._home.end(response)
        if response.status == 202:  # The registry started an upload instead, which is cancelled here.
            self._home.end(self._ask("DELETE", self._location(response)))
        return response.status == 201

    def send(self, source: UploadSource, size: int) -> str:
        """Uploads the first `size` bytes of `source` to the registry as a blob, even if the registry has it,
        and returns the blob's digest, sha256:<64 hex>, which is computed while the bytes are sent. Raises
        RemoteError on failure."""
        response = self._ask("POST", "blobs/uploads/", {"Content-Length": "0"})
        self._home.end(response)
        self._demand(response, 202)
        location, hasher, done = self._location(response), hashlib.sha256(), 0
        most = size if self._sends_whole else PIECE
        while done < size:
            end = min(done + most, size)
            location, hasher = self._piece(location, source, hasher, done, end)
            done = end
        digest = f"sha256:{hasher.hexdigest()}"
        mark = "&" if "?" in location else "?"
        last = self._ask("PUT", f"{location}{mark}{urlencode({'digest': digest})}", {"Content-Length": "0"})
        self._home.end(last)
        self._demand(last, 201, 204)
        return digest

    def send_bytes(self, data: bytes) -> str:
        """Uploads `data` as a blob to the registry, unless the registry has a blob with these bytes, and
        returns the blob's digest, sha256:<64 hex>. Raises RemoteError on failure."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        return digest if self.has(digest) else self.send(io.BytesIO(data), len(data))

    def tag(self, reference: str, manifest: bytes) -> str:
        """Uploads an OCI manifest to the registry under a tag, and returns the manifest's digest, sha256:<64
        hex>. reference: the tag; manifest: the bytes of the JSON document. Raises RemoteError on failure."""
        headers = {"Content-Type": MANIFEST, "Content-Length": str(len(manifest))}
        response = self._ask("PUT", f"manifests/{reference}", headers, io.BytesIO(manifest))
        self._home.end(response)
        self._demand(response, 201)
        return f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.close()

    def _piece(
        self, location: str, source: UploadSource, before: hashlib._Hash, start: int, end: int
    ) -> tuple[str, hashlib._Hash]:
        """Uploads the bytes start..end-1 of `source` as a part of a blob, and repeats up to twice what did
        not arrive if a connection breaks. location: path and query of the URL for this part; before: state of
        the SHA-256 of the bytes before `start`. Returns (path and query for the next part, state of the
        SHA-256 after this part). Raises RemoteError if the upload fails."""
        begin = start
        for attempt in range(_ATTEMPTS):
            piece = _Piece(source, before.copy(), start, begin, end)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(end - begin),
            }
            if not self._sends_whole:
                headers["Content-Range"] = f"{begin}-{end - 1}"
            try:
                response = self._ask("PATCH", location, headers, piece)  # type: ignore[arg-type]
                self._home.end(response)
                if response.status in (202, 204):
                    return self._location(response), piece.hasher
                if response.status != 416:
                    self._demand(response, 202)
            except RemoteError as error:
                if attempt + 1 == _ATTEMPTS or isinstance(error, SlowError):
                    raise
            answer = self._ask("GET", location)  # queries how many bytes have arrived
            self._home.end(answer)
            self._demand(answer, 204)
            location = self._location(answer)
            came = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", ""))
            have = int(came[1]) + 1 if came else start
            # A registry returns 0-0 for one byte and for none.
            begin = have if start < have <= end and have > 1 else start
            if begin == end:
                piece = _Piece(source, before.copy(), start, end, end)
                piece.seek(0)
                return location, piece.hasher
        raise RemoteError("it does not accept the uploaded bytes")

    @property
    def _home(self) -> Client:
        return self._clients[self.place.address]

    @property
    def _sends_whole(self) -> bool:
        return (self._home.host or "").endswith(_WHOLE)

    def _location(self, response: Response) -> str:
        """Returns the path and query of the next upload request from the Location header of a response.
        Raises RemoteError for another server or another part of this one, since the request is sent with
        credentials, and for an invalid address."""
        parts = _joined(f"{self.place.address}/", response.headers.get("Location", ""))
        # A server that builds the URL from the header Host leaves out the usual port.
        home, port = urlsplit(self.place.address), 80 if self.place.plain else 443
        is_home = (parts.hostname, parts.port or port) == (home.hostname, home.port or port)
        if not is_home:
            raise RemoteError(f"it redirects the upload to {quoted(parts.netloc)}, which is another server")
        if not parts.path.startswith(_UPLOADS):
            raise RemoteError(f"it names {quoted(parts.path)} as the address of an upload")
        return parts.path + (f"?{parts.query}" if parts.query else "")

    def _follow(self, method: str, name: str, headers: Mapping[str, str]) -> tuple[Client, Response]:
        """Sends a request to the registry and follows up to five redirects, whose servers receive no
        credentials. Returns (client of the last server, its response, which may be a sixth redirect). Raises
        RemoteError for a redirect to an invalid address, or from https to one without encryption, and
        SlowError if redirects exceed the time limit."""
        client, response = self._home, self._ask(method, name, headers)
        url = f"{self.place.address}/v2/{self.place.repository}/{name}"
        until = time.monotonic() + self._timeout
        for _ in range(_REDIRECTS):
            if response.status not in (301, 302, 303, 307, 308):
                break
            client.end(response)
            if time.monotonic() > until:
                raise SlowError("it does not answer")
            parts = _joined(url, response.headers.get("Location", ""))
            url = parts.geturl()
            if parts.scheme not in ("https", "http") or (parts.scheme == "http" and not self.place.plain):
                raise RemoteError("it redirects clients to an address that is not https")
            client = self._client(parts)
            response = client.ask(method, parts.path + (f"?{parts.query}" if parts.query else ""), headers)
        return client, response

    def _client(self, place: SplitResult) -> Client:
        """Returns an HTTP client for a server to which the registry redirects. It is created at the first
        call for an address, and used again for the same address. Raises RemoteError if the registry redirects
        to too many servers."""
        address = f"{place.scheme}://{place.netloc}"
        with self._guard:
            if address not in self._clients:
                if len(self._clients) > _ADDRESSES:
                    raise RemoteError(f"it redirects clients to more than {_ADDRESSES} servers")
                self._clients[address] = Client(address, self._timeout)
            return self._clients[address]

    # Credentials

    def _ask(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        source: BinaryIO | None = None,
        *,
        mounts: str = "",
    ) -> Response:
        """Sends a request to the registry with the authorization that it requires, and returns the response.
        After status 401, it is sent a second time with the authorization that the answer requires, and that
        response is returned, whatever its status; raises RemoteError if there is no other authorization.
        mounts: other repository whose blob the request makes available in this one, or ""."""
        target = name if name.startswith("/") else f"/v2/{self.place.repository}/{name}"
        scope = f"repository:{self.place.repository}:{'pull' if method in ('GET', 'HEAD') else 'pull,push'}"
        if mounts:
            scope += f" repository:{mounts}:pull"
        sent = self._authorization.get(scope)
        response = self._home.ask(method, target, _with(headers, sent), source)
        if response.status != 401:
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        if source is None:
            self._home.end(response)
        else:
            self._home.discard(response)
        granted = self._answer(challenge, scope)
        if granted is None or granted == sent:
            raise self._refusal(401)
        self._authorization[scope] = granted
        return self._home.ask(method, target, _with(headers, granted), source)

    def _answer(self, challenge: str, scope: str) -> str | None:
        """Returns the value of the Authorization header that answers a server's challenge: for "Basic" the
        user's password, for "Bearer" the user's token, else one that the token service named in the
        challenge issues, anonymously if there are no credentials. challenge: the server's WWW-Authenticate
        header, where "Bearer" precedes "Basic" if it offers both; scope: the rights to request, such as
        "repository:name:pull". Returns None for an unsupported challenge, and for "Basic" without
        a password. Raises RemoteError if the token service cannot be reached, is not https, or issues no
        valid token."""
        offered = auth.challenges(challenge)
        if "realm" in (fields := offered.get("bearer", {})):
            if isinstance(self._login, str) and self._login.startswith("Bearer "):
                return self._login
            return self._token(fields, scope)
        return self._login if isinstance(self._login, str) and "basic" in offered else None

    def _token(self, fields: Mapping[str, str], scope: str) -> str:
        realm = _joined(fields["realm"], "")
        if realm.scheme != "https" and not (realm.scheme == "http" and self.place.plain):
            raise RemoteError("its token service is not https")
        client, service = self._client(realm), fields.get("service", "")
        response = token_service.ask(client, realm, service, scope, self._login)
        data = client.end(response)
        if response.status in (401, 403):
            raise self._refusal(response.status)
        return f"Bearer {token_service.token(data, realm.netloc)}"

    def _demand(self, response: Response, *accepted: int, client: Client | None = None) -> None:
        if response.status in accepted:
            return
        (client or self._home).discard(response)
        if response.status in (401, 403):
            raise self._refusal(response.status)
        raise RemoteError(status_words(response.status))

    def _refusal(self, status: int) -> RemoteError:
        return RemoteError(auth.refusal(self.place.host, status, authorized=self._login is not None))


class _Piece:
    """A stream of the bytes `begin` to `end` - 1 of a source, for an upload. `hasher` also covers the bytes
    `start` to `begin` - 1, which the server has already. Reading starts after `seek(0)`, and raises OSError
    if the source has fewer bytes."""

    def __init__(self, source: UploadSource, hasher: hashlib._Hash, start: int, begin: int, end: int) -> None:
        self.hasher = hasher
        self._source = source
        self._before = hasher.copy()
        self._start = start
        self._begin = begin
        self._left = self._size = end - begin

    def seek(self, offset: int) -> int:
        """Moves the stream of a request's body back to its beginning, as HTTP clients do before they retry a
        request, and returns 0, the position there. offset: must be 0; raises ValueError otherwise."""
        if offset:
            raise ValueError(f"a part of an upload can only be read from its beginning, not from {offset}")
        self.hasher = self._before.copy()
        self._source.seek(self._start)
        self._left = self._begin - self._start
        while self._left:
            self.read()
        self._left = self._size
        return 0

    def read(self, count: int = 1 << 17) -> bytes:
        data = self._source.read(min(count, self._left)) if self._left else b""
        if self._left and not data:
            raise OSError(f"{self._left} bytes to send are missing")
        self.hasher.update(data)
        self._left -= len(data)
        return data


def _joined(base: str, location: str) -> SplitResult:
    """Resolves a Location header against the URL `base`, and returns the parts of the resulting URL. Raises
    RemoteError for an invalid one.
    """
    try:
        parts = urlsplit(urljoin(base, location))
        usable = parts.port != 0 and re.fullmatch(r"[\x21-\x7e]+", parts.geturl()) and "@" not in parts.netloc
    except ValueError:
        usable = None
    if not usable or not parts.hostname:
        raise RemoteError(f"it names {quoted(location or base)} as an address, which is invalid")
    return parts


def _with(headers: Mapping[str, str] | None, authorization: str | None) -> dict[str, str]:
    return {**(headers or {}), **({"Authorization": authorization} if authorization else {})}
