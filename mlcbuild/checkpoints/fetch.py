"""Selects the files of a checkpoint, in a directory or on a Hugging Face hub, and downloads them.

`needed_files` selects files by name; `fetch` is the action that downloads the pinned files of a repository. A
download is accepted only if its size and sha256 match the lock.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3
from mlcbuild_format import regular, strict_json

from mlcbuild import progress
from mlcbuild.canon import Json, note_digest
from mlcbuild.checkpoints.checkpoint_kinds import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GGUF_PART,
    POOLING,
    TORCH_FILES,
)
from mlcbuild.checkpoints.hub import HubSource, check_name, download, explained, reach
from mlcbuild.errors import SourceError, did_you_mean

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Glob patterns of the names of a checkpoint's files, other than the weights, that steps read."""

LARGEST_INDEX = 64 << 20
"""Maximum size in bytes of the index of a sharded checkpoint, such as model.safetensors.index.json; a larger
one raises SourceError."""
_BLOCK = 1 << 20

_MOST = 8
"""Maximum number of bytes received for a file over all attempts, divided by the sum of the file's size and 1
MiB; more raises SourceError."""
STREAMS = 4
"""Number of files that are downloaded at the same time: one HTTP stream rarely fills a fast line."""


@dataclass(frozen=True)
class Pinned:
    """The size in bytes and the sha256 (lower-case hex) of a file of a repository, as recipe.lock pins
    them."""

    size: int
    sha256: str


def needed_files(names: Iterable[str], shards: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the sorted names of those of a checkpoint's files that steps read: at the top level, the files
    with configuration, tokenizer, template and weights, and in a subdirectory the file that states how
    embeddings are pooled. names: all files of the checkpoint; shards: the weights files that the checkpoint's
    index lists. The weights are the first of these that exists: model.safetensors; its index and the shards;
    all *.safetensors but adapter* and consolidated*; pytorch_model.bin; its index and the shards. For a LoRA
    adapter without config.json, returns only the two files of the adapter. Raises SourceError, which does not
    name the source, if the files are not a usable checkpoint.
    """
    names = set(names)
    top = {name for name in names if "/" not in name}
    if "config.json" not in top and ADAPTER_CONFIG in top:
        return adapter_files(top)
    if "config.json" not in top:
        packed = sorted(name for name in top if name.endswith(".gguf"))
        hint = f"; to build {packed[0]}, name that file" if packed else ""
        raise SourceError(f"it has no config.json, so it is no checkpoint in Hugging Face format{hint}")
    files = {name for name in top if any(fnmatchcase(name, pattern) for pattern in WANTED)}
    files |= {POOLING} & names
    if SINGLE in top:
        return tuple(sorted(files | {SINGLE}))
    index = index_of(top)
    if index is not None:
        missing = sorted(set(shards) - top)
        if missing:
            raise SourceError(f"{index} names files that are not there: {', '.join(missing)}")
        if shards := set(shards):
            return tuple(sorted(files | {index} | shards))
    weights = _safetensors(top) or {TORCH_FILES[0]} & top
    if not weights:
        others = sorted(
            name for name in top if name.endswith((".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5"))
        )
        hint = f"; it has {', '.join(others[:3])}" if others else ""
        raise SourceError(
            f"it has no weights that can be read{hint}; weights must be *.safetensors or {TORCH_FILES[0]}"
        )
    return tuple(sorted(files | weights))


def gguf_parts(names: Collection[str], file: str) -> tuple[str, ...]:
    """Returns the sorted names of all parts of a GGUF file; `file` alone if it is not split. names: all
    files of the repository; file: the path of one part. Raises SourceError (without naming the source)
    if a part is missing.
    """
    split, parts = GGUF_PART.fullmatch(file), {file}
    if split is not None:
        stem, _, count = split.groups()
        parts |= {f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)}
    missing = sorted(parts - set(names))
    if missing:
        packed = [name for name in sorted(names) if name.endswith(".gguf")]
        hint = f"; {did_you_mean(file, packed)}" if packed else "; it has no GGUF files"
        raise SourceError(f"there is no file {missing[0]}{hint}")
    return tuple(sorted(parts))


def _safetensors(names: Iterable[str]) -> set[str]:
    return {
        name
        for name in names
        if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter"))
    }


def index_of(names: Collection[str]) -> str | None:
    """Returns the name of the index of weights files among `names`; None if there is none, or if weights
    in a single file, or for a PyTorch index any safetensors files, come before it.
    """
    if SINGLE in names:
        return None
    if INDEX in names:
        return INDEX
    single, index = TORCH_FILES
    return index if index in names and single not in names and not _safetensors(names) else None


def adapter_files(names: Container[str]) -> tuple[str, ...]:
    """Returns the names of the two files of a LoRA adapter that steps read: its config, then its weights
    (safetensors before .bin). names: all files of the adapter. Raises SourceError, which does not name the
    source, if one is missing.
    """
    weights = next((name for name in ADAPTER_WEIGHTS if name in names), None)
    if weights is None or ADAPTER_CONFIG not in names:
        missing = ADAPTER_WEIGHTS[0] if weights is None and ADAPTER_CONFIG in names else ADAPTER_CONFIG
        raise SourceError(f"it has no {missing}; an adapter is what PEFT's save_pretrained writes")
    return ADAPTER_CONFIG, weights


def index_shards(data: bytes, index: str) -> frozenset[str]:
    """Returns the names of the weights files that an index lists, each once. data: the bytes of the index;
    index: its file name, such as pytorch_model.bin.index.json. Raises SourceError, which does not name the
    source, if the index is invalid, or lists a file in another directory or without the suffix that its own
    name contains (.safetensors or .bin).
    """
    suffix = index.removesuffix(".index.json").rpartition(".")[2]
    try:
        places = strict_json.parse(data)["weight_map"]
        shards = frozenset(places.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(f"{index} is damaged: it has no 'weight_map' of file names") from None
    for name in shards:
        if not isinstance(name, str) or "/" in name or not name.endswith(f".{suffix}"):
            raise SourceError(f"{index} names {name!r}, which is no {suffix} file beside it")
    return shards


def local_files(root: Path, is_adapter: bool = False) -> tuple[str, ...]:
    """Returns the names of the files that steps read from a local directory: those that `needed_files`
    selects for a checkpoint, or `adapter_files` for an adapter. Raises SourceError if a file that steps need
    is missing or not a regular file, the index of the weights is invalid or too large, the directory cannot
    be read, or it holds an adapter where a checkpoint is needed.
    """
    try:
        names = [entry.name for entry in root.iterdir() if _is_regular(entry)]
        if is_adapter:
            return adapter_files(names)
        if ADAPTER_CONFIG in names and "config.json" not in names:
            raise SourceError("it holds an adapter and no model; list it under 'adapters' of its model")
        names += [POOLING] if (root / POOLING).is_file() else []
        index = index_of(names)
        data = b"" if index is None else regular.read(root / index, LARGEST_INDEX)
        return needed_files(names, () if index is None else index_shards(data, index))
    except NotADirectoryError:
        raise SourceError(f"{root}: not a directory; a local source is a checkpoint's directory") from None
    except FileNotFoundError:
        raise SourceError(f"{root}: no such directory; a local source is a checkpoint's directory") from None
    except OSError as error:
        raise SourceError(f"{root}: cannot be read: {error.strerror}") from None
    except SourceError as error:
        raise SourceError(f"{root}: {error}") from None


def _is_regular(path: Path) -> bool:
    """Returns True if the path is a regular file; else, as for a broken link, False. Raises SourceError
    instead of returning False if the file name is one that a checkpoint's steps read.
    """
    try:
        kind = regular.kind(path)
    except OSError as error:
        kind = f"a broken link ({error.strerror})"
    matters = any(
        fnmatchcase(path.name, pattern)
        for pattern in (*WANTED, "*.safetensors", INDEX, "*.bin", TORCH_FILES[1])
    )
    if matters and kind != "a regular file":
        raise SourceError(f"{path.name} is {kind}; a checkpoint has regular files only")
    return kind == "a regular file"


def fetch(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action: downloads the pinned files of one hub repository to `out`, and verifies size and sha256.

    params: {"repo": str, "commit": 40 hex digits, "files": {name: {"size": int, "sha256": hex}}}; no
    inputs. Files are hard links into the hub's cache where possible, otherwise copies. After the
    first failure no further download starts; those in progress finish. Raises SourceError if the hub cannot
    be reached or a file name is not allowed, otherwise with a line for each file that failed.
    """
    source = HubSource(str(params["repo"]), str(params["commit"]))
    files = _pinned(params["files"])
    for name in files:
        _named(source, name)
    reach(source, files)
    count = _counter(sum(pinned.size for pinned in files.values()))
    problems: set[str] = set()
    with ThreadPoolExecutor(STREAMS) as pool:
        started: list[Future[None]] = [
            pool.submit(_bring, source, name, pinned, out, count) for name, pinned in files.items()
        ]
        for future in as_completed(started):
            error = None if future.cancelled() else future.exception()
            if error is None:
                continue
            if not isinstance(error, SourceError):
                raise error
            problems.add(str(error))
            # Downloads that are in progress finish and stay in the cache; others would fail for the same
            # reason.
            pool.shutdown(wait=False, cancel_futures=True)
    if problems:
        raise SourceError("\n".join(sorted(problems)))


def _pinned(files: Json) -> dict[str, Pinned]:
    if not isinstance(files, dict):
        raise TypeError("params['files'] must be an object")
    pinned = {}
    for name, entry in sorted(files.items()):
        if not isinstance(entry, dict) or not isinstance(entry["size"], int):
            raise TypeError(f"params['files'][{name!r}] must be {{'size', 'sha256'}}")
        pinned[name] = Pinned(entry["size"], str(entry["sha256"]))
    return pinned


def _named(source: HubSource, name: str) -> None:
    try:
        check_name(name)
    except SourceError as error:
        raise SourceError(f"{source}: {error}") from None


def _counter(total: int) -> Callable[[int], None]:
    """Returns a function that accepts a number of downloaded bytes, sums these numbers over all files, and
    reports progress; any thread may call it. total: the expected sum.
    """
    done = 0
    lock = threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            progress.report(min(done, total), total, "B")

    return count


def _bring(source: HubSource, name: str, pinned: Pinned, out: Path, count: Callable[[int], None]) -> None:
    """Places one file in `out`, as a hard link or a copy of the file in the hub's cache, and verifies size
    and sha256. The file is downloaded if the cache lacks it and, once more, if the cached one is wrong.
    `count` is called with the number of bytes that have arrived since the last call; a last call, perhaps
    negative, makes the sum the file's size. Raises SourceError if no intact copy can be obtained.
    """
    target = out / name
    fault = ""
    heard = 0

    def hear(size: int) -> None:
        nonlocal heard
        heard += size
        count(size)
        if heard > _MOST * (pinned.size + (1 << 20)):
            raise SourceError(
                f"{source}: {name}: {heard} bytes were received of a file that has {pinned.size}: "
                "the server is not a hub; check HF_ENDPOINT and the proxy"
            )

    for again in (False, True):
        try:
            cached = download(source, name, again=again, count=hear)
        except SourceError:
            if not again:
                raise
            break  # Offline, a wrong copy in the cache cannot be replaced.
        with explained(source, name):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            _place(cached, target)
            fault = _difference(target, pinned)
        if not fault:
            count(pinned.size - heard)  # bytes from the cache, less bytes that were downloaded twice
            return
    target.unlink()
    raise SourceError(
        f"{source}: {name}: {fault}; the hub or its cache has another file than the "
        "pinned one. Try again, or pin the present files with `mlcbuild lock`"
    )


def _place(cached: Path, target: Path) -> None:
    """Makes `target`, which must not exist, a hard link of a cached file, or a copy if the cache is on
    another filesystem or links are not allowed. Raises OSError if it cannot be copied either."""
    try:
        target.hardlink_to(cached)
    except OSError:
        shutil.copyfile(cached, target)


def _difference(path: Path, pinned: Pinned) -> str:
    size = path.stat().st_size
    if size != pinned.size:
        return f"it has {size} bytes, the lock says {pinned.size}"
    sha256, digest = hashlib.sha256(), blake3()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            sha256.update(block)
            digest.update(block)
    if sha256.hexdigest() != pinned.sha256:
        return f"its sha256 is {sha256.hexdigest()}, the lock says {pinned.sha256}"
    note_digest(path, digest.hexdigest())  # The store receives both digests and does not read the file again.
    return ""


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
