"""Fuzzing targets whose cases are files with weights: safetensors files, PyTorch's files, and matrices as
other tools quantize them.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random

from fuzz_parts.model_files import Timed, refused
from fuzz_parts.mutate import dumped, mutated_bytes, mutated_json
from mlcbuild_format.safetensors import BITS

from mlcbuild import models
from mlcbuild.checkpoints import exact_weights
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parsing
from mlcbuild.models.action import LARGEST
from tests import checkpoint_files, quantized_seeds, torch_writer
from tests.quantized_files import quantized
from tests.schemes import SCHEMES


class Safetensors(Timed):
    """A fuzzing target: creates mutated headers of a safetensors file, and mutated indices of a checkpoint of
    several files, and checks that the checkpoint is either converted or refused with a suitable message. A
    case is a file's name, a line break, and the file's content.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        content = checkpoint_files.tensors()
        self.single, self.sharded = place / "single", place / "sharded"
        checkpoint_files.single(self.single, content)
        checkpoint_files.sharded(self.sharded, content)
        self.whole = {
            "model.safetensors": (self.single / "model.safetensors").read_bytes(),
            "model.safetensors.index.json": (self.sharded / "model.safetensors.index.json").read_bytes(),
        }
        checkpoint_files.write(self.single, place / "first", SCHEMES["q4f16_1"])
        self.names = [param.name for param in models.parameters(checkpoint_files.CONFIG)]

    def make(self, random: Random) -> bytes:
        name = random.choice(list(self.whole))
        data = self.whole[name]
        if name.endswith(".json"):
            return name.encode() + b"\n" + dumped(mutated_json(random, json.loads(data)))
        base = 8 + int.from_bytes(data[:8], "little")
        header, rest = data[8:base], data[base:]
        if random.random() < 0.75:
            header = dumped(mutated_json(random, json.loads(header)))
        else:
            header = mutated_bytes(random, header)
        size = len(header)
        if random.random() < 0.1:
            size = random.choice((0, 7, 2**31, 2**63, 2**64 - 1, size + 1, size - 1)) % 2**64
        if random.random() < 0.1:
            rest = rest[: random.randrange(len(rest))]
        return name.encode() + b"\n" + size.to_bytes(8, "little") + header + rest

    def read(self, case: bytes) -> str | None:
        file, _, data = case.partition(b"\n")
        name = file.decode()
        root = self.sharded if name.endswith(".json") else self.single
        out = self.place / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            (root / name).write_bytes(data)
            config = checkpoint_files.CONFIG
            parameters = exact_weights.checkpoint(root, config, parsing.tensor_names(config))
            if list(parameters) != self.names:
                return "a checkpoint is accepted that lacks parameters"
            checkpoint_files.write(root, out, SCHEMES["q4f16_1"])
        except CheckpointError as error:
            return refused(error)
        finally:
            (root / name).write_bytes(self.whole[name])
        return None


class TorchFiles(Timed):
    """A fuzzing target: creates mutated files pytorch_model.bin (a zip file with a pickle, and the numbers of
    tensors), and checks that each is read, or refused with a suitable message. A case is the file.
    """

    OPCODES = (
        *(b"cos\nsystem\n", b"cbuiltins\neval\n(X\1\0\0\x001tR", b"ctorch\nFloatStorage\n", b"R", b"b", b"Q"),
        *(
            b"X\xff\xff\xff\xff",
            b"X\xff\xff\xff\x7f",
            b"\x8a\xff",
            b"r\xff\xff\xff\xff",
            b"j\xff\xff\xff\xff",
        ),
        *(
            b"(",
            b"t",
            b"u",
            b".",
            b"0",
            b"2",
            b"\x86",
            b"]" * 1000,
            b"h\0\x86q\0" * 100,
            b"(" * 1000,
            b"}\x93",
        ),
    )
    """Byte sequences for pickles: function calls, long lengths, large memo indices, tuples that contain
    themselves.
    """
    RECORDS = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\xff" * 4, b"\xff" * 8, b"\0" * 4)

    def __init__(self, place: Path) -> None:
        self.place = place
        self.content = checkpoint_files.tensors("F16")
        self.whole = torch_writer.torch_file(self.content)
        self.names = parsing.tensor_names(checkpoint_files.CONFIG)
        self.items, self.members = {}, {}
        for i, (name, (code, array)) in enumerate(self.content.items()):
            self.items[name] = torch_writer.tensor(
                code, str(i), array.shape, torch_writer.strides(array.shape)
            )
            self.members[f"archive/data/{i}"] = array.tobytes()
        assert self.read(self.whole) is None
        checkpoint_files.single(self.place / "other", self.content)

    def make(self, random: Random) -> bytes:
        choice = random.random()
        if choice < 0.25:  # This damages the central directory and the end record.
            at = self.whole.find(b"PK\1\2")
            return self.whole[:at] + mutated_bytes(random, self.whole[at:], self.RECORDS)
        if choice < 0.4:
            return mutated_bytes(random, self.whole, self.RECORDS)
        if choice < 0.6:
            pickle = mutated_bytes(random, torch_writer.pickled(self.items), self.OPCODES)
        else:
            items = dict(self.items)
            name = random.choice(list(items))
            sizes = (0, 1, -1, 40, 72, 2**31 - 1, 2**40, 2**62, 2**70)
            shape = tuple(random.choice(sizes) for _ in range(random.randrange(4)))
            steps = tuple(random.choice(sizes) for _ in shape)
            items[name] = torch_writer.tensor("F16", "1", shape, steps, random.choice(sizes))
            if random.random() < 0.5:
                items[name] = mutated_bytes(random, self.items[name], self.OPCODES)
            pickle = torch_writer.pickled(items)
        return torch_writer.zipped({"archive/data.pkl": pickle, **self.members})

    def read(self, case: bytes) -> str | None:
        root = self.place / "torch"
        root.mkdir(exist_ok=True)
        (root / "pytorch_model.bin").write_bytes(case)
        try:
            weights = exact_weights.checkpoint(root, checkpoint_files.CONFIG, self.names)
            for name in weights:
                weights[name]
        except CheckpointError as error:
            return refused(error)
        return None


class Quantized(Timed):
    """A fuzzing target: creates checkpoints with quantized matrices in one safetensors file, with mutations
    in the file's header and in the quantization_config, and checks that each is converted or refused with a
    suitable message. A case is the index of an unchanged checkpoint and the size of the quantization_config
    in bytes, each with a line break, then the quantization_config and the header.
    """

    NUMBERS = (0, 1, 2, 3, 4, 8, 16, 31, 32, 63, 64, 65, 128, 1 << 31, 1 << 60)
    DTYPES = ("F32", "F16", "BF16", "I32", "U32", "I8", "U8", "F8_E4M3", "F8_E8M0", "I64", "BOOL")

    def __init__(self, place: Path) -> None:
        self.place = place
        self.seeds = []
        for settings, quantize, fields in quantized_seeds.SEEDS:
            quantized(place, settings, quantize, fields)
            data = (place / "model.safetensors").read_bytes()
            size = int.from_bytes(data[:8], "little")
            self.seeds.append((fields, settings, json.loads(data[8 : 8 + size]), data[8 + size :]))
        for number, (_, settings, header, _) in enumerate(self.seeds):
            assert self.read(self._case(number, json.dumps(settings).encode(), header)) is None
            self._use(number)

    def _case(self, number: int, settings: bytes, header: dict[str, object]) -> bytes:
        return b"%d\n%d\n" % (number, len(settings)) + settings + json.dumps(header).encode()

    def make(self, random: Random) -> bytes:
        number = random.randrange(len(self.seeds))
        _, settings, header, _ = self.seeds[number]
        text = dumped(mutated_json(random, settings) if random.random() < 0.3 else settings)
        header = {name: dict(entry) for name, entry in header.items()}
        for _ in range(random.choice((1, 1, 2))):
            entry = header[random.choice(list(header))]
            choice = random.random()
            if choice < 0.3:
                entry["dtype"] = random.choice(self.DTYPES)
            elif choice < 0.6:
                entry["shape"] = [random.choice((size, *self.NUMBERS)) for size in entry["shape"]]
            elif choice < 0.8:
                entry["shape"] = entry["shape"][::-1]
            else:
                del header[random.choice(list(header))]
        return self._case(number, text, self._fitted(header))

    def _fitted(self, header: dict[str, dict[str, object]]) -> dict[str, object]:
        """Changes the offsets of each tensor in a safetensors header, in place, so that they match its dtype
        and shape and the tensors follow one another; returns the header."""
        end = 0
        for entry in header.values():
            size = math.prod(entry["shape"]) * BITS[entry["dtype"]] // 8
            entry["data_offsets"] = [end, end + size]
            end += size
        return header

    def read(self, case: bytes) -> str | None:
        number, _, rest = case.partition(b"\n")
        size, _, rest = rest.partition(b"\n")
        if int(size) > LARGEST:
            return None  # The config step refuses larger files.
        settings, header = rest[: int(size)], rest[int(size) :]
        data = self.seeds[int(number)][3]
        try:
            parsed = json.loads(settings)
        except (ValueError, RecursionError):
            return None  # The config step refuses such files.
        most = max(entry["data_offsets"][1] for entry in json.loads(header).values())
        if most > 1 << 24:
            return None
        data = (data * (most // max(1, len(data)) + 1))[:most]
        (self.place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        try:
            self._use(int(number), parsed)
        except CheckpointError as error:
            return refused(error)
        return None

    def _use(self, number: int, settings: object = None) -> None:
        fields, own, *_ = self.seeds[number]
        config = parsing.parse(fields)
        views = views_for(own if settings is None else settings)
        weights = exact_weights.checkpoint(self.place, config, parsing.tensor_names(config), views)
        for name in weights:
            weights[name]
