"""A directory with the files of a small bundle, for tests of publishing."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3
from mlcbuild_format.bundle import File, Limits, Manifest, Memory, Model
from mlcbuild_format.fields import Json

TARGET: dict[str, Json] = {
    "triple": "x86_64-unknown-linux-gnu",
    "cpu": "x86-64-v3",
    "features": [],
    "device": "cpu",
    "output": "shared",
}
CONTENTS = {"model.so": b"code", "weights.bin": b"numbers" * 9, "lib/a.json": b"{}", "lib/b.json": b"{}"}


def write_bundle(directory: Path, **changes: bytes) -> tuple[Manifest, dict[str, int]]:
    """Writes the files of a bundle to `directory`, and returns (its manifest; file name -> size in bytes).
    changes: file name without its extension -> bytes that replace the default content."""
    contents = {name: changes.get(Path(name).stem, data) for name, data in CONTENTS.items()}
    manifest = Manifest(
        name="tiny-q0f32-host",
        model=Model("tiny", "toy", {"family": "toy", "vocab_size": 4}),
        scheme={"name": "q0f32"},
        target=TARGET,
        limits=Limits(64, 16, 2),
        library="model.so",
        weights=("weights.bin",),
        signature="0" * 64,
        files={name: File(blake3(data).hexdigest(), len(data)) for name, data in contents.items()},
        memory=Memory(1, 1, 0, 2),
    )
    files = {**contents, "bundle.json": manifest.to_bytes()}
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return manifest, {name: len(data) for name, data in files.items()}


def contents_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
