"""Chat templates of checkpoints: Jinja, in a sandbox, with the helpers that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

Message = Mapping[str, Json]


def find_template(path: Path, config: Mapping[str, Json]) -> str | None:
    """The chat template of the tokenizer in directory `path`, whose tokenizer_config.json is `config`.

    Of several named templates it is the one called `default`.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    other = path / "chat_template.json"
    if found is None and other.is_file():
        document = json.loads(other.read_bytes())
        found = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


class ChatTemplate:
    """A template and the special tokens (`bos_token`, ...) it may write."""

    def __init__(self, source: str | None, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special

    @property
    def source(self) -> str:
        """Empty where there is none."""
        return self._source or ""

    def render(self, messages: Sequence[Message], options: Mapping[str, Json]) -> str:
        """The prompt for an answer to `messages`. Raises RequestError with the template's own words."""
        from jinja2 import TemplateError

        variables = {"tools": None, "documents": None, **self._special, **options}
        variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from None

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or build the bundle from a checkpoint"
                " that has chat_template.jinja or a chat_template in tokenizer_config.json",
                code="no_chat_template",
            )
        return _compile(self._source)


def _compile(source: str) -> Template:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an assistant's words for training: its content is all that counts here."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
