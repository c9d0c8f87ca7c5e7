"""Tests that the browser engine computes the same tokens and the same chat prompts as the Python runtime."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from mlcbuild_runtime.text.chat_template import ChatTemplate
from mlcbuild_runtime.text.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from . import shared
from .browser_engine import call, calls, tokenizer_files
from .toy import write_tokenizer

TINY = shared.ROOT / "recipes" / "models" / "tiny"


SAMPLE = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Où est-il? It's I'LL we'Re",
    "日本語のテキストも少しあります。 Emoji: 🙂🙃, code: if (a < b) { return a[0]; }\n\tend 12345 ½ Ⅳ",
]


TEXTS = [
    *SAMPLE,
    "",
    " ",
    "  two  spaces \n\n x ",
    "\ufeffbom\x85nel\u3000wide\u00a0narrow\u2028line",
    "<s>a</s> b<|user|>hi<|end|> <tool>x <tool> </s>",
    "e\u0301 ﬁ ｆｕｌｌ İ Σς ſ",
    "👨‍👩‍👧 🇩🇪 z͑ͫ̓",
    "\t\r\n\r\n a\n",
    "▁▁ ▁a",
    "don't DON'T 'S's 1'2",
]


LETTERS = " abcABC0123.,'!?\n\tüß日本🙂▁é\u0301-_/<>"


def corpus(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [*TEXTS, *("".join(rng.choices(LETTERS, k=rng.randrange(50))) for _ in range(count))]


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|\s+"
)


HAN = r"\p{Han}+|[a-z\d]+(?>a|ab)|\w+"


@pytest.mark.parametrize("pattern", [GPT4, QWEN, O200K, DEEPSEEK, HAN])
def test_expressions_match_what_oniguruma_matches(pattern: str) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    texts = [text for text in corpus(1, 60) if text]
    expected = [[part for part, _ in split.pre_tokenize_str(text)] for text in texts]
    assert call("split", {"pattern": pattern, "texts": texts}) == expected


def test_an_expression_that_cannot_be_translated_is_named() -> None:
    for pattern in (r"(?<name>a)", r"[a&&b]", r"a\K", r"(", r"[[:alpha:]]", r"\p{Nonsense}"):
        (result,) = calls(("split", {"pattern": pattern, "texts": ["a"]}))
        assert "has the regular expression" in result["error"] and "\n" not in result["error"], pattern


def bpe(pre: Any, **model: Any) -> tokenizers.Tokenizer:
    own = tokenizers.Tokenizer(models.BPE(**model))
    own.pre_tokenizer, own.decoder = pre, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(SAMPLE * 9, trainer)
    return own


def byte_level() -> tokenizers.Tokenizer:
    own = bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    own.add_tokens([tokenizers.AddedToken("<tool>", single_word=True, lstrip=True, rstrip=True)])
    own.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return own


def split_before_bytes() -> tokenizers.Tokenizer:
    cut = pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
    own = bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                cut,
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        )
    )
    own.normalizer = normalizers.NFC()
    own.post_processor = processors.ByteLevel(trim_offsets=False)
    document = json.loads(own.to_str())
    document["model"]["ignore_merges"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def pieces_by_merging() -> tokenizers.Tokenizer:
    """Returns a BPE tokenizer like those of Llama 2 and Gemma: it merges over the whole text, and writes
    characters that are not in the vocabulary as bytes."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, show_progress=False, max_token_length=9
    )
    trained.train_from_iterator(SAMPLE[:1] * 9, trainer)
    document = json.loads(trained.to_str())
    document["model"] |= {"byte_fallback": True, "fuse_unk": True}
    own = tokenizers.Tokenizer.from_str(json.dumps(document))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(steps)
    own.add_tokens([tokenizers.AddedToken("<|user|>", normalized=True)])
    own.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
    return own


def unigram() -> tokenizers.Tokenizer:
    own = tokenizers.Tokenizer(models.Unigram())
    own.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    own.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    own.train_from_iterator(SAMPLE * 3, trainer)
    return own


KINDS = {
    "byte_level": byte_level,
    "split_before_bytes": split_before_bytes,
    "pieces_by_merging": pieces_by_merging,
    "unigram": unigram,
}


def compare(directory: Path, texts: Sequence[str]) -> None:
    """Asserts that the browser's engine and the runtime compute the same tokens for texts, with and without
    special tokens, and the same texts for tokens."""
    own = Tokenizer.load(directory)
    files = tokenizer_files(directory)
    expected = [[own.encode(text), own.vocabulary.encode(text, special=False)] for text in texts]
    lists = [tokens for _, tokens in expected]
    encoded, decoded = calls(
        ("encode", {**files, "texts": texts}), ("decode", {**files, "lists": lists, "stop": ["fox", " b"]})
    )
    for text, actual, right in zip(texts, encoded["value"], expected, strict=True):
        assert actual == right, text
    for tokens, actual in zip(lists, decoded["value"], strict=True):
        stream = own.stream(["fox", " b"], message=True)
        assert actual == [*(stream.push(token) for token in tokens), stream.finish()], tokens


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tokens_of_a_tokenizer_json_equal_the_runtimes(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    compare(tmp_path, [*corpus(2, 120), "a▁▁b"])


def test_tokens_of_a_large_vocabulary_equal_the_runtimes(tmp_path: Path) -> None:
    """Checks that the browser's tokenizer equals the Python runtime's for a vocabulary of 128,000 tokens, the
    size of DeepSeek V3's: a JavaScript call may have fewer arguments, so the engine must not pass all tokens
    as arguments of one call."""
    document = json.loads(byte_level().to_str())
    vocab = document["model"]["vocab"]
    vocab |= {f"<{i}>": i for i in range(len(vocab), 128_000)}
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    compare(tmp_path, corpus(6, 20))


def test_tokens_of_the_embedded_model_and_of_the_toy(tmp_path: Path) -> None:
    compare(TINY, corpus(3, 80))
    write_tokenizer(tmp_path)
    compare(tmp_path, corpus(4, 40))


@pytest.mark.parametrize(
    ("kind", "rule", "collapses"),
    [("bpe", "identity", False), ("unigram", "nmt_nfkc", True), ("bpe", "nfkc_cf", True)],
)
@pytest.mark.parametrize("fallback", [True, False])
def test_tokens_of_sentencepiece_equal_the_runtimes(
    kind: str, rule: str, collapses: bool, fallback: bool, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE * 20),
        model_writer=buffer,
        model_type=kind,
        vocab_size=400 if fallback else 140,
        hard_vocab_limit=False,
        byte_fallback=fallback,
        character_coverage=0.98,
        normalization_rule_name=rule,
        remove_extra_whitespaces=collapses,
        user_defined_symbols=["<tool>", "  "],
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(buffer.getvalue())
    added = {
        "9998": {"content": "<|user|>", "special": True, "rstrip": True},
        "9999": {"content": "<|end|>▁"},
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "legacy": not fallback, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    stripped = [f"{text} \u3000\n<|user|> \t{text}" for text in TEXTS]
    plain = [text.replace("\0", "") for text in corpus(5, 120)]
    compare(tmp_path, [*stripped, *plain, "a<|end|>▁"])


def test_special_tokens_end_answers_and_begin_prompts() -> None:
    own = Tokenizer.load(TINY)
    assert call("ends", {**tokenizer_files(TINY), "eos": [2]}) == [[2, *own.eos], own.bos]
    names = ["tokenizer.json", "tokenizer.model", "other", "chat_template.jinja"]
    assert call("files", {"names": names}) == ["tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##"}}, 'the decoder ["WordPiece"] is not of a kind'),
        ({"normalizer": {"type": "BertNormalizer"}}, 'the normalizer "BertNormalizer" is not of a kind'),
        ({"pre_tokenizer": {"type": "constructor"}}, 'the pre-tokenizer "constructor" is not of a kind'),
        ({"post_processor": {"type": "BertProcessing"}}, 'the post-processor "BertProcessing" is not'),
        ({"model": {"type": "WordPiece"}}, 'the model "WordPiece" is not of a kind'),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    document = json.loads((TINY / "tokenizer.json").read_bytes()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (result,) = calls(("ends", tokenizer_files(tmp_path)))
    assert message in result["error"]


TEMPLATES = [
    "{%- for m in messages -%}{{ bos_token }}{{ m.role }}:{{ m['content'] | trim }}\n{% endfor %}",
    "{% set n = namespace(x=0) %}{% for m in messages if m.role != 'system' %}{% set n.x = n.x + 1 %}"
    "{{ loop.index0 }}{{ n.x }}{{ 'last' if loop.last else '' }}{% endfor %}{{ 'no' if tools is none }}",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ messages[-1].content[:2] | upper }}",
    "  {% if add_generation_prompt %}\n<a>{{ messages | length }}\n  {% endif %}\n",
    "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[0].content.split(' ')[0]) }}{{ 1 ~ 'a' }}",
    "{% generation %}{{ messages | map(attribute='role') | join(', ') }}{% endgeneration %}"
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'yes' if flag is defined }}",
]


@pytest.mark.parametrize("index", range(len(TEMPLATES)))
def test_chat_templates_write_what_jinja_writes(index: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[index])
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "héllo <b> wörld"}]
    template = ChatTemplate(TEMPLATES[index], {"bos_token": "<s>"})
    try:
        expected = template.render(messages, {"flag": True})
    finally:
        template.close()
    asked = {**tokenizer_files(tmp_path), "messages": messages, "options": {"flag": True}}
    assert call("prompt", asked) == expected


def test_a_template_that_refuses_or_fails_does_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    for source in ("{{ raise_exception('no\\nroles') }}", "{% if %}", "{{ 1 | nofilter }}"):
        (tmp_path / "chat_template.jinja").write_text(source)
        (result,) = calls(("prompt", {**tokenizer_files(tmp_path), "messages": [], "options": {}}))
        assert "chat template refuses these messages: " in result["error"] and "\n" not in result["error"]
    (tmp_path / "chat_template.jinja").unlink()
    (result,) = calls(("prompt", {**tokenizer_files(tmp_path), "messages": [], "options": {}}))
    assert result["error"] == "this model has no chat template, so it cannot chat"


def test_a_prompt_beyond_the_vocabulary_is_refused_as_in_python() -> None:
    """Checks that a request is refused whose prompt has a token that the model's table of embeddings lacks,
    such as an added token of a checkpoint for images."""
    own, messages = Tokenizer.load(TINY), [{"role": "user", "content": "hi"}]
    try:
        largest = max(own.chat(messages))
    finally:
        own.template.close()
    asked = {**tokenizer_files(TINY), "messages": messages, "context": 100}
    fits, refused = calls(
        ("begin", {**asked, "vocab": largest + 1}),
        ("begin", {**asked, "vocab": largest}),
    )
    assert fits == {"value": True}
    message = f"token {largest} is outside the vocabulary of {largest} tokens"
    assert refused == {"error": f"the prompt does not fit the model: {message}"}
