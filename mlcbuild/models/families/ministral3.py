"""The model family Ministral 3: Mistral with a factor that multiplies queries and grows with their
position.
"""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    window = fields.maybe_integer("sliding_window", None)
    return common.of(common.all_alike(fields, common.layer(), window))


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    _read,
    RopeRules(extensions=("beta",), ignored=("max_position_embeddings",)),
    config=ConfigRules(
        head_dim=128,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
)
