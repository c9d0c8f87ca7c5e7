"""The fuzzing target of LoRA adapters: adapter_config.json, and weights in safetensors or in a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
from fuzz_parts.checkpoint_files import TorchFiles
from fuzz_parts.model_files import Timed, refused
from fuzz_parts.mutate import dumped, mutated_bytes, mutated_json
from mlcbuild_format.safetensors import Tensor
from safetensors.numpy import load_file

from mlcbuild.checkpoints.headers import read_header
from mlcbuild.checkpoints.lora import merging
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.errors import CheckpointError
from tests import torch_writer
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden" / "adapters"
NAMES = ("plain", "root", "dora", "patterns")
PICKLE, PLAIN = b"bin\n", b"safetensors\n"


class Adapters(Timed):
    """A fuzzing target: creates mutated LoRA adapters, and checks that merging them either works or is
    refused with a suitable message. A case is three parts, each of the first two ended by a line break: the
    kind of the weights file ("bin" or "safetensors"), the size of the config in bytes, and the config
    followed by the weights file."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.base = {tensor.name: tensor for tensor in read_header(GOLDEN / "base.safetensors").tensors}
        self.seeds = []
        for name in NAMES:
            config = (GOLDEN / name / "adapter_config.json").read_bytes()
            path = GOLDEN / name / "adapter_model.safetensors"
            content = {key: ("F32", np.asarray(values)) for key, values in load_file(path).items()}
            self.seeds.append((config, path.read_bytes(), torch_writer.torch_file(content)))
        for config, plain, pickle in self.seeds:
            for kind, data in ((PLAIN, plain), (PICKLE, pickle)):
                assert self.read(_case(kind, config, data)) is None
                self._use()

    def make(self, random: Random) -> bytes:
        config, plain, pickle = random.choice(self.seeds)
        choice = random.random()
        if choice < 0.3:
            config = dumped(mutated_json(random, json.loads(config)))
        if 0.2 < choice < 0.6:
            return _case(
                PICKLE, config, mutated_bytes(random, pickle, (*TorchFiles.OPCODES, *TorchFiles.RECORDS))
            )
        size = int.from_bytes(plain[:8], "little")
        if choice < 0.9:
            header = dumped(mutated_json(random, json.loads(plain[8 : 8 + size])))
            plain = len(header).to_bytes(8, "little") + header + plain[8 + size :]
        else:
            plain = mutated_bytes(random, plain)
        return _case(PLAIN, config, plain)

    def read(self, case: bytes) -> str | None:
        kind, size, rest = case.split(b"\n", 2)
        for path in self.place.glob("adapter_model.*"):
            path.unlink()
        (self.place / "adapter_config.json").write_bytes(rest[: int(size)])
        data = rest[int(size) :]
        (self.place / f"adapter_model.{kind.decode()}").write_bytes(data)
        try:
            self._use()
        except CheckpointError as error:
            return refused(error)
        return None

    def _use(self) -> None:
        """Merges the LoRA adapter of the fuzzing case into its base model, and reads all rows of the changed
        tensors. Raises CheckpointError if mlcbuild refuses the adapter.
        """
        merged = merging([(self.place, 1.0)], self.base)
        changed: list[Tensor] = [tensor for name, tensor in merged.items() if tensor is not self.base[name]]
        assert changed
        with Rows() as reader:
            for tensor in changed:
                reader.values(tensor, 0, tensor.shape[0])


def _case(kind: bytes, config: bytes, data: bytes) -> bytes:
    return kind + b"%d\n" % len(config) + config + data
