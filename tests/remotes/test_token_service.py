"""Tests of the answers of token services, which issue a registry's tokens. test_registry has the requests."""

from __future__ import annotations

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import token_service


@pytest.mark.parametrize(
    "data", [b'{"token": "t"}', b'{"access_token": "t"}', b'{"token": "", "access_token": "t"}']
)
def test_a_token_has_one_of_two_names(data: bytes) -> None:
    assert token_service.token(data, "auth.example") == "t"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<html>", "returned no token"),
        (b"[]", "returned no token"),
        (b"{}", "returned no token"),
        (b'{"token": 7}', "returned an invalid token"),
        (b'{"token": "s3cret\\r\\nHost: x"}', "returned an invalid token"),
    ],
)
def test_another_answer_names_the_service_and_shows_no_secret(data: bytes, words: str) -> None:
    with pytest.raises(RemoteError, match=words) as caught:
        token_service.token(data, "auth.example")
    assert "auth.example" in str(caught.value) and "s3cret" not in str(caught.value)
