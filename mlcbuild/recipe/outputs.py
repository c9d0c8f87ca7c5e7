"""Computes the output directories of bundles, and checks that none overwrites another one or any other
file."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlcbuild.documents.document import Where
from mlcbuild.errors import did_you_mean
from mlcbuild.recipe.matrix import AXES, Names
from mlcbuild.recipe.reading import Reading, kind, resolved

DEFAULT = "dist/{model}-{quantization}-{target}"

_WHERE: Where = ("bundle", "output")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_SHOWN = 3
"""Maximum number of output directories that are reported one by one for one kind of fault, such as equal
ones, too long ones, or those that collide with other files. A template without placeholders causes thousands.
"""


def read_template(reading: Reading) -> str | None:
    """Returns the recipe's template for output directories of bundles, such as "dist/{model}-{target}",
    without redundant ".", ".." and "/"; without one, "dist/{model}-{quantization}-{target}". Returns None for
    an invalid one, with a problem added to the recipe's list."""
    text = reading.text(*_WHERE) if "output" in reading.mapping("bundle") else DEFAULT
    if text is None:
        return None
    before = len(reading.problems)
    check_placeholders(reading, _WHERE, text)
    # Names contain no '/' and do not start with '.', so a placeholder cannot leave the directory.
    reading.path(_WHERE, _PLACEHOLDER.sub("x", text))
    return posixpath.normpath(text) if len(reading.problems) == before else None


def check_placeholders(reading: Reading, where: Where, text: str) -> bool:
    """Returns True if every placeholder in a template is {model}, {quantization} or {target}, and every brace
    has its partner; otherwise adds problems to the recipe's list. where: path of the template in the recipe;
    text: the template."""
    before = len(reading.problems)
    for name in _PLACEHOLDER.findall(text):
        if name not in AXES:
            reading.report(where, f"the placeholder '{{{name}}}' is unknown; {did_you_mean(name, AXES)}")
    if set(_PLACEHOLDER.sub("", text)) & set("{}"):
        reading.report(where, f"'{text}' has a '{{' or '}}' without its partner")
    return len(reading.problems) == before


def render(template: str, names: Names) -> str:
    """Returns a template with its placeholders replaced by names, such as the output directory of a bundle or
    the address to publish it. template: text such as "dist/{model}-{quantization}-{target}", with no other
    placeholders than these three; names: (model, quantization, target)."""
    return _PLACEHOLDER.sub(lambda match: names[AXES.index(match[1])], template)


def check(reading: Reading, template: str, cells: Iterable[Names], protected: Mapping[str, Path]) -> None:
    """Adds problems to the recipe's list for bundles with equal output directories, for output directories
    that contain or lie in a protected path, for those that a filesystem may be unable to hold, and for those
    in whose place, or above which, there is something else than a directory.

    Of many bundles with one fault, three are reported one by one, and the number of the others. Outputs of
    two bundles are compared without case, because many filesystems do so. No output contains another: names
    contain no '/', so all have the same depth. template: path of output directories, such as
    "dist/{model}-{quantization}-{target}"; cells: (model, quantization, target) of each bundle; protected:
    name of a path in messages -> path that bundles must not replace.
    """
    owners: dict[str, tuple[str, Names]] = {}
    clashes: list[str] = []
    long: list[str] = []
    for names in cells:
        output = render(template, names)
        if fault := reading.unwritable(output):
            long.append(f"the output '{output}' of {_cell(names)} {fault}")
            continue
        other, first_names = owners.setdefault(output.lower(), (output, names))
        if first_names != names:
            case = "" if other == output else " when upper and lower case count the same"
            clashes.append(f"{_cell(first_names)} and {_cell(names)} have the same output '{output}'{case}")
    _report(reading, long, "; shorten it")
    _report(reading, clashes, "; use {model}, {quantization} and {target} in it")
    _check_protected(reading, owners, protected)


def _check_protected(
    reading: Reading, owners: Mapping[str, tuple[str, Names]], protected: Mapping[str, Path]
) -> None:
    places = {path: resolved(path) or path for path in set(protected.values())}
    real = {owner: places[path] for owner, path in protected.items()}
    holding: dict[str, str] = {}
    inside = {path: owner for owner, path in real.items()}
    first = {path: owner for owner, path in reversed(real.items())}
    for path in dict.fromkeys(real.values()):
        for parent in (path, *path.parents):
            holding.setdefault(str(parent), first[path])
    # Many outputs share one parent directory, whose links are then resolved once.
    bases: dict[str, tuple[str, list[str]]] = {}
    messages: list[str] = []
    for output, _ in owners.values():
        head, tail = posixpath.split(output)
        if head not in bases:
            base = resolved(reading.directory / head) or reading.directory / head
            bases[head] = str(base), [inside[p] for p in (base, *base.parents) if p in inside]
            if blocked := _file_above(base):
                messages.append(f"the output '{output}' lies below {blocked[0]}, which is {blocked[1]}")
        place, around = bases[head]
        held_by = holding.get(place if tail == "." else f"{place.rstrip('/')}/{tail}")
        if held_by is not None:
            messages.append(f"the output '{output}' would replace {held_by}")
        else:
            messages.extend(f"the output '{output}' lies in {owner}; choose one outside" for owner in around)
            if not around and (other := _no_directory(Path(place, tail))):
                messages.append(f"the output '{output}' is {other}; move it away, or choose another output")
    _report(reading, messages, "")


def _file_above(directory: Path) -> tuple[Path, str] | None:
    """Looks for a file in the place of a directory above an output: examines `directory`, which need not
    exist, then its parents, up to the first one that exists. Returns (path, kind of the file in words, such
    as "a regular file") if that one is not a directory; None otherwise."""
    for path in (directory, *directory.parents):
        file_kind = kind(path)
        if file_kind != "missing":
            return None if file_kind == "a directory" else (path, file_kind)
    return None


def _no_directory(path: Path) -> str:
    """Returns the kind of the file at the path of a bundle's directory, such as "a regular file", or "a
    symbolic link" whatever the link leads to; "" if it is a directory or if nothing is there."""
    if path.is_symlink():
        return "a symbolic link"
    file_kind = kind(path)
    return "" if file_kind in ("missing", "a directory") else file_kind


def _report(reading: Reading, messages: list[str], advice: str) -> None:
    for message in messages[:_SHOWN]:
        reading.report(_WHERE, message + advice)
    if len(messages) > _SHOWN:
        reading.report(_WHERE, f"and {len(messages) - _SHOWN} more like these")


def _cell(names: Names) -> str:
    return "/".join(names)
