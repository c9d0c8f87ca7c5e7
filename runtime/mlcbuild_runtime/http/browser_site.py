"""Serves or writes the web site that runs a bundle in its visitors' browsers: chat page, engine in
JavaScript, bundle.

It consists of files only, so any web server can serve it; `create_app` returns the server of `serve
--browser`.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from mlcbuild_format import bundle as form
from mlcbuild_format.errors import BundleError, RequestError, SetupError
from mlcbuild_format.fields import printable
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.draining import BoundedServer
from mlcbuild_runtime.http.error_responses import until_stopped
from mlcbuild_runtime.http.sites import Sites
from mlcbuild_runtime.openai.chat_documents import error_document

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self';"
    " worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types mlcbuild"
)
"""Content security policy of every file of the web site that runs a bundle in browsers: the browser loads
nothing from another site, and sends nothing to one."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
INDEX, BUNDLE = "index.html", "bundle"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wgsl": "text/plain; charset=utf-8",
}
_OTHER = "application/octet-stream"
_PAGE = (".html", ".css", ".js", ".LICENSE")
"""File name suffixes, each with its dot, of those files of this package that belong to the web site which
runs a bundle in browsers."""


def site_files(bundle: Path) -> dict[str, Path]:
    """Returns the files of the web site that runs a bundle in browsers: path on the site, such as
    "index.html" or "bundle/bundle.json" -> file on disk. Raises BundleError for a damaged bundle, or for one
    that was not built for browsers (the target webgpu)."""
    manifest = form.read(bundle)
    if manifest.machine.output != "program" or manifest.machine.device != "webgpu":
        raise BundleError(
            f"{bundle}: browsers run bundles of the target webgpu, and this one is for the device"
            f" '{manifest.machine.device}': add webgpu to the recipe's targets"
        )
    root = Path(str(files("mlcbuild_runtime"))) / "browser"
    page_files = sorted(path for path in root.rglob("*") if path.suffix in _PAGE)
    paths = {path.relative_to(root).as_posix(): path for path in page_files}
    return paths | {f"{BUNDLE}/{name}": bundle / name for name in sorted((form.MANIFEST, *manifest.files))}


def write(bundle: Path, directory: Path) -> str:
    """Writes the web site that runs a bundle in browsers to a new or empty directory, and returns a sentence
    that reports it. Files of the bundle are hard links where the file system allows it, since weights are
    large.

    Raises BundleError for a bundle that browsers cannot run, SetupError if the directory is not empty or
    cannot be written; files that were written before that stay."""
    paths = site_files(bundle)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SetupError(f"{directory}: is not empty, so no site is written to it: name a new directory")
        for name, source in paths.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith(f"{BUNDLE}/"):
                _link(source.resolve(), target)
            else:  # Somebody may edit the page, which must not change the installed package.
                shutil.copyfile(source, target)
    except OSError as error:
        raise SetupError(f"{directory}: the site cannot be written: {error.strerror}") from None
    return printable(f"{len(paths)} files are in {directory}, for any web server with HTTPS")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def create_app(paths: Mapping[str, Path], access: Access) -> ASGIApp:
    """Returns the web application that serves the files of a site, whole or in ranges; "/" is index.html. A
    path that is not among `paths`, or whose file is no longer a regular file, has the status 404. paths: path
    on the site -> file. access: rules for access, of which only those for hosts and origins apply."""

    async def serve_file(request: Request) -> Response:
        path = request.path_params["path"] or INDEX
        if path not in paths or not _is_regular(paths[path]):
            raise HTTPException(404)
        media_type = _MEDIA_TYPES.get(paths[path].suffix, _OTHER)
        return FileResponse(paths[path], headers=HEADERS, media_type=media_type)

    async def refuse(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        document = error_document(RequestError(f"{error.detail}: this server has the files of a site only"))
        return JSONResponse(document, error.status_code, headers={**HEADERS, **(error.headers or {})})

    middleware = []
    if access.hosts is not None:
        middleware.append(Middleware(Sites, hosts=access.hosts, origins=access.origins))
    app = Starlette(
        routes=[Route("/{path:path}", serve_file)],
        exception_handlers={HTTPException: refuse},
        middleware=middleware,
    )
    app.router.redirect_slashes = False
    return until_stopped(app)


def _is_regular(path: Path) -> bool:
    """Returns True if `path` is a regular file now; False if it is itself a symbolic link, a directory, or
    missing. A file of a web site may have been replaced since the server started."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def run(app: ASGIApp, listener: socket.socket, ready: str) -> None:
    """Serves a web application on a bound socket until SIGINT or SIGTERM; prints the line `ready` to standard
    output once it accepts requests. The number of connections, and the size and time of what a client sends
    on each, are limited as for the server of models."""
    BoundedServer(app, listener, lambda: ready).run(sockets=[listener])
