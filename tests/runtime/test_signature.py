"""Tests of the signature: the digest of a bundle's parameter tensors."""

from __future__ import annotations

from mlcbuild_format import bundle


def test_the_signature_is_fixed() -> None:
    """Checks that the signature of given tensors does not change: with another value no existing bundle could
    be read."""
    actual = bundle.signature([("a", (2, 3), "float32", "plain"), ("b", (4,), "uint8", "x16")])
    assert actual == "b21459c6916f36b6b37bbad83fcf6297cd1db5acdb8425090a448d79544ea616"
    assert bundle.signature([]) != actual
