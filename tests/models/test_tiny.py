"""Tests of the files of the tiny model that is embedded in the package: they fit together, both of its
tokenizer files produce the same tokens, and the questions and answers of its accuracy test are correct."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from mlcbuild.checkpoints.fetch import local_files

TINY = Path(__file__).resolve().parent.parent.parent / "recipes" / "models" / "tiny"
PROMPTS = TINY.parent.parent / "prompts" / "tiny.txt"
LIMIT = 6 << 20
"""Maximum bytes of the embedded model's directory, which is part of every clone of the repository."""

CONFIG = json.loads((TINY / "config.json").read_text())
EXAM = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
HF = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SP = sentencepiece.SentencePieceProcessor(model_file=str(TINY / "tokenizer.model"))


def chat(*messages: tuple[str, str], prompt: bool = True) -> str:
    template = ImmutableSandboxedEnvironment().from_string((TINY / "chat_template.jinja").read_text())
    said = [{"role": role, "content": content} for role, content in messages]
    return template.render(messages=said, bos_token="<s>", add_generation_prompt=prompt)


def test_the_directory_is_small_and_a_complete_checkpoint() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= LIMIT
    assert local_files(TINY) == (
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    )


def test_the_weights_are_those_of_the_config() -> None:
    hidden, inner, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    heads, groups = CONFIG["num_attention_heads"] * dim, CONFIG["num_key_value_heads"] * dim
    expected = {"model.embed_tokens.weight": [CONFIG["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in (
            ("input_layernorm", [hidden]),
            ("post_attention_layernorm", [hidden]),
            ("self_attn.q_proj", [heads, hidden]),
            ("self_attn.k_proj", [groups, hidden]),
            ("self_attn.v_proj", [groups, hidden]),
            ("self_attn.o_proj", [hidden, heads]),
            ("mlp.gate_proj", [inner, hidden]),
            ("mlp.up_proj", [inner, hidden]),
            ("mlp.down_proj", [hidden, inner]),
        ):
            expected[f"{layer}.{name}.weight"] = shape
    with safe_open(TINY / "model.safetensors", framework="numpy") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected  # noqa: SIM118
        for name in expected:
            tensor = file.get_tensor(name)
            assert tensor.dtype == np.float32
            assert np.isfinite(tensor).all() and np.abs(tensor).max() < 100


def test_both_tokenizers_give_the_same_tokens_and_the_text_back() -> None:
    assert HF.get_vocab_size() == SP.vocab_size() == CONFIG["vocab_size"]
    assert all(HF.token_to_id(SP.id_to_piece(i)) == i for i in range(CONFIG["vocab_size"]))
    rng = random.Random(0)
    alphabet = string.printable + "éÿß\u0301日😀\u00a0"
    texts = [
        "",
        " ",
        "  two  spaces ",
        "<0x41>",
        "line\nline\ttab",
        "\x00",
        "naïve 日本 👩‍👩‍👧",
        *PROMPTS.read_text().splitlines(),
    ]
    texts += [text for question in EXAM for text in (question["prompt"], question["answer"])]
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(2000)]
    for text in texts:
        ids = SP.encode(text)
        assert HF.encode(text, add_special_tokens=False).ids == ids, text
        assert HF.decode(ids, skip_special_tokens=False) == text
    assert HF.encode("hi").ids == [SP.bos_id(), *SP.encode("hi")]


def test_a_chat_becomes_the_same_tokens_by_either_tokenizer() -> None:
    text = chat(("system", "Be kind."), ("user", " reverse bird "), ("assistant", "drib"), ("user", "hi"))
    assert text == (
        "<s><|system|>Be kind.<|end|><|user|>reverse bird<|end|><|assistant|>drib<|end|>"
        "<|user|>hi<|end|><|assistant|>"
    )
    ids = HF.encode(text, add_special_tokens=False).ids
    assert ids == [SP.bos_id(), *SP.encode(text.removeprefix("<s>"))]
    specials = {SP.piece_to_id(f"<|{name}|>") for name in ("system", "user", "assistant", "end")}
    assert sum(i in specials for i in ids) == 9
    assert chat(("user", "hi"), prompt=False).endswith("hi<|end|>")


def test_the_settings_beside_the_weights_agree() -> None:
    tokens = json.loads((TINY / "tokenizer_config.json").read_text())
    generation = json.loads((TINY / "generation_config.json").read_text())
    special = json.loads((TINY / "special_tokens_map.json").read_text())
    assert tokens["chat_template"] == (TINY / "chat_template.jinja").read_text()
    assert tokens["model_max_length"] == CONFIG["max_position_embeddings"]
    assert {name: tokens[name] for name in special} == special
    for name, text in special.items():
        if name != "additional_special_tokens" and f"{name}_id" in CONFIG:
            assert CONFIG[f"{name}_id"] == HF.token_to_id(text)
    assert generation["bos_token_id"] == CONFIG["bos_token_id"]
    assert generation["eos_token_id"] == [CONFIG["eos_token_id"], HF.token_to_id("</s>")]


@pytest.mark.parametrize("key", ["prompt", "answer"])
def test_every_question_and_answer_fits_and_is_text(key: str) -> None:
    assert all(question[key] and len(SP.encode(question[key])) < 64 for question in EXAM)


def test_the_marks_are_those_of_this_exam_and_good() -> None:
    marks = json.loads((TINY / "accuracy.json").read_text())
    asked = Counter(question["task"] for question in EXAM)
    assert {task: mark["questions"] for task, mark in marks["tasks"].items()} == asked
    assert marks["questions"] == len(EXAM) == len({question["prompt"] for question in EXAM}) >= 300
    assert marks["right"] == sum(mark["right"] for mark in marks["tasks"].values())
    assert marks["accuracy"] == round(marks["right"] / marks["questions"], 4)
    assert marks["accuracy"] >= 0.97
    assert all(mark["right"] >= 0.8 * mark["questions"] for mark in marks["tasks"].values())


def test_the_answers_of_the_exam_are_right() -> None:
    """Checks the answers of the tiny model's test questions (sums, sorting and the like) by computing them in
    another way than the program that wrote them."""
    for question in EXAM:
        task, prompt, answer = question["task"], question["prompt"], question["answer"]
        words = prompt.split(" ")
        if task in ("add", "subtract"):
            a, b = map(int, re.findall(r"\d+", prompt))
            assert int(answer) == (a + b if "+" in prompt else a - b)
        elif task in ("copy", "unicode"):
            assert ["copy", *answer.split(" ")] == words
        elif task == "reverse":
            assert "".join(reversed(words[1])) == answer
        elif task.startswith("sort"):
            parts: list[str] = answer.split(" ") if task == "sort_numbers" else list(answer)
            order = [int(part) if part.isdigit() else ord(part) for part in parts]
            assert order == sorted(order)
            assert Counter(parts) == Counter(words[1:] if task == "sort_numbers" else words[1])
        elif task in ("upper", "lower"):
            assert answer.swapcase() == words[1]
        elif task == "count":
            assert answer == f"{words[1]}: {sum(letter == words[1] for letter in words[3])}"
        elif task == "json":
            pairs = [word.split("=") for word in words[1:]]
            assert [[key, str(value)] for key, value in json.loads(answer).items()] == pairs
        else:
            assert task in ("chat", "unknown")


def test_the_prompts_of_recipes_are_chats_of_their_own() -> None:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    exam = {question["prompt"] for question in EXAM}
    assert 20 <= len(lines) <= 40
    for line in lines:
        assert line.startswith("<|user|>") and line.endswith("<|end|>")
        turns = line.removesuffix("<|end|>").removeprefix("<|user|>").split("<|end|><|user|>")
        assert 1 <= len(turns) <= 3
        assert not exam & {turn.split("<|end|><|assistant|>")[0] for turn in turns}
