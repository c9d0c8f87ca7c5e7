"""Measures onnxruntime-genai as one of the compared engines; each prompt or batch has a new generator."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai as og
from child import CONTEXT, clock, prompt, run, since


class OnnxRuntime:
    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        config = og.Config(path)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model, self.vocabulary = og.Model(config), vocabulary

    def _filled(self, prompts: list[list[int]], room: int) -> og.Generator:
        params = og.GeneratorParams(self.model)
        length = len(prompts[0]) + room
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length)
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator

    def prefill(self, tokens: list[int]) -> None:
        self._filled([tokens], 1).generate_next_token()

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        prompts = [prompt(CONTEXT, self.vocabulary, sequence) for sequence in range(batch)]
        generator = self._filled(prompts, steps + 2)
        generator.generate_next_token()
        samples = []
        for _ in range(steps):
            start = clock()
            generator.generate_next_token()
            samples.append(since(start))
        return samples

    def save_logits(self, tokens: list[int], path: str) -> None:
        actual = self._filled([tokens], 1).get_output("logits")
        np.array(actual)[0].astype(np.float32).tofile(path)


run(OnnxRuntime)
