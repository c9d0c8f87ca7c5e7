"""Tests of the metadata of a compiled library: what they must say, and that they agree with the bundle's
manifest."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.bundle import File, Limits, Manifest, Memory, Model
from mlcbuild_format.errors import BundleError, SetupError
from mlcbuild_format.library import RUNTIME_VARIABLE, find_runtime, read_metadata
from mlcbuild_format.signature import signature

PARAMS = [["table", [4, 2], "float32", "plain"], ["norm", [2], "float16", "plain"]]
SIGNATURE = signature([("table", (4, 2), "float32", "plain"), ("norm", (2,), "float16", "plain")])
LIMITS = {"context_window": 64, "prefill_chunk": 16, "max_batch": 2, "page_size": 16}
MANIFEST = Manifest(
    name="a",
    model=Model("a", "toy", {"family": "toy", "vocab_size": 4}),
    scheme={"name": "q0f32"},
    target={"triple": "x", "device": "cpu"},
    limits=Limits(**LIMITS),
    library="model.so",
    weights=(),
    signature=SIGNATURE,
    files={},
    memory=Memory(1, 1, 0, 2),
    tools={"apache-tvm": "0.27"},
)


def metadata(**changes: Any) -> str:
    document = {
        "format": "mlcbuild-library/2",
        "signature": SIGNATURE,
        "params": PARAMS,
        "config": dict(MANIFEST.model.config),
        "scheme": dict(MANIFEST.scheme),
        "target": dict(MANIFEST.target),
        "limits": LIMITS,
    }
    return json.dumps(document | changes)


def test_parameters_are_in_the_order_of_the_arguments() -> None:
    actual = read_metadata(metadata(), MANIFEST)
    assert [name for name, *_ in actual.params] == ["table", "norm"]
    assert actual.params[1] == ("norm", [2], "float16", "plain") and actual.signature == SIGNATURE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "mlcbuild-library/1"},
            r"'format' must be 'mlcbuild-library/2', found .*build the bundle",
        ),
        ({"params": 5}, "'params' must be a list"),
        ({"params": [["a", [-1], "float32", "plain"]]}, "not [name, shape, dtype, layout]"),
        ({"params": [["a", [1], "float32"]]}, "not [name, shape, dtype, layout]"),
        ({"params": PARAMS[:1]}, "the library was built for another model or scheme"),
        ({"signature": "0" * 64}, "takes weights of signature 000000000000, but the manifest"),
        ({"limits": LIMITS | {"max_batch": 3}}, "limits.max_batch = 3, but bundle.json says 2: build"),
        ({"config": {"family": "toy"}}, "config.vocab_size = null, but bundle.json says 4"),
        ({"target": {"triple": "y", "device": "cpu"}}, 'target.triple = "y", but bundle.json says "x"'),
        ({"scheme": []}, "its metadata is not usable"),
    ],
)
def test_what_contradicts_the_manifest_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        read_metadata(metadata(**changes), MANIFEST)
    head, _, tail = message.partition(".*")
    assert head in str(caught.value) and tail in str(caught.value)
    assert str(caught.value).startswith("model.so")


def test_names_may_differ_and_noise_is_refused() -> None:
    read_metadata(metadata(scheme={"name": "another"}), MANIFEST)
    for text in ("", "[]", '{"format": "mlcbuild-library/2"}', "{" * 5000):
        with pytest.raises(BundleError, match=r"^model\.so: its metadata is not usable: "):
            read_metadata(text, MANIFEST)


def test_the_runtime_is_the_bundle_s_then_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    named = tmp_path / "named.so"
    monkeypatch.setenv(RUNTIME_VARIABLE, str(named))
    with pytest.raises(SetupError, match=rf"^{RUNTIME_VARIABLE} is '.*named\.so', which is not a file$"):
        find_runtime(tmp_path, MANIFEST)
    monkeypatch.setenv(RUNTIME_VARIABLE, f"/{'x' * 300}.so")
    with pytest.raises(SetupError, match=rf"^{RUNTIME_VARIABLE} is '/x+\.so', which is not a file$"):
        find_runtime(tmp_path, MANIFEST)
    monkeypatch.setenv(RUNTIME_VARIABLE, str(named))
    named.touch()
    assert find_runtime(tmp_path, MANIFEST) == named
    brings = replace(MANIFEST, files={f"lib/{name}": File("0", 0)})
    assert find_runtime(tmp_path, brings) == tmp_path / "lib" / name
    monkeypatch.delenv(RUNTIME_VARIABLE)
    monkeypatch.setattr("mlcbuild_format.library.find_spec", lambda _: None)
    with pytest.raises(SetupError, match=rf"set {RUNTIME_VARIABLE} to a {name} of version 0\.27$"):
        find_runtime(tmp_path, MANIFEST)
