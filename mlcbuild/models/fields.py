"""Reads the fields of a JSON object that another program wrote, each once and by name, and collects every
problem.

A method that reads a field returns a valid substitute for a wrong one, so that all problems are reported at
once. Before code combines values, it calls `sound`, which returns False if one of these fields had a problem,
so that one mistake is not reported twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeGuard, TypeVar

from mlcbuild.errors import CheckpointError, did_you_mean, one_line

T = TypeVar("T")

ABSENT: Final = object()
"""The value that `Fields.get` returns for a field that does not exist. A JSON null is returned as None."""

MOST_UNKNOWN = 50
"""Maximum number of unknown fields of a JSON file that get an error message each; one more message stands for
the rest. A file with more is not a config.json."""
LARGEST = 2**31 - 1
"""Largest integer that a field of config.json may hold, unless the code that reads the field sets another
limit: the largest index in a compiled library."""


class Fields:
    """Reads the fields of one JSON object and collects error messages about them. place: the file's name for
    these messages; inside: the path of the object within the file, such as "text_config.", or "" for the
    whole document."""

    def __init__(self, place: str, values: Mapping[str, object], inside: str = "") -> None:
        self.place = place
        self.inside = inside
        self.problems: list[str] = []
        self._values = values
        self._read: set[str] = set()
        self._known: set[str] = set()
        self._wrong: set[str] = set()
        self._shown: dict[str, str] = {}
        """Name that all model families share for a field -> name in config.json, if it differs."""

    def inner(self, name: str, values: Mapping[str, object]) -> Fields:
        """Returns a reader of `values`, the JSON object that stands in the field `name` of this reader's
        object. The new reader collects its own error messages; `adopt` adds them to those of this one."""
        return Fields(self.place, values, f"{self.inside}{name}.")

    def respelled(self, spellings: Mapping[str, str], defaults: Mapping[str, object]) -> Fields:
        """Returns another reader of this JSON object, under the field names that all model families share.
        Error messages of both readers are collected in one list. Two spellings of one field with different
        values add an error message, and the later one in the object is read.

        spellings: field name that only one model family uses -> shared name. defaults: shared name -> value
        of an absent field. A field that is null keeps None, but a rope_parameters of null counts as absent;
        the default of rope_parameters is not used if the object has rope_scaling.
        """
        values: dict[str, object] = {}
        shown: dict[str, str] = {}
        for name, value in self._values.items():
            shared = spellings.get(name, name)
            if shared in values and values[shared] != value:
                self.problem(
                    name, f"is {show(value)}, but {shown[shared]} is {show(values[shared])}; keep one"
                )
            values[shared], shown[shared] = value, name
        if values.get("rope_parameters", ABSENT) is None and "rope_parameters" in defaults:
            del values["rope_parameters"]
        absent = {name: value for name, value in defaults.items() if name not in values}
        if "rope_scaling" in values:
            absent.pop("rope_parameters", None)
        fields = Fields(self.place, {**absent, **values}, self.inside)
        fields.problems, fields._read = self.problems, {spellings.get(name, name) for name in self._read}
        fields._shown = {shared: name for shared, name in shown.items() if shared != name}
        return fields

    def adopt(self, inner: Fields) -> None:
        self.problems.extend(inner.problems)

    def problem(self, name: str, message: str) -> None:
        self._wrong.add(name)
        shown = self._shown.get(name, name)
        self.problems.append(one_line(f"{self.place}: {self.inside}{shown}: {message}"))

    def sound(self, *names: str) -> bool:
        return not self._wrong.intersection(names)

    def get(self, name: str) -> object:
        """Returns the value of a field of the JSON object, such as config.json, unchanged, or the constant
        ABSENT if the object lacks it, and marks the field as read."""
        self._read.add(name)
        self._known.add(name)
        return self._values.get(name, ABSENT)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """Returns the integer in a field of config.json. default: the result if the field is absent or null;
        None: the field is required. If a required field is absent or null, or the value is no integer from
        `low` to `high`, adds an error message and returns the valid substitute `low`."""
        value = self.get(name)
        if value is None or value is ABSENT:
            return low if (default := self._default(name, default)) is None else default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.problem(name, f"must be an integer from {low} to {high}, found {show(value)}")
            return low
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """Returns the number in a field of config.json, as a float. default: the result if the field is
        absent or null; None: the field is required. If a required field is absent or null, or the value is no
        finite number above `low` and at most `high`, adds an error message and returns the valid substitute
        `high`."""
        value = self.get(name)
        if value is None or value is ABSENT:
            return high if (default := self._default(name, default)) is None else default
        if not is_number(value) or not low < value <= high:
            self.problem(name, f"must be a number above {low:g}, at most {high:g}, found {show(value)}")
            return high
        return float(value)

    def maybe_integer(self, name: str, default: int | None) -> int | None:
        """Returns the integer in a field of config.json, at least 1; None if the field is null, which turns a
        feature off; `default` if it is absent. Any other value adds an error message, and 1 is returned."""
        if self.get(name) is ABSENT:
            return default
        return None if self.get(name) is None else self.integer(name)

    def maybe_number(self, name: str, default: float | None) -> float | None:
        if self.get(name) is ABSENT:
            return default
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Returns the boolean in a field of config.json. default: the result if the field is absent. A value
        that is no boolean adds an error message, and `default` is returned. null counts as false, as in
        transformers, but as such a wrong value if `default` is True."""
        value = self.get(name)
        if value is ABSENT or (value is None and not default):
            return default
        if not isinstance(value, bool):
            self.problem(name, f"must be true or false, found {show(value)}")
            return default
        return value

    def choice(self, name: str, values: Mapping[str, T], default: str) -> T:
        """Returns the value in `values` whose key is the text in a field of config.json. default: the key
        whose value is returned instead if the field is absent or null, or, with an error message, if it holds
        anything but a key of `values`."""
        value = self.get(name)
        if value is None or value is ABSENT:
            return values[default]
        if not isinstance(value, str) or value not in values:
            supported = ", ".join(sorted(values))
            self.problem(name, f"{show(value)} is not supported; this family supports: {supported}")
            return values[default]
        return values[value]

    def switches(self, name: str, default: Sequence[bool]) -> list[bool]:
        """Returns a field of config.json that holds a list of 0 and 1, as booleans. default: the result if
        the field is absent or null. Any other value than a list of as many 0s and 1s as `default` has entries
        adds an error message, and `default` is returned."""
        value = self.get(name)
        if value is None or value is ABSENT:
            return [*default]
        if (
            not isinstance(value, list)
            or len(value) != len(default)
            or any(type(item) is not int or item not in (0, 1) for item in value)
        ):
            self.problem(name, f"must be a list of {len(default)} times 0 or 1, found {show(value)}")
            return [*default]
        return [bool(item) for item in value]

    def integers(self, name: str, count: int, default: int, high: int = 2**22) -> list[int]:
        """Returns a list of `count` integers from 1 to `high` from a field of config.json, which holds such a
        list, or one integer for all. default: the integer that is repeated if the field is absent, null or
        wrong; a wrong value adds an error message."""
        value = self.get(name)
        if not isinstance(value, list):
            integer = self.integer(name, default, high=high)
            return [integer if self.sound(name) else default] * count
        if len(value) != count or any(type(item) is not int or not 1 <= item <= high for item in value):
            self.problem(name, f"must list {count} integers from 1 to {high}, found {show(value)}")
            return [default] * count
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Returns the numbers in a field of config.json, which must hold a list of `count` numbers from 1e-6
        to 1e6. If the field is missing or wrong, it adds an error message and returns `count` ones."""
        value = self.get(name)
        stand_in = (1.0,) * count
        if value is ABSENT or value is None:
            self._default(name, None)
            return stand_in
        if not isinstance(value, list) or len(value) != count:
            actual = f"{len(value)} items" if isinstance(value, list) else show(value)
            self.problem(name, f"must be a list of {count} numbers, one per rotated pair; found {actual}")
            return stand_in
        for i, item in enumerate(value):
            if not is_number(item) or not 1e-6 <= item <= 1e6:
                self.problem(f"{name}[{i}]", f"must be a number from 1e-06 to 1e+06, found {show(item)}")
                return stand_in
        return tuple(float(item) for item in value)

    def ignore(self, names: Iterable[str]) -> None:
        """Marks fields of the JSON object as read, so that `close` adds no error messages for them: they do
        not affect results, whatever their values. names: names of the fields, some of which may be absent."""
        self._read.update(names)

    def ignore_private(self) -> None:
        """Marks all fields of the JSON object whose names begin with an underscore as read, so that they
        cause no error messages: programs store notes in them."""
        self.ignore(name for name in self._values if name.startswith("_"))

    def neutral(self, table: Mapping[str, tuple[object, ...]], owner: str) -> None:
        """Adds an error message for each field of config.json that no code has read yet and whose value would
        change results in a way that the model family does not implement. Marks the fields in `table` as read.

        table: field name -> values with which the field changes nothing; fields that it does not list are
        ignored. owner: the model family that the messages name.
        """
        for name, allowed in table.items():
            if name in self._read or name not in self._values:
                continue
            value = self.get(name)
            # True equals 1 in Python, but not in a checkpoint.
            if not any(value == item and type(value) is type(item) for item in allowed):
                alternatives = " or ".join(show(item) for item in allowed)
                self.problem(name, f"{owner} supports only {alternatives}, found {show(value)}")

    def close(self, owner: str) -> None:
        """Adds an error message for each field of a JSON object such as config.json that no code has read,
        since such a field may change results. After 50 messages, one more stands for all remaining fields.
        owner: the model family or type of rotary embedding that the messages name."""
        unknown = sorted(set(self._values) - self._read)
        for name in unknown[:MOST_UNKNOWN]:
            close = did_you_mean(name, self._known)
            hint = f"; {close}" if close.startswith("did you mean") else ""
            self.problem(
                name,
                f"unknown to {owner} and could change the results (value {show(self._values[name])}). "
                f"Remove it from config.json if it has no effect{hint}",
            )
        if len(unknown) > MOST_UNKNOWN:
            self.problem(
                unknown[MOST_UNKNOWN], f"unknown, like {len(unknown) - MOST_UNKNOWN - 1} more fields"
            )

    def check(self) -> None:
        """Raises CheckpointError with all problems that were recorded for this JSON object; does nothing if
        there are none.
        """
        if self.problems:
            raise CheckpointError("\n".join(self.problems))

    def _default(self, name: str, default: T | None) -> T | None:
        if default is None:
            self.problem(name, "missing; it is needed to know the shape of the model")
        return default


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns True if a value is a finite number that fits into a float, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def show(value: object) -> str:
    """Returns a JSON value as JSON text for an error message, cut to 60 characters; for a value that cannot
    be written as JSON, "a" and the name of its Python type."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
