"""Tests of the program that makes tables of results: from files of samples to Markdown, which replaces the
text between two markers of a page."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

BENCH = ROOT / "ci" / "bench"


def _loaded(name: str, path: Path) -> ModuleType:
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


tables = _loaded("bench_tables", BENCH / "results_parts" / "tables.py")
RESULTS = tables.Results(
    "Inference",
    "ci/bench/cpu --threads 2",
    "A Processor, 2 cores",
    "2026-01-02",
    "abc1234",
    (
        tables.Row(
            "prefill",
            "tokens/s",
            {"llama q4_0": [90, 100, 5000], "llama q8_0": [80], "ours q4a8_1": [1, 250, 260]},
            500.0,
        ),
        tables.Row("first token", "s", {"ours q4a8_1": [0.5], "ours q8a8_1": [0.25], "openvino int4": [1.0]}),
        tables.Row("memory", "MB", {"llama q4_0": [12345.6]}),
    ),
)
TABLE = """\
Inference. A Processor, 2 cores, 2026-01-02, commit abc1234: `ci/bench/cpu --threads 2`

Times as fast as llama.cpp: prefill 2.5.

|  | mlcbuild | llama.cpp | OpenVINO | ratio | of the limit |
|---|---:|---:|---:|---:|---:|
| prefill, tokens/s | 250 | 100 |  | 2.50 | 50% |
| first token, s | 0.25 |  | 1 | 4.00 |  |
| memory, MB |  | 12,346 |  |  |  |"""


def test_a_cell_is_the_median_of_a_tool_s_best_variant() -> None:
    assert tables.render(RESULTS) == TABLE


def test_losses_are_compared_at_equal_sizes() -> None:
    measured = [("ours q4a8_1", 4.7, 0.02), ("ours q8a8_1", 8.6, 0.001), ("llama.cpp q4_0", 4.9, 0.03)]
    small, large = tables.loss_rows(measured, (5, 9))
    assert (small.figure, small.unit) == ("KL at up to 5 bits a weight", "nats")
    assert small.samples == {"ours q4a8_1": [0.02], "llama.cpp q4_0": [0.03]}
    assert set(large.samples) == {name for name, _, _ in measured}
    assert tables.loss_rows(measured, (3,)) == []


def test_loads_have_a_row_for_each_figure_that_is_shown() -> None:
    samples = {
        ("8 clients", "ours q4a8_1", "output tok/s"): [300.0, 310.0],
        ("8 clients", "ours q4a8_1", "failed"): [0.0, 0.0],
        ("8 clients", "llama.cpp", "output tok/s"): [100.0],
    }
    (row,) = tables.load_rows(samples)
    assert (row.figure, row.unit) == ("8 clients: output", "tokens/s")
    assert row.samples == {"ours q4a8_1": [300.0, 310.0], "llama.cpp": [100.0]}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    tables.write(tmp_path / "new" / "cpu.json", RESULTS)
    assert tables.render(tables.read(tmp_path / "new" / "cpu.json")) == TABLE


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "results"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_replace_what_stands_between_the_markers_of_a_page(tmp_path: Path) -> None:
    tables.write(tmp_path / "b.json", RESULTS)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- results: made by ci/bench/results -->\nold\n<!-- end of results -->\nz\n")
    assert _run("--directory", tmp_path, "--write", page).returncode == 0
    once = page.read_text()
    assert once.startswith("a\n<!--") and once.endswith("-->\nz\n") and TABLE in once and "old" not in once
    assert _run("--directory", tmp_path, "--write", page).returncode == 0
    assert page.read_text() == once


def test_tables_stand_in_the_order_of_a_reader(tmp_path: Path) -> None:
    for name in ("build-1000", "weights-x", "cpu-a-2", "cpu-smollm2-2", "other", "serve-x", "accuracy-x"):
        tables.write(tmp_path / f"{name}.json", replace(RESULTS, title=name))
    titles = [
        line.partition(".")[0] for line in _run("--directory", tmp_path).stdout.splitlines() if ": `" in line
    ]
    assert titles[:3] == ["cpu-smollm2-2", "serve-x", "cpu-a-2"]
    assert titles[3:] == ["accuracy-x", "weights-x", "build-1000", "other"]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the program ci/bench/build as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return _loaded("bench_build", BENCH / "build")


def test_rows_of_cold_and_shared_builds_compare_the_same_copies(build: ModuleType) -> None:
    samples = {("mlcbuild", "no-op"): [1.0], ("mlcbuild, graph", "cold"): [3.0], ("dvc", "cold"): [9.0]}
    samples |= {("mlcbuild, graph", "shared"): [0.5, 0.7], ("snakemake", "shared"): [2.0]}
    missing = {("doit", "cold"): "no run", ("dvc", "shared"): "stopped after 600 s"}
    rows = {row.figure: row.samples for row in build.rows(samples | missing)}
    assert rows == {
        "no-op": {"mlcbuild": [1.0]},
        "plan": {},
        "cold": {"mlcbuild": [3.0], "dvc": [9.0]},
        "all results from a shared cache": {"mlcbuild": [0.5, 0.7], "snakemake": [2.0]},
    }
    assert [row.figure for row in build.rows({("dvc", "plan"): [1.0]})] == ["no-op", "plan"]


def test_a_run_from_a_shared_cache_begins_in_a_fresh_place(build: ModuleType, tmp_path: Path) -> None:
    """Checks the benchmark of build tools: before each timed run from a shared cache, the outputs and the
    local state of the run before are removed, but not the cache. Tools without a shared cache have no such
    run."""
    script = "test -e cache && ! test -e out && ! test -e state && mkdir out && echo {count} >state"
    tool = build.Tool(
        "own", Path.mkdir, (), (), (), ("cache",), shared=("sh", "-c", script), fresh=("out", "state")
    )
    (tmp_path / "cache").touch()
    for count in (20, 30):
        assert build.attempt(tool, tmp_path, count, "shared", 60.0) >= 0
        assert (tmp_path / "state").read_text() == f"{count}\n"
    with_cache = {
        build_tool.name for build_tool in build.tools.ours() if build.commands(build_tool)["shared"]
    }
    assert with_cache == {"mlcbuild, graph"}


SIZES = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "vocab_size": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": 0,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 5, "num_experts": 4, "num_experts_per_tok": 2}
ATTENTION = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
"""Number of weights of the query, key, value and output projections in one layer of the example model, whose
hidden size is 8, with two query heads and one KV head."""


def _experts_read(rows: int) -> float:
    """Returns the expected number of distinct experts that `rows` tokens use if each chooses 2 of 4 experts,
    computed by enumerating all choices."""
    choices = [*itertools.combinations(range(4), 2)]
    unions = [set(itertools.chain(*rows_of)) for rows_of in itertools.product(choices, repeat=rows)]
    return statistics.mean(map(len, unions))


@pytest.mark.parametrize(
    ("sizes", "expert", "stored", "read", "multiplied"),
    [
        (SIZES, 3 * 8 * 6, 1, (1, 1, 1), 1),
        (EXPERTS, 3 * 8 * 5, 4, tuple(map(_experts_read, (1, 2, 3))), 2),
    ],
    ids=["dense", "experts"],
)
def test_the_limit_of_a_machine_counts_what_must_be_read_and_multiplied(
    sizes: dict[str, int],
    expert: int,
    stored: int,
    read: tuple[float, ...],
    multiplied: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for parts in ("cpu_parts", "results_parts"):
        monkeypatch.syspath_prepend(str(BENCH / parts))
    figures = _loaded("bench_cpu_figures", BENCH / "cpu_parts" / "figures.py")
    machine = {"read": 3.0, "int8": 5.0, "float32": 7.0}
    total = 3 * (ATTENTION + stored * expert) + 2 * 10 * 8
    entry = figures.Entry("ours", 4, True, (), "", total // 2)  # half a byte for each weight
    for batch, experts in enumerate(read, 1):
        weights = 3 * (ATTENTION + experts * expert) + 10 * 8  # of the embeddings, only a few rows are read
        cache = batch * figures.CONTEXT * 3 * 2 * 4 * 2  # layers, keys and values, values, bytes
        rate = figures._limit(f"decode {batch}", entry, sizes, machine)
        assert rate == pytest.approx(batch / ((weights / 2 + cache) / 3e9))
    products = 2 * 16 * 3 * (ATTENTION + multiplied * expert)
    # Each of 16 tokens is compared with those before it, then sums their values: 2 operations for each.
    attention = 3 * 2 * 2 * 8 * 16 * 16 / 2
    rate = figures._limit("prefill 16", entry, sizes, machine)
    assert rate == pytest.approx(16 / (products / 5e9 + attention / 7e9))


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    result = _run("--directory", tmp_path, "--write", page)
    assert result.returncode == 1 and "are missing" in result.stderr and page.read_text() == "nothing\n"


def test_the_front_page_shows_the_results_that_are_kept() -> None:
    assert _run().stdout.strip() in (ROOT / "README.md").read_text()
    assert list((ROOT / "ci" / "results").glob("*.json")), "the page promises results"
