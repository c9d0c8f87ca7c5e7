"""Reads targets from YAML: the presets of mlcbuild, and those that a recipe describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import cast, get_args

from mlcbuild_format import processors

from mlcbuild.documents import schema
from mlcbuild.documents.document import Data, Document, Where, read
from mlcbuild.errors import InputError, Problems, SetupError, UsageError, did_you_mean
from mlcbuild.targets import host as this_machine
from mlcbuild.targets.target import CPU, Output, Target

HOST = "host"
"""The name of the target that stands for the machine on which mlcbuild runs."""


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Target]:
    """Returns name (of the YAML file, without suffix) -> target for all presets of mlcbuild, sorted by name.
    Raises InputError for an invalid preset, SetupError if there are none.
    """
    files = sorted(directory().glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: read_preset(path) for path in files}


def directory() -> Path:
    """Returns the directory with the files of the target presets. Raises SetupError if there is none."""
    package = Path(__file__).parent.parent
    # A wheel has the presets inside the package, a checkout at its top.
    for place in (package / "presets", package.parent / "targets"):
        if any(place.glob("*.yaml")):
            return place
    raise SetupError("the target presets of mlcbuild are missing: install it again")


def resolve(name: str) -> Target:
    """Returns the target preset with this name, or this machine as a target for the name `host`. Raises
    UsageError for other names, SetupError if mlcbuild cannot describe this machine or lacks its presets,
    InputError for an invalid preset.
    """
    if name == HOST:
        return Target(HOST, *this_machine.host())
    if name not in presets():
        raise UsageError(unknown(name))
    return presets()[name]


def unknown(name: str) -> str:
    """Returns the error message for a target name that is neither a preset nor `host`, with a similar name or
    the list of the valid ones. Raises InputError for an invalid preset, SetupError if there is none."""
    return f"target '{name}' is unknown; {did_you_mean(name, [*presets(), HOST])}"


def read_preset(path: Path) -> Target:
    """Reads a target preset from its YAML file, which must state all properties instead of extending another
    preset; the file's name without suffix becomes the target's. Raises InputError with all problems of the
    file, also if it cannot be read."""
    document = read(path)
    document = schema.typed(document, "target")
    problems = Problems([*document.problems, *schema.problems(document, schema.findings(document, "target"))])
    if isinstance(document.data, dict) and "extends" in document.data:
        place = document.key_place(("extends",))
        problems.append(place.problem("a preset must state all of its properties: it cannot extend another"))
    else:
        target = parse(document, (), path.stem, problems)
        if target is not None and not problems:
            return target
    raise InputError(problems)


def parse(document: Document, where: Where, name: str, problems: Problems) -> Target | None:
    """Returns the target at the path `where` of a document; properties that it does not state are those of
    the preset that it extends. Returns None if a problem was added, or if the document has no mapping at
    `where` or one without triple or processor. name: the target's name.

    The schema reports malformed values; this function adds all further problems to `problems`. Raises
    InputError if the preset that the target extends is invalid."""
    data = document.get(where)
    if not isinstance(data, dict):
        return None
    base = _base(document, where, data, problems)
    triple, cpu = (
        data.get("triple", base.triple if base else None),
        data.get("cpu", base.cpu if base else None),
    )
    if ("extends" in data and base is None) or not (isinstance(triple, str) and isinstance(cpu, str)):
        return None
    listed = data.get("features", [])
    features = [item for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
    device = str(data.get("device", base.device if base else CPU))
    output = base.output if base else "shared" if device == CPU else "program"
    target = Target(
        name,
        triple,
        cpu,
        _merged(base.features if base else (), features),
        device,
        cast(Output, data.get("output", output)),
    )
    before = len(problems)
    _check(document, where, target, problems)
    return target if len(problems) == before else None


def _base(document: Document, where: Where, data: dict[str, Data], problems: Problems) -> Target | None:
    name = data.get("extends")
    if not isinstance(name, str):
        return None
    try:
        return resolve(name)
    except (UsageError, SetupError) as error:
        problems.append(document.place((*where, "extends")).problem(str(error)))
        return None


def _merged(base: tuple[str, ...], added: list[str]) -> tuple[str, ...]:
    """Merges two lists of LLVM features, such as "+avx2" and "-avx512f", and returns them sorted, those with
    "+" first. A feature of `added` replaces the same feature of `base`, whatever its sign."""
    by_name = {feature[1:]: feature for feature in (*base, *added)}
    return tuple(sorted(by_name.values()))


@cache
def _devices() -> tuple[str, ...]:
    """Returns the names of the devices for which targets can be defined."""
    device = cast("dict[str, dict[str, list[str]]]", schema.schema("target")["properties"])["device"]
    return tuple(device["enum"])


def _check(document: Document, where: Where, target: Target, problems: Problems) -> None:
    """Adds an error message to `problems` for each value of a target that LLVM would ignore and then compile
    for another machine, such as a processor or feature without this name in LLVM or a feature both added and
    removed, and for an output that does not fit the target's device or system. where: path of the target in
    the document."""

    def report(message: str, *part: str | int) -> None:
        problems.append(document.place((*where, *part)).problem(message))

    if target.triple.count("-") < 2:
        return  # not a triple, as the schema reports
    # The schema reports a device or an output that does not exist.
    exist = target.device in _devices() and target.output in get_args(Output)
    if exist and (target.device == CPU) == (target.output == "program"):
        outputs = "'shared' or 'object'" if target.device == CPU else "'program'"
        report(f"output of the device {target.device} must be {outputs}, found '{target.output}'", "output")
        return
    if target.output == "program":
        return  # LLVM has no code generator for it
    table = processors.names().get(target.family)
    if table is None:
        suggestion = did_you_mean(target.architecture, ["x86_64", "aarch64", "arm64"])
        report(f"architecture '{target.architecture}' is unknown; {suggestion}", "triple")
        return
    if target.output == "shared" and target.system not in ("linux", "macos"):
        report("a shared library can be made for linux and macosx only; set output: object", "triple")
    if target.cpu == "native":
        report("'native' is another processor on every machine: use the target 'host'", "cpu")
    elif target.cpu not in table.cpus:
        others = {name: family for family, names in processors.names().items() for name in names.cpus}
        hint = f"it is one of {others[target.cpu]}" if target.cpu in others else _near(target.cpu, table.cpus)
        report(f"LLVM knows no {target.family} processor '{target.cpu}'; {hint}", "cpu")
    listed = cast(list[Data], document.get((*where, "features")) or [])
    earlier: set[str] = set()
    for i, feature in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(feature, str) or feature[:1] not in ("+", "-"):
            continue
        if feature[1:] not in table.features:
            hint = _near(feature[1:], table.features)
            report(f"LLVM knows no {target.family} feature '{feature[1:]}'; {hint}", "features", i)
        elif feature[1:] in earlier and feature not in listed[:i]:
            report(f"'{feature[1:]}' is both added and removed", "features", i)
        earlier.add(feature[1:])


def _near(name: str, valid_names: Collection[str]) -> str:
    """Returns the end of an error message about the unknown name of a processor or feature: "did you mean
    ...?" with a similar one of `valid_names`, or else the name of the file that lists the valid ones."""
    if get_close_matches(name, valid_names, n=1):
        return did_you_mean(name, valid_names)
    return "mlcbuild_format/cpus.json lists those it knows"
