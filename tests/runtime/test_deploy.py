"""Tests that the files in runtime/deploy use only options and paths that the server has."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlcbuild_runtime.http import arguments, server
from mlcbuild_runtime.http.serve import KEY_VARIABLE

from . import shared

DEPLOY = shared.ROOT / "runtime" / "deploy"
RUNTIME = shared.ROOT / "runtime"


def parsed(words: list[str]) -> argparse.Namespace:
    """Returns the parsed arguments of the command `mlcbuild-serve`. For arguments that it does not accept,
    argparse prints a message and raises SystemExit."""
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    return parser.parse_args(words)


def paths() -> set[str]:
    """Returns the paths of the server's routes."""
    return set(re.findall(r'Route\("([^"]+)"', Path(server.__file__).read_text(encoding="utf-8")))


def dockerfile() -> dict[str, str]:
    """Returns the Dockerfile as a mapping: instruction -> its arguments. Asserts that no instruction occurs
    twice."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert len({instruction for instruction, _ in lines}) == len(lines)
    return dict(lines)


def test_the_unit_starts_a_server_and_waits_longer_than_it_drains() -> None:
    unit = (DEPLOY / "mlcbuild.service").read_text()
    program, *words = shlex.split(re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert program.endswith("/mlcbuild-serve")
    stop = int(re.findall("^TimeoutStopSec=(.*)$", unit, re.MULTILINE)[0])
    assert parsed(words).drain < stop


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Checks runtime/deploy/mlcbuild.service, the example of a systemd service, with systemd-analyze. The
    path of the server program in it is replaced by that of the installed one, because systemd-analyze
    requires that the file exists."""
    program = Path(sys.executable).with_name("mlcbuild-serve")
    unit = (DEPLOY / "mlcbuild.service").read_text()
    for name, text in (("good", unit), ("bad", unit.replace("DynamicUser=", "DynamikUser="))):
        file = tmp_path / f"{name}.service"
        file.write_text(text.replace("/opt/mlcbuild/bin/mlcbuild-serve", str(program)))
        command = ["systemd-analyze", "verify", str(file)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        said = checked.stdout + checked.stderr
        assert ("DynamikUser" in said) if name == "bad" else (checked.returncode, said) == (0, "")


def test_the_manifest_probes_paths_that_exist_and_waits_longer_than_it_drains() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["path"] for probe in probes} == {"/health/live", "/health/ready"} <= paths()
    (port,) = container["ports"]
    assert {probe["port"] for probe in probes} == {port["name"]}
    # Kubernetes replaces CMD by args, and keeps ENTRYPOINT.
    options = parsed([*yaml.safe_load(dockerfile()["ENTRYPOINT"])[1:], *container["args"]])
    assert (options.host, options.port) == ("0.0.0.0", port["containerPort"])
    assert options.drain < pod["terminationGracePeriodSeconds"]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"] and options.bundles == [mount["mountPath"]]
    (variable,) = container["env"]
    assert variable["name"] == KEY_VARIABLE
    key = variable["valueFrom"]["secretKeyRef"]
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert f"create secret generic {key['name']} --from-literal={key['key']}=" in text
    # An image without a tag is pulled by default, also where a local build has put it on the node.
    assert ":" in container["image"] or container["imagePullPolicy"] == "IfNotPresent"
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_image_runs_the_server_on_the_port_that_it_names() -> None:
    lines = dockerfile()
    program, *words = yaml.safe_load(lines["ENTRYPOINT"])
    options = parsed([*words, *yaml.safe_load(lines["CMD"])])
    assert (program, options.host, options.bundles) == ("mlcbuild-serve", "0.0.0.0", ["/bundles"])
    assert int(lines["EXPOSE"]) == options.port
    assert f"127.0.0.1:{options.port}/health/ready" in lines["HEALTHCHECK"]
    assert lines["USER"] != "root" and lines["RUN"].endswith(f"useradd --create-home {lines['USER']}")
    assert (RUNTIME / "LICENSE").read_bytes() == (shared.ROOT / "LICENSE").read_bytes()
    # COPY takes the build context, which the comment says is `runtime`: its metadata names these files.
    assert (
        lines["COPY"] == ". /source" and "-t mlcbuild-serve runtime\n" in (DEPLOY / "Dockerfile").read_text()
    )
    project = tomllib.loads((RUNTIME / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = [project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]]
    assert program in project["project"]["scripts"] and all((RUNTIME / name).exists() for name in named)
