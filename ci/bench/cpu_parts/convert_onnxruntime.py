"""Writes a model for onnxruntime-genai with 4-bit weights in blocks of 32, for products with 8-bit
activations, which its builder offers for processors with int8 products. argv: checkpoint, directory in which
the result, int4, is created.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    root, out = sys.argv[1], Path(sys.argv[2])
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", root, "-o", str(out / "int4")]
    command += ["-p", "int4", "-e", "cpu", "-c", str(out / "cache")]
    command += ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
    subprocess.run(command, check=True)


main()
