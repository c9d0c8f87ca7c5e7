"""Reads, writes and constrains arguments of tool calls that stand between tags, one pair of tags for each
argument, as models such as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai.response_format import schema_text


@dataclass(frozen=True)
class Tags:
    """Texts before the key, between key and value, and after the value of each argument of a tool call, for
    models that do not write the arguments as one JSON object. Strings are written unquoted, other values as
    JSON."""

    before: str
    middle: str
    after: str

    @property
    def closing(self) -> str:
        """Returns the tag that stands after the value of each argument in a tool call, such as
        "</parameter>", without the line breaks around it, which some models leave out."""
        return self.after.strip("\n")

    def write(self, arguments: Mapping[str, Json]) -> str:
        """Returns the arguments of a tool call, key -> value, as the text between tags that a model would
        write."""
        written = ""
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            written += f"{self.before}{key}{self.middle}{shown}{self.after}"
        return written


class TaggedReader:
    """Converts the arguments of one tool call, which stand between tags, to the text of one JSON object, as
    parts of the text arrive.

    A value ends at the tag that a tag of the next argument or the end of the call follows. So a text may
    contain the tag after a value, and the line breaks around that tag may be missing."""

    def __init__(self, tags: Tags, tail: str, texts: Collection[str]) -> None:
        """Creates the parser of one call's arguments. tail: text that ends the call; texts: keys of the
        arguments whose values are texts, even if they look like JSON."""
        self._tags, self._tail, self._texts = tags, tail, texts
        middle = re.escape(tags.middle).replace("\\\n", "\n?")
        self._key = re.compile(f"{re.escape(tags.before)}(.+?){middle}", re.DOTALL)
        follow = f"(?={re.escape(tags.before)}|{re.escape(tail)})"
        self._end = re.compile(rf"{re.escape(tags.closing)}\s*{follow}")
        self._keys, self._is_open = 0, False

    def read(self, text: str) -> tuple[str, int]:
        """Reads more text of the arguments of a tool call. Returns (JSON text to append to what earlier reads
        returned, with the arguments that are complete now; number of characters read). The next read must
        begin with the characters that were not read. Reading stops in front of the end of the call, where the
        JSON text gets its closing brace."""
        written, at, self._is_open = "", 0, True
        while (key := self._key.match(text, at)) and self._tags.closing in text:
            end = self._end.search(text, key.end())
            if end is None:
                return written, at
            value = text[key.end() : end.start()]
            if self._tags.after.startswith("\n"):
                value = value.removesuffix("\n")
            written += f"{', ' if self._keys else '{'}{json.dumps(key[1])}: {self._value(key[1], value)}"
            self._keys, at = self._keys + 1, end.end()
        if text.startswith(self._tail, at):
            written, self._is_open = written + ("}" if self._keys else "{}"), False
        return written, at

    @property
    def is_complete(self) -> bool:
        """Returns True if the arguments of the tool call have not begun, or if their end has been read."""
        return not self._is_open

    def _value(self, key: str, text: str) -> str:
        """Returns the value of the argument `key` of a tool call as JSON text. text: the value as the model
        has written it; it becomes a JSON string if the argument's type is text, or if it is not JSON."""
        if key not in self._texts:
            with suppress(ValueError):
                json.loads(text)
                return text
        return json.dumps(text, ensure_ascii=False)


class TagRules:
    """Creates the rules of a Lark grammar that constrain arguments of tool calls, each of which stands
    between tags of its own."""

    def __init__(self, tags: Tags, tail: str, literal: Callable[[str], str]) -> None:
        """Creates those rules of the Lark grammar that do not depend on a tool: for texts and the tag after
        them. tail: text that ends a call; literal: function that returns a text as a Lark expression, with
        its special tokens."""
        self._tags, self._tail, self._literal = tags, tail, literal
        ends = {"next": literal(tags.before), "final": literal(tail)}
        closing, line_break = literal(tags.closing), '"\\n"?' if "\n" in tags.after else ""
        # A text ends at the first closing tag in front of what may follow it. A text contains no special
        # token, and a lazy rule may name none.
        if "<[" in closing or "<[" in "".join(ends.values()):
            lazy = "" if "<[" in closing else "[lazy]"
            self.listed = [f"closed{lazy}: LETTERS {closing}"]
            self.listed += [f"{name}_tag: closed {line_break} {end}" for name, end in ends.items()]
        else:
            text = f"LETTERS {closing} {line_break}"
            self.listed = [f"{name}_tag[lazy]: {text} {end}" for name, end in ends.items()]
        self.listed.append(r"LETTERS: /(.|\n)*/")
        """The rules of the Lark grammar so far, one text each. The Lark expressions for the arguments of tool
        calls refer to them by name."""

    def arguments(
        self,
        schemas: Mapping[str, dict[str, Json] | bool],
        required: Collection[Json],
        texts: Collection[str],
    ) -> str:
        """Returns a Lark expression that matches the arguments of a tool call and the end of the call, and
        adds the rules for it to the attribute `listed`. schemas: key -> JSON schema, in the order in which
        the arguments must stand; required: keys of the arguments that are not optional; texts: keys of those
        whose values are texts."""
        later, ended = "", True
        for key, schema in reversed(list(schemas.items())):
            follow = [f"{self._literal(self._tags.before)} {later}"] * bool(later)
            follow += [self._literal(self._tail)] * ended
            listed = schema.get("enum") if isinstance(schema, dict) else None
            if key not in texts:
                value = (
                    f"%json {schema_text(schema)} {self._literal(self._tags.after)} ({' | '.join(follow)})"
                )
            elif isinstance(listed, list):
                chosen = " | ".join(self._literal(str(text)) for text in listed)
                value = f"({chosen}) {self._literal(self._tags.after)} ({' | '.join(follow)})"
            else:
                value = " | ".join([f"next_tag {later}"] * bool(later) + ["final_tag"] * ended)
            skipped = f" | {later}" if later and key not in required else ""
            later, rule = f"from{len(self.listed)}", f"{self._literal(key + self._tags.middle)} ({value})"
            self.listed.append(f"{later}: {rule}{skipped}")
            ended = ended and key not in required
        options = [f"{self._literal(self._tags.before)} {later}"] * bool(later)
        return " | ".join(options + [self._literal(self._tail)] * ended)
