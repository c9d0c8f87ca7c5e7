"""argv: checkpoint, a directory for the result. Writes a model with weights of 4 bits in blocks of 32, to be
multiplied with activations of 8 bits: what its builder offers for processors with int8 products."""

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
