"""Lists the weights files of a checkpoint's directory, and reads the index of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlcbuild_format import regular, strict_json
from mlcbuild_format.safetensors import Tensor

from mlcbuild.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 64 << 20
"""Maximum size in bytes of the index of a sharded checkpoint (model.safetensors.index.json); a larger one is
refused. It has a line for each tensor; large checkpoints have about 100,000."""
OTHER_KINDS = ("adapter", "consolidated")
"""Prefixes of names of safetensors files that are ignored where a directory has neither model.safetensors nor
its index: they hold other contents, or the same weights under other names.
"""


def weights_files(root: Path) -> tuple[list[str], dict[str, str] | None]:
    """Returns the names of the safetensors files with a checkpoint's weights, and the index (tensor name ->
    file name) or None if the names are not from an index. The files are model.safetensors or, without it,
    those that model.safetensors.index.json lists or, without an index, all others but adapter* and
    consolidated*. Raises CheckpointError if there are none, or the index is invalid."""
    if (root / SINGLE).is_file():
        return [SINGLE], None
    if (root / INDEX).is_file():
        index = read_index(root / INDEX, ".safetensors")
        return sorted(set(index.values())), index
    others = sorted(path.name for path in root.glob("*.safetensors") if not path.name.startswith(OTHER_KINDS))
    if not others:
        raise CheckpointError(
            f"{root}: it has no {SINGLE}, no {INDEX} and no other weights; fetch the checkpoint"
        )
    return others, None


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """Returns tensor name -> file name from the JSON index of a sharded checkpoint. suffix: the suffix that
    all file names must have. Raises CheckpointError if the file is missing, malformed or larger than
    LARGEST_INDEX, or names a file with another suffix or in another directory.
    """
    try:
        document = strict_json.decoder()(regular.read(path, LARGEST_INDEX).decode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); fetch the file again") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: it must hold a 'weight_map' of tensors to files; fetch the file again"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise CheckpointError(
                f"{path}: it puts tensor '{name}' in {file!r}; it must name a {suffix} file beside itself"
            )
    return weight_map


def index_faults(
    path: Path,
    index: Mapping[str, str] | None,
    tensors: Mapping[str, Tensor],
    reason: Callable[[str], str | None],
) -> list[str]:
    """Returns an error message for each tensor that is not in the file that the index names, and for each
    that the index lacks; [] if there is none, or no index. path: the index file; tensors: name -> tensor, for
    all that the files hold. reason: function from a tensor's name to the reason why the index may be wrong
    about it, for which the tensor gets no message, or to None. For example, the converter of safetensors
    lists a tied output matrix that it does not store."""
    if index is None:
        return []
    problems = [
        f"{path}: it puts tensor '{name}' in {file}, which does not hold it; fetch the checkpoint again"
        for name, file in index.items()
        if (name not in tensors or tensors[name].path.name != file) and reason(name) is None
    ]
    problems += [
        f"{path}: it does not list tensor '{name}', which {tensor.path.name} holds; fetch it again"
        for name, tensor in tensors.items()
        if name not in index and reason(name) is None
    ]
    return problems
