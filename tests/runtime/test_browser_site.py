"""Tests of the web site of `serve --browser`: what it serves and writes, what it refuses, and the size of the
engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from mlcbuild_format.errors import BundleError, SetupError
from mlcbuild_runtime.http import browser_site, serve
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.serve import ServerOptions
from starlette.testclient import TestClient

from . import shared
from .browser_engine import ENGINE

LIMIT = 60_000
"""Maximum size in bytes of the JavaScript files of the browser's engine that a page loads, compressed with
gzip as web servers do it."""
VOCABULARIES = {"json_vocabulary.js", "piece_vocabulary.js"}
"""JavaScript files of the browser's engine for vocabularies. A model loads exactly one of them, depending on
its tokenizer."""
ON_DEMAND = {"json_schema.js", "byte_grammar.js", "token_masks.js"} | VOCABULARIES
"""JavaScript files of the browser's engine that are imported only when they are needed: those for JSON
schemas at the first answer with a schema, and the one for the model's vocabulary."""


@pytest.fixture(scope="module")
def bundle(toy_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the toy bundle whose manifest has the browser's target, a GPU program for webgpu. Its
    files are not such a program, so tests must not execute it."""
    path = tmp_path_factory.mktemp("site") / "toy"
    shutil.copytree(toy_bundle, path)
    document: dict[str, Any] = json.loads((path / "bundle.json").read_bytes())
    document["target"] |= {"output": "program", "device": "webgpu"}
    (path / "bundle.json").write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[TestClient]:
    app = browser_site.create_app(browser_site.site_files(bundle), Access(hosts=()))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def test_every_file_has_a_strict_policy_and_the_right_type(client: TestClient, bundle: Path) -> None:
    for path, kind in [
        ("/", "text/html; charset=utf-8"),
        ("/engine.js", "text/javascript; charset=utf-8"),
        ("/vendor/jinja.js", "text/javascript; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/bundle/bundle.json", "application/json"),
        ("/nothing", "application/json"),
    ]:
        response = client.get(path)
        assert response.headers["content-type"] == kind, path
        assert response.headers["content-security-policy"] == browser_site.POLICY
        assert "unsafe" not in browser_site.POLICY and response.headers["x-content-type-options"] == "nosniff"
    html = client.get("/").text
    assert "<script>" not in html and "style=" not in html and "onclick" not in html


def test_the_end_of_the_server_ends_a_download(bundle: Path) -> None:
    """Checks that a client which reads its file too slowly leaves no traceback in the log when the server
    ends and cancels its download."""
    sent, app = list[Any](), browser_site.create_app(browser_site.site_files(bundle), Access())
    scope = {"type": "http", "method": "GET", "path": "/engine.js", "headers": [], "extensions": {}}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) == 2:
            await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def talk() -> None:
        download = asyncio.create_task(cast(Any, app(scope, receive, send)))
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        download.cancel()
        await download

    asyncio.run(talk())
    assert sent == ["http.response.start", "http.response.body"]


def test_ranges_resume_a_download(client: TestClient, bundle: Path) -> None:
    data = (bundle / "bundle.json").read_bytes()
    response = client.get("/bundle/bundle.json", headers={"Range": "bytes=10-"})
    assert (response.status_code, response.content) == (206, data[10:])
    assert response.headers["content-range"] == f"bytes 10-{len(data) - 1}/{len(data)}"
    assert client.head("/bundle/bundle.json").headers["content-length"] == str(len(data))


def test_only_files_of_the_site_are_readable(client: TestClient, bundle: Path) -> None:
    (bundle / "secret").write_text("x")
    for path in ("/bundle/secret", "/bundle/../secret", "/bundle/%2e%2e/secret", "/package.json", "/bundle/"):
        response = client.get(path)
        assert response.status_code == 404, path
        assert "this server has the files of a site only" in response.json()["error"]["message"]
    (bundle / "secret").unlink()
    assert client.post("/").status_code == 405
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_a_file_that_is_lost_or_replaced_is_not_found(client: TestClient, bundle: Path) -> None:
    path, kept = bundle / "tokenizer.json", (bundle / "tokenizer.json").read_bytes()
    assert client.get("/bundle/tokenizer.json").content == kept
    path.unlink()
    assert client.get("/bundle/tokenizer.json").status_code == 404
    path.symlink_to("/etc/hostname")
    assert client.get("/bundle/tokenizer.json").status_code == 404
    path.unlink()
    os.mkfifo(path)
    assert client.get("/bundle/tokenizer.json").status_code == 404
    path.unlink()
    path.write_bytes(kept)
    assert client.get("/bundle/tokenizer.json").content == kept


def test_clients_of_a_site_have_the_limits_of_every_server(bundle: Path) -> None:
    command = [sys.executable, "-m", "mlcbuild_runtime", str(bundle), "--browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        match = re.fullmatch(
            r"mlcbuild-serve: .* is ready at http://([0-9.]+):([0-9]+) \(a page.*\)\n", ready
        )
        assert match is not None, ready
        address = match[1], int(match[2])
        for head, status in (
            (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
            (b"GET /" + b"a" * 100_000, b"414"),
            (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        ):
            with socket.create_connection(address, timeout=shared.WAIT) as client:
                client.sendall(head)
                assert client.recv(1000).split(b" ")[1] == status
        ranges = ",".join(f"{2 * i}-{2 * i}" for i in range(5000))
        with socket.create_connection(address, timeout=shared.WAIT) as client:
            range_head = f"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes={ranges}\r\n\r\n"
            client.sendall(range_head.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 ")
        process.terminate()
        assert process.wait(shared.WAIT) == 0


def test_the_site_is_written_for_any_web_server(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    count = len(browser_site.site_files(bundle))
    assert browser_site.write(bundle, out) == f"{count} files are in {out}, for any web server with HTTPS"
    for name, source in browser_site.site_files(bundle).items():
        assert (out / name).read_bytes() == source.read_bytes()
    assert (out / "index.html").stat().st_nlink == 1, "an edited page must not change the package"
    with pytest.raises(SetupError, match=r"out: is not empty, so no site is written to it"):
        browser_site.write(bundle, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"file: the site cannot be written: "):
        browser_site.write(bundle, tmp_path / "file")


def test_what_cannot_be_a_site_is_refused(
    toy_bundle: Path, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BundleError, match=r"run bundles of the target webgpu, and this one .* 'cpu': add"):
        browser_site.site_files(toy_bundle)
    options = ServerOptions(port=0, browser=True)
    assert serve.serve([bundle, bundle], options) == 3
    assert "--browser serves one bundle, and 2 were passed" in capfd.readouterr().err
    keyed = ServerOptions(port=0, browser=True, access=Access(keys=("k",)))
    assert serve.serve(bundle, keyed) == 3
    assert "which has no key: leave --api-key out" in capfd.readouterr().err
    assert serve.serve(bundle, ServerOptions(browser=True, site=str(tmp_path / "site"))) == 0
    assert "files are in" in capfd.readouterr().out
    result = shared.run("-m", "mlcbuild_runtime", "x", "--write", "y")
    assert result.returncode == 2 and "--browser, which is missing: add --browser" in result.stderr


def test_the_engine_is_small() -> None:
    modules = [path for path in ENGINE.rglob("*.js") if path.name != "page.js"]
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9, mtime=0)) for path in modules}
    loaded = sum(size for name, size in sizes.items() if name not in ON_DEMAND)
    assert loaded + max(sizes[name] for name in VOCABULARIES) <= LIMIT, sizes
    # A bundler that makes one module of all files leaves out their documentation.
    whole = b"".join(re.sub(rb"/\*\*.*?\*/", b"", path.read_bytes(), flags=re.S) for path in sorted(modules))
    assert len(gzip.compress(whole, 9, mtime=0)) <= LIMIT, "all files as one module"


def test_files_on_demand_are_imported_by_no_other_file() -> None:
    static = re.compile(r'^(?:import|export) .*?from "\./(.*?)";', re.MULTILINE | re.DOTALL)
    for path in ENGINE.glob("*.js"):
        if path.name not in ON_DEMAND:
            assert not ON_DEMAND & set(static.findall(path.read_text())), path.name


def test_npm_packs_the_engine() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "pack", "--dry-run", "--json", "--offline"]
    result = subprocess.run(command, cwd=ENGINE, capture_output=True, text=True, check=True)
    (document,) = json.loads(result.stdout)
    names = {entry["path"] for entry in document["files"]}
    modules = {path.relative_to(ENGINE).as_posix() for path in ENGINE.rglob("*.js")} - {"page.js"}
    assert names == modules | {"package.json", "index.d.ts", "vendor/jinja.LICENSE"}
    listed = json.loads((ENGINE / "package.json").read_bytes())
    assert listed["exports"]["."] == {"types": "./index.d.ts", "default": "./index.js"}
