"""Reads and validates the headers of a bundle's weights files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mlcbuild_format import safetensors
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import FieldError, Fields, describe, plain, printable
from mlcbuild_format.files import read_error
from mlcbuild_format.safetensors import NUMPY, HeaderError, Tensor
from mlcbuild_format.versions import WEIGHTS as FORMAT


@dataclass(frozen=True)
class WeightsHeader:
    signature: str
    scheme: str
    tensors: tuple[Tensor, ...]
    """The tensors of a weights file in the order of their bytes; their `dtype` is NumPy's name, for example
    float16."""
    source: str = ""
    """How a quantized checkpoint was read, such as the version of its zero points, and what no format keeps;
    "" if there is nothing to say."""


def read_header(path: Path) -> WeightsHeader:
    """Returns the header of a weights file after checking that its tensors fill the file. Raises BundleError
    for a file that is missing, unreadable, damaged, or of another kind or version."""
    try:
        return _header(safetensors.read_header(path))
    except OSError as error:
        raise read_error(path, error) from None
    except HeaderError as error:
        raise BundleError(f"{path}: not a whole weights file: {error}; copy the bundle again") from None
    except FieldError as error:
        raise BundleError(f"{path}: in its header, {error}; build the bundle again") from None


def _header(file: safetensors.Header) -> WeightsHeader:
    metadata = Fields(plain(file.metadata), f"'{safetensors.METADATA}'")
    version = metadata.value.get("format")
    if version != FORMAT:
        raise FieldError(f"'__metadata__.format' must be '{FORMAT}', found {describe(version)}")
    scheme = metadata.text("scheme") if "scheme" in metadata.value else ""
    source = metadata.text("source") if "source" in metadata.value else ""
    tensors = tuple(_tensor(tensor) for tensor in file.tensors)
    return WeightsHeader(metadata.text("signature", "[0-9a-f]{64}"), scheme, tensors, source)


def _tensor(tensor: Tensor) -> Tensor:
    if tensor.dtype not in NUMPY:
        shown = f"'{printable(tensor.name)}.dtype'"
        raise FieldError(f"{shown} must be one of {', '.join(NUMPY)}, found {describe(tensor.dtype)}")
    return replace(tensor, dtype=NUMPY[tensor.dtype])
