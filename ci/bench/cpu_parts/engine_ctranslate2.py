"""Measures CTranslate2 as one of the compared engines. It has no call for one decode step, so a callback
records when each token is computed.
"""

from __future__ import annotations

from itertools import pairwise

import ctranslate2
import numpy as np
from child import CONTEXT, clock, prompt, run


class CTranslate2:
    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        self.generator = ctranslate2.Generator(path, compute_type="int8", intra_threads=threads)
        self.vocabulary = vocabulary

    def _generate(self, prompts: list[list[int]], count: int) -> list[tuple[float, float]]:
        """Generates `count` tokens for each prompt, in one batch, and returns a list of `count` absolute
        clock readings (wall seconds, CPU seconds), one when each token of the last prompt was computed.
        prompts: token ids of each."""
        words = [[f"<{token}>" for token in tokens] for tokens in prompts]
        observed = []

        def tell(result: ctranslate2.GenerationStepResult) -> bool:
            if result.batch_id == len(prompts) - 1:
                observed.append(clock())
            return False

        self.generator.generate_batch(
            words,
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            end_token=[],
            callback=tell,
        )
        return observed

    def prefill(self, tokens: list[int]) -> None:
        self._generate([tokens], 1)

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        prompts = [prompt(CONTEXT, self.vocabulary, sequence) for sequence in range(batch)]
        observed = self._generate(prompts, 1 + steps)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(observed)]

    def save_logits(self, tokens: list[int], path: str) -> None:
        actual = self.generator.forward_batch([[f"<{token}>" for token in tokens]])
        np.array(actual)[0].astype(np.float32).tofile(path)


run(CTranslate2)
