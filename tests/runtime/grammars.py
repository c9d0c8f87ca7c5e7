"""Tokenizers and grammars for tests of constrained output."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_runtime.constraints.grammar import Grammars, Matcher
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.openai import harmony
from mlcbuild_runtime.openai.call_forms import SYNTAXES
from mlcbuild_runtime.text.tokenizer import Tokenizer
from mlcbuild_runtime.text.vocabulary import JsonVocabulary, PieceVocabulary
from numpy.typing import NDArray

from . import shared

TINY = shared.ROOT / "recipes" / "models" / "tiny"


SIZE = 512


def _tokenizers() -> dict[str, Tokenizer]:
    """Returns kind of tokenizer file -> the tokenizer of the repository's small model, read from this kind of
    file: "json" for tokenizer.json, "pieces" for SentencePiece's tokenizer.model."""
    both = Tokenizer.load(TINY)
    special = {"bos_token": "<s>", "eos_token": "<|end|>"}
    config = json.loads((TINY / "tokenizer_config.json").read_bytes())
    pieces = PieceVocabulary(TINY / "tokenizer.model", config, special)
    assert isinstance(both.vocabulary, JsonVocabulary)
    return {"json": both, "pieces": Tokenizer(pieces, both.template, both.bos, both.eos)}


TOOL_TOKENS = tuple(
    dict.fromkeys([name for syntax in SYNTAXES for name in syntax.special] + [*harmony.MARKS])
)


def _with_tool_tokens() -> Tokenizer:
    """Returns the tokenizer of the small model in recipes/models with additional special tokens for tool
    calls, such as other models have."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Json

    tokenizer = Json.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOOL_TOKENS])
    with tempfile.TemporaryDirectory() as area:
        tokenizer.save(f"{area}/tokenizer.json")
        vocabulary = JsonVocabulary(Path(area, "tokenizer.json"))
    both = Tokenizer.load(TINY)
    return Tokenizer(vocabulary, both.template, both.bos, both.eos)


TOKENIZERS = {**_tokenizers(), "tools": _with_tool_tokens()}


GRAMMARS = {name: Grammars(each.vocabulary, SIZE, each.eos) for name, each in TOKENIZERS.items()}


RULES = "\n".join(f'r{i}: "a{i}" start?' for i in range(8000))


def allowed_by(matcher: Matcher) -> NDArray[np.bool_]:
    """Returns a boolean for each token, [SIZE]: true if the matcher allows it next."""
    return np.unpackbits(matcher.mask().view(np.uint8), count=SIZE, bitorder="little").astype(np.bool_)


def drawn(
    constraint: Constraint,
    seed: int = 0,
    name: str = "json",
    message: bool = False,
    shown: Mapping[int, str] | None = None,
) -> str:
    """Returns the text of an answer whose tokens are drawn at random among those that the constraint
    allows."""
    source, tokenizer = random.Random(seed), TOKENIZERS[name]
    matcher = GRAMMARS[name].compiled(constraint, message).matcher()
    stream = tokenizer.stream((), message, shown)
    text = ""
    for _ in range(2000):
        allowed = allowed_by(matcher).nonzero()[0].tolist()
        assert allowed, text
        token = source.choice(allowed)
        matcher.take(token)
        if token in tokenizer.eos:
            break
        text += stream.push(token)
        if matcher.finished:
            break
    else:
        pytest.fail(f"no end: {text}")
    return text + stream.finish()
