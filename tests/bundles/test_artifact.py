"""Tests of bundles as artifacts of a registry: which files are sent, damaged downloads, and registries whose
manifests and layers are malformed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlcbuild_format import bundle as form

from mlcbuild.bundles.publish import artifact
from mlcbuild.bundles.publish.artifact import Uploaded, fetch, push
from mlcbuild.bundles.publish.transfer_bundle import pull
from mlcbuild.errors import PublishError, RemoteError
from tests.bundles.bundle_files import CONTENTS, contents_of, write_bundle
from tests.caches import Fault, Handler, serving
from tests.memory_registry import Answer, MemoryRegistries, digest_of
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
        "bundle.json has more than the 2 bytes that its manifest states",
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


HERE, THERE = "oci://host/tiny:v1", "oci://host/other:v1"
NUMBERS = CONTENTS["weights.bin"]
WEIGHTS = digest_of(NUMBERS)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistries:
    memory = MemoryRegistries()
    monkeypatch.setattr(artifact, "Registry", memory.registry)
    return memory


def pushed(
    bundle: Path, to: str = HERE, uploaded: Uploaded | None = None, **changes: bytes
) -> tuple[str, int]:
    manifest, files = write_bundle(bundle, **changes)
    return push(bundle, manifest, files, to, {} if uploaded is None else uploaded)


def test_a_bundle_comes_back_as_it_was(registries: MemoryRegistries, tmp_path: Path) -> None:
    address, sent = pushed(tmp_path / "a")
    assert address.startswith("oci://host/tiny@sha256:")
    size = sum(map(len, contents_of(tmp_path / "a").values()))
    assert sent == size - 2, "equal files are sent once"
    for source in (HERE, address):
        out = tmp_path / source[-4:]
        out.mkdir()
        assert fetch(source, out) == (address, frozenset(contents_of(tmp_path / "a")))
        assert contents_of(out) == contents_of(tmp_path / "a")
    assert registries.open_clients == 0


def test_a_link_to_a_bundle_is_replaced(
    registries: MemoryRegistries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, link = tmp_path / "bundle", tmp_path / "link"
    manifest, files = write_bundle(bundle)
    push(bundle, manifest, files, HERE, {})
    monkeypatch.setattr(form, "check", lambda path, full: manifest)  # The weights are no weights.
    link.symlink_to(bundle)
    for _ in range(2):
        pull(HERE, link)
        assert not link.is_symlink() and contents_of(link) == contents_of(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "link"}


@pytest.mark.parametrize("directory", [".", "below/.."])
def test_the_current_directory_may_be_the_bundle_that_is_replaced(
    directory: str, registries: MemoryRegistries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    manifest, files = write_bundle(bundle)
    push(bundle, manifest, files, HERE, {})
    expected = contents_of(bundle)
    monkeypatch.setattr(form, "check", lambda path, full: manifest)  # The weights are no weights.
    (bundle / "below").mkdir()
    monkeypatch.chdir(bundle)
    pull(HERE, Path(directory))
    assert contents_of(bundle) == expected and [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_manifest_describes_the_bundle_and_its_files(registries: MemoryRegistries, tmp_path: Path) -> None:
    manifest, files = write_bundle(tmp_path)
    push(tmp_path, manifest, files, HERE, {})
    document = json.loads(registries.tags["host", "tiny"]["v1"])
    assert document["artifactType"] == "application/vnd.mlcbuild.bundle.v1"
    assert document["config"]["digest"] == digest_of((tmp_path / "bundle.json").read_bytes())
    assert document["annotations"] == {
        "org.opencontainers.image.title": "tiny-q0f32-host",
        "dev.mlcbuild.model": "tiny",
        "dev.mlcbuild.scheme": "q0f32",
        "dev.mlcbuild.target": "x86_64-unknown-linux-gnu",
    }
    layers = {item["annotations"]["org.opencontainers.image.title"]: item for item in document["layers"]}
    assert [*layers] == [*files]
    for name, item in layers.items():
        data = (tmp_path / name).read_bytes()
        assert (item["digest"], item["size"]) == (digest_of(data), len(data))
        kind = "json" if name.endswith("json") else "octet-stream"
        assert item["mediaType"] == f"application/{kind}"
        if name in manifest.files:
            assert item["annotations"]["dev.mlcbuild.blake3"] == manifest.files[name].blake3


def test_what_a_registry_has_is_not_sent_again(registries: MemoryRegistries, tmp_path: Path) -> None:
    first, _ = pushed(tmp_path / "a")
    registries.calls.clear()
    assert pushed(tmp_path / "a") == (first, 0) and registries.calls == []
    changed, sent = pushed(tmp_path / "a", model=b"other")
    manifest_size = (tmp_path / "a" / "bundle.json").stat().st_size
    assert (sent, changed != first) == (5 + manifest_size, True)
    assert sorted(registries.calls) == sorted([f"send {manifest_size}", "send 5", "tag"])


def test_a_file_of_another_bundle_of_the_run_is_mounted(registries: MemoryRegistries, tmp_path: Path) -> None:
    uploaded: Uploaded = {}
    pushed(tmp_path / "a", HERE, uploaded)
    registries.calls.clear()
    assert pushed(tmp_path / "a", THERE, uploaded)[1] == 0
    assert registries.calls == ["mount"] * 4 + ["tag"]
    # Another registry has none of the files, and a lost blob is sent again.
    assert pushed(tmp_path / "a", "oci://elsewhere/tiny:v1", uploaded)[1] > 0
    for repository in ("tiny", "other"):
        del registries.blobs["host", repository][WEIGHTS]
    assert pushed(tmp_path / "a", "oci://host/third:v1", uploaded)[1] == len(NUMBERS)


def test_a_tag_of_something_else_is_replaced(registries: MemoryRegistries, tmp_path: Path) -> None:
    registries.tags["host", "tiny"]["v1"] = b"no JSON"
    assert pushed(tmp_path)[1] > 0
    assert json.loads(registries.tags["host", "tiny"]["v1"])["layers"]


def fetched(registries: MemoryRegistries, tmp_path: Path, *answers: Answer) -> list[str]:
    """Pushes a bundle to a simulated registry, downloads it again, and asserts that its files are the same.
    answers: for each request for the weights the parts of the response in order, each bytes or an exception.
    Returns "blob OFFSET" for each request for a file that did not start at byte 0."""
    pushed(tmp_path / "a")
    registries.calls.clear()
    registries.answers[WEIGHTS] = list(answers)
    (tmp_path / "out").mkdir(exist_ok=True)
    fetch(HERE, tmp_path / "out")
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "a")
    return [call for call in registries.calls if call.startswith("blob") and call != "blob 0"]


def test_a_download_continues_where_the_last_one_ended(registries: MemoryRegistries, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.bin").write_bytes(NUMBERS[:20])
    assert fetched(registries, tmp_path) == ["blob 20"]


def test_a_server_may_begin_a_file_anew(registries: MemoryRegistries, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.bin").write_bytes(b"x" * 20)
    interrupted: Answer = [NUMBERS[:5], RemoteError("it hangs up")]
    # The bytes after the new ones are those of an earlier download, and are dropped.
    assert fetched(registries, tmp_path, interrupted) == ["blob 20", "blob 5"]


def test_damaged_or_long_files_are_downloaded_again(registries: MemoryRegistries, tmp_path: Path) -> None:
    size = len(NUMBERS)
    assert fetched(registries, tmp_path, b"x" * size) == []
    assert fetched(registries, tmp_path / "long", b"x" * size * 9) == []


def test_interrupted_requests_are_repeated_a_few_times(registries: MemoryRegistries, tmp_path: Path) -> None:
    error = RemoteError("it hangs up")
    fetched(registries, tmp_path, error, error)
    with pytest.raises(RemoteError, match="it hangs up"):
        fetched(registries, tmp_path / "again", error, error, error)


def test_a_file_that_stays_damaged_is_refused(registries: MemoryRegistries, tmp_path: Path) -> None:
    wrong = b"x" * len(NUMBERS)
    with pytest.raises(RemoteError, match=r"weights\.bin has other bytes than its digest states"):
        fetched(registries, tmp_path, wrong, wrong)
    del registries.blobs["host", "tiny"][WEIGHTS]
    (tmp_path / "new").mkdir()
    with pytest.raises(RemoteError, match=r"weights\.bin is missing"):
        fetch(HERE, tmp_path / "new")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer("model.so", NUMBERS)], r"it is not a bundle: it holds no bundle\.json"),
        ([layer("bundle.json", NUMBERS), layer("bundle.json", NUMBERS)], "its manifest names a file twice"),
        ([layer("bundle.json", NUMBERS), layer("../x", NUMBERS)], r"the file name '\.\./x' is no plain path"),
        ([layer("bundle.json", NUMBERS, size=62)], r"bundle\.json has 63 bytes where its manifest states 62"),
        (5, "its manifest cannot be parsed"),
    ],
)
def test_artifacts_that_are_no_bundles_are_refused(
    registries: MemoryRegistries, tmp_path: Path, layers: Any, message: str
) -> None:
    registries.blobs["host", "tiny"][WEIGHTS] = NUMBERS
    registries.tags["host", "tiny"]["v1"] = json.dumps({"layers": layers}).encode()
    with pytest.raises(RemoteError, match=message):
        fetch(HERE, tmp_path)
    with pytest.raises(RemoteError, match="it has no artifact of this name"):
        fetch("oci://host/tiny:v2", tmp_path)


def test_no_more_is_written_than_a_manifest_states(registries: MemoryRegistries, tmp_path: Path) -> None:
    """Checks that a downloaded file which is longer than its manifest states is refused, also if all 63 bytes
    arrive at once where the manifest states 2. At most one byte more than stated is written, as if it had
    arrived in pieces, so the error message is the same."""
    registries.answers[WEIGHTS] = [[NUMBERS], [NUMBERS]]
    document = {"layers": [layer("bundle.json", NUMBERS, size=2)]}
    registries.tags["host", "tiny"]["v1"] = json.dumps(document).encode()
    with pytest.raises(RemoteError, match=r"bundle\.json has more than the 2 bytes that its manifest states"):
        fetch(HERE, tmp_path)


def test_layers_without_a_title_are_left_out(registries: MemoryRegistries, tmp_path: Path) -> None:
    registries.blobs["host", "tiny"][WEIGHTS] = NUMBERS
    nameless = {key: value for key, value in layer("", NUMBERS).items() if key != "annotations"}
    document = {"layers": [nameless, layer("bundle.json", NUMBERS)]}
    registries.tags["host", "tiny"]["v1"] = json.dumps(document).encode()
    assert fetch(HERE, tmp_path)[1] == {"bundle.json"}


def test_a_bundle_that_does_not_fit_is_refused_before_its_download(
    registries: MemoryRegistries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(tmp_path / "a")
    size = sum(map(len, contents_of(tmp_path / "a").values()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part").write_bytes(b"12345")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=size - 6))
    with pytest.raises(RemoteError, match=f"states {size} bytes, and .* has room for {size - 6}"):
        fetch(HERE, tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=size - 5))
    fetch(HERE, tmp_path / "out")
