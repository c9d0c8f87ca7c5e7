"""Tests of converting tokens to text, compared with the tokenizers' own libraries, and of stop strings and
chat templates."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import BundleError, RequestError
from mlcbuild_runtime.text.tokenizer import TextStream, Tokenizer
from tokenizers import decoders, models, pre_tokenizers

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Où est-il?",
    "日本語のテキストも少しあります。 Emoji: 🙂🙃, flags, code: if (a < b) { return a[0]; }\n\tend",
] * 20


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a byte-level BPE tokenizer, the kind that Llama 3 and Qwen use."""
    path = tmp_path_factory.mktemp("byte_level")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a SentencePiece tokenizer with byte fallback, the kind that Llama 2 and Mistral use."""
    path = tmp_path_factory.mktemp("pieces")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(buffer.getvalue())
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "legacy": False,
        "added_tokens_decoder": {
            "420": {"content": "<|user|>", "special": True},
            "421": {"content": "<tool>", "special": False},
        },
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def pieces_as_json(pieces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a tokenizer.json with the same vocabulary as the SentencePiece model, and with
    the decoder that transformers writes for Llama 2."""
    path = tmp_path_factory.mktemp("pieces_as_json")
    model = processor(pieces)
    vocabulary = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 0, byte_fallback=True))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def processor(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))


def parts(tokenizer: Tokenizer, tokens: Sequence[int], message: bool = True) -> list[str]:
    stream = tokenizer.stream(message=message)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(text=st.text(max_size=60) | st.sampled_from(SAMPLE))
def test_byte_level_text_survives(byte_level: Path, text: str) -> None:
    tokenizer = Tokenizer.load(byte_level)
    actual = parts(tokenizer, tokenizer.encode(text))
    assert "".join(actual) == text.replace("<s>", "").replace("</s>", "")
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in actual)


@given(tokens=st.lists(st.integers(0, 500), max_size=30))
def test_any_byte_level_tokens_are_read_as_the_library_does(byte_level: Path, tokens: list[int]) -> None:
    reference = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    tokenizer = Tokenizer.load(byte_level)
    ours, theirs = tokenizer.decode(tokens), reference.decode(tokens, skip_special_tokens=True)
    added = reference.token_to_id("<think>")
    if added not in tokens:  # the library takes an added token as bytes of the alphabet, where it can be
        assert ours == theirs


@given(text=st.text(st.characters(exclude_characters="▁\0", exclude_categories=["Cs"]), max_size=40))
def test_pieces_survive(pieces: Path, text: str) -> None:
    tokenizer, reference = Tokenizer.load(pieces), processor(pieces)
    tokens = tokenizer.vocabulary.encode(text, special=False)
    if not any(name in text for name in ("<s>", "</s>", "<unk>", "<tool>", "<|user|>")):
        assert tokens == reference.encode(text)
        assert tokenizer.decode(tokens) == reference.decode(tokens) == text


@given(tokens=st.lists(st.integers(3, 419), max_size=30))
def test_both_forms_of_pieces_agree(pieces: Path, pieces_as_json: Path, tokens: list[int]) -> None:
    """Checks that both kinds of tokenizer files give the same text for tokens, and that the libraries agree.
    Only the marks for incomplete characters differ."""
    ours = Tokenizer.load(pieces).decode(tokens)
    assert Tokenizer.load(pieces_as_json).decode(tokens) == ours
    if "\ufffd" not in ours:
        reference = tokenizers.Tokenizer.from_file(str(pieces_as_json / "tokenizer.json"))
        assert reference.decode(tokens) == ours


def test_a_character_of_several_tokens_comes_when_it_is_whole(pieces: Path) -> None:
    tokenizer = Tokenizer.load(pieces)
    tokens = [tokenizer.vocabulary.token_id(f"<0x{byte:02X}>") or -1 for byte in "🦀".encode()]
    assert parts(tokenizer, tokens) == ["", "", "", "🦀", ""]
    assert parts(tokenizer, tokens[:3]) == ["", "", "", "\ufffd"]
    assert parts(tokenizer, [*tokens[:2], tokenizer.vocabulary.encode("a", False)[-1]])[-2:] == [
        "\ufffd a",
        "",
    ]


def test_the_leading_space_goes_from_messages_only(pieces: Path) -> None:
    tokenizer = Tokenizer.load(pieces)
    tokens = tokenizer.vocabulary.encode("the fox", special=False)
    assert "".join(parts(tokenizer, tokens, message=True)) == "the fox"
    assert "".join(parts(tokenizer, tokens, message=False)) == " the fox"


def test_added_tokens_of_pieces(pieces: Path) -> None:
    tokenizer, model = Tokenizer.load(pieces), processor(pieces)
    tokens = tokenizer.vocabulary.encode("<|user|>fox<tool>", special=False)
    assert (tokens[0], tokens[-1]) == (420, 421)
    assert not model.id_to_piece(tokens[1]).startswith("▁")
    assert tokenizer.decode(tokens) == "fox<tool>"
    assert tokenizer.encode("the </s> fox")[0] == model.bos_id()
    assert model.eos_id() in tokenizer.encode("the </s> fox")
    assert tokenizer.vocabulary.token_bytes(9999) == b""
    assert tokenizer.vocabulary.token_name(420) == "<|user|>"
    assert tokenizer.vocabulary.token_id("no such piece") is None


def test_spaces_of_added_tokens_are_decoded(pieces: Path, pieces_as_json: Path, tmp_path: Path) -> None:
    """Checks that tokens of several spaces are decoded as spaces if a tokenizer lists them as added tokens,
    as Gemma's tokenizer.json and tokenizer_config.json do."""
    reference = tokenizers.Tokenizer.from_file(str(pieces_as_json / "tokenizer.json"))
    reference.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
    reference.save(str(tmp_path / "tokenizer.json"))
    token = reference.get_vocab()["▁▁"]
    x = reference.encode("x", add_special_tokens=False).ids
    text = reference.decode([*x, token, *x])
    assert "x  " in text
    assert Tokenizer.load(tmp_path).decode([*x, token, *x]) == text
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes())
    added = {str(token): {"content": "▁▁", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert Tokenizer.load(tmp_path).decode([*x, token, *x]) == text


def test_older_pieces_put_a_space_after_special_tokens(pieces: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes())
    tokenizer, model = Tokenizer.load(tmp_path), processor(pieces)
    tokens = tokenizer.vocabulary.encode("</s>fox", special=False)
    assert tokens == [model.eos_id(), *model.encode("fox")]


def test_bos_is_not_doubled(byte_level: Path) -> None:
    tokenizer = Tokenizer.load(byte_level)
    assert tokenizer.encode("fox") == tokenizer.encode("<s>fox")
    assert tokenizer.encode("fox")[0] == tokenizer.bos == 0


def test_a_text_has_the_same_tokens_each_time(byte_level: Path, tmp_path: Path) -> None:
    """Checks that encoding a text ignores a tokenizer's dropout of merges, which varies the tokens of a text
    in training, so that a text has the same tokens each time."""
    document = json.loads((byte_level / "tokenizer.json").read_bytes())
    document["model"]["dropout"] = 0.7
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    shutil.copy(byte_level / "tokenizer_config.json", tmp_path)
    varied, plain = Tokenizer.load(tmp_path), Tokenizer.load(byte_level)
    for text in SAMPLE[:3]:
        assert varied.encode(text) == plain.encode(text)


def test_ends_come_from_the_manifest_and_the_tokenizer(byte_level: Path) -> None:
    tokenizer = Tokenizer.load(byte_level, Serving(bos_token_id=7, eos_token_ids=(5,)))
    assert (tokenizer.bos, set(tokenizer.eos)) == (7, {1, 5})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a tokenizer that can be read"),
        ("tokenizer.model", "noise", "not a tokenizer that can be read"),
        ("tokenizer_config.json", "[", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BundleError, match=message):
        Tokenizer.load(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"neither tokenizer.json nor tokenizer.model"):
        Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_refused(byte_level: Path, tmp_path: Path) -> None:
    document = json.loads((byte_level / "tokenizer.json").read_bytes())
    document["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BundleError, match="its decoder is not of a kind this runtime supports: BPEDecoder"):
        Tokenizer.load(tmp_path)
    document["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BundleError, match="this runtime supports: none"):
        Tokenizer.load(tmp_path)


class Letters:
    """A vocabulary of which a test chooses the text of each token, and so where a text is divided into
    tokens. Every text is encoded as all of these tokens, in order."""

    leading_space = False

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = parts

    def encode(self, text: str, special: bool) -> list[int]:
        return list(range(len(self.parts)))

    def token_bytes(self, token: int) -> bytes:
        return self.parts[token].encode()

    def token_name(self, token: int) -> str:
        return self.parts[token]

    def token_id(self, name: str) -> int | None:
        return None


def plain_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first complete stop string, computed plainly, or the whole text if it
    contains none. stops: the stop strings; the longest one counts if several end at the same place."""
    for end in range(len(text) + 1):
        whole = [stop for stop in stops if text[:end].endswith(stop)]
        if whole:
            return text[: end - max(map(len, whole))]
    return text


@given(
    cuts=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_however_the_text_is_cut(cuts: list[str], stops: list[str]) -> None:
    stream = TextStream(Letters(cuts), stops, strip=False)
    actual = ""
    for i in range(len(cuts)):
        actual += stream.push(i)
        assert plain_stop("".join(cuts), stops).startswith(actual)
        if stream.stopped:
            break
    actual += stream.finish()
    assert actual == plain_stop("".join(cuts), stops)
    assert stream.stopped == any(stop in "".join(cuts) for stop in stops)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(Letters(["Hi\n", "\n", "X", "\n\nEnd", "more"]), ["\n\nEnd"], strip=False)
    assert [stream.push(i) for i in range(3)] == ["Hi", "", "\n\nX"]
    assert (stream.push(3), stream.stopped, stream.push(4), stream.finish()) == ("", True, "", "")


MESSAGES = [{"role": "user", "content": "hi"}]


def test_where_templates_are_found(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())

    def answer() -> str:
        tokenizer = Tokenizer.load(tmp_path)
        return tokenizer.decode(tokenizer.chat(MESSAGES))

    with pytest.raises(RequestError, match="this model has no chat template: use /v1/completions"):
        answer()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert answer() == "processor"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert answer() == "named"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert answer() == "config"
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert answer() == "file: hi"


def test_a_template_that_is_not_utf8(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(BundleError, match=r"chat_template\.jinja: not UTF-8: .* at byte 3$"):
        Tokenizer.load(tmp_path)


def test_word_pieces_become_text_as_their_decoder_joins_them(tmp_path: Path) -> None:
    words = ["[UNK]", "a", "##b", "n't", ".", "'s", "<tool>"]
    own = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own.add_special_tokens(["[UNK]"])
    own.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    for cleanup in (True, False):
        own.decoder = decoders.WordPiece(cleanup=cleanup)
        own.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.load(tmp_path)
        tokens = [1, 2, 3, 1, 0, 4, 1, 5, 6, 1]
        assert tokenizer.encode("ab a. <tool>a") == [1, 2, 1, 4, 6, 1]
        assert tokenizer.decode(tokens) == own.decode(tokens)
        stream = tokenizer.stream()  # a continuation keeps its space
        assert stream.push(1) + stream.push(2) + stream.finish() == " ab"
