"""The bundle format: bundle.json and what must agree with it. See runtime/README.md.

`read` makes the checks that every load makes (form, presence, sizes, digests of everything but weights,
headers of weights and library, one signature everywhere); `check(full=True)` also digests the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn, get_args

from blake3 import blake3

from mlcbuild_runtime import binary, weights
from mlcbuild_runtime.errors import BundleError
from mlcbuild_runtime.fields import FieldError, Fields, Json, describe, plain
from mlcbuild_runtime.signature import signature

__all__ = [
    "FORMAT",
    "MANIFEST",
    "POOLINGS",
    "PROVENANCE",
    "File",
    "Limits",
    "Machine",
    "Manifest",
    "Memory",
    "Model",
    "Pooling",
    "Serving",
    "check",
    "manifest",
    "parse",
    "read",
    "signature",
]

FORMAT = "mlcbuild-bundle/1"
MANIFEST = "bundle.json"
PROVENANCE = "provenance.json"
Pooling = Literal["last", "mean"]
"""How hidden states become one vector. `last`: that of the last token, which alone has seen all others."""
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
    """The model's config, verbatim; the runtime reads `vocab_size` and `hidden_size` of it."""


@dataclass(frozen=True)
class Limits:
    context_window: int
    """Tokens of one sequence, prompt and answer together."""
    prefill_chunk: int
    """Most tokens of one prefill call."""
    max_batch: int
    """Most sequences of one call."""
    page_size: int = 16


@dataclass(frozen=True)
class Memory:
    """Bytes, as estimated by the builder for max_batch sequences of context_window tokens."""

    weights: int
    kv_cache: int
    workspace: int
    total: int


@dataclass(frozen=True)
class Serving:
    """Defaults for requests, from the checkpoint's generation_config.json."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    pooling: Pooling = "last"
    """How embeddings are made of hidden states; from the checkpoint's 1_Pooling/config.json."""


@dataclass(frozen=True)
class Machine:
    """What a target says about the machine that can run the library."""

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
    """bundle.json. `scheme`, `target` and `model.config` are kept verbatim."""

    name: str
    model: Model
    scheme: Mapping[str, Json]
    target: Mapping[str, Json]
    limits: Limits
    library: str
    weights: tuple[str, ...]
    signature: str
    files: Mapping[str, File]
    """Every file of the bundle but bundle.json and those of provenance, by relative path."""
    memory: Memory
    serving: Serving = Serving()
    verification: Mapping[str, Json] | None = None
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return _machine(Fields(plain(self.target), "target"))

    @property
    def vocab_size(self) -> int:
        return Fields(plain(self.model.config), "model.config").integer("vocab_size", 1)

    @property
    def hidden_size(self) -> int:
        return Fields(plain(self.model.config), "model.config").integer("hidden_size", 1)

    @property
    def window(self) -> int | None:
        """How many tokens a layer looks back at most; None: to the beginning."""
        found = plain(self.model.config.get("windows"))
        listed = found if isinstance(found, list) else []
        sizes = [size for size in listed if isinstance(size, int)]
        return max(sizes) if sizes and len(sizes) == len(listed) else None

    def to_json(self) -> dict[str, Json]:
        """The document; `parse` is its inverse."""
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
        """The content of bundle.json: the same bytes for the same manifest."""
        text = json.dumps(self.to_json(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"


def parse(document: Json) -> Manifest:
    """A Manifest from its JSON. Raises FieldError, naming the first field at fault."""
    top = Fields(document)
    found = top.value.get("format")
    if found != FORMAT:
        raise FieldError(f"'format' must be '{FORMAT}', the one this runtime reads, found {found!r}")
    top.only("format", *Manifest.__dataclass_fields__)
    model = top.fields("model").only("name", "family", "config")
    limits = top.fields("limits").only(*Limits.__dataclass_fields__)
    memory = top.fields("memory").only(*Memory.__dataclass_fields__)
    verification = top.value.get("verification")
    tools = top.fields("tools")
    manifest = Manifest(
        name=top.text("name"),
        model=Model(model.text("name"), model.text("family"), model.object("config")),
        scheme=top.object("scheme"),
        target=top.object("target"),
        limits=Limits(**{key: limits.integer(key, 1) for key in Limits.__dataclass_fields__}),
        library=top.text("library"),
        weights=top.texts("weights"),
        signature=top.text("signature"),
        files=_files(top.fields("files")),
        memory=Memory(**{key: memory.integer(key, 0) for key in Memory.__dataclass_fields__}),
        serving=_serving(top.fields("serving")),
        verification=None if verification is None else top.object("verification"),
        tools={key: tools.text(key) for key in tools.value},
    )
    _cross_check(manifest)
    return manifest


def _serving(fields: Fields) -> Serving:
    fields.only(*Serving.__dataclass_fields__)
    bos = fields.value.get("bos_token_id")
    top_k = fields.value.get("top_k")
    return Serving(
        bos_token_id=None if bos is None else fields.integer("bos_token_id", 0),
        eos_token_ids=fields.integers("eos_token_ids"),
        temperature=fields.number("temperature", 0, 100),
        top_p=fields.number("top_p", 0, 1),
        top_k=None if top_k is None else fields.integer("top_k", 0),
        pooling=_pooling(fields),
    )


def _pooling(fields: Fields) -> Pooling:
    found = fields.value.get("pooling", Serving.pooling)
    for kind in POOLINGS:
        if found == kind:
            return kind
    raise FieldError(f"'serving.pooling' must be one of {', '.join(POOLINGS)}, found {describe(found)}")


def _machine(fields: Fields) -> Machine:
    return Machine(
        triple=fields.text("triple"),
        cpu=fields.text("cpu"),
        features=fields.texts("features"),
        device=fields.text("device"),
        output=fields.text("output"),
    )


def _files(fields: Fields) -> dict[str, File]:
    files = {}
    for path in fields.value:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path or path == ".":
            raise FieldError(f"'files' names {path!r}, which is not a plain path inside the bundle")
        entry = fields.fields(path).only("blake3", "size")
        files[path] = File(_hex(entry, "blake3"), entry.integer("size", 0))
    return files


def _hex(fields: Fields, key: str) -> str:
    text = fields.text(key)
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise FieldError(f"'{fields.name}.{key}' must be 64 lower-case hex digits, found {text!r}")
    return text


def _cross_check(manifest: Manifest) -> None:
    """Checks that need more than one field."""
    for path in (manifest.library, *manifest.weights):
        if path not in manifest.files:
            raise FieldError(f"'files' does not list {path!r}, which the manifest says is needed")
    if not manifest.weights:
        raise FieldError("'weights' names no file")
    vocab_size = manifest.vocab_size
    serving = manifest.serving
    for token in (*serving.eos_token_ids, *([] if serving.bos_token_id is None else [serving.bos_token_id])):
        if token >= vocab_size:
            raise FieldError(f"'serving' names token {token}, but the vocabulary has {vocab_size} tokens")
    _ = manifest.machine


def read(path: Path) -> Manifest:
    """The manifest of the bundle in directory `path`, after every check that needs no reading of weights.

    Raises BundleError with one sentence.
    """
    return check(path, full=False)


def check(path: Path, full: bool = True) -> Manifest:
    """As `read`; `full` also digests the weights, at about 2 GB per CPU-second."""
    found = manifest(path)
    large = set() if full else set(found.weights)
    for name, file in sorted(found.files.items()):
        _check_file(path, name, file, digest=name not in large)
    for name in found.weights:
        own = weights.read_header(path / name).signature
        if own != found.signature:
            raise BundleError(
                f"{path}: the weights in {name} have signature {own[:12]}, but {MANIFEST} is for"
                f" {found.signature[:12]}: they belong to another model or scheme; build the bundle again"
            )
    if found.machine.output == "shared":
        binary.check(path / found.library)
    return found


def manifest(path: Path) -> Manifest:
    """What bundle.json says, without a look at the other files. Raises BundleError."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise BundleError(f"{path}: {what}, but a bundle is a directory that holds {MANIFEST}")
    file = path / MANIFEST
    try:
        document = json.loads(file.read_bytes(), parse_constant=_no_constant, object_pairs_hook=_unique)
        return parse(document)
    except FileNotFoundError:
        raise BundleError(f"{path}: there is no {MANIFEST} in it, so it is not a bundle") from None
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error.strerror}") from None
    except FieldError as error:
        raise BundleError(f"{file}: {error}; build the bundle again") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not valid JSON ({error}); build the bundle again") from None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _check_file(root: Path, name: str, file: File, digest: bool) -> None:
    path = root / name
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BundleError(f"{path}: not a regular file, as {MANIFEST} says it is; build the bundle again")
        if size != file.size:
            raise BundleError(
                f"{path}: has {size} bytes, but {MANIFEST} says {file.size}: copy the bundle again"
            )
        if digest and (found := _digest(path)) != file.blake3:
            raise BundleError(
                f"{path}: has BLAKE3 {found[:12]}, but {MANIFEST} says {file.blake3[:12]}: it was changed or"
                " damaged after the build, so copy the bundle again"
            )
    except FileNotFoundError:
        raise BundleError(f"{path}: missing, but {MANIFEST} lists it: copy the bundle again") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None


def _digest(path: Path) -> str:
    hasher = blake3()
    if path.stat().st_size:
        hasher.update_mmap(path)
    return str(hasher.hexdigest())


def check_tokens(tokens: Sequence[int], manifest: Manifest) -> None:
    """Raises ValueError for a token outside the vocabulary: the library would read beyond its table."""
    vocab_size = manifest.vocab_size
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size} tokens")
