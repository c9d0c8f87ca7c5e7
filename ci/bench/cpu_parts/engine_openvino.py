"""Measures OpenVINO GenAI as one of the compared engines. Its pipeline has no call for one decode step, but
reports afterwards when each token was computed. The wall time of a step is the difference of two such times;
its CPU time is estimated as the same share of the whole call's CPU time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import openvino
import openvino_genai as genai
from child import CONTEXT, clock, prompt, run, since


class OpenVino:
    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        self.path, self.vocabulary = path, vocabulary
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
            "ATTENTION_BACKEND": "SDPA",
        }
        self.pipeline = genai.LLMPipeline(path, "CPU", **properties)

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[float, float, list[float]]:
        """Generates `count` tokens for each prompt, in one batch. Returns (wall seconds of the whole call,
        CPU seconds of the whole call, list of wall times in seconds at which each generation step ended; only
        their differences have a meaning). prompts: token ids, all of the same length."""
        ids = openvino.Tensor(np.array(prompts, np.int64))
        mask = openvino.Tensor(np.ones((len(prompts), len(prompts[0])), np.int64))
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        start = clock()
        actual = self.pipeline.generate(genai.TokenizedInputs(ids, mask), config)
        return *since(start), [1e-3 * time for time in actual.perf_metrics.raw_metrics.m_new_token_times]

    def prefill(self, tokens: list[int]) -> None:
        self._generate([tokens], 1)

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        prompts = [prompt(CONTEXT, self.vocabulary, sequence) for sequence in range(batch)]
        wall, cpu, times = self._generate(prompts, 1 + steps)
        # Its threads are equally busy during a prompt and a step.
        return [(later - sooner, (later - sooner) * cpu / wall) for sooner, later in pairwise(times)]

    def save_logits(self, tokens: list[int], path: str) -> None:
        model = openvino.Core().compile_model(f"{self.path}/openvino_model.xml", "CPU")
        count = len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        actual = model.create_infer_request().infer(inputs)
        np.array(actual["logits"])[0].astype(np.float32).tofile(path)


run(OpenVino)
