"""Writes q4_0.gguf and q8_0.gguf with ik_llama.cpp. argv: checkpoint, directory of the results. The
environment variable IK_CALLS must hold the path of the compiled library of ik_calls.c."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from convert_llama import write

FORMATS = {"q4_0": 2, "q8_0": 7}
"""Name of a format -> its number in `enum llama_ftype`. Files contain the number, which therefore never
changes.
"""


def main() -> None:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    lib = ctypes.CDLL(os.environ["IK_CALLS"])
    whole = out / "f32.gguf"
    write(root, whole)
    for name, number in FORMATS.items():
        if lib.ik_quantize(bytes(whole), bytes(out / f"{name}.gguf"), number) != 0:
            sys.exit(f"ik_llama.cpp could not quantize to {name}")
    whole.unlink()


if __name__ == "__main__":
    main()
