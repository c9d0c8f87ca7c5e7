"""Lists the kinds of checkpoints: the files of each kind that build steps read, and the modules that read
them.

Modules are named and not imported, so the cache key of a step depends only on the code for its own kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlcbuild.canon import Json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Names of the tokenizer files of a safetensors checkpoint, which a bundle keeps unchanged if they exist."""
TOKENIZERS = TOKENIZER_FILES[:2]
"""Names of the tokenizer files of which a safetensors checkpoint must have at least one."""
ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file in which PEFT describes a LoRA adapter."""
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the files in which PEFT stores the weights of a LoRA adapter; the first of them that exists in the
adapter's directory is read.
"""
POOLING = "1_Pooling/config.json"
"""Name of the file in which sentence-transformers states how an embedding is computed from hidden states."""


@dataclass(frozen=True)
class CheckpointKind:
    """A kind of checkpoint: the files and functions by which it is read. File names are glob patterns."""

    config: str
    """The function, as `module:function`, that reads the config of a model in this kind of checkpoint
    (safetensors, PyTorch or GGUF) and writes it in this project's form.
    """
    config_files: tuple[str, ...]
    tokenizer: str
    """The function, as `module:function`, that writes the tokenizer files of a model in this kind of
    checkpoint (safetensors, PyTorch or GGUF).
    """
    tokenizer_files: tuple[str, ...]
    weights_files: tuple[str, ...]
    reader: str | None = None
    """Name of the module whose function `read_tensors(path)` returns the checkpoint's tensors; None if
    `checkpoints.mapping` reads the files itself.
    """

    @property
    def code(self) -> tuple[str, ...]:
        """Returns the names of the Python modules that a build step imports by name when it reads the weights
        of this kind of checkpoint, such as ("mlcbuild.checkpoints.gguf_tensors",); () for safetensors.
        """
        return () if self.reader is None else (self.reader,)


SAFETENSORS = CheckpointKind(
    config="mlcbuild.models.action:normalise",
    config_files=("config.json",),
    tokenizer="mlcbuild.bundles.assemble:tokenizer",
    tokenizer_files=(*TOKENIZER_FILES, POOLING, "config.json"),
    weights_files=("*.safetensors", "*.safetensors.index.json"),
)
PYTORCH = replace(
    SAFETENSORS,
    weights_files=("*.bin", "*.bin.index.json"),
    reader="mlcbuild.checkpoints.torch_files",
)
GGUF = CheckpointKind(
    config="mlcbuild.checkpoints.gguf_config:normalise",
    config_files=("**/*.gguf",),
    tokenizer="mlcbuild.bundles.gguf_text:tokenizer",
    tokenizer_files=("**/*.gguf",),
    weights_files=("**/*.gguf",),
    reader="mlcbuild.checkpoints.gguf_tensors",
)


GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
"""Matches the file name of one of the files into which a GGUF file is split: stem, number and count."""
TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of the file, or of the index of the files, in which PyTorch's checkpoints store their weights."""


def kind_of(path: Path) -> CheckpointKind:
    """Returns the kind of a checkpoint: GGUF for a path that ends in .gguf, for a directory what
    `kind_of_files` returns for the names in it (PYTORCH if it has PyTorch's weights and no safetensors ones),
    and SAFETENSORS for everything else, also for a missing directory.
    """
    if path.suffix == ".gguf":
        return GGUF
    return kind_of_files([entry.name for entry in path.iterdir()] if path.is_dir() else [])


def kind_of_files(names: Collection[str]) -> CheckpointKind:
    """Returns the kind of a checkpoint, SAFETENSORS or PYTORCH, whose directory has files with these names.
    PyTorch files (pytorch_model.bin or its index) count only if there are no safetensors files other than
    adapter* and consolidated*, and no index of such files; without either, the kind is SAFETENSORS. Names of
    files that are still being downloaded, such as model.safetensors.part, do not count.
    """
    others = ("adapter", "consolidated")
    endings = (".safetensors", ".safetensors.index.json")
    if any(name.endswith(endings) and not name.startswith(others) for name in names):
        return SAFETENSORS
    return PYTORCH if any(name in names for name in TORCH_FILES) else SAFETENSORS


def tokenizer_fault(place: str, names: Container[str]) -> str | None:
    """Returns an error message for a safetensors checkpoint without a tokenizer; None for one that has it.

    place: the checkpoint's directory or address; names: those of its files.
    """
    if any(name in names for name in TOKENIZERS):
        return None
    return (
        f"{place}: it has neither {' nor '.join(TOKENIZERS)}, so no text can be read or written; add one of "
        "them to the checkpoint"
    )


def checkpoint_path(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> Path:
    """Returns the path of the checkpoint that a build step reads: inputs["checkpoint"], or the file in it
    that params["file"] names, since a directory may hold several GGUF files.
    """
    return inputs["checkpoint"] / str(params.get("file", ""))


LORA = "mlcbuild.checkpoints.lora"
"""Dotted name of the module that merges LoRA adapters."""


def adapter_argument(number: int) -> str:
    """Returns the name of the input of a build step that holds the directory of a LoRA adapter: "adapter-1"
    for number 0.
    """
    return f"adapter-{number + 1}"
