"""Creates /openapi.json, the description of the API as an OpenAPI 3.1 document, from the tables with which
request bodies are checked."""

from __future__ import annotations

from collections.abc import Mapping

from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai import (
    anthropic_request,
    api,
    embeddings,
    llama_completion,
    ollama_request,
    responses_request,
    service,
)
from mlcbuild_runtime.openai.body import Field, Table

RULE = (
    "Fields that are not listed are refused, and so are listed fields with values "
    "that are not supported; null means absent."
)
_STREAM = "With `stream`: server-sent events, or lines of JSON."
_BODIES: Mapping[str, tuple[str, Table, tuple[str, ...], str]] = {
    "/v1/chat/completions": ("An answer to a chat.", api.CHAT, ("messages",), "chat.completion"),
    "/v1/completions": ("More of a text.", api.COMPLETION, ("prompt",), "text_completion"),
    "/v1/responses": (
        "An answer to a chat, which may call functions.",
        responses_request.TABLE,
        ("input",),
        "response",
    ),
    "/v1/embeddings": ("Vectors of texts.", embeddings.TABLE, ("input",), "list"),
    "/v1/messages": (
        "An answer, in Anthropic's form.",
        anthropic_request.TABLE,
        ("messages", "max_tokens"),
        "",
    ),
    "/v1/messages/count_tokens": ("Tokens of a chat.", anthropic_request.COUNT, ("messages",), ""),
    "/api/chat": ("An answer, in Ollama's form.", ollama_request.CHAT, ("messages",), ""),
    "/api/generate": ("An answer to a chat, or the continuation of a text.", ollama_request.GENERATE, (), ""),
    "/api/embed": ("Vectors of texts.", ollama_request.EMBED, ("input",), ""),
    "/api/embeddings": ("The embedding vectors of texts.", ollama_request.EMBEDDING, ("prompt",), ""),
    "/api/show": ("One model, in Ollama's form.", ollama_request.SHOW, (), ""),
    "/completion": (
        "The continuation of a text, in llama.cpp's form.",
        llama_completion.TABLE,
        ("prompt",),
        "",
    ),
    "/apply-template": (
        "The prompt that the chat template renders for a chat.",
        api.CHAT,
        ("messages",),
        "",
    ),
    "/tokenize": ("The tokens of a text or of a chat.", service.TOKENIZE, (), ""),
    "/detokenize": ("The text that a list of tokens stands for.", service.DETOKENIZE, ("tokens",), ""),
}
"""Path of a POST endpoint -> (summary, fields of its request body, names of the required fields, value of
`object` in its response, "" if it has none)."""


def table(path: str) -> Table | None:
    """Returns name of a field -> its schema and description, for the request bodies of the endpoint `path`,
    from which a leading /v1 may be missing; None for a path whose bodies are not checked with such a table.
    """
    entry = _BODIES.get(path) or _BODIES.get(f"/v1{path}")
    return None if entry is None else entry[1]


_USAGE: Json = {"type": "object", "additionalProperties": {"type": ["integer", "object"]}}
_COUNT: Json = {"type": "integer"}
_LIST: Json = {"type": "array", "items": {"type": "object"}}
_ANSWERS: Mapping[str, Mapping[str, Json]] = {
    "/v1/chat/completions": {"choices": _LIST, "usage": _USAGE},
    "/v1/completions": {"choices": _LIST, "usage": _USAGE},
    "/v1/responses": {"output": _LIST, "status": {"enum": ["completed", "incomplete", "cancelled"]}},
    "/v1/embeddings": {"data": _LIST, "usage": _USAGE},
    "/v1/messages": {"content": _LIST, "usage": _USAGE},
    "/v1/messages/count_tokens": {"input_tokens": {"type": "integer"}},
    "/api/chat": {"message": {"type": "object"}, "done": {"type": "boolean"}},
    "/api/generate": {"response": {"type": "string"}, "done": {"type": "boolean"}},
    "/api/embed": {"embeddings": {"type": "array"}},
    "/api/embeddings": {"embedding": {"type": "array"}},
    "/api/show": {"details": {"type": "object"}, "capabilities": {"type": "array"}},
    "/completion": {"content": {"type": "string"}, "stop": {"type": "boolean"}},
    "/apply-template": {"prompt": {"type": "string"}},
    "/tokenize": {
        "tokens": {"type": "array", "items": {"type": ["integer", "object"]}},
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
    },
    "/detokenize": {"prompt": {"type": "string"}, "content": {"type": "string"}},
}
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_ID: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_CARD: dict[str, Json] = {
    "id": {"type": "string"},
    "object": {"const": "model"},
    "loaded": {"type": "boolean"},
    "aliases": {"type": "array", "items": {"type": "string"}},
}
ERROR: dict[str, Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_MESSAGES_ERROR: dict[str, Json] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
"""JSON Schema of an error response in the form of Anthropic's API."""
_OLLAMA_ERROR: dict[str, Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
"""JSON Schema of an error response in the form of Ollama's API."""


def _error_schema(path: str) -> str:
    """Returns the name of the OpenAPI schema that describes the errors of an endpoint's path."""
    return {"/v1/m": "MessagesError", "/api/": "OllamaError"}.get(path[:5], "Error")


def document(keys: bool) -> dict[str, Json]:
    """Returns the OpenAPI 3.1 document that describes the server. keys: True if requests must have an API
    key."""
    paths: dict[str, Json] = {path: {"post": _post(path)} for path in _BODIES}
    paths |= _others()
    schema: dict[str, Json] = {
        "openapi": "3.1.0",
        "info": {"title": "mlcbuild-serve", "version": "1", "description": RULE},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": ERROR,
                "MessagesError": _MESSAGES_ERROR,
                "OllamaError": _OLLAMA_ERROR,
                **{_title(path): _schema(path) for path in _BODIES},
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return schema | {"security": [{"key": []}]} if keys else schema


def _title(path: str) -> str:
    return "".join(word.capitalize() for word in path.strip("/").split("/") if word != "v1")


def _schema(path: str) -> Json:
    _, table, required, _ = _BODIES[path]
    return {
        "type": "object",
        "required": list(required),
        "properties": {name: _property(field, name in required) for name, field in table.items()},
        "additionalProperties": False,
    }


def _property(field: Field, required: bool) -> Json:
    shown: dict[str, Json] = dict(field.schema)
    if not required and shown:
        shown = {"anyOf": [shown, {"type": "null"}]}
    return {**shown, "description": field.about} if field.about else shown


def _post(path: str) -> Json:
    about, table, _, kind = _BODIES[path]
    properties: dict[str, Json] = dict(_ANSWERS[path])
    if kind:
        properties["object"] = {"const": kind}
    content: dict[str, Json] = {"application/json": {"schema": _object(properties)}}
    if "stream" in table:
        stream = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        content[stream] = {"schema": {"type": "string"}}
    return {
        "summary": about + (f" {_STREAM}" if "stream" in table else ""),
        "operationId": _title(path),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_title(path)}"}}},
        },
        "responses": {
            "200": {"description": about, "content": content},
            **_errors("400", "404", "413", schema=_error_schema(path)),
        },
    }


def _others() -> dict[str, Json]:
    models: Json = _object({"object": {"const": "list"}, "data": {"type": "array", "items": _object(_CARD)}})
    response: Json = _object({"object": {"const": "response"}, "output": _LIST})
    deleted: Json = _object({"object": {"const": "response"}, "deleted": {"const": True}})
    items: Json = _object({"object": {"const": "list"}, "data": _LIST})
    health: Json = _object({"status": {"enum": ["ok", "stopped"]}})
    live: Json = _get("Whether engines run.", _object({"live": {"type": "boolean"}}))
    return {
        "/v1/models": {"get": _get("The models.", models)},
        "/v1/models/{name}": {"get": _get("One model.", _object(_CARD), _NAME)},
        "/v1/responses/{id}": {
            "get": _get("A stored response.", response, _ID),
            "delete": _get("Forgets a response.", deleted, _ID),
        },
        "/v1/responses/{id}/input_items": {"get": _get("The input items of a stored response.", items, _ID)},
        "/v1/responses/{id}/cancel": {"post": _get("Cancels a running response.", response, _ID)},
        "/api/version": {"get": _get("Ollama's release.", _object({"version": {"type": "string"}}))},
        "/api/tags": {"get": _get("The models.", _object({"models": _LIST}))},
        "/api/ps": {"get": _get("The loaded models.", _object({"models": _LIST}))},
        "/props": {"get": _get("The model's limits and template.", _object({"total_slots": _COUNT}))},
        "/slots": {"get": _get("The slots of a batch and their sequences.", _LIST)},
        "/health": {"get": _get("Whether the engines run, and their current load.", health)},
        "/health/live": {"get": live},
        "/ping": {"get": live, "post": live},
        "/version": {"get": _get("The version of the server.", _object({"version": {"type": "string"}}))},
        "/health/ready": {
            "get": _get("Whether the server accepts requests.", _object({"ready": {"type": "boolean"}}))
        },
    }


def _get(about: str, answer: Json, *parameters: Json) -> Json:
    missing = _errors("404") if parameters else {}
    content: Json = {"application/json": {"schema": answer}}
    operation: dict[str, Json] = {"summary": about, "parameters": list(parameters)}
    return {**operation, "responses": {"200": {"description": about, "content": content}, **missing}}


def _object(properties: Mapping[str, Json]) -> Json:
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _errors(*statuses: str, schema: str = "Error") -> dict[str, Json]:
    content: Json = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    words = {
        "400": "The request is invalid.",
        "404": "The model, path or stored response does not exist.",
        "413": "The body is too large.",
    }
    listed = {*statuses, "401", "500", "503", "504"}
    words |= {"401": "A key is needed.", "500": "The model or the server failed."}
    words |= {"503": "The server is full, or stopping.", "504": "It took too long."}
    return {status: {"description": words[status], "content": content} for status in sorted(listed)}
