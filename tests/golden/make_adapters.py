# mypy: ignore-errors

"""Writes tests/golden/adapters: LoRA adapters by PEFT, and the matrices that PEFT merges in float32.

    GOLDEN_PYTHON tests/golden/make_adapters.py

It needs torch and peft. The base is made of random numbers by a rule that the tests repeat.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parent / "adapters"
VOCABULARY, HIDDEN, INNER = 40, 32, 48


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
            setattr(self, name, torch.nn.Linear(HIDDEN, rows, bias=False))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = torch.nn.Linear(INNER, HIDDEN, bias=False)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList([Layer()])


class Model(torch.nn.Module):
    """A module whose parameters have the names of a Llama model with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"model_type": "llama"}
        self.model = Inner()
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)


CONFIGS: dict[str, dict[str, object]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    "root": {"r": 8, "lora_alpha": 3, "use_rslora": True, "target_modules": ["v_proj", "up_proj", "o_proj"]},
    "dora": {"r": 4, "lora_alpha": 16, "use_dora": True, "target_modules": ["q_proj", "gate_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj"],
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"q_proj": 32},
        "modules_to_save": ["lm_head"],
    },
    "twin": {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
}
TOGETHER = {
    "together": (("plain", 1.0), ("root", 0.5), ("dora", 1.0)),
    "added": (("plain", 0.5), ("twin", -0.75), ("root", 1.5)),
}
"""Name of a reference result -> (name of a LoRA adapter, factor) of the adapters that are merged into the
base model one after the other. The adapters of "added" change the same matrices."""


def base() -> Model:
    torch.manual_seed(0)
    return Model()


def randomize(model: torch.nn.Module) -> None:
    """Gives every trained parameter of the adapters random values, because the product of PEFT's initial
    matrices is zero."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.requires_grad:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    save_file(
        {name: value.contiguous() for name, value in base().state_dict().items()}, GOLDEN / "base.safetensors"
    )
    for name, settings in CONFIGS.items():
        model = get_peft_model(base(), LoraConfig(**settings))
        randomize(model)
        with tempfile.TemporaryDirectory() as area:
            model.save_pretrained(area)
            (GOLDEN / name).mkdir()
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(Path(area, file), GOLDEN / name / file)
        save_merged(model.merge_and_unload(), GOLDEN / f"{name}-merged.safetensors")
    for golden, adapters in TOGETHER.items():
        merge_together(golden, adapters)


def merge_together(golden: str, adapters: tuple[tuple[str, float], ...]) -> None:
    """Merges several adapters into the base model, and writes the merged matrices and the adapters' names and
    factors."""
    model = None
    for name, factor in adapters:
        config = LoraConfig(**CONFIGS[name])
        if model is None:
            model = get_peft_model(base(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        model.load_adapter(GOLDEN / name, adapter_name=name)
        for module in model.modules():
            if hasattr(module, "set_scale") and name in getattr(module, "scaling", {}):
                module.set_scale(name, factor)
    assert model is not None
    merged = model.merge_and_unload(adapter_names=[name for name, _ in adapters])
    save_merged(merged, GOLDEN / f"{golden}-merged.safetensors")
    (GOLDEN / f"{golden}.json").write_text(json.dumps(adapters) + "\n")


def save_merged(model: torch.nn.Module, path: Path) -> None:
    """Writes those tensors of the merged model that differ from the base model's to a safetensors file."""
    before = load_file(GOLDEN / "base.safetensors")
    after = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file({name: value for name, value in after.items() if not torch.equal(value, before[name])}, path)


if __name__ == "__main__":
    main()
