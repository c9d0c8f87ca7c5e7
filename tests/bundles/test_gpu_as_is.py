"""Tests that a GGUF file whose quantized values are kept becomes a verified bundle for GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import gpu_harness
from tests.conftest import TINY, checked, mlcbuild
from tests.gguf_files import tiny_metadata, write_gguf

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(900)]
RECIPE = """\
version: 1
models: {m: ./m.gguf}
quantizations: {same: as-is}
targets: [webgpu]
compile: {context_window: 64, prefill_chunk: 32, max_batch: 2}
verify: {prompts: ["What is 20 + 11?"], max_kl: 0.001}
"""


def test_a_file_of_mixed_types_keeps_its_values_on_gpus(tmp_path: Path) -> None:
    """Checks a GGUF file of mixed quantization types on a GPU: `verify` compares the GPU program's logits
    with float64 logits of the file's own values."""
    gpu_harness.needs_adapter()
    types = {"attn_output.weight": "Q8_0", "ffn_down.weight": "MXFP4", "token_embd.weight": "F16"}
    write_gguf(TINY, tmp_path / "m.gguf", "Q4_1", metadata=tiny_metadata(TINY), types=types)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = checked(mlcbuild("run", "recipe.yaml", store=tmp_path / "store", cwd=tmp_path))
    assert "1 bundle in dist" in result.splitlines()[-1]
    document = json.loads((tmp_path / "dist" / "m-same-webgpu" / "bundle.json").read_bytes())
    scheme = document["scheme"]
    assert (document["target"]["device"], scheme["bits"], scheme["layout"]) == ("webgpu", 4, "row")
    others = {override["scheme"]["name"] for override in scheme["overrides"]}
    assert others == {"q8_0", "mxfp4", "f16", "f32"}
