"""Tests of downloading bundles with the browser engine."""

from __future__ import annotations

import json
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from safetensors import numpy as safetensors

from .browser_engine import call, calls


@pytest.mark.parametrize("part", [7, 64, 100_000])
def test_weights_arrive_in_whole_words_however_they_are_cut(part: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(part)
    tensors = {
        "a": rng.integers(0, 255, (3, 5), np.uint8),
        "b": rng.normal(size=(7, 3)).astype(np.float16),
        "c": rng.normal(size=(33, 2)).astype(np.float32),
    }
    path = tmp_path / "w.safetensors"
    safetensors.save_file(tensors, path, {"signature": "5"})
    params = [
        {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in tensors.items()
    ]
    asked = {"path": str(path), "params": params, "signature": "5", "part": part}
    for name, data in call("weights", asked).items():
        expected = tensors[name].tobytes()
        assert bytes(data) == expected + bytes(-len(expected) % 4), name
    (result,) = calls(("weights", {**asked, "params": params[1:]}))
    assert result["error"] == "weights: 'a' is no parameter of the program: build the bundle again"
    (result,) = calls(("weights", {**asked, "signature": "6"}))
    assert "its weights have signature" in result["error"]


class Broken(SimpleHTTPRequestHandler):
    """A file server that sends half of the remaining bytes and then closes the connection, so that a client
    must resume."""

    ranges = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if self.ranges else 0
        rest = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if len(rest) < 4096 or not self.ranges else rest[: len(rest) // 2])


class WithoutRanges(Broken):
    ranges = False


@pytest.mark.parametrize("handler", [Broken, WithoutRanges])
def test_a_broken_download_goes_on_where_it_broke(
    handler: type[Broken], toy_bundle: Path, tmp_path: Path
) -> None:
    document = json.loads((toy_bundle / "bundle.json").read_bytes())
    document["target"] |= {"output": "program", "device": "webgpu"}
    for name in document["files"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((toy_bundle / name).read_bytes())
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        expected = {name: entry["blake3"] for name, entry in document["files"].items()}
        assert call("open", {"url": url}) == expected
        name = max(document["files"], key=lambda own: document["files"][own]["size"])
        damaged = bytearray((tmp_path / name).read_bytes())
        damaged[-1] ^= 1
        (tmp_path / name).write_bytes(damaged)
        (result,) = calls(("open", {"url": url}))
        assert result["error"].startswith(f"{name} is not the file that bundle.json lists")
        server.shutdown()


def test_a_bundle_for_another_device_is_refused(toy_bundle: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(WithoutRanges, directory=str(toy_bundle))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (result,) = calls(("open", {"url": f"http://127.0.0.1:{server.server_port}/"}))
        assert result["error"] == "this bundle is for the device 'cpu': build it for the target webgpu"
        server.shutdown()


class Cut(SimpleHTTPRequestHandler):
    """Sends half of bundle.json, and then ends the connection."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{" * 500)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_cannot_be_reached_is_an_error_of_the_engine() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Cut) as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        Thread(target=server.serve_forever, daemon=True).start()
        (cut,) = calls(("open", {"url": url}))
        server.shutdown()
    (closed,) = calls(("open", {"url": url}))
    for result in (cut, closed):
        assert re.fullmatch(
            rf"{url}bundle.json cannot be read \(.*\): check the address and the connection", result["error"]
        )
