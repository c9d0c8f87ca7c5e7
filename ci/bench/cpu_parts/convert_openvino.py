"""Writes int4 (symmetric, groups of 32; the embedding has 8 bits, OpenVINO's default) and int8 models for
OpenVINO. argv: checkpoint, directory of the results, formats (default: both), each of which names a directory
there. It also removes torchvision from the environment, since the installed one cannot be imported without
CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORMATS = {"int4": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"], "int8": ["int8"]}


def main() -> None:
    root, out = sys.argv[1], Path(sys.argv[2])
    # The exporter's packages install a torchvision that fits only torch with CUDA and then cannot be
    # imported.
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    export = str(Path(sys.executable).with_name("optimum-cli"))
    for name in sys.argv[3:] or FORMATS:
        command = [export, "export", "openvino", "-m", root, "--task", "text-generation-with-past"]
        subprocess.run([*command, "--weight-format", *FORMATS[name], str(out / name)], check=True)


main()
