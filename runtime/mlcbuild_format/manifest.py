"""The manifest of a bundle, bundle.json: its fields, and the rules for their values. See runtime/README.md.

A manifest is untrusted: `parse` checks the type and range of every field and raises FieldError, so that code
that holds a Manifest need not check them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, get_args

from mlcbuild_format.fields import MAX_INTEGER, FieldError, Fields, Json, describe, is_line, plain
from mlcbuild_format.limits import Limits

FORMAT = "mlcbuild-bundle/1"
MANIFEST = "bundle.json"
PROVENANCE = "provenance.json"
ENVELOPE = "provenance.intoto.jsonl"
Pooling = Literal["last", "mean"]
"""How hidden states are combined into one embedding: `last` takes that of the last token (in a causal model
the only one that attends to all tokens), `mean` averages all."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class File:
    blake3: str
    size: int


@dataclass(frozen=True)
class Model:
    name: str
    family: str
    config: Mapping[str, Json]
    """The model's config in mlcbuild's own form, not the checkpoint's, exactly as in bundle.json. The runtime
    reads only its fields `vocab_size`, `hidden_size`, `layers` and `layer_specs`."""


@dataclass(frozen=True)
class Memory:
    """The builder's estimate of the memory, in bytes, that serving a bundle takes: max_batch sequences of
    context_window tokens each. `total` is the sum of weights, KV cache and workspace."""

    weights: int
    kv_cache: int
    workspace: int
    total: int


@dataclass(frozen=True)
class Serving:
    """Default sampling parameters, from the checkpoint's generation_config.json, and the ids of its BOS and
    EOS tokens, from there or config.json; None, or () for EOS, where they are not stated. The temperature is
    0 if do_sample is false."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    pooling: Pooling = "last"
    """How hidden states are combined into an embedding, "last" or "mean", from the checkpoint's
    1_Pooling/config.json. A bundle that does not state it uses "last"."""


@dataclass(frozen=True)
class Machine:
    """The machine for which a library is compiled, from the manifest's target: LLVM's triple, processor and
    signed features, the kind of device ("cpu" or a GPU's) and the kind of compiled file."""

    triple: str
    cpu: str
    features: tuple[str, ...]
    device: str
    output: str

    @property
    def architecture(self) -> str:
        return self.triple.partition("-")[0]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a bundle: the content of its bundle.json. The objects `scheme`, `target` and
    `model.config` are kept as they are in the file."""

    name: str
    model: Model
    scheme: Mapping[str, Json]
    target: Mapping[str, Json]
    limits: Limits
    library: str
    weights: tuple[str, ...]
    signature: str
    files: Mapping[str, File]
    """Relative path -> BLAKE3 digest and size in bytes of every file of the bundle except bundle.json and the
    provenance files."""
    memory: Memory
    serving: Serving = Serving()
    verification: Mapping[str, Json] | None = None
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return _machine(Fields(plain(self.target), "target"))

    @property
    def vocab_size(self) -> int:
        return Fields(plain(self.model.config), "model.config").integer("vocab_size", 1, MAX_INT32)

    @property
    def hidden_size(self) -> int:
        return Fields(plain(self.model.config), "model.config").integer("hidden_size", 1, MAX_INT32)

    @property
    def num_layers(self) -> int:
        """Returns the number of the model's layers; 0 if the model's config has no list of layers."""
        layers = self.model.config.get("layers")
        return len(layers) if isinstance(layers, list | tuple) else 0

    @property
    def everything(self) -> frozenset[str]:
        """Returns the relative paths of all files that a bundle with this manifest may contain: those that it
        lists, bundle.json, and two files with the provenance."""
        return frozenset({*self.files, MANIFEST, PROVENANCE, ENVELOPE})

    @property
    def window(self) -> int | None:
        """Returns the longest attention window of the model's layers, in tokens; None if a layer attends to
        all tokens, or if the config does not describe the layers."""
        windows = _windows(self.model.config)
        sizes = [size for size in windows if size is not None]
        return max(sizes) if sizes and len(sizes) == len(windows) else None

    def to_json(self) -> dict[str, Json]:
        """Returns the manifest as a decoded JSON document (a dict); `parse` is the inverse."""
        serving: dict[str, Json] = {"bos_token_id": self.serving.bos_token_id}
        serving["eos_token_ids"] = list(self.serving.eos_token_ids)
        for key in ("temperature", "top_p", "top_k"):
            value = getattr(self.serving, key)
            if value is not None:
                serving[key] = value
        if self.serving.pooling != Serving.pooling:
            serving["pooling"] = self.serving.pooling
        return {
            "format": FORMAT,
            "name": self.name,
            "model": {
                "name": self.model.name,
                "family": self.model.family,
                "config": plain(self.model.config),
            },
            "scheme": plain(self.scheme),
            "target": plain(self.target),
            "limits": plain(vars(self.limits)),
            "library": self.library,
            "weights": list(self.weights),
            "signature": self.signature,
            "files": {path: plain(vars(file)) for path, file in sorted(self.files.items())},
            "memory": plain(vars(self.memory)),
            "serving": serving,
            "verification": plain(self.verification),
            "tools": plain(self.tools),
        }

    def to_bytes(self) -> bytes:
        """Returns the content of bundle.json: equal manifests yield equal bytes."""
        text = json.dumps(self.to_json(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"


MAX_INT32 = (1 << 31) - 1
MAX_FILES = 10_000
MAX_VALUES = 100_000
"""Maximum number of keys and values, nested ones and items of lists included, in a JSON object of bundle.json
that is kept unchanged, such as the model's config. More raise FieldError."""
MAX_NESTING = 16
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}"
"""Regular expression of a file or directory name: 1 to 200 ASCII letters, digits and `_ . + -`, the first a
letter, a digit or `_`, so that a shell needs no quotes. A name that ends with `.` or is a device's on Windows
also matches."""
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}
"""File names, in lower case, that Windows reserves for devices, whatever their extension: con, prn, aux, nul,
com0 to com9, lpt0 to lpt9."""
_HEX = "[0-9a-f]{64}"
_TRIPLE = r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+){1,4}"
_WORD = r"[A-Za-z0-9_.+-]+"
_FIGURES: Mapping[str, float] = {
    "kl_mean": 1e9,
    "kl_max": 1e9,
    "top1_agreement": 1,
    "perplexity": 1e308,
    "reference_perplexity": 1e308,
    "decode_error": 1e308,
}
"""Name of a measured value in the field `verification` of bundle.json -> its maximum valid value; the minimum
is 0."""


def parse(document: Json) -> Manifest:
    """Returns the manifest of a bundle that a decoded JSON document describes, after checking every field.
    Raises FieldError naming the first field that is missing, unknown or invalid, or contradicts another."""
    top = Fields(document)
    version = top.value.get("format")
    if version != FORMAT:
        raise FieldError(
            f"'format' must be '{FORMAT}', the one this runtime reads, found {describe(version)}"
        )
    top.only("format", *Manifest.__dataclass_fields__)
    model = top.fields("model").only("name", "family", "config")
    limits = top.fields("limits").only(*Limits.__dataclass_fields__)
    memory = top.fields("memory").only(*Memory.__dataclass_fields__)
    tools = top.fields("tools")
    manifest = Manifest(
        name=top.text("name"),
        model=Model(model.text("name"), model.text("family"), _verbatim(model, "config")),
        scheme=_verbatim(top, "scheme"),
        target=_verbatim(top, "target"),
        limits=Limits(**{key: limits.integer(key, 1, MAX_INT32) for key in Limits.__dataclass_fields__}),
        library=top.text("library"),
        weights=top.texts("weights"),
        signature=top.text("signature", _HEX),
        files=_files(top.fields("files")),
        memory=Memory(**{key: memory.integer(key, 0) for key in Memory.__dataclass_fields__}),
        serving=_serving(top.fields("serving")),
        verification=_verification(top),
        tools={key: tools.text(key) for key in tools.value},
    )
    _cross_check(manifest)
    return manifest


def _verbatim(fields: Fields, key: str) -> dict[str, Json]:
    """Returns the JSON object in the field `key` of a manifest, unchanged. Raises FieldError if it is
    missing, nested more than 16 deep, has more than 100,000 keys and values, or holds a value that is not
    safe to print, compare and write again: text of more than one line or 1000 characters, or a number of a
    magnitude above 2**53."""
    verbatim = fields.fields(key)
    level: Sequence[Json] = [verbatim.value]
    count = 0
    for depth in range(MAX_NESTING + 1):
        count += len(level)
        is_too_deep = depth == MAX_NESTING and any(isinstance(value, dict | list) for value in level)
        if is_too_deep or count > MAX_VALUES:
            raise FieldError(f"{verbatim.name} has more than {MAX_VALUES} values, or is nested too deeply")
        children: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                children += [*value, *value.values()]
            elif isinstance(value, list):
                children += value
            elif not _is_plain(value):
                rule = "single lines of printable text, and numbers of at most 53 bits"
                raise FieldError(f"{verbatim.name} may hold only {rule}, found {describe(value)}")
        level = children
    return verbatim.value


def _is_plain(value: bool | float | str | None) -> bool:
    if isinstance(value, str):
        return not value or is_line(value)
    return value is None or -MAX_INTEGER <= value <= MAX_INTEGER


def _verification(top: Fields) -> dict[str, Json] | None:
    if top.value.get("verification") is None:
        return None
    figures = top.fields("verification").only("tokens", *_FIGURES)
    for key, largest in _FIGURES.items():
        if figures.number(key, 0, largest) is None:
            raise FieldError(f"'verification.{key}' is missing")
    figures.integer("tokens", 1)
    return figures.value


def _serving(fields: Fields) -> Serving:
    fields.only(*Serving.__dataclass_fields__)
    bos = fields.value.get("bos_token_id")
    top_k = fields.value.get("top_k")
    return Serving(
        bos_token_id=None if bos is None else fields.integer("bos_token_id", 0, MAX_INT32),
        eos_token_ids=fields.integers("eos_token_ids", MAX_INT32),
        temperature=fields.number("temperature", 0, 100),
        top_p=fields.number("top_p", 0, 1),
        top_k=None if top_k is None else fields.integer("top_k", 0, MAX_INT32),
        pooling=_pooling(fields),
    )


def _pooling(fields: Fields) -> Pooling:
    pooling = fields.value.get("pooling", Serving.pooling)
    for kind in POOLINGS:
        if pooling == kind:
            return kind
    raise FieldError(f"'serving.pooling' must be one of {', '.join(POOLINGS)}, found {describe(pooling)}")


def _machine(fields: Fields) -> Machine:
    return Machine(
        triple=fields.text("triple", _TRIPLE),
        cpu=fields.text("cpu", _WORD),
        features=fields.texts("features", _WORD),
        device=fields.text("device", _WORD),
        output=fields.text("output", _WORD),
    )


def _files(fields: Fields) -> dict[str, File]:
    if len(fields.value) > MAX_FILES:
        raise FieldError(f"'files' names more than {MAX_FILES} files")
    for path in fields.value:
        if not is_plain_path(path):
            raise FieldError(f"'files' names {describe(path)}, which is not a plain path inside the bundle")
    spellings: dict[str, str] = {}
    for path in fields.value:
        for part in (path, *map(str, PurePosixPath(path).parents)):
            if spellings.setdefault(part.lower(), part) != part:
                raise FieldError(
                    f"'files' names '{part}' and '{spellings[part.lower()]}', which are one file where"
                    " capital letters do not count"
                )
            if part != path and part in fields.value:
                raise FieldError(f"'files' names '{part}' as a file, and as the directory of '{path}'")
        if path.lower() in (MANIFEST, PROVENANCE, ENVELOPE):
            raise FieldError(f"'files' names '{path}', which no manifest lists")
    files = {}
    for path in fields.value:
        entry = fields.fields(path).only("blake3", "size")
        files[path] = File(entry.text("blake3", _HEX), entry.integer("size", 0))
    return files


def is_plain_path(path: str) -> bool:
    """Returns True if a path may stand in a manifest: at most 16 names, separated by `/`, each of at most 200
    ASCII letters, digits and `_ . + -`, that begin with none of `. + -`, do not end with `.`, and are no
    device's name on Windows, with or without an extension (con, com1.txt)."""
    parts = path.split("/")
    return (
        len(parts) <= MAX_NESTING
        and all(re.fullmatch(_NAME, part) and not part.endswith(".") for part in parts)
        and not any(part.partition(".")[0].lower() in _DEVICES for part in parts)
    )


def _cross_check(manifest: Manifest) -> None:
    """Raises FieldError if fields of a manifest contradict each other, for example if it names a file that it
    does not list, or if a field of `target`, the scheme's name or the model's config is invalid."""
    needed = (manifest.library, *manifest.weights)
    for path in needed:
        if path not in manifest.files:
            raise FieldError(f"'files' does not list {path!r}, which the manifest says is needed")
    if not manifest.weights:
        raise FieldError("'weights' names no file")
    if len(set(needed)) != len(needed):
        raise FieldError("'library' and 'weights' name one file twice")
    Fields(plain(manifest.scheme), "scheme").text("name")
    _ = manifest.machine
    _check_config(manifest)
    limits, memory = manifest.limits, manifest.memory
    if limits.prefill_chunk > limits.context_window:
        raise FieldError(
            f"'limits.prefill_chunk' is {limits.prefill_chunk}, more than the context of"
            f" {limits.context_window} tokens"
        )
    if limits.pages > MAX_INT32:
        raise FieldError(f"'limits' need more than {MAX_INT32} pages of KV cache")
    if memory.total != memory.weights + memory.kv_cache + memory.workspace:
        raise FieldError(f"'memory.total' is {memory.total}, which is not the sum of its parts")


def _check_config(manifest: Manifest) -> None:
    """Raises FieldError unless the fields of the model's config that the runtime reads are valid, and all
    special tokens are in the vocabulary."""
    config, serving, vocab_size = manifest.model.config, manifest.serving, manifest.vocab_size
    for token in (*serving.eos_token_ids, *([] if serving.bos_token_id is None else [serving.bos_token_id])):
        if token >= vocab_size:
            raise FieldError(f"'serving' names token {token}, but the vocabulary has {vocab_size} tokens")
    if "hidden_size" in config:
        _ = manifest.hidden_size
    _windows(config)


def _windows(config: Mapping[str, Json]) -> list[int | None]:
    """Returns, for each kind of layer in a model's config, the attention window in tokens, or None if its
    layers attend to all tokens; [] if the config lists no kinds of layers. Raises FieldError for a
    description of layers that has another form."""
    specs = plain(config.get("layer_specs", []))
    if not isinstance(specs, list):
        raise FieldError(f"'model.config.layer_specs' must be a list of layers, found {describe(specs)}")
    windows: list[int | None] = []
    for index, spec in enumerate(specs):
        mixer = Fields(spec, f"model.config.layer_specs[{index}]").fields("mixer")
        windows.append(mixer.integer("window", 1, MAX_INT32) if "window" in mixer.value else None)
    return windows
