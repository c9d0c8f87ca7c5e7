"""Creates recipes/models/tiny from nothing: text, tokenizer, training, exam.

    python train_tiny.py --out tiny --state /tmp/tiny.pt --prompts ../prompts/tiny.txt

Needs torch, transformers, tokenizers, sentencepiece and protobuf, none of which mlcbuild itself needs. The
model is a Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings. It is trained
on answers, and a little on questions, with Muon for matrices and AdamW for the rest; the written weights are
their moving average. A run can be stopped and started again: it continues from `--state`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import sentencepiece
import tiny_export
import tiny_tasks
import tiny_tokenizer
import torch
import torch.nn.functional as F
from tiny_net import CONFIG, Tiny

BOS, SYSTEM, USER, ASSISTANT, END = 1, 3, 4, 5, 6
ASKED_WEIGHT = 0.05
"""Weight of the loss for predicting a token of a question, compared with 1 for one of an answer. It suffices
to make the model one of whole chats, so that its perplexity is meaningful.
"""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are Tiny.", "Answer briefly.", "Be kind and short.")


@dataclass(frozen=True)
class Batch:
    """Rows of packed conversations; each tensor is [rows, length]."""

    tokens: torch.Tensor
    """The token ids, int64 [rows, length]."""
    weights: torch.Tensor
    """The weight of each token in the loss of predicting it, float32 [rows, length]; 0 for the first token of
    a conversation."""
    owners: torch.Tensor
    """The index of the conversation, within its row, to which each token belongs, int64 [rows, length]."""


def conversation(
    questions: Iterator[tiny_tasks.Question],
    sp: sentencepiece.SentencePieceProcessor,
    rng: random.Random,
    room: int,
) -> tuple[list[int], list[float]]:
    """Returns (token ids, weight of each token in the loss) of one chat of at most `room` tokens, usually
    with one question and sometimes with many.
    """
    tokens = [BOS]
    turns = 1 if room < 200 and rng.random() < 0.6 else rng.randint(2, 5 if room < 200 else 24)
    if room > 64 and rng.random() < 0.08:
        tokens += [SYSTEM, *sp.encode(rng.choice(SYSTEM_PROMPTS)), END]
    weights = [0.0] + [ASKED_WEIGHT] * (len(tokens) - 1)
    for question in islice(questions, turns):
        asked = [USER, *sp.encode(question.prompt), END, ASSISTANT]
        said = [*sp.encode(question.answer), END]
        if len(tokens) + len(asked) + len(said) > room:
            break
        tokens += asked + said
        weights += [ASKED_WEIGHT] * len(asked) + [1.0] * len(said)
    return tokens, weights


def batches(sp: sentencepiece.SentencePieceProcessor, tokens_per_batch: int, seed: int) -> Iterator[Batch]:
    """Yields rows packed with whole conversations. Every eighth batch has long rows, so that far positions
    occur.
    """
    rng = random.Random(seed)
    questions = tiny_tasks.training(seed)
    step = 0
    while True:
        step += 1
        length = 480 if step % 8 == 0 else 128
        rows = tokens_per_batch // length
        created = torch.zeros(2, rows, length, dtype=torch.int64)
        counts = torch.zeros(rows, length)
        for row in range(rows):
            at = owner = 0
            while at < length - 24:
                tokens, weights = conversation(questions, sp, rng, length - at)
                end = at + len(tokens)
                created[0, row, at:end] = torch.tensor(tokens)
                counts[row, at:end] = torch.tensor(weights)
                created[1, row, at:end] = owner
                at, owner = end, owner + 1
            created[1, row, at:] = owner
        yield Batch(created[0], counts, created[1])


def accuracy(
    model: Tiny, sp: sentencepiece.SentencePieceProcessor, questions: list[tiny_tasks.Question]
) -> dict[str, float]:
    """Returns task -> share of questions whose whole answer greedy decoding gets right.

    One forward pass over prompt and answer suffices: greedy decoding yields exactly the answer if every token
    of it is the most probable one after the tokens before it.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(questions), 64):
        part = questions[start : start + 64]
        asked = [[BOS, USER, *sp.encode(q.prompt), END, ASSISTANT] for q in part]
        said = [[*sp.encode(q.answer), END] for q in part]
        length = max(len(a) + len(s) for a, s in zip(asked, said, strict=True))
        tokens = torch.zeros(len(part), length, dtype=torch.int64)
        for row, (a, s) in enumerate(zip(asked, said, strict=True)):
            tokens[row, : len(a) + len(s)] = torch.tensor(a + s)
        with torch.no_grad():
            best = model(tokens, torch.zeros_like(tokens)).argmax(-1)
        for row, (question, a, s) in enumerate(zip(part, asked, said, strict=True)):
            right[question.task].append(best[row, len(a) - 1 : len(a) + len(s) - 1].tolist() == s)
    return {task: sum(actual) / len(actual) for task, actual in right.items()}


class Training:
    """The state of a training run: weights, their average, optimizers, and the progress."""

    def __init__(self, minutes: float, steps: int) -> None:
        torch.manual_seed(0)
        self.model = Tiny()
        self.average = Tiny()
        self.average.load_state_dict(self.model.state_dict())
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step = 0
        self.spent = 0.0
        self.minutes = minutes
        self.steps = steps

    def progress(self) -> float:
        """Returns the progress of training, from 0 to 1: the fraction of the steps or of the time, whichever
        is larger."""
        return min(1.0, max(self.step / self.steps, self.spent / (60 * self.minutes)))

    def rate(self) -> float:
        """Returns the learning rate factor: a short rise, constant for half of the run, then a
        cosine to 0.
        """
        late = max(0.0, (self.progress() - 0.4) / 0.6)
        return min(1.0, (self.step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * late))

    def update(self, batch: Batch) -> float:
        started = time.monotonic()
        # Position i predicts token i + 1.
        weights = batch.weights.roll(-1, dims=1)
        weights[:, -1] = 0
        chosen = weights > 0
        logits = self.model(batch.tokens, batch.owners, chosen)
        losses = F.cross_entropy(logits, batch.tokens.roll(-1, dims=1)[chosen], reduction="none")
        loss = (losses * weights[chosen]).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        base = self.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * base
            optimizer.step()
            optimizer.zero_grad()
        decay = min(0.99, 1 - 10 / (self.step + 20))
        with torch.no_grad():
            for kept, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        self.step += 1
        self.spent += time.monotonic() - started
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent = state["step"], state["spent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--state", type=Path, required=True, help="file that keeps an unfinished run")
    parser.add_argument("--prompts", type=Path, help="also write prompts for recipes to this file")
    parser.add_argument("--minutes", type=float, default=45, help="time for training")
    parser.add_argument("--steps", type=int, default=8000, help="steps at most")
    parser.add_argument("--batch", type=int, default=6144, help="tokens in a step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer.train(options.out / "tokenizer.model")
    sp = sentencepiece.SentencePieceProcessor(model_file=str(options.out / "tokenizer.model"))
    training = Training(options.minutes, options.steps)
    if options.state.exists():
        training.load(options.state)
    # An intermediate check on questions that are neither in the training text nor in the committed exam.
    check = tiny_tasks.exam(each=60, seed=7)
    started, loss = time.monotonic(), 0.0
    for batch in batches(sp, options.batch, seed=1000 + training.step):
        if training.progress() >= 1:
            break
        loss += 0.02 * (training.update(batch) - loss)
        if training.step % 100 == 0:
            training.save(options.state)
            scores = accuracy(training.average, sp, check)
            overall = sum(scores.values()) / len(scores)
            marks = " ".join(f"{task}={score:.2f}" for task, score in scores.items())
            clock = f"{time.monotonic() - started:.0f}s {training.progress():.3f}"
            print(f"{training.step} {clock} loss {loss:.4f} right {overall:.4f} {marks}", flush=True)
    training.save(options.state)
    tiny_export.write(options.out, training.average, CONFIG)
    if options.prompts:
        tiny_export.write_prompts(options.prompts)


if __name__ == "__main__":
    main()
