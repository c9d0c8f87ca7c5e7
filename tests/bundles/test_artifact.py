"""Tests of pulling bundles from a registry whose manifests and layers are malformed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mlcbuild.bundles.publish.transfer_bundle import pull
from mlcbuild.errors import PublishError
from tests.caches import Fault, Handler, serving
from tests.remotes.odd_values import (
    ADDRESSES,
    FIELDS,
    HEADERS,
    VALUES,
    layer,
    manifest,
    plain,
    saying,
    uploading,
)

__all__ = ["plain"]
pytestmark = pytest.mark.usefixtures("plain")


def test_a_bundle_is_not_published_to_odd_places(
    tiny_bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlcbuild.cli import main

    bundle = tiny_bundles / "dist" / "tiny-q4f16_1-host"
    with serving() as cache:
        url = f"oci://{cache.url[7:]}/r:v1"
        for value in ADDRESSES:
            cache.fault = uploading(value)
            assert main(["publish", str(bundle), "--to", url]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"failed  publish/{bundle.name}: {url}: "), (value, said)
            assert said.count("\n") == 1 and "defect" not in said and len(said) < 600


@pytest.mark.parametrize("field", FIELDS)
def test_odd_manifests_of_a_bundle(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that `mlcbuild pull` reports a malformed manifest in one sentence, with exit code 1 and without
    a traceback, and leaves no file behind."""
    from mlcbuild.cli import main

    data = b""

    def fault(handler: Handler) -> bool:
        handler.answer(200, data if "/manifests/" in handler.path else b"{}")
        return True

    with serving(fault) as cache:
        for number, value in enumerate(VALUES):
            data = manifest(field, value)
            url, out = f"oci://{cache.url[7:]}/r:v1", tmp_path / str(number)
            assert main(["pull", url, str(out)]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"{url}: ") and said.count("\n") == 1, (value[:80], said)
            assert "defect" not in said and len(said) < 600 and not out.exists()


@pytest.mark.parametrize(("status", "name"), [key for key in HEADERS if key[1] != "x-amz-bucket-region"])
def test_odd_headers_of_a_bundle(
    status: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlcbuild.cli import main

    with serving() as cache:
        for number, value in enumerate(HEADERS[status, name]):
            odd = saying(status, name, value)

            def fault(handler: Handler, odd: Fault = odd) -> bool:
                if "/blobs/" in handler.path or status != 206:
                    return odd(handler)
                handler.answer(200, manifest("", ""))
                return True

            cache.fault = fault
            url = f"oci://{cache.url[7:]}/r:v1"
            assert main(["pull", url, str(tmp_path / str(number))]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"{url}: ") and said.count("\n") == 1, (value[:80], said)
            assert "defect" not in said and len(said) < 600


BUNDLES: dict[str, tuple[list[dict[str, object]], str]] = {
    "size too large": (
        [layer("bundle.json", b"abcd", size=10**4)],
        "bundle.json has 4 bytes where its manifest states",
    ),
    "size too small": (
        [layer("bundle.json", b"abcd", size=2)],
        "bundle.json has 4 bytes where its manifest states 2",
    ),
    "size of a whole disk": (
        [layer("bundle.json", b"abcd", size=10**17)],
        "its manifest states 1000000000000000",
    ),
    "below a file": (
        [layer("bundle.json", b"a"), layer("bundle.json/x", b"b")],
        "'bundle.json' as a file and as a",
    ),
    "twice": ([layer("bundle.json", b"a"), layer("bundle.json", b"b")], "its manifest names a file twice"),
    "above": ([layer("bundle.json", b"a"), layer("../x", b"b")], "the file name '../x' is no plain path"),
    "absolute": ([layer("bundle.json", b"a"), layer("/x", b"b")], "the file name '/x' is no plain path"),
    "escape": ([layer("bundle.json", b"a"), layer("\x1b[31m", b"b")], "'\\x1b[31m' is no plain path"),
    "surrogate": ([layer("bundle.json", b"a"), layer("\ud800", b"b")], "'\\ud800' is no plain path"),
    "long": ([layer("bundle.json", b"a"), layer("x" * 300, b"b")], "is longer than 255 bytes"),
    "deep": ([layer("bundle.json", b"a"), layer("x/" * 3000 + "x", b"b")], "File name too long"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_odd_bundles(name: str, tmp_path: Path) -> None:
    layers, words = BUNDLES[name]
    contents = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (b"abcd", b"a", b"b")}

    def fault(handler: Handler) -> bool:
        data = contents.get(handler.path.rpartition("/")[2], json.dumps({"layers": layers}).encode())
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        handler.answer(206 if start else 200, data[start:], extra)
        return True

    with serving(fault) as cache:
        url = f"oci://{cache.url[7:]}/r:v1"
        for _ in range(2):  # the second attempt uses what the first one has stored
            with pytest.raises(PublishError) as error:
                pull(url, tmp_path / "out")
            assert str(error.value).startswith(f"{url}: ") and words in str(error.value), str(error.value)[
                :300
            ]
            assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
