"""Fuzzing targets whose cases describe a model: mutated config.json files, GGUF files, and GPU programs."""

from __future__ import annotations

import json
import shutil
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from fuzz_parts.files import Files, fault
from fuzz_parts.mutate import ODD_TEXTS, Json, dumped, mutated_bytes, mutated_json
from mlcbuild_format.fields import FieldError, parse_json
from mlcbuild_format.program import check
from mlcbuild_format.program_json import parse, to_bytes
from mlcbuild_runtime.devices.gpu_program import MAX_PROGRAM
from mlcbuild_runtime.text.tokenizer import Tokenizer

from mlcbuild import models
from mlcbuild.bundles import gguf_text
from mlcbuild.checkpoints import exact_weights, gguf_config
from mlcbuild.checkpoints.gguf_file import read_gguf
from mlcbuild.checkpoints.gguf_names import names_in_file
from mlcbuild.errors import CheckpointError
from mlcbuild.models import action, parsing
from tests import gguf_experts, gguf_files, typegoldens
from tests.conftest import ROOT, TINY
from tests.program_interpreter import Interpreter
from tests.test_program import PROGRAM

SECONDS = 10.0
"""Maximum CPU seconds that reading one fuzzing case may take. The cases are files of a few kB."""
MOST_LINES, LONGEST_LINE = 61, 4000
"""MOST_LINES: maximum number of lines in an error message for users. LONGEST_LINE: maximum number of
characters in each. A fuzzing case with a larger message is a finding."""
LARGEST = 1 << 24
"""Total size in bytes of the buffers and parameters of a GPU program up to which the program is also run."""
Entry: TypeAlias = tuple[bytes, int, bytes]
"""An entry of GGUF metadata: (key, GGUF's number of the value's type, bytes of the value)."""
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of a GGUF metadata value's type -> size of such a value in bytes. Types of 4 bytes, strings and
arrays are left out.
"""


def refused(error: CheckpointError) -> str | None:
    """Returns the reason why the message of an error is unsuitable for users: it is empty, has more than
    MOST_LINES lines or one of more than LONGEST_LINE characters, or contains control characters, a traceback
    or the words "a defect of mlcbuild". None if it is suitable."""
    lines = str(error).splitlines()
    if not lines or len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_LINE:
        return f"a message of {len(lines)} lines and {len(str(error))} characters"
    return fault(1, "\n".join(lines), (1,))


class Timed(Files, ABC):
    """Base class of fuzzing targets that fail a case if mlcbuild takes more than SECONDS of CPU time to read
    it. Subclasses define `read`."""

    def check(self, case: bytes) -> str | None:
        began = time.process_time()
        problem = self.read(case)
        seconds = time.process_time() - began
        return f"it took {seconds:.0f} CPU seconds" if seconds > SECONDS and not problem else problem

    @abstractmethod
    def read(self, case: bytes) -> str | None:
        """Lets mlcbuild read the bytes of one fuzzing case, and returns the reason why the outcome is wrong;
        None if the case is accepted or is refused with a suitable message. An exception that reaches the
        caller is a finding, too."""


class Configs(Timed):
    """A fuzzing target: creates mutated config.json files, and checks that mlcbuild either accepts each as a
    consistent model or refuses it with a suitable error message. A case is the file.
    """

    NAMES = (
        *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim", "text_config"),
        *("num_key_value_heads", "num_experts", "quantization_config", "architectures", "auto_map"),
    )

    def __init__(self, place: Path) -> None:
        self.place = place
        defaults = json.loads((ROOT / "tests" / "models" / "transformers_defaults.json").read_bytes())
        self.seeds = [*typegoldens.CONFIGS.values()]
        for written in defaults.values():
            self.seeds += [
                written["base"] | written[name] for name in written.keys() - {"base", "generation"}
            ]
        self.seeds.sort(key=lambda seed: json.dumps(seed, sort_keys=True))
        for config in typegoldens.CONFIGS.values():
            assert self.check(json.dumps(config).encode()) is None
            parsing.parse(config)

    def make(self, random: Random) -> bytes:
        seed = dict(random.choice(self.seeds))
        if random.random() < 0.1:
            return mutated_bytes(random, json.dumps(seed).encode())
        if random.random() < 0.3:  # uses a field of another family
            other = random.choice(self.seeds)
            name = random.choice([*other, *self.NAMES])
            seed[name] = other.get(name, random.choice(list(seed.values())))
        return dumped(mutated_json(random, seed))

    def read(self, case: bytes) -> str | None:
        path = self.place / "config.json"
        path.write_bytes(case)
        try:
            action.normalise({}, {"checkpoint": self.place}, self.place / "out")
        except CheckpointError as error:
            return refused(error)
        document = json.loads((self.place / "out" / "config.json").read_bytes())
        config = models.from_json(document)
        if models.to_json(config) != document:
            return "a config is accepted that is not what is read again"
        if not models.parameters(config) or models.context_window(config, None) < 1:
            return "a model is accepted that computes nothing"
        return None


class Programs(Timed):
    """A fuzzing target: creates mutated program.json files, which describe a bundle's GPU program, and checks
    that each is refused with a suitable message or is safe to run: every launch stays within its buffers. A
    case is the file.
    """

    PAGES = 32

    def __init__(self, place: Path) -> None:
        self.whole = json.loads(to_bytes(PROGRAM))
        assert self.check(to_bytes(PROGRAM)) is None

    def make(self, random: Random) -> bytes:
        if random.random() < 0.1:
            return mutated_bytes(random, to_bytes(PROGRAM))
        document = mutated_json(random, self.whole)
        if random.random() < 0.5:
            places = list(_numbers(document))
            holder, key = random.choice(places) if places else ([0], 0)
            holder[key] = random.choice((0, 1, 2, 64, 255, 256, 2**31 - 1, 2**42, holder[key] + 1, "n"))
        return dumped(document)

    def read(self, case: bytes) -> str | None:
        if len(case) > MAX_PROGRAM:
            return None  # refused before it is parsed
        try:
            program = parse(parse_json(case))
            check(program, self.PAGES)
        except (FieldError, ValueError) as error:
            text = str(error)
            return fault(1, text, (1,)) if "\n" not in text and text else f"more than a sentence: {text!r}"
        if parse(parse_json(to_bytes(program))) != program:
            return "a program is accepted that is not what is written again"
        if sum(program.buffer_bytes(self.PAGES).values()) + sum(program.param_bytes().values()) > LARGEST:
            return None
        machine = Interpreter(program, self.PAGES, dict.fromkeys(program.kernels, lambda *_: None))
        for name, variants in program.functions.items():
            for variant in variants:
                machine.run(name, variant.sizes)  # This asserts that each launch stays within its buffers.
        return None


def _numbers(document: Json) -> Iterator[tuple[Json, object]]:
    """Yields (container, key or index) for each integer in a JSON document at any depth, but not for
    booleans, so that it can be replaced."""
    if isinstance(document, dict | list):
        keys = list(document) if isinstance(document, dict) else range(len(document))
        for key in keys:
            if type(document[key]) is int:
                yield document, key
            yield from _numbers(document[key])


@dataclass(frozen=True)
class GgufSeed:
    """The bytes of a valid GGUF file (`whole`), and its parts, from which files with other metadata entries
    are made."""

    whole: bytes
    entries: list[Entry]
    descriptions: bytes
    """The part of a GGUF file between the metadata and the data of the first tensor: the name, shape, type
    and offset of each tensor, and padding bytes.
    """
    data: int
    """Offset in bytes of the first tensor's data in the GGUF file."""

    @classmethod
    def of(cls, path: Path) -> GgufSeed:
        whole = path.read_bytes()
        entries, end = _entries(whole)
        data = min(tensor.start for tensor in read_gguf(path).tensors.values())
        seed = cls(whole, entries, whole[end:data], data)
        assert seed.written(entries) == whole
        return seed

    def written(self, entries: list[Entry]) -> bytes:
        """Returns the bytes of a GGUF file that consists of these metadata entries, which may be invalid, and
        of the seed file's tensors, unchanged.
        """
        head = self.whole[:16] + struct.pack("<Q", len(entries))
        for key, kind, value in entries:
            head += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        head += self.descriptions
        return head + bytes(-len(head) % 32) + self.whole[self.data :]


class Ggufs(Timed):
    """A fuzzing target: creates mutated models in one GGUF file, from the header to weights and tokenizer,
    and checks that each is read or refused with a suitable message. The unchanged files are a dense model
    with a tokenizer, and models with experts, one of them with latent attention, without a tokenizer. A case
    is the file."""

    def __init__(self, place: Path) -> None:
        self.path, self.out = place / "model.gguf", place / "out"
        gguf_files.write_gguf(TINY, self.path, "Q8_0", metadata=gguf_files.tiny_metadata(TINY))
        self.seeds = [GgufSeed.of(self.path)]
        assert self._use() is None
        for name in ("deepseek_v3", "gpt_oss", "granitemoeshared", "qwen2_moe"):
            gguf_experts.write(name, self.path)
            self.seeds.append(GgufSeed.of(self.path))
            self._read_weights()

    def make(self, random: Random) -> bytes:
        seed = random.choice(self.seeds)
        if random.random() < 0.3:
            # Most of a file is weights and tokens, where changes have little effect.
            at = random.choice((0, max(0, seed.data - 2000)))
            part = mutated_bytes(random, seed.whole[at : at + 2000], (b"\xff" * 8, b"\x09\0\0\0", b"\0" * 8))
            return seed.whole[:at] + part + seed.whole[at + 2000 :]
        entries = list(seed.entries)
        for _ in range(random.choice((1, 1, 2, 3))):
            at = random.randrange(len(entries))
            key, kind, value = entries[at]
            choice = random.random()
            if choice < 0.15:
                del entries[at]
            elif choice < 0.3:
                entries[at] = key, *random.choice(entries)[1:]
            elif choice < 0.8:
                entries[at] = key, *_odd_value(random)
            else:
                entries[at] = key, kind, mutated_bytes(random, value)
        return seed.written(entries)

    def read(self, case: bytes) -> str | None:
        self.path.write_bytes(case)
        try:
            return self._use()
        except CheckpointError as error:
            return refused(error)

    def _read_weights(self) -> None:
        config = gguf_config.read_config(self.path)
        weights = exact_weights.checkpoint(self.path, config, names_in_file(self.path, config))
        for name in weights:
            weights[name]

    def _use(self) -> str | None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        inputs: dict[str, Path] = {"checkpoint": self.path.parent}
        params: dict[str, Json] = {"file": self.path.name}
        self._read_weights()
        gguf_text.tokenizer(params, inputs, self.out)
        tokenizer = Tokenizer.load(self.out)
        tokenizer.decode(tokenizer.encode("one two"))
        return None


def _entries(data: bytes) -> tuple[list[Entry], int]:
    """Returns (metadata entries of a complete GGUF file, offset of their end)."""
    (count,) = struct.unpack_from("<Q", data, 16)
    entries, at = list[Entry](), 24
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", data, at)
        key, at = data[at + 8 : at + 8 + size], at + 8 + size
        (kind,) = struct.unpack_from("<I", data, at)
        end = _end(data, at + 4, kind)
        entries.append((key, kind, data[at + 4 : end]))
        at = end
    return entries, at


def _end(data: bytes, at: int, kind: int) -> int:
    """Returns the offset at which a value in a GGUF file's metadata ends. data: bytes of the file; at: offset
    of the value; kind: GGUF's number of its type, where unknown types count as 4 bytes."""
    if kind == 8:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != 9:
        return at + SIZES.get(kind, 4)
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for _ in range(count):
        at = _end(data, at, inner)
    return at


def _odd_value(random: Random) -> tuple[int, bytes]:
    """Returns a random, often invalid value for a metadata entry of a GGUF file, as (number of its type, its
    bytes).
    """
    kind = random.randrange(13)
    if kind == 8:
        text = random.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
        return kind, struct.pack("<Q", len(text)) + text
    if kind == 9:
        inner, count = random.randrange(14), random.choice((0, 1, 3, 2**32, 2**62))
        return kind, struct.pack("<IQ", inner, count) + bytes(random.choice((0, 24)))
    size = SIZES.get(kind, 4)
    return kind, random.choice(
        (bytes(size), b"\xff" * size, random.randbytes(size), b"\x01" + bytes(size - 1))
    )
