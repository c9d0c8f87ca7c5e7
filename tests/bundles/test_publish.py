"""Tests of bundles in an OCI registry: publishing from a recipe, pulling with mlcbuild and with other tools,
and refused bundles."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from mlcbuild_format import bundle as form

from mlcbuild.bundles.publish import fault, transfer_bundle
from mlcbuild.bundles.publish.transfer_bundle import publish, pull
from mlcbuild.errors import PublishError
from tests.caches import Handler, serving
from tests.conftest import QUICKSTART, checked, mlcbuild
from tests.registries import Server

TITLE = "org.opencontainers.image.title"
VARIANT = "tiny-q4f16_1-host"


@pytest.fixture(autouse=True)
def no_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def repository(registry_server: Server) -> str:
    return f"team/{secrets.token_hex(8)}"


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_recipe_is_published_and_pulled(
    tiny_bundles: Path, common_store: Path, registry_server: Server, repository: str, tmp_path: Path
) -> None:
    for name in ("tiny", "prompts.txt"):
        (tmp_path / name).symlink_to(tiny_bundles / name)
    to = registry_server.url(f"{repository}/{{model}}:{{quantization}}-{{target}}")
    (tmp_path / "recipe.yaml").write_text(f'{QUICKSTART}publish: [{{to: "{to}"}}]\n')
    command = ("publish", tmp_path / "recipe.yaml", "--allow-outside")
    said = checked(mlcbuild(*command, store=common_store))
    addresses = [line.split()[1] for line in said.splitlines() if line.startswith("published ")]
    assert len(addresses) == 3 and all("/tiny@sha256:" in address for address in addresses)
    uploads = [line for line in registry_server.requests() if line.startswith("PATCH") and repository in line]
    bundles = [contents(path) for path in (tmp_path / "dist").iterdir()]
    different = {hashlib.sha256(data).digest() for files in bundles for data in files.values()}
    assert len(uploads) == len(different), "files that bundles share are sent once"

    again = json.loads(checked(mlcbuild(*command, "--json", store=common_store)))
    assert [row["status"] for row in again["published"]] == ["present"] * 3
    assert sorted(row["address"] for row in again["published"]) == sorted(addresses)
    assert {step["status"] for step in again["run"]["steps"]} == {"reused"}

    tag = registry_server.url(f"{repository}/tiny:q4f16_1-host")
    said = checked(mlcbuild("pull", tag, tmp_path / "pulled", store=common_store))
    assert said.splitlines()[1].removeprefix("the immutable address of this content is ") in addresses
    assert contents(tmp_path / "pulled") == contents(tmp_path / "dist" / VARIANT)
    assert checked(mlcbuild("verify", tmp_path / "pulled", store=common_store))


def test_the_artifact_is_what_the_format_says(
    tiny_bundles: Path, registry_server: Server, repository: str
) -> None:
    bundle = tiny_bundles / "dist" / VARIANT
    actual = publish(bundle, registry_server.url(f"{repository}:v1"))
    data = registry_server.get(f"{repository}/manifests/v1")
    assert actual.url == registry_server.url(f"{repository}@sha256:{hashlib.sha256(data).hexdigest()}")
    manifest = json.loads(data)
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.mlcbuild.bundle.v1"
    assert (
        registry_server.get(f"{repository}/blobs/{manifest['config']['digest']}")
        == (bundle / "bundle.json").read_bytes()
    )
    files = contents(bundle)
    assert {layer["annotations"][TITLE] for layer in manifest["layers"]} == files.keys()
    for layer in manifest["layers"]:
        data = files[layer["annotations"][TITLE]]
        assert (layer["digest"], layer["size"]) == (f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        assert registry_server.get(f"{repository}/blobs/{layer['digest']}") == data
    assert publish(bundle, registry_server.url(f"{repository}:v1")).sent == 0
    other = publish(bundle, registry_server.url(f"{repository}:v2"))
    assert other.url == actual.url, "no time and no place are in it"


def test_another_client_pulls_a_bundle_that_can_be_served(
    tiny_bundles: Path, registry_server: Server, repository: str, tmp_path: Path
) -> None:
    """Checks that the program `oras`, or the Python package of that name in the interpreter
    MLCBUILD_TEST_ORAS, pulls a bundle that can be served."""
    program = shutil.which("oras")
    python = os.environ.get("MLCBUILD_TEST_ORAS")
    if program is None and python is None:
        pytest.skip("neither oras nor MLCBUILD_TEST_ORAS, a Python that has the package oras, is here")
    publish(tiny_bundles / "dist" / VARIANT, registry_server.url(f"{repository}:v1"))
    name, out = f"127.0.0.1:{registry_server.port}/{repository}:v1", tmp_path / "pulled"
    if program is not None:
        command = [program, "pull", "--plain-http", name, "-o", str(out)]
    else:
        code = (
            "import sys, oras.client; c = oras.client.OrasClient(insecure=True);"
            "c.pull(target=sys.argv[1], outdir=sys.argv[2])"
        )
        command = [str(python), "-c", code, name, str(out)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert contents(out) == contents(tiny_bundles / "dist" / VARIANT)
    assert form.check(out, full=True).name == VARIANT


def test_what_another_repository_has_is_mounted(
    tiny_bundles: Path, registry_server: Server, repository: str
) -> None:
    observed: dict[tuple[str, str], tuple[str, str]] = {}
    bundle = tiny_bundles / "dist" / VARIANT
    first = publish(bundle, registry_server.url(f"{repository}/a:v1"), observed)
    second = publish(bundle, registry_server.url(f"{repository}/b:v1"), observed)
    assert first.sent > 0 and second.sent == 0
    assert first.url.partition("@")[2] == second.url.partition("@")[2]


def test_a_pull_goes_on_where_it_broke_off(
    tiny_bundles: Path, registry_server: Server, repository: str, tmp_path: Path
) -> None:
    actual = publish(tiny_bundles / "dist" / VARIANT, registry_server.url(f"{repository}:v1"))
    weights = "weights-00001-of-00001.safetensors"
    whole = (tiny_bundles / "dist" / VARIANT / weights).read_bytes()
    for begun in (whole[:100_000], b"wrong" * 1000, whole + b"more"):
        part = tmp_path / ".pulled.partial"
        part.mkdir()
        (part / weights).write_bytes(begun)
        (part / "left by another version").write_text("x")
        assert pull(actual.url, tmp_path / "pulled")[0] == actual.url
        assert contents(tmp_path / "pulled") == contents(tiny_bundles / "dist" / VARIANT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pulled"]
    assert pull(actual.url, tmp_path / "pulled")[0] == actual.url, "again, over what is there"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for taken in ("mine", "link"):
        with pytest.raises(PublishError, match="it exists and is not a bundle: name another directory"):
            pull(actual.url, tmp_path / taken)


def test_a_bundle_stays_if_its_replacement_cannot_be_moved(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "bundle.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        transfer_bundle._show(tmp_path / "absent", bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"] and (bundle / "bundle.json").is_file()


def layers(data: bytes) -> tuple[dict[str, object], list[dict[str, object]]]:
    manifest = json.loads(data)
    return manifest, manifest["layers"]


def swapped(data: bytes) -> bytes:
    """Returns a manifest in which two files have exchanged their names, so that each digest is right but the
    bundle is wrong."""
    manifest, actual = layers(data)
    one, two = [layer for layer in actual if str(layer["annotations"]).find("tokenizer") > 0][:2]
    one["annotations"], two["annotations"] = two["annotations"], one["annotations"]
    return json.dumps(manifest).encode()


def escaping(data: bytes) -> bytes:
    manifest, actual = layers(data)
    actual[-1]["annotations"] = {TITLE: "../escaped"}
    return json.dumps(manifest).encode()


def lacking(data: bytes) -> bytes:
    manifest, actual = layers(data)
    manifest["layers"] = [layer for layer in actual if "safetensors" not in str(layer)]
    return json.dumps(manifest).encode()


def resized(change: Callable[[int], object]) -> Callable[[bytes], bytes]:
    """Returns a function that edits an OCI manifest (JSON bytes -> JSON bytes): it applies `change` to the
    size in bytes that is stated for the last file."""

    def lie(data: bytes) -> bytes:
        manifest, actual = layers(data)
        actual[-1]["size"] = change(int(str(actual[-1]["size"])))
        return json.dumps(manifest).encode()

    return lie


def below_a_file(data: bytes) -> bytes:
    manifest, actual = layers(data)
    actual[-1]["annotations"] = {TITLE: "bundle.json/more"}
    return json.dumps(manifest).encode()


def twice(data: bytes) -> bytes:
    manifest, actual = layers(data)
    actual[-1]["annotations"] = actual[-2]["annotations"]
    return json.dumps(manifest).encode()


def bare(data: bytes) -> bytes:
    manifest, _ = layers(data)
    return json.dumps(manifest | {"layers": []}).encode()


WRONG: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "swapped": (swapped, "the fetched bundle is refused: "),
    "escaping": (escaping, "the file name '../escaped' is no plain path inside the repository"),
    "lacking": (lacking, "the fetched bundle is refused: "),
    "bare": (bare, "it is not a bundle: it holds no bundle.json"),
    "one byte more": (resized(lambda size: size + 1), r"has \d+ bytes where its manifest states \d+"),
    "one byte less": (resized(lambda size: size - 1), r"has \d+ bytes where its manifest states \d+"),
    "two bytes": (resized(lambda size: 2), "has more than the 2 bytes that its manifest states"),
    "no bytes": (resized(lambda size: 0), "other bytes than its digest states|where its manifest states 0"),
    "a petabyte": (resized(lambda size: 10**15), r"states 10\d{14} bytes, and .* has room for"),
    "a negative size": (resized(lambda size: -size), "its manifest cannot be parsed"),
    "a size in words": (resized(str), "its manifest cannot be parsed"),
    "below a file": (below_a_file, "it names .bundle.json. as a file and as a directory"),
    "twice": (twice, "its manifest names a file twice"),
    "nonsense": (lambda data: b'{"layers": [1]}', "its manifest cannot be parsed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bundle_that_is_wrong_is_refused(
    name: str, tiny_bundles: Path, registry_server: Server, repository: str, tmp_path: Path
) -> None:
    change, words = WRONG[name]
    publish(tiny_bundles / "dist" / VARIANT, registry_server.url(f"{repository}:v1"))
    data = change(registry_server.get(f"{repository}/manifests/v1"))

    def lies(handler: Handler) -> bool:
        path = handler.path.removeprefix("/v2/")
        handler.answer(200, data if "/manifests/" in path else registry_server.get(path))
        return True

    with serving(lies) as server:
        url = f"oci://{server.url[7:]}/{repository}:v1"
        with pytest.raises(PublishError, match=words):
            pull(url, tmp_path / "pulled")
        assert not (tmp_path / "pulled").exists() and not (tmp_path / "escaped").exists()
        pinned = url.replace(":v1", "@sha256:" + "0" * 64)
        with pytest.raises(PublishError, match="has other bytes than its digest states"):
            pull(pinned, tmp_path / "pulled")


def test_what_cannot_be_reached_or_found_is_told(
    bundle_copy: Callable[[str], Path], registry_server: Server, repository: str, tmp_path: Path
) -> None:
    with pytest.raises(PublishError, match="v1: it has no artifact of this name; check the name and the tag"):
        pull(registry_server.url(f"{repository}:v1"), tmp_path / "pulled")
    with serving() as gone:
        pass
    with pytest.raises(PublishError, match="Connection refused"):
        publish(bundle_copy("q4f16_1"), f"oci://{gone.url[7:]}/x:v1")
    bundle = tmp_path / "copy-q4f16_1"
    (bundle / "tokenizer.json").write_text("{}")
    result = mlcbuild(
        "publish", bundle, "--to", registry_server.url(f"{repository}:v1"), store=tmp_path / "s"
    )
    assert result.returncode == 1 and "tokenizer.json" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("url", "writing", "words"),
    [
        ("ftp://x/y", True, "must start with oci:// (a registry) or hf:// (a model hub)"),
        ("oci", True, "must start with oci:// (a registry) or hf:// (a model hub)"),
        ("oci://host/x", True, "'oci://host/x' lacks a tag: add ':' and one"),
        ("oci://host/X:v1", True, "names no repository"),
        ("oci://host/x:v 1", True, "must be an address alone"),
        ("oci://host/x@sha256:" + "0" * 64, True, "names content by its digest: publish to a tag"),
        ("oci://host/x@sha256:" + "0" * 64, False, ""),
        ("oci://host/x:v1", True, ""),
        ("hf://a/b/c", True, "is not the name of a repository"),
        ("hf://a/b@" + "0" * 40, True, "names a commit: publish to a branch"),
        ("hf://a/b/c.gguf", True, "names a file: write hf://a/b"),
        ("hf://a/b@" + "0" * 40, False, ""),
    ],
)
def test_addresses_are_checked(url: str, writing: bool, words: str) -> None:
    actual = fault(url, writing=writing)
    assert words in actual if words else actual == ""


def test_the_command_line_says_what_is_missing(tiny_bundles: Path, tmp_path: Path) -> None:
    def stderr(code: int, *command: str | Path) -> str:
        result = mlcbuild(*command, store=tmp_path / "store")
        assert result.returncode == code, result.stderr
        return result.stderr

    recipe, bundle = tiny_bundles / "recipe.yaml", tiny_bundles / "dist" / VARIANT
    assert "it lists no destination: add `publish: [{to: " in stderr(2, "publish", recipe)
    assert "--to applies to a bundle; a recipe" in stderr(2, "publish", recipe, "--to", "hf://a/b")
    assert "the destination is missing: mlcbuild publish BUNDLE --to" in stderr(2, "publish", bundle)
    assert "--to 'x' must start with oci://" in stderr(2, "publish", bundle, "--to", "x")
    dry = stderr(2, "publish", bundle, "--to", "oci://localhost:1/a:b", "--dry-run")
    assert "--dry-run prints the plan of a recipe; a bundle has none" in dry, "nothing is sent"
    assert "mlcbuild pull: 'x' must start with oci://" in stderr(2, "pull", "x")
