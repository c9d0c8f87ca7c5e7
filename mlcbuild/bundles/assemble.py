"""Assembles a bundle from library, weights, tokenizer and manifest, in the form that the package
mlcbuild_format defines.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcbuild_format import regular, strict_json

from mlcbuild.canon import Json, file_digest, note_digest, noted_digest
from mlcbuild.checkpoints.checkpoint_kinds import POOLING, TOKENIZER_FILES, tokenizer_fault
from mlcbuild.errors import CheckpointError

if TYPE_CHECKING:
    from mlcbuild_format.bundle import File, Manifest, Serving
    from mlcbuild_format.fields import Json as FreeJson

_LARGEST_CONFIG = 16 << 20
"""Maximum size in bytes of a checkpoint's JSON file, such as config.json; a larger one raises
CheckpointError."""
_POOLINGS = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
SERVING = "serving.json"
LIBRARY = "library.json"
"""Name of the file with the library's metadata, which can be read where the library's code cannot run."""


def tokenizer(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: copies the tokenizer's files of a checkpoint to the directory `out`, and writes
    there serving.json, the serving defaults (end-of-sequence tokens, sampling parameters, pooling) that the
    checkpoint states. `inputs["checkpoint"]` is the checkpoint's directory. Raises CheckpointError if the
    checkpoint has no tokenizer, if a JSON file is invalid, and for a pooling that the runtime lacks. The
    content of the tokenizer's files is not checked.
    """
    checkpoint = inputs["checkpoint"]
    names = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
    if (fault := tokenizer_fault(str(checkpoint), names)) is not None:
        raise CheckpointError(fault)
    for name in names:
        # The files are copied, not linked: the checkpoint may be the user's directory, where files are
        # changed in place.
        shutil.copyfile(checkpoint / name, out / name)
    (out / SERVING).write_text(
        json.dumps(serving_document(checkpoint), sort_keys=True) + "\n", encoding="utf-8"
    )


def serving_document(checkpoint: Path) -> dict[str, object]:
    """Returns the serving defaults of a checkpoint as a JSON object: "eos_token_ids", a list ([] if none are
    stated), and, if the checkpoint states them, "bos_token_id", "pooling" ("mean" or "last") and, from
    generation_config.json only, "temperature", "top_p" and "top_k". If that file has do_sample false, the
    temperature is 0.0, and top_p and top_k are left out. Its token ids override those in config.json, as in
    transformers; values are not checked. Missing files count as empty; raises CheckpointError for files that
    cannot be read or hold no JSON object, and for another pooling."""
    documents = [_object(checkpoint / name) for name in ("config.json", "generation_config.json")]
    merged = {key: value for document in documents for key, value in document.items() if value is not None}
    ends = merged.get("eos_token_id", [])
    serving: dict[str, object] = {"eos_token_ids": ends if isinstance(ends, list) else [ends]}
    if "bos_token_id" in merged:
        serving["bos_token_id"] = merged["bos_token_id"]
    sampled = documents[1].get("do_sample", True)
    if sampled is False:
        serving["temperature"] = 0.0
    for key in ("temperature", "top_p", "top_k"):
        if sampled is not False and documents[1].get(key) is not None:
            serving[key] = documents[1][key]
    if pooling := _pooling(checkpoint / POOLING):
        serving["pooling"] = pooling
    return serving


def _pooling(path: Path) -> str | None:
    """Returns the mode by which a sentence-transformers file says that embeddings are pooled: "mean" or
    "last"; None if the file is missing or states no mode. Raises CheckpointError for any other mode, for
    several, and for a file that holds no JSON object. Older files have one boolean for each mode."""
    prefix, document = "pooling_mode_", _object(path)
    named = document.get("pooling_mode")
    ways = [key.removeprefix(prefix) for key, value in document.items() if key.startswith(prefix) and value]
    ways += [named] if isinstance(named, str) else []
    poolings = {_POOLINGS.get(way, way) for way in ways}
    if poolings - {"mean", "last"} or len(poolings) > 1:
        raise CheckpointError(
            f"{path}: embeddings can be the mean over all tokens or the last token's state, not"
            f" {' and '.join(sorted(poolings))}; without the file they are the last token's"
        )
    return poolings.pop() if poolings else None


def _object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        document = strict_json.parse(regular.read(path, _LARGEST_CONFIG).decode("utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); repair the checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; repair the checkpoint") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: must be a JSON object; repair the checkpoint")
    return document


def assemble(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: assembles a bundle without provenance and verification figures in the directory
    `out`.

    params: `name`, `model`, `scheme` and `target` as the manifest bundle.json states them; a null scheme
    means the one in the library's metadata, which another step chose. inputs: the directories `library`,
    `weights` and `tokenizer`, `runtime` (libtvm_runtime) if the target is this system, and `budget` and
    `calibration` with the report files of such steps, if there are any. Raises CheckpointError for serving
    defaults, such as token ids, that the runtime would refuse.
    """
    from mlcbuild_format import bundle as form

    library = cast("dict[str, FreeJson]", json.loads((inputs["library"] / LIBRARY).read_bytes()))
    files = [path.relative_to(inputs["library"]) for path in inputs["library"].rglob("*") if path.is_file()]
    model = next(path.name for path in files if path.name.startswith(("model.", "program.")))
    weights = sorted(path.name for path in inputs["weights"].iterdir())
    serving = _serving_defaults(inputs["tokenizer"] / SERVING)
    for path in files:
        (out / path).parent.mkdir(exist_ok=True)
        _place(inputs["library"] / path, out / path)
    _place_other_files(inputs, weights, out)
    config = cast("dict[str, FreeJson]", library["config"])
    memory = cast("dict[str, int]", library["memory"])
    parts = {key: memory[key] for key in ("weights", "kv_cache", "workspace")}
    manifest = form.Manifest(
        name=cast(str, params["name"]),
        model=form.Model(cast(str, params["model"]), cast(str, config["family"]), config),
        scheme=cast("dict[str, FreeJson]", params["scheme"] or library["scheme"]),
        target=cast("dict[str, FreeJson]", params["target"]),
        limits=form.Limits(**cast("dict[str, int]", library["limits"])),
        library=model,
        weights=tuple(weights),
        signature=cast(str, library["signature"]),
        files=_files(out),
        memory=form.Memory(**parts, total=sum(parts.values())),
        serving=serving,
        tools=cast("dict[str, str]", library["tools"]),
    )
    _check_serving(manifest)
    (out / form.MANIFEST).write_bytes(manifest.to_bytes())


def _place_other_files(inputs: Mapping[str, Path], weights: Sequence[str], out: Path) -> None:
    """Places weights, tokenizer files and the reports of a budget step and of a calibration in a bundle's
    directory `out`, as hard links where possible, and copies the runtime's libraries to its folder lib.
    inputs: name -> directory, of which "runtime", "budget" and "calibration" may be absent; weights: file
    names.
    """
    for name in weights:
        _place(inputs["weights"] / name, out / name)
    for path in sorted(inputs["tokenizer"].iterdir()):
        if path.name != SERVING:
            _place(path, out / path.name)
    for report in (inputs[name] for name in ("budget", "calibration") if name in inputs):
        for path in sorted(report.iterdir()):
            _place(path, out / path.name)
    for path in sorted(inputs["runtime"].glob("libtvm_runtime.*")) if "runtime" in inputs else ():
        (out / "lib").mkdir(exist_ok=True)
        shutil.copyfile(path, out / "lib" / path.name)


def _serving_defaults(path: Path) -> Serving:
    from mlcbuild_format.bundle import Serving

    document = json.loads(path.read_bytes())
    document["eos_token_ids"] = tuple(document["eos_token_ids"])
    return Serving(**document)


def _check_serving(manifest: Manifest) -> None:
    """Raises CheckpointError if a bundle's manifest is not valid by the runtime's rules, so that invalid
    token ids of a checkpoint are reported during the build and not when the bundle is served.
    """
    from mlcbuild_format.bundle import parse
    from mlcbuild_format.fields import FieldError

    try:
        parse(manifest.to_json())
    except FieldError as error:
        raise CheckpointError(
            f"{manifest.model.name}: generation_config.json or config.json: {error}; repair the checkpoint"
        ) from None


def _files(root: Path) -> dict[str, File]:
    from mlcbuild_format.bundle import File

    paths = sorted(path for path in root.rglob("*") if path.is_file())
    files = {}
    for path in paths:
        digest = noted_digest(path)
        if digest is None:
            digest = file_digest(path)
            note_digest(path, digest)  # With the digest, the store need not hash the file.
        files[path.relative_to(root).as_posix()] = File(digest, path.stat().st_size)
    return files


def _place(source: Path, destination: Path) -> None:
    """Hard-links a file of the store to the path `destination`, where no file may be, so that the disk holds
    weights once; copies it where hard links are impossible. Raises OSError if both fail."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def tvm_runtime(stem: str = "libtvm_runtime") -> Path | None:
    """Returns the path of a shared library of TVM's runtime in the installed package tvm, without importing
    the package; None if the package or the library is missing. stem: file name of the library without suffix.
    """
    spec = find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    paths = sorted(
        path
        for folder in (root, root / "lib")
        for path in folder.glob(f"{stem}.*")
        if path.suffix in (".so", ".dylib")
    )
    return paths[0] if paths else None
