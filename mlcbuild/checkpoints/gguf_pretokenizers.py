"""Lists the rules by which byte-level BPE tokenizers split text into words, by the names that GGUF files use.

GGUF states only the name of a pre-tokenizer. The expressions are those of each model's tokenizer.json; if a
model's file is not public, they are those that llama.cpp uses for the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlcbuild.canon import Json

Step = dict[str, Json]
"""One pre-tokenizer, as a JSON object of the form that tokenizer.json has."""


@dataclass(frozen=True)
class PreTokenizer:
    steps: tuple[Step, ...]
    """Pre-tokenizers, which split a text into words in this order; each splits the words of the previous
    one.
    """
    is_nfc: bool = False
    """True if the original tokenizer composes characters (Unicode NFC) before it cuts a text into words."""
    ignores_merges: bool = False
    """True if a word that equals a token becomes this token even if no merges lead to it."""
    adds_bos: bool = False
    """True if a prompt begins with the BOS token when the GGUF file does not say so."""

    def to_json(self) -> Json:
        steps: Sequence[Json] = self.steps
        return {"type": "Sequence", "pretokenizers": list(steps)} if len(steps) > 1 else steps[0]


def _split(expression: str) -> Step:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, cuts: bool) -> Step:
    """Returns the byte-level pre-tokenizer of tokenizer.json, which writes each byte as a printable
    character. cuts: True if it first splits the text into words by GPT-2's expression.
    """
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cuts}


def _digits(*, single: bool) -> Step:
    return {"type": "Digits", "individual_digits": single}


def _splits(*expressions: str) -> tuple[Step, ...]:
    return (*map(_split, expressions), _byte_level(cuts=False))


_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cl100k(numbers: str, spaces: str = _SPACES) -> str:
    """Returns the regular expression by which OpenAI's cl100k splits text into words. numbers, spaces:
    regular expressions, the parts for digits and for spaces, which differ between models."""
    return rf"{_SUFFIX}|{_LEAD}\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{spaces}"


def _o200k(numbers: str, suffix: str) -> str:
    """Returns the regular expression by which OpenAI's o200k splits text into words, where a word ends when a
    capital follows small letters.

    numbers: a regular expression, the part for digits; suffix: one for what may follow a word, such as 's,
    which must also match the empty text; "" for nothing.
    """
    words = f"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_NUMBER, _THREE = r"\p{N}", r"\p{N}{1,3}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_V3 = (
    _THREE,
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
# The cased letters of Unicode 11, escaped: several look alike, and editors that normalize text would merge
# them.
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_BYTE_LEVEL = PreTokenizer((_byte_level(cuts=True),))
_DIGITS = PreTokenizer((_digits(single=True), _byte_level(cuts=True)))
_LLAMA3 = PreTokenizer(_splits(_cl100k(_THREE)), ignores_merges=True, adds_bos=True)
_CL100K = PreTokenizer(_splits(_cl100k(_THREE)))
_QWEN2 = PreTokenizer(_splits(_cl100k(_NUMBER)), is_nfc=True)
_O200K = PreTokenizer(_splits(_o200k(_THREE, f"{_SUFFIX}?")))
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


_SPELLINGS: Sequence[tuple[str, PreTokenizer]] = (
    ("gpt-2 phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _BYTE_LEVEL),
    ("mpt olmo", replace(_BYTE_LEVEL, is_nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _DIGITS),
    ("command-r", replace(_DIGITS, is_nfc=True)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe", _CL100K),
    ("glm4 glm5", replace(_CL100K, ignores_merges=True)),
    ("qwen2", _QWEN2),
    ("deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", replace(_QWEN2, is_nfc=False)),
    (
        "qwen35",
        PreTokenizer(
            _splits(
                rf"{_SUFFIX}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
            ),
            is_nfc=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 minimax-m2", _O200K),
    (
        "tekken",
        PreTokenizer(_splits(_o200k(_NUMBER, "")), ignores_merges=True, adds_bos=True),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(_splits(*_DEEPSEEK_V3))),
    (
        "deepseek-coder",
        PreTokenizer(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _NUMBER)),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            _splits(
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _HAN_AND_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    (
        "falcon",
        PreTokenizer(
            (
                {"type": "Punctuation", "behavior": "Contiguous"},
                _byte_level(cuts=True),
                _digits(single=False),
                _split("[0-9][0-9][0-9]"),
            )
        ),
    ),
    (
        "default",
        PreTokenizer(_splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_splits(_BAILING))),
    (
        "seed-coder",
        PreTokenizer(_splits(rf"{_SUFFIX}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")),
    ),
    ("minicpm5", PreTokenizer(_splits(_THREE, _cl100k(r"\p{N}+")), ignores_merges=True)),
    ("bloom poro-chat gpt3-finnish", PreTokenizer(_splits(_BLOOM))),
    ("viking", PreTokenizer(_splits(_BLOOM, _NUMBER))),
)
"""Pairs (names that GGUF files use for a pre-tokenizer, separated by spaces; the pre-tokenizer itself)."""
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: words for names, words in _SPELLINGS for name in names.split()
}
"""Value of `tokenizer.ggml.pre` in a GGUF file -> PreTokenizer, the regular expressions that split a text
before its tokens are merged."""
