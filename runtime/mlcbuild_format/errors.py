"""Every error that the runtime raises on purpose.

    ServingError                 exit code 1
    ├── BundleError              exit code 1   a bundle is damaged, mixed up, or for another machine
    ├── SetupError               exit code 3   this machine lacks something the runtime needs
    ├── RequestError             one request asks for something that cannot be done
    └── EngineError              one request failed while it ran; the engine goes on

A message is complete by itself: where, what was found, what to do. It is one line without control
characters, whatever a bundle or a client has put into it: `printable`.
"""

from __future__ import annotations

from typing import ClassVar

from mlcbuild_format.fields import printable


class ServingError(Exception):
    """Base of the tree. `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class BundleError(ServingError):
    pass


class SetupError(ServingError):
    exit_code = 3


class RequestError(ServingError):
    """`param` names the field at fault and `code` is a short machine-readable word, as in OpenAI's errors."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class EngineError(ServingError):
    pass
