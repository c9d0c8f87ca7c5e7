"""Compares two pre-images of a build step's cache key (all that is hashed into it) and describes the
differences in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mlcbuild.canon import Json, Tree
from mlcbuild.store.records import Preimage


@dataclass(frozen=True)
class Change:
    """One difference between two pre-images of a build step's cache key, which are all that is hashed into
    the key.
    """

    subject: str
    """The part of what is hashed into a build step's cache key that differs from the previous key, in words:
    "scheme q4: group_size", "mlcbuild/canon.py", "checkpoint: config.json".
    """
    before: str | None
    """The old value of the part of a step's key that differs, as text, if the part is a parameter, a tool or
    the action; the old BLAKE3 digest if it is a file. None if the old key had no such part.
    """
    after: str | None
    """The new value of the part of a step's key that differs, as text, if the part is a parameter, a tool or
    the action; the new BLAKE3 digest if it is a file. None if the new key has no such part.
    """
    by_value: bool
    """True if the attributes `before` and `after` of this change are values, which a message can show; False
    if they are digests of files, which messages omit.
    """

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.subject} is new" + (f" ({self.after})" if self.by_value else "")
        if self.after is None:
            return f"{self.subject} is gone"
        return f"{self.subject} {self.before} -> {self.after}" if self.by_value else f"{self.subject} changed"


def summary(changes: tuple[Change, ...], limit: int = 3) -> str:
    """Returns one line of text that describes the first `limit` of the differences between two cache keys of
    a build step, and states the number of further ones. changes: the differences.
    """
    words = [str(change) for change in changes[:limit]]
    if len(changes) > limit:
        words.append(f"and {len(changes) - limit} more")
    return "; ".join(words)


def compare(before: Preimage, after: Preimage, labels: Mapping[str, str]) -> tuple[Change, ...]:
    """Returns every difference between two pre-images of a build step's cache key (a pre-image is all that is
    hashed into the key).

    Parameters come first, each leaf of a nested value separately, then tools, input files, and source files.
    labels: name of a parameter or input -> words that describe it in the differences.
    """
    changes: list[Change] = []
    if before.action != after.action:
        changes.append(Change("action", before.action, after.action, True))
    for name in sorted(before.params.keys() | after.params.keys()):
        label = labels.get(name, name)
        old, new = (
            _leaves(before.params.get(name), name in before.params),
            _leaves(after.params.get(name), name in after.params),
        )
        changes += [
            Change(f"{label}: {leaf}" if leaf else label, old.get(leaf), new.get(leaf), True)
            for leaf in dict.fromkeys([*old, *new])
            if old.get(leaf) != new.get(leaf)
        ]
    changes += _differences(before.tools, after.tools, "", by_value=True)
    for argument in sorted(before.inputs.keys() | after.inputs.keys()):
        changes += _differences(
            _files(before.inputs.get(argument)),
            _files(after.inputs.get(argument)),
            f"{labels.get(argument, argument)}: ",
            by_value=False,
        )
    return (*changes, *_differences(before.code, after.code, "", by_value=False))


def _differences(
    before: Mapping[str, str], after: Mapping[str, str], prefix: str, *, by_value: bool
) -> list[Change]:
    return [
        Change(prefix + name, before.get(name), after.get(name), by_value)
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _files(tree: Tree | None) -> dict[str, str]:
    return {entry.path: entry.digest for entry in tree.files} if tree else {}


def _leaves(value: Json, present: bool, path: str = "") -> dict[str, str]:
    """Returns dotted path -> text for every leaf of a JSON value, such as "verify.max_kl" -> "0.1"; {} if
    `present` is False. path: prefix of all paths.
    """
    if not present:
        return {}
    if isinstance(value, dict) and value:
        pairs = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value if isinstance(value, str) else json.dumps(value)}
    return {leaf: text for name, item in pairs for leaf, text in _leaves(item, True, name).items()}
