"""Tests that a GGUF file whose quantized values are kept becomes a verified bundle for GPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import gpu_harness
from tests.checkpoint_files import shorten
from tests.conftest import TINY, checked, mlcbuild
from tests.gguf_files import tiny_metadata, write_gguf
from tests.libharness import EVERY
from tests.runtime import shared
from tests.runtime.test_browser_page import ENGINE, GPU, evaluate
from tests.runtime.test_page import CHROMIUM, Browser

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(900)]
RECIPE = """\
version: 1
models: {m: ./m.gguf}
quantizations: {same: as-is}
targets: [webgpu]
compile: {context_window: 64, prefill_chunk: 32, max_batch: 2}
verify: {prompts: ["What is 20 + 11?"], max_kl: 0.001}
"""


def built(area: Path, kind: str, types: dict[str, str], layers: int | None = None) -> Path:
    """Writes the embedded model as a GGUF file, builds it for GPUs with the file's own quantization, and
    returns the bundle's directory. Skips the test without a GPU adapter. kind: GGUF type of the matrices;
    types: ending of a tensor's name -> another type for these tensors; layers: number of the model's first
    layers that are kept, None for all."""
    gpu_harness.needs_adapter()
    checkpoint = shutil.copytree(TINY, area / "checkpoint")
    if layers is not None:
        shorten(checkpoint, layers)
    write_gguf(checkpoint, area / "m.gguf", kind, metadata=tiny_metadata(TINY), types=types)
    (area / "recipe.yaml").write_text(RECIPE)
    result = checked(mlcbuild("run", "recipe.yaml", store=area / "store", cwd=area))
    assert "1 bundle in dist" in result.splitlines()[-1]
    return area / "dist" / "m-same-webgpu"


def test_a_file_of_mixed_types_keeps_its_values_on_gpus(tmp_path: Path) -> None:
    """Checks a GGUF file of mixed quantization types on a GPU: `verify` compares the GPU program's logits
    with float64 logits of the file's own values."""
    types = {"attn_output.weight": "Q8_0", "ffn_down.weight": "MXFP4", "token_embd.weight": "F16"}
    document = json.loads((built(tmp_path, "Q4_1", types, layers=1) / "bundle.json").read_bytes())
    scheme = document["scheme"]
    assert (document["target"]["device"], scheme["bits"], scheme["layout"]) == ("webgpu", 4, "row")
    others = {override["scheme"]["name"] for override in scheme["overrides"]}
    assert others == {"q8_0", "mxfp4", "f16", "f32"}


@pytest.mark.skipif(not EVERY, reason="MLCBUILD_TEST_EVERY is not set: browsers compile kernels for minutes")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_a_file_answers_in_a_browser_as_it_does_here(kind: str, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    bundle = built(tmp_path, kind, {})
    prompt = ("--temperature", "0", "What is 20 + 11?")
    here = checked(mlcbuild("chat", bundle, *prompt, store=tmp_path / "store")).strip()
    with shared.serving(bundle, "--browser") as site:
        browser = Browser(tmp_path / "profile", GPU)
        try:
            # Unlike the page itself, this file loads no model.
            browser.call("Page.navigate", url=f"{site.url}/page.css")
            browser.until("document.readyState === 'complete' && document.body.innerText")
            answer = f"{ENGINE} return (await create(sum)).choices[0].message.content;"
            assert here and evaluate(browser, answer) == here
        finally:
            browser.close()
