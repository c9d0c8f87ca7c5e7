"""Tests of a real server with other people's clients: schemathesis, LangChain and instructor.

These clients need many packages, so they are installed in a separate environment, made by `python -m venv E`
and `E/bin/pip install schemathesis langchain-openai instructor`; MLCBUILD_CLIENTS names its Python. A client
that is installed in the tests' own environment is used there. Tests of clients that are not installed are
skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mlcbuild_runtime.http import reference_page
from mlcbuild_runtime.openai import openapi

from . import shared
from .conftest import needs
from .shared import Server

CLIENTS = os.environ.get("MLCBUILD_CLIENTS", sys.executable)
EXAMPLES = os.environ.get("MLCBUILD_FUZZ_EXAMPLES", "5")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


def run(package: str, *arguments: str) -> str:
    """Runs a Python program that uses `package`, such as a client library, with the interpreter that
    MLCBUILD_CLIENTS names or the tests' own, and returns its standard output. arguments: those of Python.
    Skips the test if the package is not installed."""
    there = subprocess.run([CLIENTS, "-c", f"import {package}"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip(f"{package} is not installed: MLCBUILD_CLIENTS may name a Python that has it")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [CLIENTS, *arguments], capture_output=True, text=True, env=environment, timeout=250, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


def test_schemathesis_finds_nothing(real: Server, tmp_path: Path) -> None:
    """Checks the server with random bodies that follow its OpenAPI document and bodies that break it: no
    answer is a 5xx or undocumented, and what the document forbids is refused. A body that the document allows
    may still be refused, for example because its prompt is too long."""
    arguments = ["run", f"{real.url}/openapi.json", "--phases", "fuzzing"]
    arguments += ["--max-examples", EXAMPLES, "--generation-deterministic", "--no-color"]
    arguments += ["--checks", f"{CHECKS},negative_data_rejection", "--request-timeout", "60"]
    code = (
        "import os, sys; from schemathesis.cli import schemathesis; os.chdir(sys.argv.pop(1)); schemathesis()"
    )
    run("schemathesis", "-c", code, str(tmp_path), *arguments)
    assert real.wait_idle()["status"] == "ok"


LANGCHAIN = """
import sys
from typing import Literal
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, model = sys.argv[1:]
given = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}

class Total(BaseModel):
    "the sum"
    total: Literal[4, 5]

def sky(day: Literal["today", "tomorrow"]) -> str:
    "of a day"

for responses in (False, True):
    chat = ChatOpenAI(**given, max_tokens=400, use_responses_api=responses)
    plain = chat.invoke("What is 12 + 30?")
    assert plain.usage_metadata["output_tokens"] > 0, plain
    streamed = "".join(chunk.text for chunk in chat.stream("What is 12 + 30?"))
    assert streamed == plain.text, (streamed, plain.text)
    call = chat.bind_tools([sky], tool_choice="sky").invoke("How?").tool_calls[0]
    assert call["name"] == "sky" and set(call["args"]) == {"day"}, call
    history = [SystemMessage("hi"), HumanMessage("How?"), AIMessage("", tool_calls=[call])]
    assert chat.invoke([*history, ToolMessage("rain", tool_call_id=call["id"])]).text
    for method in ("json_schema", "function_calling"):
        maker = chat.with_structured_output(Total, method=method)
        assert isinstance(maker.invoke("2 + 2"), Total), method
assert OpenAI(**given, max_tokens=4).invoke("Once")
"""

EMBEDDINGS = """
import sys
from langchain_openai import OpenAIEmbeddings

url, model = sys.argv[1:]
vectors = OpenAIEmbeddings(base_url=url, api_key="none", model=model, check_embedding_ctx_length=False)
first, second = vectors.embed_documents(["one", "two"])
assert max(abs(a - b) for a, b in zip(vectors.embed_query("two"), second)) < 1e-3 and first != second
"""

INSTRUCTOR = """
import sys
from typing import Literal
import instructor, openai
from pydantic import BaseModel

url, model = sys.argv[1:]

class Total(BaseModel, extra="forbid"):
    total: Literal[4, 5]

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "2 + 2"}]
    given = {"response_model": Total, "max_retries": 0, "max_tokens": 400, "temperature": 0}
    if mode is instructor.Mode.TOOLS:
        given["parallel_tool_calls"] = False  # this model would call until there is no room
    found = client.chat.completions.create(model=model, messages=messages, **given)
    assert isinstance(found, Total), mode
"""


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields a server of the toy model with a context of 8192 tokens, enough for the long prompts that
    LangChain and instructor send."""
    needs("tvm")

    def build(out: Path) -> None:
        from tests import compiler_process

        compiler_process.run_program("tests.runtime.toy", str(out), "8192")

    with shared.serving(shared.once(tmp_path_factory, "toy-8192", build)) as running:
        yield running


@pytest.mark.parametrize(
    ("package", "program"), [("langchain_openai", LANGCHAIN), ("instructor", INSTRUCTOR)]
)
def test_a_client(roomy: Server, package: str, program: str) -> None:
    run(package, "-c", program, f"{roomy.url}/v1", roomy.name)


def test_langchain_embeddings(real: Server) -> None:
    run("langchain_openai", "-c", EMBEDDINGS, f"{real.url}/v1", real.name)


def test_the_page_of_the_api_names_every_endpoint_and_field(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=shared.WAIT).json()
    answer = httpx.get(f"{server.url}/docs", timeout=shared.WAIT)
    assert answer.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "src=" not in answer.text and "//" not in answer.text, "it loads nothing"
    for path, methods in document["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in answer.text for method in methods)
    for name, schema in document["components"]["schemas"].items():
        fields = set(schema["properties"]) if "Error" not in name else set()
        assert all(f"<td><code>{field}</code>" in answer.text for field in fields)
    assert "<code>messages</code> (required)</td><td>array</td><td>The chat so far.</td>" in answer.text
    assert "<code>temperature</code></td><td>number</td>" in answer.text
    assert "<p>The request has no body.</p>" in answer.text
    assert "Requests need an API key" not in answer.text
    assert "Requests need an API key" in reference_page.page(openapi.document(keys=True))
