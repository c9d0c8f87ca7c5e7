"""Tests of a shared cache in a registry: its objects as tags, and registries that lose or change them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import oci
from mlcbuild.remotes.oci import Oci
from mlcbuild.remotes.transport import DamagedError
from tests.memory_registry import MemoryRegistries, digest_of

NAME, DATA = "cas/123", b"some bytes"
PLACE = ("host", "cache")


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistries:
    memory = MemoryRegistries()
    monkeypatch.setattr(oci, "Registry", memory.registry)
    return memory


def put(cache: Oci, name: str = NAME, data: bytes = DATA) -> None:
    cache.put(name, io.BytesIO(data), len(data))


def read(cache: Oci, name: str = NAME, start: int = 0) -> tuple[int, bytes] | None:
    body = cache.open(name, start)
    if body is None:
        return None
    with body:
        parts = iter(lambda: bytes(body.read()), b"")
        return body.start, b"".join(parts)


def document(registries: MemoryRegistries, tag: str = "cas-123") -> Any:
    return json.loads(registries.tags[PLACE][tag])


def test_an_object_is_read_back_from_any_offset(registries: MemoryRegistries) -> None:
    cache = Oci("oci://host/cache")
    put(cache)
    put(cache, "ac/123", b"")
    assert read(cache) == (0, DATA) and read(cache, start=4) == (4, DATA[4:])
    assert read(cache, start=len(DATA)) == (0, DATA), "an offset at the end is that of a changed object"
    assert read(cache, "ac/123") == (0, b"") and read(cache, "ac/9") is None
    assert (cache.size(NAME), cache.size("ac/123"), cache.size("ac/9")) == (len(DATA), 0, None)
    cache.close()
    assert registries.open_clients == 0


def test_an_object_is_an_artifact_with_one_layer_and_an_empty_config(registries: MemoryRegistries) -> None:
    cache = Oci("oci://host/cache")
    put(cache)
    put(cache, "ac/7", b"record")
    assert {*registries.tags[PLACE]} >= {"cas-123", "ac-7"}
    artifact = document(registries)
    assert artifact["artifactType"] == "application/vnd.mlcbuild.cache.v1"
    (layer,) = artifact["layers"]
    assert (layer["digest"], layer["size"]) == (digest_of(DATA), len(DATA))
    assert (artifact["config"]["digest"], artifact["config"]["size"]) == (digest_of(b"{}"), 2)
    assert registries.calls == ["send 2", "send 10", "tag", "send 6", "tag"], "the config is sent once"


def test_a_tag_whose_blob_is_lost_is_damaged(registries: MemoryRegistries) -> None:
    cache = Oci("oci://host/cache")
    put(cache)
    del registries.blobs[PLACE][digest_of(DATA)]
    for call in (cache.open, cache.size):
        with pytest.raises(DamagedError, match="the registry lacks the blob that the tag names"):
            call(NAME)


@pytest.mark.parametrize("layers", ["[]", "5", "[1]", "two"])
def test_another_artifact_of_this_name_is_damaged(registries: MemoryRegistries, layers: str) -> None:
    cache = Oci("oci://host/cache")
    put(cache)
    (layer,) = document(registries)["layers"]
    text = json.dumps([layer, layer]) if layers == "two" else layers
    registries.tags[PLACE]["cas-123"] = f'{{"layers": {text}}}'.encode()
    with pytest.raises(DamagedError, match="the tag does not name a file of a cache"):
        cache.open(NAME)


def test_a_manifest_that_was_cut_is_replaced_by_other_bytes(registries: MemoryRegistries) -> None:
    cache = Oci("oci://host/cache")
    put(cache)
    registries.truncated.add(registries.tags[PLACE]["cas-123"])
    put(cache)
    assert read(cache) == (0, DATA)
    assert [*document(registries)["annotations"]] == ["vnd.mlcbuild.cache.again"]


def test_a_registry_that_keeps_no_manifest_is_an_error(
    registries: MemoryRegistries, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Oci("oci://host/cache")
    monkeypatch.setattr("tests.memory_registry.MemoryRegistry.manifest", lambda self, reference: None)
    with pytest.raises(RemoteError, match="it does not return a manifest that it accepted"):
        put(cache)
    assert registries.calls.count("tag") == 2
