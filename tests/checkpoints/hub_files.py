"""Files of a small checkpoint that tests put on a simulated hub."""

from __future__ import annotations

import hashlib

import pytest

from tests.hub_client import Client, RefusedError

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces" * 50,
    "model.safetensors": bytes(range(256)) * 400,
    "README.md": b"words",
}


FETCHED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"]


def pins(*names: str) -> dict[str, object]:
    """Returns the files of the simulated repository as a lock file lists them: file name -> {"size": bytes,
    "sha256": hex digest}. names: the files to list; by default those that a build downloads."""
    chosen = {name: FILES[name] for name in names or FETCHED}
    return {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in chosen.items()
    }


def refusal(client: Client, function: str, *arguments: object) -> str:
    """Calls a function of the hub client that must fail, and returns its error message. Fails unless the
    error is a SourceError, UnreachableError or AbsentError whose message has no traceback."""
    with pytest.raises(RefusedError) as caught:
        client.call(function, *arguments)
    assert caught.value.kind in ("SourceError", "UnreachableError", "AbsentError"), caught.value
    assert "Traceback" not in caught.value.message
    return caught.value.message
