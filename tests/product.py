"""Creates a recipe of many variants whose steps cost nothing.

`python -m tests.product make DIRECTORY MODELS` writes the recipe with MODELS x 8 schemes x 12 targets.
`python -m tests.product fill ARGUMENT...` executes `mlcbuild run ARGUMENT...` with actions that write a few
bytes.

Only the actions are replaced, and only in that process. Recipe, graph, keys, store and bundles are the
ordinary ones, so `mlcbuild plan` and `mlcbuild run` find everything built afterwards. No two models are
equal, so variants share nothing but sources, tokenizers and weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from mlcbuild.canon import bytes_digest

SCHEMES = ("q0f32", "q0f16", "q4f32_1", "q4f16_1", "q8f32_1", "q8f16_1", "q4a8_1", "q8a8_1")
PRESETS = (
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "x86-64-v4-vnni",
    "x86-64-v4-amx",
    "aarch64-linux",
    "macos-arm64",
)
OWN: Mapping[str, str] = {
    "cortex-a72": "{extends: aarch64-linux, cpu: cortex-a72}",
    "neoverse-n1": "{extends: aarch64-linux, cpu: neoverse-n1}",
    "neoverse-v2": "{extends: aarch64-linux, cpu: neoverse-v2}",
    "haswell-object": "{extends: x86-64-v3, output: object}",
    "arm-object": "{extends: aarch64-linux, output: object}",
}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
Inputs = Mapping[str, Path]


def make(
    root: Path, models: int, schemes: Sequence[str] = SCHEMES, targets: Sequence[str] = (*PRESETS, *OWN)
) -> Path:
    """Writes a recipe, recipe.yaml, and its local models below `root`, and returns the recipe's path.
    Existing models are not changed. models: number of models; schemes, targets: names that the recipe
    lists."""
    names = [f"m{number:03}" for number in range(models)]
    for number, name in enumerate(names):
        model = root / "models" / name
        if not model.exists():
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 64 + number}))
            (model / "tokenizer.json").write_text(json.dumps({"model": number}))
            tiny_weights(model / "model.safetensors", f"weights of {number}")
    lines = ["version: 1", "models:", *(f"  {name}: models/{name}" for name in names)]
    lines += [f"quantizations: [{', '.join(schemes)}]", "targets:"]
    lines += [f"  {name}: {OWN.get(name, name)}" for name in targets]
    recipe = root / "recipe.yaml"
    recipe.write_text("\n".join([*lines, "compile: {context_window: 256}", ""]))
    return recipe


def tiny_weights(path: Path, text: str) -> None:
    """Writes a safetensors file with one U8 tensor that holds the bytes of a text."""
    size = len(text.encode())
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"text": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + text.encode())


def library(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    (out / "model.so").write_text(json.dumps([params["scheme"], params["target"], _digest(inputs)]))
    memory = {"weights": 1, "kv_cache": 1, "workspace": 1}
    (out / "library.json").write_text(json.dumps({"memory": memory}))


def weights(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    (out / "weights-00001-of-00001.safetensors").write_text(json.dumps([params["scheme"], _digest(inputs)]))


def assemble(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    for argument in ("library", "weights", "tokenizer"):
        for path in sorted(inputs[argument].iterdir()):
            (out / path.name).hardlink_to(path)
    (out / "bundle.json").write_text(json.dumps({"name": params["name"], "verification": None}))


def reference(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    (out / "tokens.json").write_text(json.dumps(_digest(inputs)))


def verify(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    document = json.loads((inputs["bundle"] / "bundle.json").read_bytes())
    document["verification"] = {"kl_mean": 0.01, "kl_max": 0.1, "top1_agreement": 0.99}
    (out / "bundle.json").write_text(json.dumps(document))


def bench(params: Mapping[str, object], inputs: Inputs, out: Path) -> None:
    (out / "speed.json").write_text(json.dumps({"machine": params["machine"]}))


def need_no_tools(*_: object) -> None:
    """Does nothing. It replaces the check for an installed linker in runs whose build actions are replaced by
    ones that compile nothing."""


def _digest(inputs: Inputs) -> str:
    return bytes_digest((inputs["config"] / "config.json").read_bytes())


REPLACED: Mapping[str, Callable[..., None]] = {
    "mlcbuild.compiler.cpu.action:compile_library": library,
    "mlcbuild.checkpoints.conversion:convert": weights,
    "mlcbuild.bundles.assemble:assemble": assemble,
    "mlcbuild.bundles.reference_logits:reference": reference,
    "mlcbuild.bundles.verify:verify": verify,
    "mlcbuild.bench.speed:bench": bench,
    "mlcbuild.session:require_tools": need_no_tools,
}


def replace_work(put: Callable[[object, str, object], None] = setattr) -> None:
    """Replaces, in this process, the functions that build steps execute by ones that write a few bytes. put:
    function that sets an attribute (object, name, value), such as pytest's monkeypatch.setattr."""
    for action, instead in REPLACED.items():
        module, _, name = action.partition(":")
        put(import_module(module), name, instead)


def main(verb: str, *arguments: str) -> int:
    from mlcbuild.cli import main as command_line

    if verb == "make":
        make(Path(arguments[0]), int(arguments[1]))
        return 0
    replace_work()
    return command_line(["run", *arguments, "--executor", "inline"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
