"""Compares CPU targets with machines: why a machine cannot run a target's code, and which labels, such as
"avx2", a cluster worker must have to run it."""

from __future__ import annotations

from mlcbuild_format import processors

from mlcbuild.targets.target import Target


def missing_features(target: Target, host: Target) -> tuple[str, ...]:
    """Returns the LLVM features that code for `target` may use and the machine `host` lacks, among those that
    the runtime checks before it runs code (processors.CHECKABLE), sorted and without sign; () if it lacks
    none."""
    needed, present = _checkable(target), _checkable(host)
    return tuple(sorted(needed - present))


def labels(target: Target) -> tuple[str, ...]:
    """Returns the labels that a cluster worker needs to run code for a target: system and architecture, such
    as "linux x86_64", and each needed CPU feature that can be checked, such as "avx2"."""
    return (f"{target.system} {target.family}", *sorted(_checkable(target)))


def why_not(target: Target, host: Target) -> str | None:
    """Returns the reason why the machine `host` cannot run code for `target`, as part of an error message;
    None if it can. Object files can never be run."""
    if target.output == "object":
        return "an object file must be linked into a program before it can run"
    theirs, ours = (f"{item.system} {item.family}" for item in (target, host))
    if theirs != ours:
        return f"this is for {theirs}, and this machine is {ours}"
    missing = missing_features(target, host)
    if missing:
        return f"this needs {', '.join(missing)}, which this CPU lacks"
    return None


def _checkable(target: Target) -> frozenset[str]:
    return processors.needed(target.architecture, target.cpu, target.features)
