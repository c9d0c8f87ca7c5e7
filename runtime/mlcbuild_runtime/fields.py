"""Typed access to JSON objects that someone else wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeGuard

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


class FieldError(ValueError):
    """A field is missing or of the wrong kind; the message names the field and what was found."""


class Fields:
    """One JSON object. Every accessor raises FieldError with the dotted name of the field."""

    def __init__(self, value: Json, name: str = "") -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{name or 'the document'} must be an object, found {describe(value)}")
        self.value, self.name = value, name

    def only(self, *known: str) -> Fields:
        """Refuses keys that are not in `known`."""
        unknown = sorted(set(self.value) - set(known))
        if unknown:
            raise FieldError(f"unknown field {self._path(unknown[0])}")
        return self

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a non-empty string", value)
        return value

    def integer(self, key: str, minimum: int) -> int:
        value = self._get(key)
        if not is_integer(value) or value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings", value)
        found = [item for item in value if isinstance(item, str) and item]
        if len(found) != len(value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(found)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of integers", value)
        found = [item for item in value if is_integer(item) and item >= 0]
        if len(found) != len(value):
            raise self._wrong(key, "a list of integers of at least 0", value)
        return tuple(found)

    def number(self, key: str, minimum: float, maximum: float) -> float | None:
        """None where the field is absent or null."""
        value = self.value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self._wrong(key, f"a number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def object(self, key: str) -> dict[str, Json]:
        return Fields(self._get(key), self._path(key)).value

    def fields(self, key: str) -> Fields:
        return Fields(self._get(key), self._path(key))

    def _get(self, key: str) -> Json:
        if key not in self.value:
            raise FieldError(f"{self._path(key)} is missing")
        return self.value[key]

    def _path(self, key: str) -> str:
        shown = key if key.isprintable() else repr(key)[1:-1]  # what a document says is one line here
        return f"'{self.name.strip(chr(39))}.{shown}'" if self.name else f"'{shown}'"

    def _wrong(self, key: str, wanted: str, found: Json) -> FieldError:
        return FieldError(f"{self._path(key)} must be {wanted}, found {describe(found)}")


def is_integer(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def describe(value: object) -> str:
    """A short rendering of any value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(value: object) -> Json:
    """A deep copy with plain dicts and lists for Mappings and tuples."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")
