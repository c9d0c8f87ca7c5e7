"""Tests of the description of the API: valid JSON Schema, with the fields that bodies are checked with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai import anthropic_request, api, embeddings, openapi, responses_request, service
from mlcbuild_runtime.openai.body import RequestBody

DOCUMENT: Any = openapi.document(keys=False)
SCHEMAS: Any = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from references(part)


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    for reference in set(references(DOCUMENT)):
        root, section, kind, name = reference.split("/")
        assert (root, section, kind) == ("#", "components", "schemas") and name in SCHEMAS, reference
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_document_has_what_bodies_are_checked_with() -> None:
    tables = {
        "ChatCompletions": api.CHAT,
        "Completions": api.COMPLETION,
        "Responses": responses_request.TABLE,
        "Messages": anthropic_request.TABLE,
        "MessagesCount_tokens": anthropic_request.COUNT,
        "Embeddings": embeddings.TABLE,
        "Tokenize": service.TOKENIZE,
        "Detokenize": service.DETOKENIZE,
    }
    for name, table in tables.items():
        assert set(SCHEMAS[name]["properties"]) == set(table)
        assert SCHEMAS[name]["additionalProperties"] is False
    temperature = SCHEMAS["ChatCompletions"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 2}
    assert "refused" in DOCUMENT["info"]["description"]
    assert not {"/", "/metrics", "/openapi.json"} & set(DOCUMENT["paths"])


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, True),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": None}, True),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 3}, False),
        ({"messages": [{"role": "user", "content": "x"}], "n": 1.5}, False),
        ({"messages": [{"role": "user", "content": "x"}], "no_such": 1}, False),
    ],
)
def test_the_schema_and_the_check_agree(body: dict[str, Any], valid: bool) -> None:
    assert jsonschema.Draft202012Validator(SCHEMAS["ChatCompletions"]).is_valid(body) == valid
    try:
        RequestBody(body, api.CHAT)
        accepted = True
    except RequestError:
        accepted = False
    assert accepted == valid


def test_tables_by_path_and_the_need_of_a_key() -> None:
    assert openapi.table("/v1/chat/completions") is openapi.table("/chat/completions") is api.CHAT
    assert openapi.table("/v1/models") is None
    assert "security" not in DOCUMENT
    assert openapi.document(keys=True)["security"] == [{"key": []}]


def test_errors_have_the_form_of_each_api_and_streams_a_type() -> None:
    def error(path: str) -> str:
        content = DOCUMENT["paths"][path]["post"]["responses"]["400"]["content"]
        return str(content["application/json"]["schema"]["$ref"].rpartition("/")[2])

    assert error("/v1/messages") == "MessagesError" and error("/api/chat") == "OllamaError"
    assert error("/v1/completions") == error("/completion") == "Error"
    answers = {
        path: DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"] for path in openapi._BODIES
    }
    streams = {path: set(content) - {"application/json"} for path, content in answers.items()}
    assert streams["/api/chat"] == {"application/x-ndjson"}
    assert streams["/v1/responses"] == {"text/event-stream"} and streams["/v1/embeddings"] == set()
