"""Responds to requests that end outside of an endpoint: unknown paths, clients that have disconnected,
defects.
"""

from __future__ import annotations

from mlcbuild_format.errors import RequestError, ServingError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlcbuild_runtime.openai.chat_documents import error_document


async def http_error(_request: Request, error: Exception) -> Response:
    """Answers requests that the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    document = error_document(
        RequestError(f"{error.detail}: /openapi.json lists the paths, such as /v1/chat/completions")
    )
    return JSONResponse(document, error.status_code, headers=error.headers)


async def gone(_request: Request, _error: Exception) -> Response:
    """Ends a request whose client has disconnected. Nobody reads the response."""
    return Response(status_code=400)


async def unexpected_error(_request: Request, _error: Exception) -> Response:
    """Answers after a defect: the log has its traceback, and the client learns only that the server
    failed."""
    return JSONResponse(error_document(ServingError("the server has failed: see its log")), 500)
