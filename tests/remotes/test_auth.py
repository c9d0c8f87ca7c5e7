"""Tests of credentials for a host: where they are found, in which order, and the messages about them."""

from __future__ import annotations

import base64
import json
import pwd
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import auth, aws
from mlcbuild.remotes.oci_reference import parse

TOKEN, LOGIN = auth.variables("cache.example")


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Returns environment variables (NETRC, DOCKER_CONFIG, REGISTRY_AUTH_FILE) that make mlcbuild search for
    credential files in a test's directory only. It holds a netrc file with one login."""
    (tmp_path / "netrc").write_text("machine cache.example login ann password p\n")
    return {
        "NETRC": str(tmp_path / "netrc"),
        "DOCKER_CONFIG": str(tmp_path),
        "REGISTRY_AUTH_FILE": str(tmp_path / "none"),
    }


def test_the_host_is_in_the_names_of_the_variables() -> None:
    assert (TOKEN, LOGIN) == ("MLCBUILD_TOKEN_CACHE_EXAMPLE", "MLCBUILD_LOGIN_CACHE_EXAMPLE")


def test_a_token_precedes_a_login_which_precedes_netrc(home: dict[str, str]) -> None:
    assert auth.authorization("cache.example", {**home, TOKEN: "t", LOGIN: "a:b"}) == "Bearer t"
    assert auth.authorization("cache.example", {**home, LOGIN: "a:b"}) == basic("a:b")
    assert auth.authorization("cache.example", home) == basic("ann:p")
    assert auth.authorization("other.example", home) is None


@pytest.mark.parametrize(("name", "value"), [(TOKEN, "se cret"), (TOKEN, "secr\u00e9t"), (LOGIN, "secret")])
def test_a_credential_that_cannot_be_sent_is_not_shown(name: str, value: str) -> None:
    with pytest.raises(RemoteError) as caught:
        auth.authorization("cache.example", {name: value})
    assert name in str(caught.value) and value not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "offered"),
    [
        ("", {}),
        ("Negotiate", {"negotiate": {}}),
        ('BASIC realm="Sonatype Nexus"', {"basic": {"realm": "Sonatype Nexus"}}),
        (
            'Bearer realm="https://h/token",service=s,scope="a,b" , Basic realm = "h"',
            {"bearer": {"realm": "https://h/token", "service": "s", "scope": "a,b"}, "basic": {"realm": "h"}},
        ),
        ('Basic realm="1", basic realm="2"', {"basic": {"realm": "1"}}),
    ],
)
def test_challenges_are_told_apart(header: str, offered: dict[str, dict[str, str]]) -> None:
    assert auth.challenges(header) == offered


def test_without_a_home_there_are_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container whose user has no name
    assert auth.login("cache.example", {}) is None
    with pytest.raises(RemoteError, match="there are no credentials for it"):
        aws.settings("s3://bucket", {})


def test_a_damaged_netrc_is_named_with_its_line_and_without_its_words(home: dict[str, str]) -> None:
    path = Path(home["NETRC"])
    path.write_text("machine cache.example login ann\nsecret\n")
    with pytest.raises(RemoteError) as caught:
        auth.authorization("cache.example", home)
    assert str(caught.value).startswith(f"{path}:") and "secret" not in str(caught.value)


def test_a_registry_is_found_in_the_file_of_docker(home: dict[str, str]) -> None:
    entry = {"auth": base64.b64encode(b"bob:q").decode()}
    Path(home["DOCKER_CONFIG"], "config.json").write_text(json.dumps({"auths": {"r.example:5000": entry}}))
    assert auth.login("r.example:5000", home) == basic("bob:q")
    assert auth.login("r.example", home) is None


def test_a_refresh_token_precedes_the_placeholder_beside_it(home: dict[str, str]) -> None:
    """Checks the entry that `docker login` writes for a registry whose token service issues such tokens."""
    entry = {"auth": basic("0000-00:").removeprefix("Basic "), "identitytoken": "s3cret"}
    Path(home["DOCKER_CONFIG"], "config.json").write_text(json.dumps({"auths": {"r.example": entry}}))
    refresh = auth.login("r.example", home)
    assert refresh == auth.RefreshToken("s3cret") and "s3cret" not in repr(refresh)


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": {}, "auths": {}}', '{"auths": 1}'])
def test_a_damaged_file_of_docker_is_an_error(home: dict[str, str], text: str) -> None:
    path = Path(home["DOCKER_CONFIG"], "config.json")
    path.write_text(text)
    with pytest.raises(RemoteError, match="cannot be parsed"):
        auth.login("r.example", home)


def test_docker_hub_has_other_names_in_the_files_of_docker_and_podman(home: dict[str, str]) -> None:
    logins = {"https://index.docker.io/v1/": "hub:d", "https://old.example": "old:d", "r.example": "r:d"}
    entries = {name: {"auth": basic(text).removeprefix("Basic ")} for name, text in logins.items()}
    Path(home["DOCKER_CONFIG"], "config.json").write_text(json.dumps({"auths": entries}))
    for host, text in (
        *((name, "hub:d") for name in ("docker.io", "registry-1.docker.io", "index.docker.io")),
        *(("old.example", "old:d"), ("r.example", "r:d")),
    ):
        assert auth.login(host, home) == basic(text)
    assert auth.login("other.example", home) is None
    entries = {"docker.io": {"auth": basic("hub:p").removeprefix("Basic ")}}
    Path(home["REGISTRY_AUTH_FILE"]).write_text(json.dumps({"auths": entries}))
    assert auth.login("docker.io", home) == basic("hub:p")
    assert parse("oci://docker.io/me/model:v1").address == "https://registry-1.docker.io"


def test_a_refusal_names_the_variables_unless_there_are_credentials() -> None:
    assert TOKEN in auth.refusal("cache.example", 401, authorized=False)
    assert auth.refusal("h", 403, authorized=True) == "it refuses the credentials for h (status 403)"
