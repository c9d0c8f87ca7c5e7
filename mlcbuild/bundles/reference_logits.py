"""Computes a model's reference logits from the original weights in NumPy, as the step `reference/<model>`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcbuild import progress
from mlcbuild.canon import Json
from mlcbuild.errors import UsageError

if TYPE_CHECKING:
    from mlcbuild.checkpoints.exact_weights import Weight
    from mlcbuild.models import ModelConfig

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Water boils at 100 degrees Celsius at sea level, and it freezes at zero.",
    "def add(a, b):\n    return a + b\n",
    '{"name": "Ann", "age": 7, "likes": ["maps", "trains"]}',
    "Once upon a time there was a small village at the edge of a great forest. Every morning",
    "Question: what is 12 + 30?\nAnswer: 42\nQuestion: what is 7 + 8?\nAnswer:",
)
"""The prompts with which bundles are verified if the recipe names none."""
MAX_TOKENS = 512
"""Maximum number of tokens of each prompt for which a bundle's logits are compared with NumPy's reference
logits, whose computation is slow. Of longer prompts, only the first tokens are compared.
"""


def reference(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: computes the tokens and the reference logits of every prompt.

    params: `prompts` (a list of strings, or the name of a file in `inputs["prompts"]` with one per line,
    where blank lines are skipped) and `context_window`, the number of tokens for which the model is compiled
    (null: its maximum, but at most 4096), on which LongRoPE depends.
    Prompts are cut to MAX_TOKENS tokens and to the context window; those of less than two tokens are left
    out. Writes tokens.json, a list of token ids for each prompt that is left, and logits-<i>.npy for each of
    these, float32 [n, vocab], with i from 0000 on, to `out`. Raises UsageError when no prompt is left,
    CheckpointError for a checkpoint that cannot be read.
    """
    import numpy as np

    from mlcbuild.bundles.reference import logits

    config, parameters, window, sequences = opened_prompts(params, inputs, "verify.prompts")
    note = TokenProgress(sum(map(len, sequences)), len(config.layers))

    def compute(item: tuple[int, list[int]]) -> None:
        i, tokens = item
        on_layer = partial(note.add, len(tokens))
        values = logits(config, parameters, tokens, context_window=window, on_layer=on_layer)
        np.save(out / f"logits-{i:04}.npy", values)

    # Prompts run in parallel, each on one core, so that no result depends on the number of cores.
    with ThreadPoolExecutor(_cores()) as pool:
        list(pool.map(compute, enumerate(sequences)))
    (out / "tokens.json").write_text(json.dumps(sequences) + "\n", encoding="utf-8")


def opened_prompts(
    params: Mapping[str, Json], inputs: Mapping[str, Path], section: str
) -> tuple[ModelConfig, Mapping[str, Weight], int, list[list[int]]]:
    """Returns (the model's config, its exact weights as name -> values, context window in tokens, token ids
    of each prompt) for a build step that evaluates the exact model on prompts. Prompts are cut to MAX_TOKENS
    tokens and to the context window; those of less than two tokens are left out. section: place of the
    prompts in a recipe, for messages. Raises UsageError when no prompt is left, CheckpointError for a
    checkpoint that cannot be read.
    """
    from mlcbuild_runtime.text.tokenizer import Tokenizer

    from mlcbuild import models
    from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
    from mlcbuild.checkpoints.checkpoint_views import views_of
    from mlcbuild.checkpoints.exact_weights import checkpoint, read_tensor_names

    config = models.from_json(json.loads((inputs["config"] / "config.json").read_bytes()))
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    window = models.context_window(config, cast("int | None", params["context_window"]))
    limit = min(window, MAX_TOKENS)
    sequences = [list(tokenizer.encode(text))[:limit] for text in _prompts(params, inputs)]
    sequences = [tokens for tokens in sequences if len(tokens) > 1]
    if not sequences:
        raise UsageError(f"{section}: no prompt has more than one token; give at least one line of text")
    names = read_tensor_names(inputs["config"])
    weights = checkpoint(checkpoint_path(params, inputs), config, names, views_of(params, inputs))
    return config, weights, window, sequences


class TokenProgress:
    """Reports to the user how many tokens of the prompts have been computed. A layer that is finished for
    some tokens counts as 1 / (number of layers) of these tokens.
    """

    def __init__(self, tokens: int, layers: int) -> None:
        self._tokens, self._layers, self._done = tokens, layers, 0
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        """Records, for the progress report, that one more layer is finished for `tokens` tokens. Any thread
        may call it."""
        with self._lock:
            self._done += tokens
            progress.report(self._done // self._layers, self._tokens, "tokens")


def _cores() -> int:
    return int(os.environ.get("MLCBUILD_CORES", "1"))


def _prompts(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> Sequence[str]:
    inline = params["prompts"]
    if isinstance(inline, list):
        return [str(prompt) for prompt in inline]
    path = inputs["prompts"] / str(inline)  # The directory belongs to the user and may hold other files.
    return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
