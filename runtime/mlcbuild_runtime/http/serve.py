"""Serves bundles over HTTP until a signal ends the process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mlcbuild_format import sizes
from mlcbuild_format.bundle import Pooling
from mlcbuild_format.errors import ServingError, SetupError

from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.memory_modes import LimitOverrides
from mlcbuild_runtime.http import logs
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.logs import event_line

if TYPE_CHECKING:
    from mlcbuild_runtime.engine.served_models import Models
    from mlcbuild_runtime.engine.trace import Trace
    from mlcbuild_runtime.http.accesslog import Form

DRAIN = 25
"""Default number of seconds that running requests get to finish after SIGTERM; container managers kill a
process 30 seconds after that signal."""
KEY_VARIABLE = "MLCBUILD_API_KEY"


@dataclass(frozen=True)
class Logs:
    """The settings of the logs that a server writes: lines about requests, and the trace of its engines'
    steps."""

    file: str | None = None
    """File to which a line of JSON is appended for each request; "-" is standard output."""
    form: str = "auto"
    """Form of the lines about requests on standard error: "text", "json", "none" (no such lines), or "auto":
    text if it is a terminal, otherwise none. With "json", every other line is JSON, too: errors, warnings,
    and the server's start and end."""
    trace: str | None = None
    """Path of the file for a trace of the engine's steps, in Chrome's trace format, which is overwritten;
    None: no trace is written.
    """


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    """TCP port of the server; 0 selects any free port, which the line that the server prints at its start
    reports."""
    threads: int | None = None
    limits: LimitOverrides = field(default_factory=LimitOverrides)
    max_waiting: int | None = None
    pooling: Pooling | None = None
    """How the hidden states of a text's tokens are combined into its embedding: "last" takes that of the last
    token, "mean" the average; None: as the bundle states."""
    speculate: Speculate | None = None
    drain: float = DRAIN
    access: Access = field(default_factory=Access)
    logs: Logs = field(default_factory=Logs)
    browser: bool = False
    """True if the server only serves a page that runs the bundle in its visitors' browsers."""
    site: str | None = None
    """Directory to which the files of the web page that runs a bundle in browsers are written, without
    starting a server; None: a server starts, which serves the page if `browser` is True, else the API."""


def serve(bundles: str | Path | Sequence[str | Path], options: ServerOptions | None = None) -> int:
    """Serves bundles over HTTP until SIGINT or SIGTERM, or writes the files of a web site if `options.site`
    is set. Returns the exit code: 0, also after a signal that ends the running server; 3 if this machine or
    the options do not allow it; 1 after another error; 130 if SIGINT comes before the server runs. Errors are
    printed to standard error. A key in the environment variable MLCBUILD_API_KEY is accepted besides those of
    the options.

    bundles: one or several, each DIRECTORY or NAME=DIRECTORY; a directory of bundles, without a NAME, stands
    for all of them. A web page for browsers requires exactly one DIRECTORY. A single bundle is loaded at
    once, several are loaded when requests first name them."""
    listed = [bundles] if isinstance(bundles, str | Path) else bundles
    options = options or ServerOptions()
    form = options.logs.form
    logs.to_stderr(form)
    try:
        options = replace(options, access=_with_keys(options.access))
        if options.site is not None:
            return _serve_site(listed, options, None)
        with ExitStack() as stack:
            listener = stack.enter_context(_bind(options.host, options.port))
            options = replace(options, access=_for_listener(options.access, listener))
            if options.browser:
                return _serve_site(listed, options, listener)
            file = stack.enter_context(_opened(options.logs.file))
            files: list[tuple[TextIO, Form]] = [] if file is None else [(file, "json")]
            return _serve([str(bundle) for bundle in listed], options, listener, [*files, *_log(form)])
    except ServingError as error:
        print(event_line(str(error), form, ERROR), file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _with_keys(access: Access) -> Access:
    """Returns `access` with the key in the environment variable MLCBUILD_API_KEY added to its keys, if it is
    set, and without white space around keys, with which no request can send them. Raises SetupError if a key
    is empty or only white space, which any client could send."""
    named = os.environ.get(KEY_VARIABLE)
    keys = tuple(key.strip() for key in (*access.keys, *([named] if named else ())))
    if not all(keys):
        raise SetupError(
            "an API key is empty, and would let every client in: pass a key with --api-key or"
            f" {KEY_VARIABLE}, or none at all"
        )
    return replace(access, keys=keys)


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address and does not listen yet. port: 0 selects any free port. It
    is bound before the model is loaded, so that a port in use fails quickly. Raises SetupError if the address
    or port cannot be used."""
    if not 0 <= port < 1 << 16:
        raise SetupError(f"cannot listen on {host} port {port}: a port is a number from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SetupError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    except UnicodeError:  # a part of a name that is empty or has more than 63 letters
        raise SetupError(f"cannot listen on {host} port {port}: this is no name of a host") from None
    return listener


def _for_listener(access: Access, listener: socket.socket) -> Access:
    """Returns the access rules for a server on `listener`. The Host field of requests and the origins of web
    pages are checked only if the server has no keys and is on the loopback interface, or if the user has
    stated hosts."""
    from mlcbuild_runtime.http.sites import is_loopback

    is_local = not access.keys and is_loopback(listener.getsockname()[0])
    return access if access.hosts or is_local else replace(access, hosts=None)


def _opened(name: str | None) -> AbstractContextManager[TextIO | None]:
    """Returns the file of the access log, opened for appending, as a context manager; it yields None if
    `name` is None. "-" is standard output, which stays open. Raises SetupError if the file cannot be written.
    """
    if name is None or name == "-":
        return nullcontext(None if name is None else sys.stdout)
    try:
        return Path(name).open("a", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"the access log {name} cannot be written: {error.strerror}") from None


def _log(form: str) -> list[tuple[TextIO, Form]]:
    """Returns [(standard error, form)] if lines about requests are written there, else []. form: "text",
    "json", "none", or "auto", which is text on a terminal."""
    if form == "json":
        return [(sys.stderr, "json")]
    is_shown = form == "text" or (form == "auto" and sys.stderr.isatty())
    return [(sys.stderr, "text")] if is_shown else []


def _trace(name: str | None) -> Trace | None:
    """Returns the file `name` for the trace of the engines' steps, opened for writing, so that its earlier
    content is lost; None if no name is stated. Raises SetupError if the file cannot be written."""
    from mlcbuild_runtime.engine.trace import Trace

    try:
        return None if name is None else Trace(name)
    except OSError as error:
        raise SetupError(f"the trace {name} cannot be written: {error.strerror}") from None


def _serve_site(bundles: Sequence[str | Path], options: ServerOptions, listener: socket.socket | None) -> int:
    """Serves the web page that runs a bundle in browsers until a signal, and returns the exit code 0. Without
    a listener, writes the page's files to the directory `options.site` instead. Raises ServingError for
    options or a bundle that the page cannot use, and if the files cannot be written."""
    from mlcbuild_runtime.http import browser_site

    if len(bundles) != 1:
        raise SetupError(
            f"--browser serves one bundle, and {len(bundles)} were passed: start a server for each"
        )
    bundle = Path(bundles[0])
    if listener is None:
        print(f"mlcbuild-serve: {browser_site.write(bundle, Path(options.site or ''))}")  # noqa: T201
        return 0
    if options.access.keys:
        raise SetupError(
            "--browser serves files to a page, which has no key: leave --api-key out, and"
            f" {KEY_VARIABLE} unset"
        )
    app = browser_site.create_app(browser_site.site_files(bundle), options.access)
    ready = f"{bundle.name} is ready at {_url(listener)} (a page for browsers with WebGPU)"
    browser_site.run(app, listener, event_line(ready, options.logs.form))
    return 0


def _serve(
    bundles: Sequence[str],
    options: ServerOptions,
    listener: socket.socket,
    access_logs: Sequence[tuple[TextIO, Form]],
) -> int:
    # Set before NumPy is imported: this process computes no matrix products with it and needs no threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from mlcbuild_runtime.engine.engine_options import MAX_WAITING, EngineOptions
    from mlcbuild_runtime.engine.served_models import Models, ModelSource

    trace = _trace(options.logs.trace)
    sources = [source for text in bundles for source in ModelSource.of(text).all()]
    max_waiting = MAX_WAITING if options.max_waiting is None else options.max_waiting
    shared = EngineOptions(max_waiting=max_waiting, pooling=options.pooling, speculate=options.speculate)
    models = Models(sources, options.limits, options.threads, shared, trace)
    if len(models.entries) == 1:
        models.load_first()
    # Imported late, so that a bundle that cannot be served is refused sooner.
    from mlcbuild_runtime.http.draining import run
    from mlcbuild_runtime.http.server import create_app

    form = options.logs.form
    app = create_app(models, options.access, access_logs)
    run(app, models, listener, options.drain, lambda: event_line(_ready_line(models, _url(listener)), form))
    ended = models.close(timeout=0.2)
    if trace is not None:
        trace.close()
    if _log(form):
        print(event_line("stopped", form), file=sys.stderr, flush=True)  # noqa: T201
    if not ended:
        # A long step is still running inside the library, which cannot be interrupted: leave at once
        # rather than unload the library under it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _ready_line(models: Models, url: str) -> str:
    """Returns the line that announces that the server is ready. For a loaded model it states its first name,
    the URL, the device, and the limits (context, batch, prefill chunk, memory); for several, which are loaded
    later, the URL, the memory for all of them, and their names."""
    requested, first = models.requested, models.entries[0]
    if first.engine is None or first.chosen is None:
        names = ", ".join(name for entry in models.entries for name in entry.names)
        count, budget = len(models.entries), sizes.show(requested.budget)
        loading = "each is loaded at its first request"
        return (
            f"{count} models are served at {url} ({loading}; mode {requested.mode}, memory {budget}): {names}"
        )
    executor, chosen = first.engine.executor, first.chosen
    context = executor.manifest.limits.context_window
    return (
        f"{first.names[0]} is ready at {url} ({executor.description}, context {context},"
        f" batch {chosen.max_batch}, prefill {chosen.prefill_chunk}, mode {chosen.mode}, memory"
        f" {sizes.show(chosen.memory)})"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
