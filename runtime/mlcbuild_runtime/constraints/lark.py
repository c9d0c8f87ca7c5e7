"""Defines constraints on answers (JSON schema, regular expression or grammar), and translates them into Lark,
llguidance's grammar language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Constraint:
    """The form that an answer must have: a JSON schema, a regular expression or a Lark grammar that accepts
    it."""

    kind: Kind
    source: str
    param: str
    """The name of the request's field that states the constraint."""


def in_lark(constraint: Constraint, space: bool) -> str:
    """Returns a constraint as a Lark grammar for llguidance. With `space`, one space may come before the
    text. A constraint that is a Lark grammar already is returned unchanged, whatever `space` is."""
    if constraint.kind == "lark":
        return constraint.source
    return f'start: " "? {as_rule(constraint)}' if space else f"start: {as_rule(constraint)}"


def as_rule(constraint: Constraint) -> str:
    """Returns a constraint, which must be a JSON schema or a regular expression, as an expression of
    llguidance's Lark grammars."""
    if constraint.kind == "json_schema":
        return f"%json {constraint.source}"
    return f"/{_slashes_escaped(constraint.source)}/"


def _slashes_escaped(regex: str) -> str:
    """Returns a regular expression with slashes and line feeds escaped by a backslash unless they are
    already, since they would end a regular expression in Lark."""
    text, escaped = "", False
    for letter in regex:
        if letter in "/\n" and not escaped:
            text += "\\"
        text += "n" if letter == "\n" else letter
        escaped = letter == "\\" and not escaped
    return text
