"""Tests of the fields of a manifest: each has a type and a range, and it names regular files only."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import Json

from tests.runtime.refusals import refusal

from .test_any_manifest import FIGURES
from .test_bundle import edit, put, section


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory, which does not exist yet, in which the runtime records the files that a child
    process has loaded successfully."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


CLUTTER = [
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "generation_config.json",
    "tokenizer.model", ".DS_Store", "notes.txt", ".git/config", "lib/libtvm_runtime.so", "adapters/a.bin",
    "con", "empty/",
]  # fmt: skip


@pytest.mark.parametrize("name", CLUTTER)
def test_what_the_manifest_does_not_list_is_refused(toy_copy: Path, name: str) -> None:
    place = toy_copy / name
    if name.endswith("/"):
        place.mkdir()
    else:
        place.parent.mkdir(exist_ok=True)
        place.write_text("{{ raise_exception('INJECTED') }}")
    message = refusal(toy_copy)
    assert f"{toy_copy / name.split('/', maxsplit=1)[0]}: the manifest does not list this" in message
    assert "remove it, or copy the bundle again" in message
    with pytest.raises(BundleError, match="does not list this"):
        bundle.read(toy_copy)


def test_provenance_is_not_listed_and_allowed(toy_copy: Path) -> None:
    for name in (bundle.PROVENANCE, bundle.ENVELOPE):
        (toy_copy / name).write_text("{}")
    assert bundle.check(toy_copy).name == "toy-q0f32-host"


NAMES = [
    "a\0b", "a\nb", "\x1b[2J", "/etc/passwd", "../x", "a/../x", "a//x", "./x", "x/", "", ".", "..",
    "C:/x", "C:\\x", "a\\b", "con", "CON.txt", "lib/nul", "COM1.json", "x.", "x ", " x", "a" * 201,
    ".git/config", "é", "x/" * 20 + "x", "a:b", "a*b", "~x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_not_plain_paths(toy_copy: Path, name: str) -> None:
    put(name, {"blake3": "0" * 64, "size": 0}, "files")(toy_copy)
    assert "which is not a plain path inside the bundle" in refusal(toy_copy)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x", "X"], "'files' names 'X' and 'x', which are one file where capital letters do not count"),
        (["a/x", "A/y"], "'files' names 'A' and 'a', which are one file"),
        (["a", "a/b"], "'files' names 'a' as a file, and as the directory of 'a/b'"),
        (["bundle.json"], "'files' names 'bundle.json', which no manifest lists"),
        (["Provenance.json"], "which no manifest lists"),
    ],
)
def test_names_that_do_not_go_together(toy_copy: Path, names: list[str], message: str) -> None:
    for name in names:
        put(name, {"blake3": "0" * 64, "size": 0}, "files")(toy_copy)
    assert message in refusal(toy_copy)


FIELDS: list[tuple[str, Json, str]] = [
    ("\ud800", {}, "half of a surrogate pair"),
    ("name", "\ud800", "half of a surrogate pair"),
    ("name", "\x1b]0;x\x07", "'name' must be a non-empty string of at most 1000 printable characters"),
    ("name", "x" * 1001, "'name' must be a non-empty string of at most 1000"),
    ("name", ["x"], "'name' must be a non-empty string"),
    ("model.name", "a\nb", "'model.name' must be a non-empty string"),
    ("model.config.vocab_size", 10**20, "found 100000000000000000000"),
    ("model.config.hidden_size", "x", "'model.config.hidden_size' must be an integer"),
    ("model.config.layer_specs", 1, "'model.config.layer_specs' must be a list of layers, found 1"),
    ("model.config.layer_specs", [1], "model.config.layer_specs[0] must be an object, found 1"),
    ("model.config.layer_specs", [{}], "'model.config.layer_specs[0].mixer' is missing"),
    (
        "model.config.layer_specs",
        [{"mixer": {"window": -1}}],
        "'model.config.layer_specs[0].mixer.window' must be an integer of at least 1",
    ),
    ("model.config.x", "\x9b1m", "'model.config' may hold only single lines of printable text"),
    ("model.config.x", 2**53 + 1, "'model.config' may hold only"),
    (
        "model.config.x",
        [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]],
        "'model.config' has more than 100000 values, or is",
    ),
    ("model.config.x", [0] * 100_001, "'model.config' has more than 100000 values"),
    ("scheme", {}, "'scheme.name' is missing"),
    ("scheme.name", 3, "'scheme.name' must be a non-empty string"),
    ("target.triple", "\ud800", "half of a surrogate pair"),
    ("target.triple", "x86_64 linux", "'target.triple' must be a string of the form"),
    ("target.cpu", "a b", "'target.cpu' must be a string of the form"),
    ("target.features", ["+x,y"], "'target.features.0' must be a string of the form"),
    ("target.output", "\x1b", "'target' may hold only"),
    ("limits.context_window", 2**31, "'limits.context_window' must be an integer of at most 2147483647"),
    ("limits.prefill_chunk", 257, "'limits.prefill_chunk' is 257, more than the context of 256 tokens"),
    ("limits.max_batch", 2**31 - 1, "'limits' need more than 2147483647 pages"),
    ("memory.total", 10**400, "is too large"),
    ("memory.kv_cache", 10**90, "'memory.kv_cache' must be an integer of at most"),
    ("memory.total", 1, "'memory.total' is 1, which is not the sum of its parts"),
    ("memory.weights", 1.5, "'memory.weights' must be an integer"),
    ("signature", "AB" * 32, "'signature' must be a string of the form"),
    ("weights", ["model.so"], "'library' and 'weights' name one file twice"),
    ("serving.bos_token_id", -1, "'serving.bos_token_id' must be an integer of at least 0"),
    ("serving.top_k", 2**40, "'serving.top_k' must be an integer of at most"),
    ("serving.eos_token_ids", [2**40], "'serving.eos_token_ids' must be a list of integers from 0 to"),
    ("verification", {}, "'verification.kl_mean' is missing"),
    ("verification", [], "'verification' must be an object"),
    ("verification", {**FIGURES, "extra": 1}, "unknown field 'verification.extra'"),
    ("verification.kl_mean", "\x1b[31m", "'verification.kl_mean' must be a number from 0 to 1e+09"),
    ("verification.top1_agreement", 1.1, "'verification.top1_agreement' must be a number from 0 to 1,"),
    ("verification.tokens", 0, "'verification.tokens' must be an integer of at least 1"),
    ("tools.apache-tvm", "\r\n", "'tools.apache-tvm' must be a non-empty string"),
]


@pytest.mark.parametrize(("place", "value", "message"), FIELDS)
def test_fields_have_a_type_and_a_range(toy_copy: Path, place: str, value: Json, message: str) -> None:
    *parents, last = place.split(".")

    def change(actual: dict[str, Json]) -> None:
        if parents == ["verification"]:
            actual["verification"] = dict(FIGURES)
        inner = actual
        for key in parents:
            inner = section(inner, key)
        inner[last] = value

    edit(toy_copy, change)
    assert message in refusal(toy_copy)


def test_verification_figures_are_kept(toy_copy: Path) -> None:
    put("verification", FIGURES)(toy_copy)
    assert bundle.check(toy_copy).verification == FIGURES
