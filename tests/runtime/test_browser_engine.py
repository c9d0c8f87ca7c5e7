"""The browser's engine against the Python runtime and the libraries that it stands for: digests, random
numbers, sampling, tokens, text, templates, weights."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import blake3
import numpy as np
import pytest
import sentencepiece
import tokenizers
from mlcbuild_format import abi
from mlcbuild_runtime.devices import host_sampling
from mlcbuild_runtime.executor.sampling_params import Sampling, adjusted, generator, logprobs
from mlcbuild_runtime.text.chat_template import ChatTemplate
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray
from safetensors import numpy as safetensors
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


def test_digests_equal_those_of_blake3() -> None:
    sizes = [0, 1, 64, 65, 1023, 1024, 1025, 2048, 3073, 7168, 102_401]
    results = calls(*(("digest", {"size": size, "step": 777}) for size in sizes))
    expected = [blake3.blake3(bytes(i % 251 for i in range(size))).hexdigest() for size in sizes]
    assert [result["value"] for result in results] == [[digest, digest] for digest in expected]


@pytest.mark.parametrize("seed", [0, 3, 2**32, 2**64 - 1, 12345678901234567])
def test_a_seed_gives_the_numbers_of_numpy(seed: int) -> None:
    expected = generator(Sampling(seed=seed)).random(70).tolist()
    assert call("random", {"seed": str(seed), "count": 70}) == expected


SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1, top_k=5),
    Sampling(temperature=1, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.5, top_k=40),
    Sampling(temperature=1, min_p=0.05),
    Sampling(temperature=0),
    Sampling(temperature=1, top_k=1),
]


def options(sampling: Sampling) -> dict[str, float]:
    return {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "topK": sampling.top_k,
        "minP": sampling.min_p,
    }


def logits_of(seed: int, count: int = 300) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, count).astype(np.float32)


def top_of(logits: NDArray[np.float32]) -> list[int]:
    """Returns what the kernel `top` writes of a row: the 64 largest logits, here in any order."""
    order = np.argsort(-logits, kind="stable")[:64]
    words = np.empty(2 + 2 * 64, np.float32)
    words[0], words[1] = logits.max(), np.exp(logits - logits.max()).sum()
    words[2::2] = logits[order]
    bits = words.view(np.int32)
    bits[3::2] = order
    actual: list[int] = bits.tolist()
    return actual


@pytest.mark.parametrize("index", range(len(SAMPLINGS)))
def test_tokens_are_drawn_as_the_runtime_draws_them(index: int) -> None:
    sampling, logits = SAMPLINGS[index], logits_of(index)
    logits[[7, 9]] = logits[7]
    randoms = np.random.default_rng(1).random(50).tolist()
    rows = [(*sampling.columns, number) for number in randoms]
    asked = {"params": options(sampling), "randoms": randoms}
    whole, top = calls(
        ("draws", {**asked, "logits": logits.tolist()}), ("top", {**asked, "words": top_of(logits)})
    )
    assert whole["value"] == [host_sampling.draw(logits, row) for row in rows]
    if sampling.temperature and not sampling.greedy:
        words = np.array(top_of(logits), np.int32)
        assert top["value"] == [host_sampling.draw_from_top(words, row) for row in rows]


def test_logits_that_are_not_numbers_give_no_token() -> None:
    bits = np.array([np.nan, 1] + [0] * 128, np.float32).view(np.int32).tolist()
    asked = {"params": options(Sampling()), "randoms": [0.5]}
    assert call("top", {**asked, "words": bits}) == [abi.INVALID_TOKEN]
    assert call("draws", {**asked, "bits": bits}) == [abi.INVALID_TOKEN]


def test_penalties_and_log_probabilities_equal_the_runtimes() -> None:
    logits, counts = logits_of(3, 40), {5: 2, 7: 1}
    sampling = Sampling(
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.3,
        bias=((1, 4.5), (7, -3.0)),
    )
    penalties = {"repetition": 1.3, "frequency": 0.5, "presence": -0.25, "bias": [[1, 4.5], [7, -3.0]]}
    asked = {
        "logits": logits.tolist(),
        "options": penalties,
        "prompt": [0, 5],
        "counts": list(counts.items()),
    }
    expected = adjusted(logits, sampling, [0, 5], counts)
    assert call("adjust", asked) == expected.tolist()
    own, others = logprobs(logits, 3, 4)
    actual = call("logprobs", {"logits": logits.tolist(), "token": 3, "count": 4})
    assert [token for token, _ in actual] == [own.token, *(other.token for other in others)]
    values = [own.logprob, *(other.logprob for other in others)]
    np.testing.assert_allclose([value for _, value in actual], values, atol=1e-6)


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
    """Returns a tokenizer as Llama 2 and Gemma have it: merging over the whole text, bytes for text that is
    not in the vocabulary."""
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
    """Compares the tokens of both engines for texts, with and without special tokens, and the text of the
    tokens."""
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
    compare(tmp_path, corpus(2, 120))


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
    added = {"9998": {"content": "<|user|>", "special": True}, "9999": {"content": "<|end|>"}}
    config = {"bos_token": "<s>", "eos_token": "</s>", "legacy": not fallback, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, [text.replace("\0", "") for text in corpus(5, 120)])


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


@pytest.mark.parametrize("part", [7, 64, 100_000])
def test_weights_arrive_in_whole_words_however_they_are_cut(part: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(part)
    tensors = {
        "a": rng.integers(0, 255, (3, 5), np.uint8),
        "b": rng.normal(size=(7, 3)).astype(np.float16),
        "c": rng.normal(size=(33, 2)).astype(np.float32),
    }
    path = tmp_path / "w.safetensors"
    safetensors.save_file(tensors, path, {"signature": "5"})
    params = [
        {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in tensors.items()
    ]
    asked = {"path": str(path), "params": params, "signature": "5", "part": part}
    for name, data in call("weights", asked).items():
        expected = tensors[name].tobytes()
        assert bytes(data) == expected + bytes(-len(expected) % 4), name
    (result,) = calls(("weights", {**asked, "params": params[1:]}))
    assert result["error"] == "weights: 'a' is no parameter of the program: build the bundle again"
    (result,) = calls(("weights", {**asked, "signature": "6"}))
    assert "its weights have signature" in result["error"]


class Broken(SimpleHTTPRequestHandler):
    """Sends half of the rest of a file, so that a client must go on from there."""

    ranges = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if self.ranges else 0
        rest = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if len(rest) < 4096 or not self.ranges else rest[: len(rest) // 2])


class WithoutRanges(Broken):
    ranges = False


@pytest.mark.parametrize("handler", [Broken, WithoutRanges])
def test_a_broken_download_goes_on_where_it_broke(
    handler: type[Broken], toy_bundle: Path, tmp_path: Path
) -> None:
    document = json.loads((toy_bundle / "bundle.json").read_bytes())
    document["target"] |= {"output": "program", "device": "webgpu"}
    for name in document["files"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((toy_bundle / name).read_bytes())
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        expected = {name: entry["blake3"] for name, entry in document["files"].items()}
        assert call("open", {"url": url}) == expected
        name = max(document["files"], key=lambda own: document["files"][own]["size"])
        damaged = bytearray((tmp_path / name).read_bytes())
        damaged[-1] ^= 1
        (tmp_path / name).write_bytes(damaged)
        (result,) = calls(("open", {"url": url}))
        assert result["error"].startswith(f"{name} is not the file that bundle.json lists")
        server.shutdown()


def test_a_bundle_for_another_device_is_refused(toy_bundle: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(WithoutRanges, directory=str(toy_bundle))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (result,) = calls(("open", {"url": f"http://127.0.0.1:{server.server_port}/"}))
        assert result["error"] == "this bundle is for the device 'cpu': build it for the target webgpu"
        server.shutdown()
