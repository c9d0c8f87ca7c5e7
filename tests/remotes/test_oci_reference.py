"""Tests of addresses of OCI registries, and of the layers that a manifest lists."""

from __future__ import annotations

import json

import pytest

from mlcbuild.remotes.oci_reference import Descriptor, fault, layers_of

DIGEST = f"sha256:{'a' * 64}"
LAYER = {"mediaType": "application/octet-stream", "digest": DIGEST, "size": 3}


def manifest(*layers: object) -> bytes:
    return json.dumps({"layers": layers}).encode()


def test_layers_are_read_in_order() -> None:
    second = {**LAYER, "size": 4, "annotations": {"org.opencontainers.image.title": "model.so"}}
    layers = layers_of(manifest(LAYER, second))
    assert [layer.size for layer in layers] == [3, 4]
    assert [layer.to_json() for layer in layers] == [LAYER, second]
    assert Descriptor.from_json(LAYER) == layers[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"layers": 1}',
        b'{"layers": [1]}',
        b'{"layers": [], "layers": []}',
        b"[" * 100_000,
        b"\xff",
        manifest({**LAYER, "size": -1}),
        manifest({**LAYER, "digest": "md5:1"}),
    ],
)
def test_what_is_no_manifest_of_layers_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        layers_of(data)


@pytest.mark.parametrize("url", ["oci://host/team/name", "oci://host:5000/a/b:tag?plain-http=true"])
def test_addresses_of_repositories_have_no_fault(url: str) -> None:
    assert fault(url) == ""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oci://host", "names no repository"),
        ("oci://host/Team/name", "in lower case letters"),
        ("oci://host/name?http=true", "plain-http=true or plain-http=false"),
    ],
)
def test_a_fault_of_an_address_names_the_rule(url: str, words: str) -> None:
    assert words in fault(url)
