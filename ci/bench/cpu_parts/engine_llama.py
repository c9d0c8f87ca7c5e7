"""Measures llama.cpp as one of the compared engines, through the C interface that llama-cpp-python wraps."""

from __future__ import annotations

import ctypes
import os

import llama_cpp as lib
import numpy as np
from child import SEQUENCES, run
from sequences import ROOM, ROWS, Row, Sequences


@lib.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class Llama:
    """A model loaded by llama.cpp, a compared engine: it computes batches of tokens on the CPU."""

    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        lib.llama_log_set(_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.vocabulary = vocabulary
        options = lib.llama_model_default_params()
        options.use_extra_bufts = "LLAMA_PLAIN_BUFFERS" not in os.environ
        self.model = lib.llama_model_load_from_file(path.encode(), options)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = ROOM * SEQUENCES, SEQUENCES
        params.n_batch = params.n_ubatch = ROWS
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(ROWS, 0, 1)

    def run(self, rows: list[Row]) -> None:
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, has_logits) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = has_logits
        if lib.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        lib.llama_synchronize(self.context)

    def logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, row), (self.vocabulary,))

    def forget(self, sequence: int, first: int) -> None:
        lib.llama_memory_seq_rm(self.memory, sequence, first, -1)


run(lambda path, threads, vocabulary: Sequences(Llama(path, threads, vocabulary), vocabulary))
