"""Functions that call some of the server's endpoints in the test's own process, without a socket. The engine
behind them runs a simulated model, which repeats a part of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import httpx
from mlcbuild_format import bundle
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.served_models import Models
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.handling import RequestHandling
from mlcbuild_runtime.http.metrics import Metrics
from mlcbuild_runtime.text.tokenizer import Tokenizer
from starlette.applications import Starlette
from starlette.routing import Route

from . import parrot, toy


class Endpoints(Protocol):
    def routes(self) -> list[Route]: ...


@contextmanager
def running(directory: Path, template: str = toy.TEMPLATE) -> Iterator[Engine]:
    """Writes the bundle of a simulated model, which repeats a part of its prompt, into a directory, and
    yields a running engine for it. template: the model's chat template."""
    parrot.write(directory, template)
    manifest = bundle.manifest(directory)
    executor = parrot.load(directory, manifest, None, None)
    engine = Engine(executor, Tokenizer.load(directory, manifest.serving)).start()
    try:
        yield engine
    finally:
        engine.close()


def send(
    create: Callable[[RequestHandling], Endpoints],
    engine: Engine,
    *requests: tuple[str, str, object],
    access: Access | None = None,
) -> Sequence[httpx.Response]:
    """Sends requests one after the other to some of the server's endpoints, in this process and without a
    socket, and returns the responses. create: class of the endpoints; requests: (method, path, body) of each.
    Raises the error of a request that is refused."""
    models = Models.of(engine)
    handling = RequestHandling(models, access or Access(), Metrics(models.states))
    app = Starlette(routes=create(handling).routes())

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    responses = asyncio.run(talk())
    assert not any(entry.users for entry in models.entries), "each request returns its reference to the model"
    return responses
