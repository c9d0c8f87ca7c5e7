"""Tests of every kind of block of a layer on this machine's GPU adapter, compared with float64 and with
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import BoundBuffer, Expression, Launch, evaluate, scalar_values
from mlcbuild_runtime.executor.executor import score

from mlcbuild import quant
from mlcbuild.bundles import reference
from mlcbuild.compiler.gpu.emitter import Emitter, Make
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.layer_launches import layer_launches
from mlcbuild.compiler.gpu.shader_text import OPENCL
from mlcbuild.compiler.gpu.support import unsupported
from mlcbuild.models import Experts, LatentAttention, LayerNorm, LayerSpec, ModelConfig, parameters
from tests import experts_golden, gpu_harness, typegoldens
from tests.libharness import EVERY, HERE, golden, pack, unpacked
from tests.patchwork import patchwork, random_weights
from tests.schemes import GPU_SCHEMES as SCHEMES

# Software adapters compile kernels for minutes where other tests compute, too.
pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(1200)]
GOLDENS = sorted((HERE / "golden").glob("*/golden.safetensors"))
TYPES = ["deepseek_v3"]
if EVERY:
    TYPES = [*typegoldens.NAMES, *(f"experts-{name}" for name in experts_golden.VARIANTS)]
    TYPES += [f"family-{path.parent.name}" for path in GOLDENS]
LIMITS = {"context_window": 64, "prefill_chunk": 64, "max_batch": 4}


def worst(config: ModelConfig, scheme: str, weights: Any, case: tuple[Any, Any], area: Path) -> list[float]:
    """Returns the largest difference of logits, as a fraction of their range, for the whole prompt, for
    chunks of it, and for single tokens."""
    library = gpu_harness.compiled(area, config, SCHEMES[scheme], **LIMITS)
    model = gpu_harness.loaded(library, config, SCHEMES[scheme], weights)
    tokens, expected = [int(token) for token in case[0]], case[1]
    try:
        logits = [score(model, tokens), score(model, tokens, chunk=7), score(model, tokens, chunk=1)]
    finally:
        model.close()
    return [float(np.abs(actual - expected).max() / np.ptp(expected)) for actual in logits]


@pytest.mark.parametrize(
    ("scheme", "limit"), [("q0f32", 1e-4), ("q4f16_1", 2e-2)] if EVERY else [("q0f32", 1e-4)]
)
def test_layers_of_every_block_give_what_the_reference_gives(
    scheme: str, limit: float, tmp_path: Path
) -> None:
    gpu_harness.needs_adapter()
    config = patchwork(every=EVERY)
    weights = random_weights(config)
    held = unpacked(config, SCHEMES[scheme], pack(config, SCHEMES[scheme], weights))
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, 71, 40)]
    expected = reference.logits(config, held, tokens, dtype=np.float64)
    assert max(worst(config, scheme, weights, (tokens, expected), tmp_path)) < limit


@pytest.mark.parametrize("name", TYPES)
def test_a_type_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    gpu_harness.needs_adapter()
    kind, _, variant = name.partition("-")
    loaders = {"experts": experts_golden.golden, "family": golden}
    case: Any = loaders[kind](variant) if kind in loaders else typegoldens.load(name, tmp_path)
    errors = worst(case.config, "q0f32", case.weights, (case.tokens, case.logits), tmp_path / "library")
    assert max(errors) < 1e-4


def test_stacks_larger_than_a_binding_are_bound_in_parts() -> None:
    config = experts_golden.golden("granitemoeshared").config
    emitter = Emitter(dialect=OPENCL)  # without variants for the features of WebGPU devices
    builder = LaunchBuilder(
        config, SCHEMES["q0f32"], Limits(**LIMITS), emitter=emitter, binding_bytes=1 << 13
    )
    for rows in (1, None):
        launches = layer_launches(builder, 0, config.layers[0], rows)
        for stack in ("gate_up", "down"):
            name = f"layers.0.mlp.experts.{stack}.weight"
            parts = [(launch, use) for launch in launches for use in launch.uses if use.name == name]
            assert len(parts) > 1
            assert sorted(use.offset for _, use in parts) == [use.offset for _, use in parts]
            assert all(use.offset % 256 == 0 for _, use in parts)
            bound = [builder.emitter.shaders[launch.kernel].bindings for launch, _ in parts]
            assert max(len(bindings) for bindings in bound) <= 8
        shared = [use.name for launch in launches for use in launch.uses if ".shared." in use.name]
        assert sorted(shared) == [f"layers.0.mlp.shared.{name}.weight" for name in ("down", "gate_up")]


@pytest.mark.parametrize(
    ("name", "scheme", "count"),
    [
        ("qwen2-bias", "q4f16_1", 7),
        *([("gemma2", "q4f16_1", 7)] if EVERY else []),
        ("gemma2", "q0f32", 7),
        ("mixtral", "q8f32_1", 9),
        ("granitemoeshared", "q4f16_1", 9),
    ],
)
def test_a_token_reads_each_weight_once_in_few_launches(name: str, scheme: str, count: int) -> None:
    """Checks that one token reads each weight exactly once, in `count` kernel launches per layer. Launches
    that copy pages for drafts do not count: without drafts they have no workgroups."""
    model: Any = experts_golden.golden(name) if name in experts_golden.VARIANTS else golden(name)
    emitter = Emitter(dialect=OPENCL)  # without variants for the features of WebGPU devices
    builder = LaunchBuilder(model.config, SCHEMES[scheme], Limits(**LIMITS), emitter=emitter)
    sizes = {**builder.calls.sizes, "n": 1}
    for index, layer in enumerate(model.config.layers[:2]):
        launches = layer_launches(builder, index, layer, 1)
        assert sum("fork" not in launch.kernel for launch in launches) == count
        read = dict[str, int]()
        for launch in launches:
            shader = builder.emitter.shaders[launch.kernel]
            scalars = scalar_values(shader, launch, sizes)
            for use, binding in zip(launch.uses, shader.bindings, strict=True):
                if use.name.startswith("layers."):
                    assert use.name not in read or "norm" in use.name, "no weight is read twice"
                    read[use.name] = evaluate(binding.size, scalars)
        params = [param for param in parameters(model.config) if param.name.startswith(f"layers.{index}.")]
        stored = {tensor.name: tensor.size for tensor in quant.stored_parameters(params, SCHEMES[scheme])}
        # With a pending sum, the norm after the layer is read by the next one.
        left_out = {name for name in set(stored) - set(read) if "post_norm" in name}
        assert {name: -(-size // 4) * 4 for name, size in stored.items() if name not in left_out} == {
            name: -(-size // 4) * 4 for name, size in read.items() if name.startswith(f"layers.{index}.")
        }
    assert len(builder.settle()) <= 1, "at most one launch after all layers"


@dataclass
class CountedLaunches(Emitter):
    """A builder of kernel launches whose kernels are never compiled; each is named after the function that
    makes it. It records the descriptions of all matrix products, in the order of the launches."""

    products: list[ProductSpec] = field(default_factory=list)

    def kernel(self, make: Make, *arguments: object) -> str:
        self.products += [argument for argument in arguments[:1] if isinstance(argument, ProductSpec)]
        return make.__name__

    def launch(
        self, kernel: str, scalars: Mapping[str, Expression], buffers: Mapping[str, str | BoundBuffer]
    ) -> Launch:
        return Launch(kernel, (), ())


def launches_of(layer: LayerSpec, is_first: bool) -> int:
    """Returns the number of GPU kernel launches that one layer needs for one token, computed from the table
    of launches in targets/README.md. is_first: True for the first layer of a model."""
    mixer, block, count = layer.mixer, layer.feed_forward, 7
    adds_normed = layer.norms.after is not None
    if isinstance(mixer, LatentAttention):
        count += 3 if mixer.query_latent else 2
        count += mixer.bias or (adds_normed and not is_first)
    else:
        count += isinstance(mixer.qk_norm, LayerNorm) and mixer.qk_norm.bias
        count += not is_first and adds_normed and layer.norms.before is not None and mixer.qkv_bias
    if isinstance(block, Experts):
        count += 2 + 2 * block.shared_gate + (adds_normed and block.shared_size > 0)
    return count


WITH_PAIRS = ("granitemoeshared", "qwen2_moe", "type deepseek_v2")
"""Names of model types whose layers multiply the same rows with two matrices in one launch, unless a sum is
still to be added to these rows."""


def _with_norms_after(config: ModelConfig) -> ModelConfig:
    """Returns a model whose layers also have norms after attention and feed-forward."""
    layers = [replace(each, norms=replace(each.norms, after=each.norms.before)) for each in config.layers]
    return replace(config, layers=tuple(layers))


def test_the_first_sum_of_experts_replaces_what_a_norm_reads() -> None:
    """Checks products that write the buffer `delta`, whose rows a norm reads: the first one of a layer
    replaces them, later ones add to them."""
    for name, rest in (("granitemoeshared", []), ("qwen2_moe", [True])):
        config = _with_norms_after(experts_golden.golden(name).config)
        emitter = CountedLaunches()
        builder = LaunchBuilder(config, SCHEMES["q4f16_1"], Limits(**LIMITS), emitter=emitter)
        layer_launches(builder, 0, config.layers[0], 1)
        to_delta = [each.residual for each in emitter.products if each.outputs == config.hidden_size]
        assert to_delta == [False, False, *rest], name


def test_every_model_type_is_supported_and_takes_the_launches_of_the_guide(tmp_path: Path) -> None:
    configs = {name: experts_golden.golden(name).config for name in experts_golden.VARIANTS}
    configs |= {path.parent.name: golden(path.parent.name).config for path in GOLDENS}
    for name in typegoldens.NAMES:
        (tmp_path / name).mkdir()
        configs[f"type {name}"] = typegoldens.load(name, tmp_path / name).config
    configs |= {f"{name}, norms after": _with_norms_after(configs[name]) for name in WITH_PAIRS}
    assert len(configs) > 60
    for name, config in configs.items():
        assert unsupported(config) == [], name
        for rows in (1, 4):
            builder = LaunchBuilder(config, SCHEMES["q4f16_1"], Limits(**LIMITS), emitter=CountedLaunches())
            for index, layer in enumerate(config.layers):
                launches = layer_launches(builder, index, layer, rows)
                count = sum(launch.kernel != "fork" for launch in launches)
                assert count == launches_of(layer, index == 0), (name, index)
