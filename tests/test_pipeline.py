"""Tests of the steps that a recipe becomes: which steps variants share, and what is refused before any step
runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild import machine, pipeline, recipe
from mlcbuild.build.graph import Source
from mlcbuild.canon import file_digest
from mlcbuild.checkpoints.checkpoint_kinds import TOKENIZERS
from mlcbuild.checkpoints.fetch import Pinned
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.checkpoints.lock import Lock, Locked
from mlcbuild.errors import InputError, UsageError
from mlcbuild.models import parameters
from mlcbuild.pipeline import Pipeline
from mlcbuild.prospect import PROCESS_MEMORY
from tests import experts_golden, typecheckpoints
from tests.checkpoint_files import HF, sharded, tensors
from tests.conftest import TINY, project


def built(directory: Path, text: str, lock: Lock | None = None) -> Pipeline:
    path = project(directory, "version: 1\n" + text)
    return pipeline.build(recipe.load(path), lock or Lock())


def kinds(created: Pipeline) -> Counter[str]:
    """Returns kind of step -> number of steps of this kind in a pipeline. The kind is the first part of a
    step's name."""
    return Counter(step.name.partition("/")[0] for step in created.graph.steps())


MATRIX = """
models: {one: ./tiny, two: ./copy}
quantizations: [q0f32, q4f16_1, q4a8_1]
targets: [x86-64-v2, x86-64-v3]
"""


def fine_tune(directory: Path) -> None:
    """Copies the checkpoint of the small model in recipes/models to `directory`/copy, with another model name
    in its config.json, like a fine-tuned model with the same architecture."""
    copy = directory / "copy"
    copy.mkdir(parents=True)
    for path in TINY.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "somewhere"}))


def test_what_cells_of_the_matrix_share(tmp_path: Path) -> None:
    fine_tune(tmp_path)
    created = built(tmp_path, MATRIX)
    assert created.recipe_digest == file_digest(created.recipe.path)
    assert kinds(created) == {
        "config": 2,
        "tokenizer": 2,
        "reference": 2,
        "weights": 6,
        "library": 6,
        "bundle": 12,
        "verify": 12,
    }
    libraries = [step for step in created.graph.steps() if step.name.startswith("library/")]
    assert all("one" not in step.name and "two" not in step.name for step in libraries)


def test_no_path_and_no_display_name_enters_a_library_or_weights(tmp_path: Path) -> None:
    created = built(
        tmp_path, "models: {shown: ./tiny}\nquantizations: {alias: q4f16_1}\ntargets: {mine: x86-64-v3}\n"
    )
    for step in created.graph.steps():
        if step.name.startswith(("library/", "weights/", "config/", "reference/", "verify/")):
            text = json.dumps(dict(step.params))
            assert not any(word in text for word in ("shown", "alias", "mine", str(tmp_path))), step.name


def test_limits_and_prompts_that_differ_get_their_own_steps(tmp_path: Path) -> None:
    text = """
models: {tiny: ./tiny}
quantizations: [q0f32, q4f16_1]
targets: [x86-64-v3]
compile: {context_window: 256}
verify: {prompts: ["one two"]}
matrix:
  include:
    - {quantization: q4f16_1, compile: {max_batch: 2}, verify: {prompts: ["a b"]}}
"""
    created = built(tmp_path, text)
    references = sorted(step.name for step in created.graph.steps() if step.name.startswith("reference/"))
    assert len(references) == 2
    assert references[0] == "reference/tiny"
    assert references[1].startswith("reference/tiny/")


def test_each_variant_knows_its_steps(tmp_path: Path) -> None:
    created = built(tmp_path, "models: {tiny: ./tiny}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    (product,) = created.products
    assert {name.partition("/")[0] for name in product.steps} == {
        "config",
        "tokenizer",
        "weights",
        "library",
        "bundle",
        "reference",
        "verify",
    }
    assert product.last == "verify/tiny-q0f32-x86-64-v2"
    assert created.choose(["tiny-*"]) == (product.last,)
    assert created.choose(["weights/*"]) == ("weights/tiny/q0f32/plain",)
    with pytest.raises(UsageError, match="no step is called 'tony'"):
        created.choose(["tony"])


def test_speed_is_measured_beside_what_makes_a_bundle(tmp_path: Path) -> None:
    text = "models: {tiny: ./tiny}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\nbench: {prompt_tokens: 9}\n"
    created = built(tmp_path, text)
    (product,) = created.products
    assert product.bench is not None and product.bench not in product.steps
    assert created.choose(["tiny-*"]) == product.ends == (product.last, product.bench)
    bench = created.graph.step(product.bench)
    assert (bench.shared, bench.alone) == (False, True)
    assert bench.params == {"prompt_tokens": 9, "generate_tokens": 64, "machine": machine.kind()}
    assert machine.label(machine.kind()) in bench.needs


def test_a_speed_that_no_context_holds_is_refused(tmp_path: Path) -> None:
    text = "models: {tiny: ./tiny}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n"
    text += "compile: {context_window: 128}\nbench: {prompt_tokens: 100, generate_tokens: 29}\n"
    with pytest.raises(
        InputError,
        match=r":6:8: 100 tokens of prompt and 29 of answer do not fit the context of "
        r"tiny-q0f32-x86-64-v2, 128; lower them, or raise compile.context_window",
    ):
        built(tmp_path, text)


def test_a_step_of_a_local_model_reads_only_the_files_it_needs(tmp_path: Path) -> None:
    created = built(tmp_path, "models: {tiny: ./tiny}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    source = created.graph["fetch/tiny"]
    assert isinstance(source, Source)
    assert "model.safetensors" in source.files
    assert "heldout.jsonl" not in source.files
    selects = {step.name: step.inputs.get("checkpoint") for step in created.graph.steps()}
    config = selects["config/tiny"]
    assert config is not None
    assert config.select == ("config.json",)


def test_a_target_of_another_machine_is_not_verified(tmp_path: Path) -> None:
    created = built(
        tmp_path,
        "models: {tiny: ./tiny}\nquantizations: [q0f32]\n"
        "targets: {board: {triple: aarch64-unknown-linux-gnu, cpu: generic, output: object},"
        " here: {extends: x86-64-v2, output: object}}\n",
    )
    reasons = {product.variant.target.name: product.unverified for product in created.products}
    assert reasons["here"] == "an object file must be linked into a program before it can run"
    assert all(product.verify is None for product in created.products)
    assert kinds(created)["reference"] == 0


def test_faults_of_models_are_told_at_their_place_all_at_once(tmp_path: Path) -> None:
    fine_tune(tmp_path)
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        built(tmp_path, "models: {a: ./copy, b: ./empty}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    first, second = map(str, caught.value.problems)
    assert "recipe.yaml:2:13: model 'a'" in first
    assert '"lama" is not a supported family; supported: ' in first
    assert "recipe.yaml:2:24: model 'b'" in second
    assert "no config.json" in second


def damaged(directory: Path, name: str, damage: Callable[[Path], object]) -> str:
    """Returns the error message for a recipe whose model is damaged. name: the file that `damage` changes."""
    fine_tune(directory)
    damage(directory / "copy" / name)
    with pytest.raises(InputError) as caught:
        built(directory, "models: {a: ./copy}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 5), r"5 bytes do not hold the header\); fetch the file again"),
        (lambda path: os.truncate(path, 100), "100 bytes do not hold the header"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), r"\((\d+) bytes; its header describes \d+"),
        (lambda path: path.write_text("version https://git-lfs"), "Git LFS pointer, .* run 'git lfs pull'"),
    ],
)
def test_incomplete_weights_are_found_before_any_step(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    message = damaged(tmp_path, "model.safetensors", damage)
    assert re.search(rf"recipe.yaml:2:13: model 'a': .*copy/model.safetensors: .*{words}", message), message


def test_every_incomplete_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path / "parts", tensors())
    (tmp_path / "parts" / "config.json").write_text(json.dumps(HF))
    for path in (tmp_path / "parts").glob("*.safetensors"):
        os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(InputError) as caught:
        built(tmp_path, "models: {a: ./parts}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    shards = [str(problem) for problem in caught.value.problems if "safetensors" in str(problem)]
    assert len(shards) == 3
    assert len(caught.value.problems) == 4, "the missing tokenizer is reported with them"


def test_a_model_without_tokenizer_is_found_before_any_step(tmp_path: Path) -> None:
    fine_tune(tmp_path)
    for name in TOKENIZERS:
        (tmp_path / "copy" / name).unlink()
    with pytest.raises(InputError) as caught:
        built(tmp_path, "models: {a: ./copy}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n")
    message = str(caught.value)
    assert "copy: it has neither tokenizer.json nor tokenizer.model, so no text can be" in message
    os.truncate(tmp_path / "copy" / "model.safetensors", 100)
    with pytest.raises(InputError) as caught:
        pipeline.build(recipe.load(tmp_path / "recipe.yaml"), Lock())
    assert len(caught.value.problems) == 2, "weights and tokenizer are reported together"
    source, commit = HubSource("org/name", "main"), "a" * 40
    files = {name: Pinned(1, "b" * 64) for name in ("config.json", "model.safetensors")}
    with pytest.raises(InputError, match=r"hf://org/name@main: it has neither tokenizer.json nor"):
        built(
            tmp_path / "far",
            "models: {far: hf://org/name@main}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n",
            Lock({source: Locked(commit, files)}),
        )


def test_an_incomplete_adapter_is_found_before_any_step(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    model = "{source: ./tiny, adapters: [./adapter]}"
    with pytest.raises(InputError, match=r"adapter_model.safetensors: is truncated.*\(5 bytes"):
        built(
            tmp_path,
            f"models: {{a: {model}}}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n",
        )


def test_what_a_model_cannot_give_is_refused(tmp_path: Path) -> None:
    text = """
models: {tiny: ./tiny}
quantizations: {mixed: {scheme: q4f16_1, overrides: [{match: "no_such*", scheme: q8f16_1}]}}
targets: [x86-64-v2]
compile: {context_window: 100000}
"""
    with pytest.raises(InputError) as caught:
        built(tmp_path, text)
    message = str(caught.value)
    assert (
        "takes at most 512 tokens, but compile.context_window is 100000 for tiny-mixed-x86-64-v2" in message
    )
    assert "quantization 'mixed'" in message
    assert "no_such*" in message


def test_an_int8_cache_is_a_part_of_the_library_and_of_no_other_step(tmp_path: Path) -> None:
    text = """
models: {tiny: ./tiny}
quantizations: [q0f32]
targets: [x86-64-v2, x86-64-v3]
matrix: {include: [{model: tiny, quantization: q0f32, target: x86-64-v3, compile: {kv_cache: int8}}]}
"""
    steps = built(tmp_path, text).graph.steps()
    caches = {step.name: step.params["kv_cache"] for step in steps if "kv_cache" in step.params}
    assert [(name.split("/")[-1], kind) for name, kind in caches.items()] == [("x86-64-v3", "int8")]
    text = text.replace("[x86-64-v2,", "[webgpu,") + "compile: {kv_cache: int8}\n"
    with pytest.raises(InputError) as caught:
        built(tmp_path / "gpu", text)
    assert str(caught.value).endswith(
        ": target 'webgpu': compile.kv_cache is int8, which only CPUs have: leave it out for this target, "
        "or use a CPU"
    )


def test_a_hub_model_is_a_step_with_its_pinned_files(tmp_path: Path) -> None:
    source = HubSource("org/name", "main")
    commit = "a" * 40
    files = {name: Pinned(1, "b" * 64) for name in ("config.json", "model.safetensors", "tokenizer.json")}
    created = built(
        tmp_path,
        "models: {far: hf://org/name@main}\nquantizations: [q0f32]\ntargets: [x86-64-v2]\n",
        Lock({source: Locked(commit, files)}),
    )
    step = created.graph.step("fetch/far")
    assert step.params["commit"] == commit
    assert "main" not in json.dumps(dict(step.params)), "a branch never enters a key"
    assert any(step.name.startswith("library/bbbbbbbbbbbb/") for step in created.graph.steps())


def test_steps_reserve_memory_for_one_expert_at_a_time(tmp_path: Path) -> None:
    typecheckpoints.write("qwen3_moe", tmp_path / "experts")
    created = built(tmp_path, "models: {m: ./experts}\nquantizations: [q8a8_1]\ntargets: [x86-64-v3]\n")
    (weights,) = (step for step in created.graph.steps() if step.name.startswith("weights/"))
    golden = experts_golden.golden("qwen3_moe-8-of-257")
    shapes = [param.shape for param in parameters(golden.config)]
    stack = max(math.prod(shape) for shape in shapes)
    matrix = max(math.prod(shape[-2:]) for shape in shapes)
    assert 10 * matrix < stack
    assert weights.memory == 3 * 4 * matrix + PROCESS_MEMORY
