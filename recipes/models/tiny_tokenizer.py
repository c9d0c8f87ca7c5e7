"""The tiny model's tokenizer: trained with SentencePiece, then written as tokenizer.json with the same ids.

A unigram model: single characters, bytes for everything unknown, and whole words of the fixed phrases.
Short multi-letter pieces are removed after training, so that the words a question is about always
arrive letter by letter: spelling tasks are then learnable by a very small model.
"""

from __future__ import annotations

import io
import math
import random
import re
import string
from collections import Counter
from itertools import islice
from pathlib import Path

import sentencepiece
import tiny_tasks
from sentencepiece import sentencepiece_model_pb2 as schema
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
VOCAB_SIZE = 432
SPACE = "▁"
NORMAL, BYTE = 1, 6

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(destination: Path) -> None:
    """Writes the SentencePiece model, with exactly VOCAB_SIZE pieces."""
    texts = [
        text
        for question in islice(tiny_tasks.training(seed=99, even=True), 60_000)
        for text in (question.prompt, question.answer)
    ]
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=buffer,
        model_type="unigram",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=1.0,
        required_chars=string.printable.strip(),
        user_defined_symbols=list(SPECIAL),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        minloglevel=2,
    )
    model = schema.ModelProto()
    model.ParseFromString(buffer.getvalue())
    # The special, byte and ASCII pieces are kept; words replace the others.
    kept = [piece for piece in model.pieces if piece.type != NORMAL]
    letters = [
        piece
        for piece in model.pieces
        if piece.type == NORMAL and len(piece.piece) == 1 and (piece.piece.isascii() or piece.piece == SPACE)
    ]
    words = [
        schema.ModelProto.SentencePiece(piece=word, score=score, type=NORMAL)
        for word, score in _words(texts, VOCAB_SIZE - len(kept) - len(letters))
    ]
    # Alphabetical order, so that a small change to the tasks changes few ids.
    kept += [*sorted(letters, key=_spelling), *sorted(words, key=_spelling)]
    del model.pieces[:]
    model.pieces.extend(kept)
    destination.write_bytes(model.SerializeToString())


def _spelling(piece: schema.ModelProto.SentencePiece) -> str:
    return str(piece.piece)


def _words(texts: list[str], room: int) -> list[tuple[str, float]]:
    """Returns the `room` words that shorten the texts most, each with its log probability.

    Words under four letters would occur inside invented ones; only two such words of the questions are
    allowed. Words that questions are about stay letters, so that `reverse hello` is as easy as any other.
    """
    pattern = re.compile(r" ?[A-Za-z]{4,}| (?:is|in)\b|\{\"|\"[:,}]| \"")
    counts = Counter(word.replace(" ", SPACE) for text in texts for word in pattern.findall(text))
    spelled = {word.lower() for word in tiny_tasks.REAL} - set(tiny_tasks.KEYS)
    counts = Counter({word: n for word, n in counts.items() if word.strip(SPACE).lower() not in spelled})
    best = sorted(counts, key=lambda word: (-counts[word] * (len(word) - 1), word))[:room]
    total = sum(counts.values())
    return [(word, max(math.log(counts[word] / total), -9.0)) for word in best]


def convert(source: Path, destination: Path) -> None:
    """Writes tokenizer.json with the pieces, ids and segmentation of the SentencePiece model."""
    model = schema.ModelProto()
    model.ParseFromString(source.read_bytes())
    # SentencePiece never matches byte pieces in text; a score that no path can have achieves the same here.
    vocab = [(piece.piece, -1e6 if piece.type == BYTE else piece.score) for piece in model.pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>", *SPECIAL)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(destination))


def differences(folder: Path, seed: int = 5) -> list[str]:
    """Returns strings, out of about ten thousand, on which the two tokenizers disagree. The list must be
    empty.
    """
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    hf = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(seed)
    texts = [
        "",
        " ",
        "  a  b ",
        "\n\t",
        "<0x41>",
        "▁",
        "日本語 👩‍👩‍👧",
        "a\u0301",
        "\x00",
        "ﬁ",
        "Ω≈ç",
        "{}[]\\\"'",
    ]
    for question in islice(tiny_tasks.training(seed), 4000):
        texts += [question.prompt, question.answer, f"<|user|>{question.prompt}<|end|><|assistant|>"]
    alphabet = string.printable + "  éßñ😀日" + tiny_tasks.ACCENTED
    texts += ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(3000)]
    words = "".join(tiny_tasks.KEYS) + "reverse sort count upper lower copy json What is"
    texts += ["".join(rng.choices(words.split() + list(words), k=rng.randint(1, 12))) for _ in range(3000)]
    wrong = []
    for text in texts:
        ids = sp.encode(text)
        if hf.encode(text, add_special_tokens=False).ids != ids or (
            hf.decode(ids, skip_special_tokens=False) != text.replace(SPACE, " ")
        ):
            wrong.append(text)
    return wrong
