"""A fuzzing target: runs `mlcbuild pull` against a registry whose answers are wrong, and checks that no wrong
bundle is written."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz_parts.files import command, fault
from fuzz_parts.mutate import dumped, mutated_json

from tests.runtime import toy


class Answers:
    """A fuzzing target: runs `mlcbuild pull` against a registry that sends wrong answers, and checks that it
    either writes an intact bundle, or writes nothing and fails with a suitable message. A case is a JSON list
    of changes, a line break, and the manifest that the registry sends. A change applies to the requests whose
    path contains a text: [this text, other status or null, additional headers, fraction of the body that is
    sent].
    """

    TITLE = "org.opencontainers.image.title"

    def __init__(self, place: Path) -> None:
        self.place = place
        if not (place / "toy").exists():
            toy.write(place / "toy")
        self.blobs = {path.name: path.read_bytes() for path in sorted((place / "toy").iterdir())}
        self.digests = {
            name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in self.blobs.items()
        }
        layers = [
            {
                "mediaType": "application/octet-stream",
                "digest": self.digests[name],
                "size": len(data),
                "annotations": {self.TITLE: name},
            }
            for name, data in self.blobs.items()
        ]
        self.manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.mlcbuild.bundle.v1",
            "config": {"mediaType": "application/json", **{k: layers[0][k] for k in ("digest", "size")}},
            "layers": layers,
        }
        self.changes: list[Any] = []
        answers = self

        class Registry(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answers.answer(self)

            do_HEAD = do_GET  # noqa: N815 - the base class's name

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        why = self.check(b"[]\n" + dumped(self.manifest))
        assert why is None and (place / "pulled").exists(), why

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        part = handler.path.rpartition("/")[2]
        status, headers, body = 404, {"Content-Type": "application/json"}, b"{}"
        if "/manifests/" in handler.path:
            status, body = 200, self.text
            headers = {"Content-Type": str(self.manifest["mediaType"]), "Docker-Content-Digest": self.digest}
        elif part in self.digests.values():
            name = next(name for name, digest in self.digests.items() if digest == part)
            status, headers, body = 200, {"Content-Type": "application/octet-stream"}, self.blobs[name]
        for where, changed, more, cut in self.changes:
            if where in handler.path:
                status, headers = changed or status, {**headers, **more}
                body = body[: int(len(body) * cut)]
        with suppress(OSError, ValueError):
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(body)
        handler.close_connection = True

    def make(self, random: Random) -> bytes:
        manifest, changes = self.manifest, []
        if random.random() < 0.7:
            manifest = mutated_json(random, manifest)
        if manifest is self.manifest or random.random() < 0.3:
            for _ in range(random.choice((1, 2))):
                changes.append(
                    [
                        random.choice(("/manifests/", "/blobs/", "/v2/")),
                        random.choice((None, 200, 206, 301, 302, 307, 401, 403, 404, 416, 429, 500)),
                        self._headers(random),
                        random.choice((1, 1, 0, 0.5)),
                    ]
                )
        return json.dumps(changes).encode() + b"\n" + dumped(manifest)

    def _headers(self, random: Random) -> dict[str, str]:
        values = {
            "Location": (
                "http://[",
                "http://127.0.0.1:99999/",
                "http://127.0.0.1:1/x",
                "/x",
                "é",
                "file:///etc/passwd",
            ),
            "WWW-Authenticate": (
                "Basic",
                'Bearer realm="http://["',
                'Bearer realm="é"',
                "Bearer",
                'Bearer realm=""',
            ),
            "Content-Length": ("0", "-1", "x", "9" * 30, "1"),
            "Content-Range": ("bytes 0-1/2", "bytes */*", "bytes " + "9" * 5000 + "-1/1", "x"),
            "Docker-Content-Digest": ("sha256:é", "sha256:" + "0" * 64, "", "x"),
            "Content-Type": ("text/html", "", "é"),
            "Content-Encoding": ("gzip", "x"),
            "Retry-After": ("-1", "x", "0"),
        }
        chosen = random.sample(list(values), random.choice((0, 1, 2)))
        return {name: random.choice(values[name]) for name in chosen}

    def check(self, case: bytes) -> str | None:
        changes, _, self.text = case.partition(b"\n")
        self.changes, self.digest = json.loads(changes), f"sha256:{hashlib.sha256(self.text).hexdigest()}"
        out = self.place / "pulled"
        shutil.rmtree(out, ignore_errors=True)
        code, text = command("pull", f"oci://127.0.0.1:{self.server.server_port}/team/toy:1", out)
        if problem := fault(code, text, (0, 1, 2)):
            return problem
        if code == 0:
            held = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
            code, text = command("verify", out)
            if code or not held <= self.blobs.keys():
                return f"a bundle was installed that is not its manifest: {sorted(held)} {text[-200:]}"
            return None
        return f"a refused bundle was left in {out}" if out.exists() and any(out.iterdir()) else None
