"""The model family Qwen2 with experts: a gated feed-forward that every token uses beside its experts; every
second of the lower layers may have an attention window."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import layers_by_step, mixed, read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules, layer_windows, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import LAYER_KINDS


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = replace(common.attention, qkv_bias=fields.flag("qkv_bias", True))
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    layers = windowed(layer, _windows(fields, common.count))
    router = Router(normalized=fields.flag("norm_topk_prob", False))
    experts = read_experts(fields, common, router, defaults=(60, 4, 1408))
    shared = fields.integer("shared_expert_intermediate_size", 5632, high=2**22)
    experts = replace(experts, shared_size=shared, shared_gate=True)
    sparse = layers_by_step(fields, common.count)
    return replace(common.model, layers=mixed(layers, sparse, experts, common.feed_forward))


def _windows(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Returns one attention window, in tokens, for each of `count` layers; None: no window. If
    use_sliding_window is set in config.json, layers 0, 2, 4 and so on below max_window_layers (28 if absent)
    have one of sliding_window (4096) tokens or, if layer_types is present, the layers that it lists. A wrong
    field adds an error message to `fields`; the result must then not be used."""
    fields.ignore(("sliding_window", "max_window_layers"))
    full, sliding = LAYER_KINDS
    if not fields.flag("use_sliding_window", False):
        return layer_windows(fields, [full] * count, None)
    window, last = fields.integer("sliding_window", 4096), fields.integer("max_window_layers", 28, low=0)
    kinds = [sliding if index % 2 == 0 and index < last else full for index in range(count)]
    return layer_windows(fields, kinds, window)


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _read,
    config=ConfigRules(defaults={"num_key_value_heads": 16}),
    tensors=TensorRules(
        {
            "mlp.shared.gate_up.weight": (
                "mlp.shared_expert.gate_proj.weight",
                "mlp.shared_expert.up_proj.weight",
            ),
            "mlp.shared.down.weight": ("mlp.shared_expert.down_proj.weight",),
            "mlp.shared_gate.weight": ("mlp.shared_expert_gate.weight",),
        }
    ),
)
