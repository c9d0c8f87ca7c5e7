"""Constraints as they come from requests, and their form in the grammar language Lark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Constraint:
    """What an answer must be: text that a JSON schema, a regular expression or a Lark grammar accepts."""

    kind: Kind
    source: str
    param: str
    """The field of the request that it came from."""


def in_lark(constraint: Constraint, space: bool) -> str:
    """Returns a constraint as a Lark grammar, for llguidance. `space`: the text may begin with one."""
    if constraint.kind == "lark":
        return constraint.source
    return f'start: " "? {as_rule(constraint)}' if space else f"start: {as_rule(constraint)}"


def as_rule(constraint: Constraint) -> str:
    """Returns a schema or a regular expression as a part of a rule in Lark."""
    if constraint.kind == "json_schema":
        return f"%json {constraint.source}"
    return f"/{_slashes_escaped(constraint.source)}/"


def _slashes_escaped(regex: str) -> str:
    """Returns a regular expression without slashes and line feeds, which would end it in Lark."""
    text, escaped = "", False
    for letter in regex:
        if letter in "/\n" and not escaped:
            text += "\\"
        text += "n" if letter == "\n" else letter
        escaped = letter == "\\" and not escaped
    return text
