"""Tests of the Dockerfile in runtime/deploy: the image is built and run without a container daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import container
from tests.caches import free_port
from tests.container import Builder

from . import shared

RUNTIME = shared.ROOT / "runtime"
DOCKERFILE = RUNTIME / "deploy" / "Dockerfile"
every = pytest.mark.skipif(
    not os.environ.get("MLCBUILD_TEST_EVERY"), reason="installs packages: set MLCBUILD_TEST_EVERY"
)


@every
@pytest.mark.timeout(1200)
def test_the_image_is_built_and_serves(tmp_path: Path, tiny_bundle: Path) -> None:
    """Checks the container image of runtime/deploy: builds it from its Dockerfile, on a base with this
    machine's Python, and runs it with the user, entry point, health check and stop signal of its
    configuration."""
    if why := container.refusal(tmp_path / "trial"):
        pytest.skip(why)
    (base,) = (line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM "))
    with container.builder(tmp_path) as builder:
        container.make_base(builder, tmp_path, f"docker.io/library/{base}", RUNTIME / "pyproject.toml")
        options = ["--isolation", "chroot", "--format", "docker", "--pull-never"]
        builder.run("bud", *options, "-f", DOCKERFILE, "-t", "mlcbuild-serve", RUNTIME)
        config = json.loads(builder.run("inspect", "--type", "image", "mlcbuild-serve"))["Docker"]["config"]
        assert config["ExposedPorts"] == {"8000/tcp": {}}
        builder.run("from", "--name", "server", "--pull-never", "mlcbuild-serve")
        inside = ("run", "--isolation", "chroot", "server", "--")
        facts = "import os, pwd; print(pwd.getpwuid(os.getuid()).pw_name, os.path.exists('/source'))"
        assert builder.run(*inside, "python", "-c", facts) == f"{config['User']} False"
        copied = tmp_path / "bundles" / "tiny"
        shutil.copytree(tiny_bundle, copied, symlinks=False)
        builder.run("add", "-q", "server", tmp_path / "bundles", *config["Cmd"])
        serve(builder, config, tmp_path / "log")


def serve(builder: Builder, config: dict[str, Any], log: Path) -> None:
    """Starts the server in the container named "server", and checks its health and an answer to a question.
    The container shares the machine's network, so a free port replaces the image's."""
    port = str(free_port())
    inside = ("run", "--isolation", "chroot", "server", "--")
    command = builder.command(*inside, *config["Entrypoint"], "--port", port, *config["Cmd"])
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            check = config["Healthcheck"]["Test"]
            assert check[0] == "CMD"
            words = [word.replace(":8000/", f":{port}/") for word in check[1:]]
            wait_for(builder.command(*inside, *words), process, log)
            body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        finally:
            for server in servers(port):
                os.kill(server, signal.Signals[config["StopSignal"]])
        assert process.wait(shared.WAIT) == 0, log.read_text()


def wait_for(command: list[str], process: subprocess.Popen[bytes], log: Path) -> None:
    """Runs the command of a container's health check until it succeeds. Fails if the server `process` ends
    before, or after WAIT seconds. log: file with the server's output."""
    end = time.monotonic() + shared.WAIT
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert process.poll() is None and time.monotonic() < end, log.read_text()


def servers(port: str) -> list[int]:
    """Returns the ids of all Python processes on this machine that have `port` among their arguments: the
    server processes that the container started."""
    pids = []
    for directory in Path("/proc").glob("[0-9]*"):
        words = (directory / "cmdline").read_bytes().split(b"\0")
        if b"python" in words[0] and port.encode() in words:
            pids.append(int(directory.name))
    return pids
