"""Tests of exceptions of the runtime: their exit codes, and messages of one visible line."""

from __future__ import annotations

import pytest
from mlcbuild_format import errors
from mlcbuild_format.errors import (
    BundleError,
    DeviceLostError,
    EngineError,
    RequestError,
    ServingError,
    SetupError,
    StoppingError,
)


def test_exit_codes() -> None:
    others = ServingError, BundleError, RequestError, StoppingError, EngineError, DeviceLostError
    public = {value for name, value in vars(errors).items() if name.endswith("Error")}
    assert {kind: kind.exit_code for kind in public} == {SetupError: 3, **dict.fromkeys(others, 1)}


@pytest.mark.parametrize("kind", [BundleError, SetupError, RequestError, EngineError])
def test_whatever_is_quoted_the_message_is_one_visible_line(kind: type[ServingError]) -> None:
    message = str(kind("a\nb\x1b[31mc\u202ed"))
    assert message.isprintable() and message.startswith("a") and message.endswith("d")


def test_a_request_s_error_has_the_fields_of_openai() -> None:
    plain = RequestError("x")
    assert (plain.param, plain.code, plain.status) == (None, None, 400)
    full = RequestError("x", param="p", code="c", status=404)
    assert (full.param, full.code, full.status) == ("p", "c", 404)
