"""Tests that secrets appear in nothing that a run writes, sends or prints."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcbuild import keyfile
from mlcbuild.cli import main
from tests import product
from tests.caches import Handler, serving

PASSWORD, TOKEN, AWS, HUB = "pa55-w0rd-of-ann", "t0ken-of-ann", "aws-s3cret-of-ann", "hf_s3cretOfAnn"


def written(*roots: Path) -> Iterator[tuple[str, bytes]]:
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield str(path), str(path).encode() + path.read_bytes()


def test_no_secret_is_in_anything_that_a_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checks everything that two runs leave behind. They use a cache with a password, which accepts one of
    them and refuses the other, and they write every kind of file."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    key = home / "key.pem"
    keyfile.create(key)
    for name, value in {
        "MLCBUILD_KEY": str(key),
        "MLCBUILD_LOGIN_127_0_0_1": f"ann:{PASSWORD}",
        "MLCBUILD_TOKEN_EXAMPLE_COM": TOKEN,
        "AWS_SECRET_ACCESS_KEY": AWS,
        "HF_TOKEN": HUB,
        "GITHUB_ACTIONS": "true",
    }.items():
        monkeypatch.setenv(name, value)
    login = base64.b64encode(f"ann:{PASSWORD}".encode()).decode()
    product.replace_work(monkeypatch.setattr)
    refuses: list[str] = []

    def guarded(handler: Handler) -> bool:
        if handler.headers.get("Authorization") != f"Basic {login}" or refuses:
            handler.body()
            handler.answer(401, f"no: {handler.headers.get('Authorization')}".encode())
            return True
        return False

    with serving(guarded) as cache:
        recipe = product.make(work, 1, ("q4f16_1", "q0f32"), ("x86-64-v2", "aarch64-linux"))
        recipe.write_text(recipe.read_text() + f"cache: {{remotes: [{{url: {cache.url}}}]}}\n")
        common = ["recipe.yaml", "--store", str(work / "store")]
        output = ["--junit", "junit.xml", "--summary", "summary.md"]
        assert main(["run", *common, *output, "--executor", "inline"]) == 0
        assert cache.names("ac") and cache.names("cas"), "the login was used"
        refuses.append("from now on")
        product.tiny_weights(work / "models" / "m000" / "model.safetensors", "other weights")
        assert main(["run", *common, *output, "--executor", "inline"]) == 0
        assert main(["run", *common, "--json"]) == 0
        assert main(["report", *common, "--output", "report.html"]) == 0
        assert main(["cache", "push", "recipe.yaml", cache.url, "--store", str(work / "store")]) == 1
        said = capfd.readouterr()
        assert "401" in said.out + said.err, "a refusal was told"
        sent = [(name, name.encode() + data) for name, data in cache.content.items()]
    kept = [*written(work), *sent, ("what was said", (said.out + said.err).encode())]
    assert {"junit.xml", "summary.md", "report.html"} <= {Path(name).name for name, _ in kept}
    assert any(name.endswith("provenance.intoto.jsonl") for name, _ in kept)
    signer = keyfile.load(key)
    assert signer is not None and any(signer.public.encode() in data for _, data in kept), "it signed"
    private = "".join(key.read_text().splitlines()[1:-1])
    for secret in (PASSWORD, TOKEN, AWS, HUB, login, private, private[-24:]):
        assert [name for name, data in kept if secret.encode() in data] == []
    assert os.environ["HF_TOKEN"] == HUB
