"""Renders the OpenAPI document as the page /docs: HTML that has no scripts and loads nothing from other
sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import cast

from mlcbuild_format.fields import Json

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The Content-Security-Policy of the page /docs."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
:root { color-scheme: light dark; }
summary { cursor: pointer; padding: .25rem 0; }
code { font-family: ui-monospace, monospace; }
.wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; }
"""

_Mapping = Mapping[str, Json]


def page(document: _Mapping) -> str:
    """Returns the HTML of the page /docs, which lists the server's endpoints and the fields of their
    requests. document: the server's OpenAPI document."""
    info = cast("_Mapping", document["info"])
    title = escape(str(info["title"]))
    intro = f"<p>{escape(str(info['description']))}</p>"
    if document.get("security"):
        intro += "<p>Requests need an API key: the header <code>Authorization: Bearer KEY</code>.</p>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{title}</h1>\n{intro}\n<p>For programs: <a href="openapi.json">openapi.json</a></p>\n'
        + "".join(_operations(document))
        + "</body></html>\n"
    )


def _operations(document: _Mapping) -> Iterator[str]:
    """Yields the text of an HTML element for each operation (HTTP method and path) of the server's OpenAPI
    document, in its order."""
    for path, methods in cast("Mapping[str, _Mapping]", document["paths"]).items():
        for method, operation in cast("Mapping[str, _Mapping]", methods).items():
            head = f"<code>{method.upper()} {escape(path)}</code> {escape(str(operation['summary']))}"
            yield f"<details><summary>{head}</summary>{_fields(document, operation)}</details>\n"


def _fields(document: _Mapping, operation: _Mapping) -> str:
    """Returns an HTML table of the fields of an operation's request body, or a sentence if the operation has
    no body. document: the OpenAPI document of the server; operation: its object for one HTTP method of a
    path."""
    body = cast("Mapping[str, Mapping[str, _Mapping]]", operation.get("requestBody") or {})
    if not body:
        return "<p>The request has no body.</p>"
    name = str(cast("_Mapping", body["content"]["application/json"]["schema"])["$ref"]).rpartition("/")[2]
    components = cast("Mapping[str, Mapping[str, _Mapping]]", document["components"])
    schema = components["schemas"][name]
    required = cast("list[str]", schema["required"])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' * (field in required)}</td>"
        f"<td>{escape(_kind(about))}</td><td>{escape(str(about.get('description', '')))}</td></tr>\n"
        for field, about in cast("Mapping[str, _Mapping]", schema["properties"]).items()
    )
    return f'<div class="wide"><table><tr><th>field<th>type<th></tr>\n{rows}</table></div>'


def _kind(schema: _Mapping) -> str:
    """Returns a text that names the types which a JSON schema allows, or the values if it lists them, except
    null: "number", or "string or array" for several; "" if it allows anything."""
    if "anyOf" in schema:
        kinds = [_kind(part) for part in cast("list[_Mapping]", schema["anyOf"])]
    elif "enum" in schema:
        kinds = [str(value) for value in cast("list[Json]", schema["enum"])]
    elif "const" in schema:
        kinds = [str(schema["const"])]
    else:
        stated = schema.get("type", "")
        kinds = [str(kind) for kind in (stated if isinstance(stated, list) else [stated])]
    return " or ".join(dict.fromkeys(kind for kind in kinds if kind not in {"null", "None", ""}))
