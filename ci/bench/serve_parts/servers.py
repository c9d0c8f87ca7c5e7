"""Prepares the servers whose speed is compared: mlcbuild's server with bundles, llama.cpp's server with GGUF
files of the same random checkpoint, and vLLM's server with the checkpoint itself.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import engines
import vllm_server

SHAPE = "smollm2-135m"
CONTEXT, SLOTS = 512, 16
"""Two limits of both servers: CONTEXT is the maximum number of tokens of a request, prompt and answer
together, and SLOTS the maximum number of requests that are served at a time."""
FORMATS = ("q4_0", "q4_k_m")
"""Quantization formats of llama.cpp that the benchmark measures, because they use about as many bits per
weight as mlcbuild's 4-bit scheme.
"""
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


@dataclass(frozen=True)
class Competitor:
    name: str
    command: tuple[str, ...]
    """Command that starts the server, up to its option --port; the port's number is appended as the last
    argument."""
    ours: bool
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Running:
    competitor: Competitor
    url: str
    pid: int

    def cpu(self) -> float:
        """Returns the CPU seconds that the measured server's processes have used since their start; 0 if the
        system does not report them."""
        return sum(_cpu(pid) for pid in _family(self.pid))


def _cpu(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[int]:
    """Returns the numbers of a process and of all processes that it has started, directly or not."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, path.read_text().split())
    return [pid, *(member for child in children for member in _family(child))]


def prepare(directory: Path, schemes: list[str], threads: int, target: str) -> list[Competitor]:
    """Creates missing environments, models and server programs below `directory`, and returns the servers to
    compare, which are not started: mlcbuild's with each of the quantization schemes, then llama.cpp's with
    each of its formats, with and without flash attention, then vLLM's. llama.cpp's are left out if its GGUF
    file could not be created, and vLLM's if it cannot be installed or not be held to the target. Raises
    CalledProcessError if another step fails, such as the build of a bundle or of llama.cpp's server. target:
    "host", or "x86-64-v3" for servers that use AVX2 and nothing newer."""
    engines.prepare(directory, SHAPE, schemes[:1], ["llama"], target)
    listed = _ours(directory / SHAPE, schemes, threads, target)
    if (directory / SHAPE / "llama" / "q4_0.gguf").is_file():
        listed += _llama(directory, threads, target)
    if target == "host":
        listed += _vllm(directory, threads)
    else:
        print(f"vllm is left out: it cannot be held to {target}", flush=True)
    return listed


def _llama(directory: Path, threads: int, target: str) -> list[Competitor]:
    server = _llama_server(directory, target)
    environment = "llama" if target == "host" else f"llama-{target}"
    python = str(directory / "environments" / environment / "bin" / "python")
    limits = ("-c", str(CONTEXT * SLOTS), "-np", str(SLOTS), "-t", str(threads), "-tb", str(threads))
    quiet = ("--no-webui", "--log-disable", "--host", "127.0.0.1")
    return [
        Competitor(
            f"llama.cpp {form}{', flash attention' if flash == 'on' else ''}",
            (
                server,
                "-m",
                str(_gguf(directory / SHAPE, python, form)),
                "-fa",
                flash,
                *limits,
                *quiet,
                "--port",
            ),
            False,
        )
        for form in FORMATS
        for flash in ("on", "off")
    ]


def _vllm(directory: Path, threads: int) -> list[Competitor]:
    checkpoint = directory / SHAPE / "checkpoint"
    try:
        command = vllm_server.command(directory, checkpoint, (CONTEXT, SLOTS))
    except subprocess.CalledProcessError as error:
        print(f"vllm is left out: {error.cmd[0]} failed; see {error.output}", flush=True)
        return []
    return [Competitor("vllm bfloat16", command, False, vllm_server.variables(threads))]


def _gguf(area: Path, python: str, form: str) -> Path:
    """Returns the path of a GGUF file, with a vocabulary, which llama.cpp's server needs, of the benchmark's
    random checkpoint, the directory `area`/checkpoint. form: quantization format, such as q4_0; python:
    interpreter with gguf. The file is created if it is missing, and CalledProcessError raised if that fails.
    """
    directory, checkpoint = area / "llama", area / "checkpoint"
    created = directory / f"{form}-vocabulary.gguf"
    if not created.is_file():
        if not (directory / f"{form}.gguf").is_file():
            convert = [python, str(engines.HERE / "convert_llama.py"), str(checkpoint), str(directory), form]
            subprocess.run(convert, check=True, env=engines.environment(str(engines.HERE)))
        part = created.with_suffix(".part")
        script = str(Path(__file__).with_name("add_vocabulary.py"))
        inputs = [str(directory / f"{form}.gguf"), str(checkpoint / "tokenizer.json")]
        subprocess.run([python, script, *inputs, str(part)], check=True)
        part.rename(created)
    return created


def _ours(area: Path, schemes: list[str], threads: int, target: str) -> list[Competitor]:
    recipe, bundles = area / "serve.yaml", "serve" if target == "host" else f"serve-{target}"
    recipe.write_text(
        "version: 1\n"
        "models: {random: ./checkpoint}\n"
        f"quantizations: [{', '.join(schemes)}]\n"
        f"targets: [{target}]\n"
        f"compile: {{context_window: {CONTEXT}, prefill_chunk: 512, max_batch: {SLOTS}}}\n"
        'verify: {prompts: ["0123456789 abcdefghijkl"]}\n'
        f'bundle: {{output: "{bundles}/{{quantization}}"}}\n'
    )
    command = [sys.executable, "-m", "mlcbuild", "run", str(recipe), "--store", str(area.parent / "store")]
    subprocess.run(command, check=True, env=engines.environment(engines.OURS), stdout=subprocess.DEVNULL)
    variables = engines.environment(engines.OURS)
    start = (sys.executable, "-m", "mlcbuild_runtime")
    return [
        Competitor(
            f"ours {scheme}",
            (*start, str(area / bundles / scheme), "--threads", str(threads), "--port"),
            True,
            variables,
        )
        for scheme in schemes
    ]


def _llama_server(directory: Path, target: str) -> str:
    """Returns the path of llama.cpp's server, built for this machine, or for AVX2 and nothing newer, from the
    source that llama-cpp-python brings. Downloads and builds it if it is missing; raises CalledProcessError
    if that fails."""
    area = directory / ("llama-server" if target == "host" else f"llama-server-{target}")
    processor = ("-DGGML_NATIVE=ON",) if target == "host" else engines.V3_CMAKE
    created = area / "build" / "bin" / "llama-server"
    if not created.is_file():
        print("building llama.cpp's server: this takes a while ...", flush=True)
        shutil.rmtree(area, ignore_errors=True)
        area.mkdir()
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*fetch, "--dest", str(area), "llama-cpp-python"], check=True)
        with tarfile.open(next(area.glob("*.tar.gz"))) as archive:
            archive.extractall(area / "source", filter="data")
        source = next((area / "source").glob("*/vendor/llama.cpp"))
        with (area / "build.log").open("wb") as log:
            configure = ["cmake", "-S", str(source), "-B", str(area / "build"), *CMAKE, *processor]
            # The compiler that compiles its kernels correctly, as for the engine of ci/bench/cpu.
            variables = {**os.environ, **engines.PEERS["llama"].environment}
            subprocess.run(configure, check=True, stdout=log, stderr=log, env=variables)
            build = ["cmake", "--build", str(area / "build"), "--target", "llama-server", "--parallel"]
            subprocess.run(build, check=True, stdout=log, stderr=log)
    return str(created)


@contextmanager
def running(competitor: Competitor) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*competitor.command, str(port)],
        env={**os.environ, **competitor.variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/health")
        yield Running(competitor, url, process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"{process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{process.args!r} is not ready after 300 s")
