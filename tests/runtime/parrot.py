"""A simulated model that repeats text of its prompt: its bundle, its executor, and a server of it.

The answer is the text between the last mark "SAY:" in the prompt and the mark ":END" after it. Text that the
template writes after the last `<|assistant|>` counts as a part of the answer that already exists. If there is
a constraint, it takes precedence over the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mlcbuild_format.manifest import Manifest
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import Masks, ModelStep
from mlcbuild_runtime.executor.executor import StepOutput
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray

from . import shared, toy
from .numpy_executor import NumpyExecutor
from .shared import Server

SAY, END = "SAY:", ":END"
ASSISTANT = toy.VOCAB - 1
CONTEXT = 4096


def say(text: str) -> str:
    """Returns the message that makes the simulated model answer `text`."""
    return f"{SAY}{text}{END}"


def write(out: Path, template: str = toy.TEMPLATE, special: Sequence[str] = ()) -> None:
    """Writes the bundle of the simulated model, which repeats a part of its prompt, to the directory `out`.
    template: its chat template; special: names of special tokens in addition to those of toy.py."""
    toy.write(out, "numpy")
    (out / "model.json").write_text(json.dumps({"vocab_size": toy.VOCAB + len(special)}))
    if special:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Json

        tokenizer = Json.from_file(str(out / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        tokenizer.save(str(out / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    manifest = json.loads((out / "bundle.json").read_bytes())
    for name in manifest["files"]:
        file = toy.describe(out / name)
        manifest["files"][name] = {"blake3": file.blake3, "size": file.size}
    manifest["limits"] |= {"context_window": CONTEXT, "prefill_chunk": 512}
    manifest["model"]["config"]["vocab_size"] = toy.VOCAB + len(special)
    (out / "bundle.json").write_text(json.dumps(manifest))


def load(path: Path, manifest: Manifest, threads: int | None, pages: int | None) -> Parrot:
    return Parrot(path, manifest, pages or 4 * CONTEXT // manifest.limits.page_size)


class Parrot(NumpyExecutor):
    """An executor that simulates a model which repeats a part of its prompt: the text between the marks
    "SAY:" and ":END". The next token of that text is always by far the most likely one, and after the text an
    end-of-sequence token."""

    def __init__(self, path: Path, manifest: Manifest, pages: int) -> None:
        super().__init__(path, manifest, pages)
        encode = Tokenizer.load(path).vocabulary.encode
        self._marks = encode(SAY, False), encode(END, False)

    def step(self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepOutput:
        self._totals(step)
        size, rows = self.manifest.limits.page_size, list[Floats]()
        positions, _ = step.places(size)
        for s in range(len(step.lengths)):
            pages = step.page_table[step.page_indptr[s] : step.page_indptr[s + 1]]
            text: NDArray[np.int64] = self.cache[pages].ravel()
            rows += [
                self._next(text[: at + 1].tolist()) for at in positions[step.indptr[s] : step.indptr[s + 1]]
            ]
        logits = np.stack(rows)[step.rows]
        return StepOutput(self.sample(logits, sampling_params, masks), lambda: logits)

    def _next(self, tokens: list[int]) -> Floats:
        """Returns the logits of the position after `tokens`, float32 [vocabulary]."""
        logits = np.linspace(0, -1, self.vocab_size, dtype=np.float32)
        begin, end = (_last(tokens, mark) for mark in self._marks)
        script = tokens[begin + len(self._marks[0]) : end] if 0 <= begin < end else []
        said = len(tokens) - 1 - _last(tokens, [ASSISTANT])
        logits[script[said] if said < len(script) else toy.EOS] = 40.0
        return logits


def _last(tokens: list[int], part: list[int]) -> int:
    """Returns the index at which `part` begins for the last time in `tokens`; -1 if it does not occur."""
    places = range(len(tokens) - len(part), -1, -1)
    return next((i for i in places if tokens[i : i + len(part)] == part), -1)


@contextmanager
def serving(bundle: Path, *options: str) -> Iterator[Server]:
    """Starts a server process for a bundle of the simulated model, which repeats a part of its prompt, on a
    free port, and yields it. options: further options of the command line."""
    extra = {"PYTHONPATH": f"{shared.ROOT / 'runtime'}:{shared.ROOT}"}
    arguments = ("-m", "tests.runtime.parrot", str(bundle), "--port", "0", *options)
    with shared.program(*arguments, extra=extra) as running:
        yield running


if __name__ == "__main__":
    loading.LOADERS["numpy"] = f"{__spec__.name}:load"
    from mlcbuild_runtime.__main__ import main

    sys.exit(main(sys.argv[1:]))
