"""The exceptions that the runtime raises deliberately.

    ServingError                 exit code 1
    ├── BundleError              exit code 1   a bundle is damaged, inconsistent, or for another machine
    ├── SetupError               exit code 3   this machine lacks something the runtime needs
    ├── RequestError             exit code 1   one request is invalid or cannot be served
    │   └── StoppingError        exit code 1   the server is stopping
    └── EngineError              exit code 1   one request failed while it ran; the engine continues
        └── DeviceLostError      exit code 1   the device computes nothing any more; the engine ends

A message is complete by itself: place, finding, remedy. It is one line without control characters, whatever
text of a bundle or a client it quotes: see `printable`.
"""

from __future__ import annotations

from typing import ClassVar

from mlcbuild_format.fields import printable


class ServingError(Exception):
    """The base class of the runtime's exceptions. `exit_code` is the exit status of the command line, 1
    unless a subclass states another."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class BundleError(ServingError):
    pass


class SetupError(ServingError):
    exit_code = 3


class RequestError(ServingError):
    """An invalid request, or one that cannot be served. `param` names the field and `code` is a
    machine-readable word, as in OpenAI's errors, both None if there is none; `status` is the HTTP status, 400
    by default."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class StoppingError(RequestError):
    """The error for a request that cannot be served because the server is stopping; another server may serve
    it."""

    def __init__(self) -> None:
        super().__init__("the server is stopping: use another server", code="stopping", status=503)


class EngineError(ServingError):
    pass


class DeviceLostError(EngineError):
    """The error for a device, such as a GPU, that can compute nothing any more until the server is
    restarted."""
