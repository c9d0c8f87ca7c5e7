"""Tests that execute the commands and programs of runtime/README.md as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from . import shared

README = (shared.ROOT / "runtime" / "README.md").read_text()
BUNDLE = "dist/tiny-q4f16_1-host"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tiny_bundle: Path, tmp_path: Path) -> Path:
    """Returns a directory that contains what runtime/README.md expects: a bundle at the path that the
    document states, and a program mlcbuild-serve in bin/."""
    (tmp_path / "dist").mkdir()
    (tmp_path / BUNDLE).symlink_to(tiny_bundle)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "mlcbuild-serve"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlcbuild_runtime "$@"\n')
    command.chmod(0o755)
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_serving(place: Path) -> None:
    port = str(free_port())
    serve, curl = (block.replace("8000", port) for block in blocks("sh"))
    client = next(block.replace("8000", port) for block in blocks("python") if "openai" in block)
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = shared.environment({"PATH": path})
    with subprocess.Popen(
        ["sh", "-c", f"exec {serve.rstrip().removesuffix('&')}"],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            assert re.fullmatch(pattern_of_ready_line(port), ready), ready
            answered = subprocess.run(
                ["sh", "-ec", curl], cwd=place, env=environment, capture_output=True, text=True, check=True
            )
            for expected in ('"finish_reason"', "data: [DONE]", '"status":"ok"'):
                assert expected in answered.stdout
            assert '"error"' not in answered.stdout
            result = shared.run("-c", client)
            assert (result.returncode, result.stderr) == (0, "")
            assert result.stdout.strip()
        finally:
            server.kill()


def pattern_of_ready_line(port: str) -> str:
    """Returns a regular expression of the line that the README shows for a started server; numbers of this
    machine and the bundle's name may differ."""
    (shown,) = (block for block in blocks("text") if "is ready at" in block)
    plain = re.escape(shown.replace("8000", port))
    plain = re.sub(r"(threads|context|batch|prefill|memory)\\ [0-9.\\]+", r"\1\\ [0-9.]+", plain)
    return plain.replace(re.escape("tiny-q4f16_1-host"), r"tiny\S*")


def test_programs(place: Path) -> None:
    programs = [block for block in blocks("python") if "openai" not in block]
    assert len(programs) == 3
    for program in programs:
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=place,
            env=shared.environment(),
            input="What is 12 + 30?\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip()


def test_tables_name_every_field() -> None:
    from mlcbuild_format import bundle
    from mlcbuild_runtime.openai import api, embeddings, responses_request

    for name in (*api.CHAT, *api.COMPLETION, *embeddings.TABLE, *responses_request.TABLE):
        assert f"`{name}`" in README or f"`{name}." in README or name == "model", name
    for name in bundle.Manifest.__dataclass_fields__:
        assert f"`{name}`" in README, name


def test_options_are_those_of_the_program() -> None:
    help_text = shared.run("-m", "mlcbuild_runtime", "--help").stdout
    for option in re.findall(r"`(--[a-z-]+)", README):
        assert option in help_text, option
