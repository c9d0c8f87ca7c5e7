"""A small simulated hub: the part of the Hugging Face hub's HTTP interface that downloads and uploads of
models use.

It answers queries about models, redirects downloads of large files to another host name, and supports ranges.
Tests can make it fail in the ways in which hubs and networks fail. hub_client.py runs mlcbuild's functions
with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Fault:
    """A way in which the simulated hub fails when a file is requested. The fault ends after `times`
    requests."""

    kind: str
    """The way in which the simulated hub fails. As status: unauthorized, gated (access not granted),
    disabled, no_file, or status (the number in the field `status`). By its answer: slow, no_commit (the
    answer states none), not_a_hub (a login page), xet (points to Xet storage). In a download: wrong (one bit
    flipped), short, drop (connection closed halfway), hold (pause halfway)."""
    times: int = 1 << 30
    status: int = 503


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """The token that requests for this repository must have; None: they need none."""
    faults: dict[str | None, Fault] = field(default_factory=dict)
    """File name -> failure of the requests for this file. The key None stands for queries about the
    repository itself."""
    large_files: set[str] = field(default_factory=set)
    """Names of files that the hub keeps in large-file storage although their suffix is another."""

    def keeps_large(self, name: str) -> bool:
        return name in self.large_files or is_large(name)

    def fault(self, name: str | None, *kinds: str) -> Fault | None:
        """Returns the fault of a file if its kind is one of `kinds`, and counts one use of it; None
        otherwise.
        """
        reply = self.faults.get(name)
        if reply is None or reply.kind not in kinds or reply.times <= 0:
            return None
        self.faults[name] = replace(reply, times=reply.times - 1)
        return reply


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    host: str
    range: str | None
    token: str | None


def is_large(name: str) -> bool:
    """Returns True if the hub keeps a file in large-file storage for its suffix: its sha256 is stated."""
    return name.endswith((".safetensors", ".bin", ".gguf", ".model"))


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(data: bytes) -> bytes:
    """Returns the text that git keeps in place of a file in large-file storage."""
    sha256 = hashlib.sha256(data).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()


class Hub:
    """The simulated hub, which runs in a thread of this process. Usage: `with Hub() as hub:
    hub.add("org/name", files)`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.write_token: str | None = None
        """The token with which a client may write; None: nobody may."""
        self.large: dict[str, bytes] = {}
        """SHA-256 digest -> content of each uploaded large file."""
        self.private: set[str] = set()
        self.held = threading.Event()
        """Event that is set when a download has sent half of a file and waits."""
        self.release = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def add(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch of a repository, and returns its hash."""
        names = json.dumps([[name, git_oid(data)] for name, data in sorted(files.items())])
        actual = self.repos.setdefault(repo, Repo())
        commit = hashlib.sha1(f"{repo} {len(actual.commits)} {names}".encode()).hexdigest()
        actual.commits[commit] = dict(files)
        actual.refs[branch] = commit
        return commit

    def asked(self, method: str, name: str) -> list[Request]:
        return [request for request in self.requests if request.method == method and name in request.path]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Logs no request line, since tests read the list Hub.requests."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.receive()

    def do_PUT(self) -> None:
        self.receive()

    # Uploads, as huggingface_hub sends them

    def receive(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.chunks()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append(Request(self.command, path, "", None, token))
        if self.command == "PUT":
            oid = path.rpartition("/")[2]
            right = hashlib.sha256(data).hexdigest() == oid
            if right:
                self.hub.large[oid] = data
            self.send(200 if right else 400, b"")
            return
        if path == "api/validate-yaml":
            self.document({"errors": [], "warnings": []})
            return
        if self.hub.write_token is None or token != self.hub.write_token:
            self.refuse(401 if token is None else 403, "", "no token that may write")
            return
        if path == "api/repos/create":
            asked = json.loads(data)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repos:
                self.send(409, json.dumps({"url": f"{self.hub.address}/{name}"}).encode())
                return
            self.hub.add(name, {".gitattributes": b""})
            self.hub.private.add(name) if asked["visibility"] == "private" else None
            self.document({"url": f"{self.hub.address}/{name}"})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(path.partition(".git/")[0], json.loads(data))
        else:
            self.change(path.removeprefix("api/models/"), data)

    def chunks(self) -> bytes:
        actual = b""
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            actual += self.rfile.read(size)
            self.rfile.readline()
        return actual

    def batch(self, repo: str, asked: dict[str, Any]) -> None:
        objects = []
        for item in asked["objects"]:
            entries = item["oid"] in self.hub.large
            action = {"upload": {"href": f"{self.hub.address}/lfs/{repo}/{item['oid']}", "header": {}}}
            objects.append({**item, **({} if entries else {"actions": action})})
        self.document({"transfer": "basic", "objects": objects})

    def change(self, path: str, data: bytes) -> None:
        name, what, revision = path.rsplit("/", 2)
        repo = self.hub.repos[name]
        if what == "branch":
            if revision in repo.refs:
                self.send(409, b"{}")
                return
            repo.refs[revision] = repo.refs["main"]
            self.document({})
            return
        files = dict(repo.commits[repo.refs[revision]])
        if what == "preupload":
            modes = {True: "lfs", False: "regular"}
            listed = [
                {"path": item["path"], "uploadMode": modes[is_large(item["path"])], "shouldIgnore": False}
                for item in json.loads(data)["files"]
            ]
            self.document({"files": listed})
            return
        for line in data.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(name, files, revision)
        self.document({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})

    def document(self, actual: object) -> None:
        self.send(200, json.dumps(actual).encode(), {"Content-Type": "application/json"})

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        host = (self.headers.get("Host") or "").partition(":")[0]
        self.hub.requests.append(Request(self.command, path, host, self.headers.get("Range"), token))
        if path.startswith("xet/"):
            self.xet(path)
            return
        if path.startswith("api/models/"):
            repo, _, revision = path.removeprefix("api/models/").partition("/revision/")
            self.question(repo, revision or "main", token)
            return
        storage = path.startswith("storage/")
        repo, mark, rest = path.removeprefix("storage/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        if not mark:
            self.send(404, b"no such page")
            return
        # A signed address needs no token.
        actual = self.repo(repo, name, token, signed=storage)
        if actual is not None:
            self.file(actual, repo, commit, name, storage)

    def repo(self, name: str, file: str | None, token: str | None, signed: bool = False) -> Repo | None:
        """Returns the repository of a request. If it is missing, or the request may not read it, answers with
        an error and returns None."""
        reply = self.hub.repos.get(name)
        if reply is None:
            self.refuse(401 if token is None else 404, "RepoNotFound", "Repository not found")
            return None
        if reply.token is not None and token != reply.token and not signed:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
            return None
        fault = reply.fault(
            file, "unauthorized", "gated", "disabled", "status", "slow", "no_file", "not_a_hub"
        )
        kind = fault.kind if fault else ""
        if kind == "slow":
            time.sleep(3)
        elif kind == "unauthorized":
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif kind == "gated":
            self.refuse(403, "GatedRepo", "Access is restricted and you are not in the authorized list.")
        elif kind == "disabled":
            self.refuse(403, "", "Access to this resource is disabled.")
        elif kind == "no_file":
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif kind == "not_a_hub":
            self.send(200, b"<html>Please log in to the wireless network</html>", {"ETag": '"portal"'})
        elif fault:
            self.refuse(fault.status, "", "Busy")
        return None if kind not in ("", "slow") else reply

    def question(self, name: str, revision: str, token: str | None) -> None:
        repo = self.repo(name, None, token)
        if repo is None:
            return
        commit = repo.refs.get(revision, revision)
        if repo.fault(None, "no_commit") is not None:
            commit = ""
        elif commit not in repo.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        siblings = []
        for file, data in sorted(repo.commits.get(commit, {}).items()):
            entry: dict[str, object] = {"rfilename": file, "size": len(data), "blobId": git_oid(data)}
            if repo.keeps_large(file):
                sha256 = hashlib.sha256(data).hexdigest()
                pointer = lfs_pointer(data)
                entry["blobId"] = git_oid(pointer)
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": len(pointer)}
            siblings.append(entry)
        answer = {"_id": "1", "id": name, "modelId": name, "sha": commit or None, "siblings": siblings}
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def file(self, repo: Repo, name: str, commit: str, file: str, storage: bool) -> None:
        commit = repo.refs.get(commit, commit)
        data = repo.commits.get(commit, {}).get(file)
        if data is None:
            entries = commit in repo.commits
            self.refuse(404, "EntryNotFound" if entries else "RevisionNotFound", "not found")
            return
        sha256 = hashlib.sha256(data).hexdigest()
        about = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{git_oid(data)}"'}
        if repo.fault(file, "xet"):
            about |= {"X-Xet-Hash": sha256, "X-Xet-Refresh-Route": f"{self.hub.address}/xet/token"}
        if repo.keeps_large(file):
            about |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
            if not storage:
                # As on the hub, large files are on another host, which must not see the token.
                place = f"http://localhost:{self.hub.port}/storage/{name}/resolve/{commit}/{file}"
                self.send(302, b"", about | {"Location": place})
                return
        if self.command == "HEAD":
            self.head(200, len(data), about)
            return
        self.body(repo, file, data, about)

    def body(self, repo: Repo, file: str, data: bytes, about: dict[str, str]) -> None:
        fault = repo.fault(file, "wrong", "short", "drop", "hold")
        kind = fault.kind if fault else ""
        if kind == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        if kind == "short":
            data = data[: len(data) // 2]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            about = about | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        rest = data[start:]
        self.head(206 if start else 200, len(rest), about)
        if kind in ("drop", "hold"):
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            if kind == "drop":
                self.close_connection = True
                return
            self.hub.held.set()
            self.hub.release.wait(60)
            rest = rest[len(rest) // 2 :]
        try:
            self.wfile.write(rest)
        except OSError:
            self.close_connection = True  # the client was killed

    def xet(self, path: str) -> None:
        """Answers like a Xet storage server that issues tokens and then refuses them."""
        if path != "xet/token":
            self.refuse(403, "", "not with this token")
            return
        expiry = str(int(time.time()) + 3600)
        headers = {"X-Xet-Cas-Url": f"{self.hub.address}/xet", "X-Xet-Access-Token": "x"}
        self.send(200, b"{}", headers | {"X-Xet-Token-Expiration": expiry})

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.send(status, json.dumps({"error": message}).encode(), headers)

    def send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
