"""Tests of the test suite: for example, how it reports tests that this machine cannot run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.conftest import ROOT, kind

SKIPS = ("pytest.skip", "pytest.mark.skipif", "pytest.importorskip")


def test_what_is_skipped_is_grouped_at_the_end() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/compiler/test_aarch64.py"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MLCBUILD_AARCH64": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    title, line = result.stdout.partition("not tested on this machine")[1:]
    pattern = r"\n +(\d+) need another processor: /nowhere is not there: ci/emulated-aarch64 \(\1\)\n"
    assert title and re.search(pattern, line), line


def trees(files: str, pattern: str) -> list[ast.Module]:
    """Returns the syntax trees of those test files whose names match `files` and whose text matches
    `pattern`. Parsing all of them would take two seconds."""
    texts = (path.read_text() for path in sorted((ROOT / "tests").rglob(files)))
    return [ast.parse(text) for text in texts if re.search(pattern, text)]


def test_every_reason_to_skip_says_what_is_missing() -> None:
    """Checks that every reason for skipping a test names what is missing. Reasons that are names of constants
    are not checked."""
    reasons = set()
    for tree in trees("*.py", r"\bskip"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SKIPS:
                values = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                reasons |= {ast.unparse(value) for value in values or node.args[:1]}
    assert len(reasons) > 30
    texts = {reason for reason in reasons if not re.fullmatch(r"[\w.]+", reason)}
    assert not {text for text in texts if kind(text) == "something else"}


CLOCKS = re.compile(r"\btime\.(?:process_time|thread_time|perf_counter|monotonic|time)(?:_ns)?\(")


def compared_with_numbers(function: ast.FunctionDef) -> list[str]:
    """Returns the assertions of a test function that compare a clock reading, or a variable that holds one,
    with a number of seconds."""
    timed = {
        ast.unparse(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and CLOCKS.search(ast.unparse(node.value))
    }

    def is_time(text: str) -> bool:
        return bool(CLOCKS.search(text)) or not timed.isdisjoint(re.findall(r"\w+", text))

    return [
        ast.unparse(compared)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for compared in ast.walk(node.test)
        if isinstance(compared, ast.Compare)
        and any(isinstance(side, ast.Constant) and side.value for side in compared.comparators)
        and is_time(ast.unparse(compared.left))
    ]


def test_no_test_asserts_a_number_of_seconds() -> None:
    """Checks that no test asserts a number of seconds, because a slow or busy machine would fail it: tests
    count, or compare with other work in the same process."""
    functions = [
        node
        for tree in trees("test_*.py", CLOCKS.pattern)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 100
    assert not [(node.name, wrong) for node in functions if (wrong := compared_with_numbers(node))]
    (example,) = ast.parse("def test():\n a = time.time()\n assert time.time() - a < 2").body
    assert isinstance(example, ast.FunctionDef) and compared_with_numbers(example)


LARGE = 100
"""Size of a large module, in lines of code without docstrings and comments: a module of at least this size
must have a test file with its name."""
PACKAGES = (ROOT / "mlcbuild", ROOT / "runtime" / "mlcbuild_format", ROOT / "runtime" / "mlcbuild_runtime")


def lines_of_code(source: str) -> int:
    """Returns the number of lines with code, not counting blank lines, comments and docstrings."""
    code = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and line.strip()[0] != "#"
    }
    described: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Expr):
            lines = range(node.lineno, (node.end_lineno or 0) + 1)
            text = node.value if isinstance(node, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                described.update(lines)
            elif not isinstance(node, ast.Expr):
                code.update(lines)  # a text may have empty lines
    return len(code - described)


@cache
def large_modules() -> dict[str, Path]:
    """Returns dotted name -> file of every large module of the project, that is, with at least LARGE lines of
    code."""
    by_name = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            text = path.read_text()
            if text.count("\n") >= LARGE and lines_of_code(text) >= LARGE:
                parts = path.relative_to(package.parent).with_suffix("").parts
                by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


KERNELS = "each kernel of a CPU is compiled for all instruction sets and run beside NumPy in tests/compiler"
LAUNCHES = "programs of GPUs run on an adapter beside the reference, in tests/compiler/test_gpu_blocks.py"
TESTED_TOGETHER: Mapping[str, str] = {
    "mlcbuild.bench.generator": "bench/test_bench.py",
    "mlcbuild.bundles.assemble": "bundles/test_bundle.py",
    "mlcbuild.bundles.reference_blocks": "bundles/test_reference.py",
    "mlcbuild.checkpoints.conversion": "checkpoints/test_weights.py",
    "mlcbuild.checkpoints.gguf_pretokenizers": "checkpoints/test_gguf_tokenizer.py",
    "mlcbuild.checkpoints.gguf_tensors": "checkpoints/test_gguf_file.py",
    "mlcbuild.checkpoints.mapping": "checkpoints/test_checkpoint.py",
    "mlcbuild.checkpoints.quantized.bitsandbytes_reader": "checkpoints/test_quantized_tables.py",
    "mlcbuild.checkpoints.quantized.compressed_tensors_reader": "checkpoints/test_quantized_compressed.py",
    "mlcbuild.checkpoints.row_reader": "checkpoints/test_lora.py",
    "mlcbuild.checkpoints.stored_parts": "checkpoints/test_quantized_gptq.py",
    "mlcbuild.ci.affected": "ci/test_ci.py",
    "mlcbuild.cli.build": "cli/test_run.py",
    "mlcbuild.cli.receipts": "store/test_receipt.py",
    "mlcbuild.cli.store_verbs": "remotes/test_sharing.py",
    "mlcbuild.compiler.cpu.isa": "compiler/test_kernels_code.py",
    "mlcbuild.compiler.cpu.ops": "compiler/test_decoder.py",
    "mlcbuild.compiler.cpu.parts": "compiler/test_decoder.py",
    "mlcbuild.compiler.program.functions": "compiler/test_decoder.py",
    "mlcbuild.installed.resolve": "installed/test_install.py",
    "mlcbuild.models.family": "models/test_type_names.py",
    "mlcbuild.prospect": "test_pipeline.py",
    "mlcbuild_format.program_json": "test_program.py",
    "mlcbuild_runtime.devices.gpu_program": "runtime/test_gpu.py",
    "mlcbuild_runtime.openai.anthropic_request": "runtime/test_anthropic.py",
    "mlcbuild_runtime.openai.ollama_request": "runtime/test_ollama.py",
    "mlcbuild_runtime.openai.responses_request": "runtime/test_responses.py",
}
"""Name of a large module without a test file of its own -> the test file that tests it together with other
modules, or the reason. New modules need a test file with their name; a module that gets one must be removed
here."""
TESTED_BY_ROOM: Mapping[str, str] = {
    "mlcbuild.compiler.cpu.kernels.": KERNELS,
    "mlcbuild.compiler.gpu.": LAUNCHES,
}
"""Beginning of module names -> the reason why these modules need no test files with their names."""


def has_tests(name: str) -> bool:
    """Returns True if there is a test file with a module's name. If several large modules have that name, the
    file must be in a directory with the name of the module's room, or in `runtime` for the runtime's modules.
    """
    *rooms, last_part = name.split(".")
    rooms += ["runtime"] if rooms[0] != "mlcbuild" else []
    files = list((ROOT / "tests").rglob(f"test_{last_part}.py"))
    is_shared = sum(other.rpartition(".")[2] == last_part for other in large_modules()) > 1
    return any(not is_shared or path.parent.name in rooms for path in files)


def test_every_large_module_has_a_file_of_tests() -> None:
    without = {
        name for name in large_modules() if not has_tests(name) and not name.startswith(tuple(TESTED_BY_ROOM))
    }
    new = sorted(without - TESTED_TOGETHER.keys())
    assert not new, "write a file of tests with the name of each of these modules"
    old = sorted(TESTED_TOGETHER.keys() - without)
    assert not old, "these have tests now, or are small: remove the lines"
    missing = {file for file in TESTED_TOGETHER.values() if not (ROOT / "tests" / file).is_file()}
    assert not missing


REGISTERED = "found by their names: tests/test_keys.py and tests of the room load every one of them"
BY_COMMAND = "a verb: tests run the command line"
NOT_IMPORTED: Mapping[str, str] = {
    "mlcbuild.compiler.cpu.formats.": REGISTERED,
    "mlcbuild.models.families.": REGISTERED,
    "mlcbuild.quant.formats.": REGISTERED,
    "mlcbuild.cli.bench": BY_COMMAND,
    "mlcbuild.cli.bundles": BY_COMMAND,
    "mlcbuild.cli.ci": BY_COMMAND,
    "mlcbuild.cli.cluster": BY_COMMAND,
    "mlcbuild.cli.listing": BY_COMMAND,
    "mlcbuild.cli.publishing": BY_COMMAND,
    "mlcbuild.cli.receipts": BY_COMMAND,
    "mlcbuild.cli.recipes": BY_COMMAND,
    "mlcbuild.cli.store_access": BY_COMMAND,
    "mlcbuild.compiler.cpu.kernels.amx": KERNELS,
    "mlcbuild.compiler.cpu.kernels.amx_weights": KERNELS,
    "mlcbuild.compiler.cpu.kernels.attention_amx": KERNELS,
    "mlcbuild.compiler.cpu.kernels.attention_prompt": KERNELS,
    "mlcbuild.compiler.cpu.kernels.bf16_math": KERNELS,
    "mlcbuild.compiler.cpu.kernels.dot": KERNELS,
    "mlcbuild.compiler.cpu.kernels.epilogue": KERNELS,
    "mlcbuild.compiler.cpu.kernels.expert_gate": KERNELS,
    "mlcbuild.compiler.cpu.kernels.float_product": KERNELS,
    "mlcbuild.compiler.cpu.kernels.int8_block": KERNELS,
    "mlcbuild.compiler.cpu.kernels.int8_cache": KERNELS,
    "mlcbuild.compiler.cpu.kernels.int8_call": KERNELS,
    "mlcbuild.compiler.cpu.kernels.int8_group": KERNELS,
    "mlcbuild.compiler.cpu.kernels.latent_rows": KERNELS,
    "mlcbuild.compiler.cpu.kernels.quantize_activations": KERNELS,
    "mlcbuild.compiler.cpu.kernels.rope": KERNELS,
    "mlcbuild.compiler.cpu.kernels.row_group": KERNELS,
    "mlcbuild.compiler.cpu.kernels.sampling_filters": KERNELS,
    "mlcbuild.compiler.cpu.kernels.sampling_row": KERNELS,
    "mlcbuild.compiler.cpu.kernels.table_rows": KERNELS,
    "mlcbuild.compiler.cpu.kernels.tiled_matrix": KERNELS,
    "mlcbuild.compiler.cpu.latents": KERNELS,
    "mlcbuild.compiler.cpu.mixture": KERNELS,
    "mlcbuild.compiler.cpu.parts": KERNELS,
    "mlcbuild.compiler.gpu.attention_launches": LAUNCHES,
    "mlcbuild.compiler.gpu.expert_launches": LAUNCHES,
    "mlcbuild.compiler.gpu.gpu_action": LAUNCHES,
    "mlcbuild.compiler.gpu.gpu_child": LAUNCHES,
    "mlcbuild.compiler.gpu.kernels.activations": LAUNCHES,
    "mlcbuild.compiler.gpu.kernels.heads": LAUNCHES,
    "mlcbuild.compiler.gpu.kernels.normed_factors": LAUNCHES,
    "mlcbuild.compiler.gpu.kernels.paged_attention": LAUNCHES,
    "mlcbuild.compiler.gpu.launch_plan": LAUNCHES,
    "mlcbuild.compiler.gpu.residual_stream": LAUNCHES,
}
"""Module, or the beginning of the names of several -> the reason why no file of tests imports it. Whoever
writes tests for one removes the line."""
IMPORT = re.compile(
    r"^\s*(?:from (mlcbuild[\w.]*) import (\([^)]*\)|.*)|import (mlcbuild[\w.]*))", re.MULTILINE
)


def imported(text: str) -> set[str]:
    """Returns the dotted names of all modules that the import statements in a program's text may mean. For
    `from a import b` these are "a" and "a.b", because b may be a module."""
    names = set()
    for package, listed, module in IMPORT.findall(text):
        names |= {package or module, *(f"{package}.{name}" for name in re.findall(r"\w+", listed))}
    return names


def test_every_module_is_imported_by_a_file_of_tests() -> None:
    """Checks that each module is imported directly by a test file: a failing unit shows in a test that calls
    it, and not only in one of a server or of a build."""
    names = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            if path.name not in ("__init__.py", "__main__.py"):
                names.add(".".join(path.relative_to(package.parent).with_suffix("").parts))
    assert len(names) > 500
    tested = set().union(*(imported(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")))
    without = names - tested
    new = sorted(name for name in without if not any(name.startswith(prefix) for prefix in NOT_IMPORTED))
    assert not new, "write a test that imports each of these modules"
    old = [prefix for prefix in NOT_IMPORTED if not any(name.startswith(prefix) for name in without)]
    assert not old, "these are imported now: remove the lines"
    text = (
        "from mlcbuild.a import (\n  b,\n  c as d,\n)\n    from mlcbuild_x import y  # z\nimport mlcbuild.e\n"
    )
    assert {"mlcbuild.a", "mlcbuild.a.b", "mlcbuild.a.c", "mlcbuild_x.y", "mlcbuild.e"} <= imported(text)
