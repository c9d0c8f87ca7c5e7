"""Tests of tokenizers and chat templates that cannot be loaded, or that are hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlcbuild_format import bundle
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import Json
from mlcbuild_runtime import untrusted
from mlcbuild_runtime.text.tokenizer import Tokenizer

from tests.runtime.refusals import Damage, started

from . import shared, toy
from .test_bundle import put, reseal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory, which does not exist yet, in which the runtime records the files that a child
    process has loaded successfully."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


def tried(path: Path) -> Tokenizer:
    """Returns the tokenizer of a bundle after a child process has loaded it successfully."""
    manifest = bundle.check(path)
    untrusted.check(path, manifest)
    return Tokenizer.of(path, manifest)


def test_a_tokenizer_reads_listed_files_only(toy_copy: Path) -> None:
    manifest = bundle.read(toy_copy)
    (toy_copy / "chat_template.jinja").write_text("INJECTED")
    assert "INJECTED" in Tokenizer.load(toy_copy).template.source
    assert "INJECTED" not in Tokenizer.of(toy_copy, manifest).template.source


def tokenizer(**changes: Json) -> Damage:
    def damage(path: Path) -> None:
        actual = json.loads((path / "tokenizer.json").read_bytes()) | changes
        (path / "tokenizer.json").write_text(json.dumps(actual))
        reseal(path)

    return damage


def config(data: str | bytes, name: str = "tokenizer_config.json") -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        put(name, {}, "files")(path)
        reseal(path)

    return damage


def charsmap(text: str) -> Damage:
    return tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": text})


def empty(**model: Json) -> Damage:
    return tokenizer(model=model, added_tokens=[])


def replacing(letter: str, text: str) -> dict[str, Json]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": text}


MANY_TOKENS: dict[str, Json] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 4000, "tokens": ["<s>"] * 4000}},
}
"""A post-processor for a tokenizer.json that puts 4,000 tokens in front of each text."""
TOKENIZERS: list[tuple[str, Damage, str]] = [
    ("a map that is cut", charsmap("AAAA"), "not a tokenizer that can be read"),
    ("a map of 8 GB", charsmap("/////w=="), "its tokenizer is not usable: the process|not a tok"),
    ("no map", charsmap(""), "not a tokenizer that can be read"),
    ("a letter that grows", tokenizer(normalizer=replacing("z", "a" * 999)), "make a text 999 times longer"),
    ("a letter that doubles", tokenizer(normalizer={"type": "Sequence",
        "normalizers": [replacing("a", "aa")] * 30}), "make a text 1073741824 times longer"),
    ("a long prefix", tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 5000}), "5000 times longer"),
    ("many tokens", tokenizer(post_processor=MANY_TOKENS), "makes [0-9]+ tokens of a text of 29 bytes"),
    ("an empty BPE", empty(type="BPE", vocab={}, merges=[]), "its vocabulary is empty"),
    ("an empty Unigram", empty(type="Unigram", vocab=[], unk_id=None), "vocabulary is empty|not a tok"),
    ("an empty WordLevel", empty(type="WordLevel", vocab={}, unk_token="x"), "vocabulary is empty|not a tok"),
    ("an empty WordPiece", empty(type="WordPiece", vocab={}, unk_token="x", continuing_subword_prefix="#",
        max_input_chars_per_word=9), "its vocabulary is empty|not a tok"),
    ("words only", empty(type="WordLevel", vocab={"a": 0}, unk_token="x"), "cannot read plain text"),
    ("chunks of nothing", tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "token"),
    ("deep", config("[" * 100_000, "tokenizer.json"), "not a tokenizer that can be read"),
    ("not UTF-8", config(b'{"a": "\xff"}', "tokenizer.json"), "not a tokenizer that can be read"),
    ("empty", config("", "tokenizer.json"), "not a tokenizer that can be read"),
    ("a deep config", config("[" * 100_000), "config.json: not valid JSON: it is nested too deeply"),
    ("half a surrogate", config('{"bos_token": "\\ud800"}'), "half of a surrogate pair"),
    ("a config that is a list", config("[]"), "tokenizer_config.json: must hold a JSON object"),
    ("deep special tokens", config("[" * 100_000, "special_tokens_map.json"), "map.json: not valid JSON"),
    ("template not UTF-8", config(b"\xff", "chat_template.jinja"), "jinja: not UTF-8: invalid start byte"),
    ("template of 2 MB", config("x" * (2 << 20), "chat_template.jinja"), "has more than 1048576 bytes"),
]  # fmt: skip


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(("damage", "message"), [c[1:] for c in TOKENIZERS], ids=[c[0] for c in TOKENIZERS])
def test_tokenizers_that_cannot_be_loaded(toy_copy: Path, damage: Damage, message: str) -> None:
    damage(toy_copy)
    with pytest.raises(BundleError, match=message) as caught:
        tried(toy_copy)
    assert str(caught.value).isprintable()


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    "text",
    [
        '{"chat_template": [{"name": ["x"]}]}',
        '{"chat_template": {"default": 1}}',
        '{"chat_template": 5, "bos_token": 5, "eos_token": {"content": ["x"]}}',
        '{"added_tokens_decoder": {"9999999999999999999": {"content": 1}, "\\u0663": 5}}',
    ],
)
def test_odd_configs_count_for_nothing(toy_copy: Path, text: str) -> None:
    config(text)(toy_copy)
    assert not tried(toy_copy).template.source


def test_a_panic_or_abort_is_a_sentence_of_the_server(toy_copy: Path) -> None:
    charsmap("AAAA")(toy_copy)
    assert "not a tokenizer that can be read" in started(toy_copy)


def test_a_bundle_is_tried_once(toy_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(toy_bundle)
    notes = list((cache / "mlcbuild" / "loaded").iterdir())
    assert len(notes) == 2, "one of the tokenizer, one of the library"
    monkeypatch.setattr(untrusted, "_START", "raise SystemExit(1)")
    tried(toy_bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    with pytest.raises(BundleError, match="its library is not usable: the process that loads it fails"):
        tried(toy_bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    notes[0].unlink()
    with pytest.raises(BundleError, match="is not usable: the process that loads it fails"):
        tried(toy_bundle)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.abort()", "is ended by SIGABRT"),
        (
            "from mlcbuild_runtime import untrusted; untrusted.limit(); bytearray(8 << 30)",
            "fails, or needs more than 4 GiB",
        ),
        ("import time; time.sleep(60)", "takes more than 3 s"),
    ],
)
def test_what_a_tokenizer_can_do_to_a_process(
    toy_bundle: Path, program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted, "_START", f"print('library', flush=True); {program}")
    if "sleep" in program:
        monkeypatch.setattr(untrusted, "SECONDS", 3)
    with pytest.raises(BundleError, match=f"its tokenizer is not usable: [^;]+ {message}"):
        tried(toy_bundle)


def test_a_tokenizer_is_tried_without_a_place_for_notes(
    toy_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("not a directory")
    assert tried(toy_bundle).vocabulary.token_id("<s>") == toy.BOS


def test_a_template_cannot_write_to_a_terminal(toy_copy: Path) -> None:
    template = "{{ raise_exception('\\x1b]0;PWNED\\x07\\r\\nline') }}"
    config(template, "chat_template.jinja")(toy_copy)
    result = shared.run("-m", "mlcbuild_runtime.chat", str(toy_copy), stdin="hello\n")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and result.stderr.rstrip("\n").isprintable(), result.stderr
    assert "PWNED" in result.stderr
