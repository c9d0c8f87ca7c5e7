"""Measures ik_llama.cpp as one of the compared engines, through the C functions of ik_calls.c. The
environment variable IK_CALLS must hold the path of their compiled library."""

from __future__ import annotations

import ctypes
import os

import numpy as np
from child import SEQUENCES, run
from sequences import ROOM, ROWS, Row, Sequences

lib = ctypes.CDLL(os.environ["IK_CALLS"])
lib.ik_logits.restype = ctypes.POINTER(ctypes.c_float)


class IkLlama:
    """A model loaded by ik_llama.cpp, as one of the compared engines, with the weights repacked in memory
    (its option -rtr). It computes batches of tokens on the CPU.
    """

    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        if lib.ik_open(path.encode(), threads, ROOM, SEQUENCES, ROWS) != 0:
            raise SystemExit(f"{path}: ik_llama.cpp cannot load this file")

    def run(self, rows: list[Row]) -> None:
        token, position, sequence = (np.array([row[i] for row in rows], np.int32) for i in range(3))
        has_logits = np.array([row[3] for row in rows], np.int8)
        if lib.ik_run(
            len(rows), *(a.ctypes.data_as(ctypes.c_void_p) for a in (token, position, sequence, has_logits))
        ):
            raise SystemExit("llama_decode failed")

    def logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(lib.ik_logits(row), (self.vocabulary,))

    def forget(self, sequence: int, first: int) -> None:
        lib.ik_forget(sequence, first)


run(lambda path, threads, vocabulary: Sequences(IkLlama(path, threads, vocabulary), vocabulary))
