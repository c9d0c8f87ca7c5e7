"""The step `tokenizer/<model>` of a GGUF file: extracts its tokenizer and chat template for the runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlcbuild.bundles.assemble import SERVING, serving_document
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
from mlcbuild.checkpoints.gguf_file import read_gguf
from mlcbuild.checkpoints.gguf_tokenizer import write_tokenizer


def tokenizer(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: writes tokenizer files, and serving.json with serving defaults (end-of-sequence
    tokens, sampling parameters), from the GGUF file params["file"] in inputs["checkpoint"] to the directory
    `out`. Raises CheckpointError if the file is damaged, lacks a tokenizer, or has one of an unsupported
    kind.
    """
    path = checkpoint_path(params, inputs)
    write_tokenizer(read_gguf(path).metadata, str(path), out)
    document = json.dumps(serving_document(out), sort_keys=True)
    (out / SERVING).write_text(document + "\n", encoding="utf-8")
