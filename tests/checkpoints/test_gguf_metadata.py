"""Tests of faulty metadata of GGUF files: each fault is reported in one sentence, and whatever is accepted
can be loaded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer

from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer
from mlcbuild.errors import CheckpointError

Metadata = dict[str, object]
UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


SMALL: Metadata = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES: Metadata = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", *BYTES],
    "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, NORMAL, *[BYTE] * 256],
    "tokenizer.ggml.scores": [0.0] * 259,
    "tokenizer.ggml.bos_token_id": 1,
}
T = "tokenizer.ggml."
WRONG: list[tuple[Metadata, Metadata, str]] = [
    (SMALL, {T + "model": "rwkv"}, "model: 'rwkv' is not supported; supported: gpt2, llama, t5, bert"),
    (SMALL, {T + "model": None}, "model: is absent"),
    (SMALL, {T + "model": 7}, "model: must be a string, not 7"),
    (SMALL, {T + "pre": "gpt2"}, "pre: 'gpt2' is unknown; did you mean 'gpt-2'?"),
    (SMALL, {T + "pre": None}, "pre: is absent"),
    (PIECES, {T + "model": "t5", T + "precompiled_charsmap": [1]}, "charsmap: is damaged: it points beyond"),
    (PIECES, {T + "model": "t5", T + "precompiled_charsmap": [1, 256]}, "must be bytes, but entry 1 is 256"),
    (PIECES, {T + "remove_extra_whitespaces": 1}, "remove_extra_whitespaces: must be true or false, not 1"),
    (SMALL, {T + "tokens": None}, "tokens: is absent or empty"),
    (SMALL, {T + "tokens": "abc"}, "tokens: must be an array, not 'abc'"),
    (SMALL, {T + "tokens": np.zeros((2, 2))}, "tokens: must be an array"),
    (SMALL, {T + "tokens": ["a", b"\xff", "ab", "e"]}, "tokens: entries must be str, but entry 1 is 1 bytes"),
    (SMALL, {T + "tokens": ["a", "\udcff", "ab", "e"]}, "tokens: entries must be UTF-8, but entry 1"),
    (SMALL, {T + "tokens": ["a", "b", "ab", "a"]}, "tokens: tokens must differ, but 'a' stands 2 times"),
    (SMALL, {T + "tokens": ["a"] * 10_000_000}, "tokens: has 10000000 entries, and at most 4194304 are read"),
    (SMALL, {T + "token_type": [1, 1]}, "token_type: must have an entry for each of the 4 tokens, but has 2"),
    (SMALL, {T + "token_type": [1, 1, 9, 1]}, "token_type: types are 0 to 6, but entry 2 is 9"),
    (SMALL, {T + "token_type": [1, 1.5, 1, 1]}, "token_type: entries must be int, but entry 1 is 1.5"),
    (SMALL, {T + "merges": None}, "merges: is absent"),
    (SMALL, {T + "merges": ["a b", "a x"]}, "merges: entries must be two tokens with a space between them"),
    (SMALL, {T + "merges": ["b a"]}, "but entry 0 is 'b a'"),
    (SMALL, {T + "merges": ["ab"]}, "but entry 0 is 'ab'"),
    (SMALL, {T + "eos_token_id": 4}, "eos_token_id: must be the id of one of the 4 tokens, not 4"),
    (SMALL, {T + "eos_token_id": -1}, "eos_token_id: must be the id of one of the 4 tokens, not -1"),
    (SMALL, {T + "eos_token_id": 10**5000}, "not an integer of more than 64 bits"),
    (SMALL, {T + "eos_token_id": True}, "eos_token_id: must be an integer, not True"),
    (SMALL, {T + "add_bos_token": 1}, "add_bos_token: must be true or false, not 1"),
    (SMALL, {T + "add_bos_token": True}, "add_bos_token: needs tokenizer.ggml.bos_token_id"),
    (SMALL, {"tokenizer.chat_template": ["x"]}, "chat_template: must be a string, not an array of 1"),
    (
        SMALL,
        {"tokenizer.chat_template.\udc80": "x"},
        "must be UTF-8, but 'x' or its key has broken characters",
    ),
    (SMALL, {"tokenizer.chat_template": "x" * 2_000_000}, "chat_template: has 2000000 bytes"),
    (PIECES, {T + "scores": None}, "scores: is absent"),
    (
        PIECES,
        {T + "scores": [0.0] * 258 + [float("nan")]},
        "scores: entries must be finite, but entry 258 is nan",
    ),
    (PIECES, {T + "scores": [1e300] * 259}, "scores: entries must be finite, but entry 0 is 1e+300"),
    (PIECES, {T + "scores": ["0"] * 259}, "scores: entries must be float or int, but entry 0 is '0'"),
    (PIECES, {T + "token_type": [1] * 259}, "token_type: exactly one token must be unknown (2), and none is"),
    (
        PIECES,
        {T + "token_type": [2, 3, 6, *[6] * 256]},
        "token_type: the byte tokens (6) must be all of <0x00>",
    ),
    (PIECES, {T + "token_type": [2, 3, *[6] * 256, 1]}, "but 2 are missing or have other names"),
    (
        PIECES,
        {T + "tokens": ["<unk>", "<s>", "a\0", *BYTES], T + "token_type": [2, 3, 4, *[6] * 256]},
        "tokens: entry 2 is 'a\\x00', with NUL in it",
    ),
]


@pytest.mark.parametrize(("base", "changes", "message"), WRONG, ids=[message[:60] for *_, message in WRONG])
def test_wrong_metadata_is_one_sentence(
    base: Metadata, changes: Metadata, message: str, tmp_path: Path
) -> None:
    write_tokenizer(base, "m.gguf", tmp_path)
    assert list(tmp_path.iterdir()), "without the changes it is right"
    clear(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        write_tokenizer(base | changes, "m.gguf", tmp_path)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("m.gguf: tokenizer.") and message in line and len(line) < 500
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_many_problems_are_counted(tmp_path: Path) -> None:
    wrong = SMALL | {f"tokenizer.chat_template.{i}\n": i for i in range(1000)}
    with pytest.raises(CheckpointError) as raised:
        write_tokenizer(wrong, "m.gguf", tmp_path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 61 and lines[-1] == "m.gguf: there are 940 more problems of these kinds"


def test_all_problems_are_reported(tmp_path: Path) -> None:
    wrong = SMALL | {T + "token_type": [1], T + "merges": ["x y"], T + "eos_token_id": 9}
    with pytest.raises(CheckpointError) as raised:
        write_tokenizer(wrong, "m.gguf", tmp_path)
    assert len(str(raised.value).splitlines()) == 3


def test_random_metadata_is_refused_or_loads(tmp_path: Path) -> None:
    rng = random.Random(3)
    values: list[object] = [
        None,
        0,
        3,
        -1,
        1 << 70,
        1.5,
        True,
        "",
        "a",
        "\udc80",
        b"a",
        [],
        [1],
        ["a"],
        ["a b"],
        {},
    ]
    accepted = 0
    for _ in range(1500):
        metadata = dict(rng.choice([SMALL, PIECES]))
        for _ in range(rng.randrange(3)):
            key = rng.choice(
                [*metadata, T + "add_bos_token", T + "unknown_token_id", "tokenizer.chat_template.x"]
            )
            metadata[key] = rng.choice(values)
        names = metadata.get(T + "tokens")
        if isinstance(names, list) and names and rng.random() < 0.5:
            i = rng.randrange(len(names))
            metadata[T + "tokens"] = [
                *names[:i],
                rng.choice(["", " ", "\0", "▁", "\U0001f642", "x" * 999]),
                *names[i + 1 :],
            ]
        try:
            write_tokenizer(metadata, "m.gguf", tmp_path)
        except CheckpointError as error:
            assert all(line.startswith("m.gguf: tokenizer.") for line in str(error).splitlines())
            continue
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.decode(tokenizer.encode("ab <e> \0 🙂"))
        accepted += 1
        clear(tmp_path)
    assert accepted > 100
