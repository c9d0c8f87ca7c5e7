"""Tests of `mlcbuild run` from a recipe to bundles, with the real command line, compiler and runtime."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
from blake3 import blake3

from mlcbuild.store.store import Store
from tests.conftest import QUICKSTART, ROOT, TINY, checked, copy_store, mlcbuild, project
from tests.forkserver import COMMANDS
from tests.hub import Hub
from tests.libharness import EVERY
from tests.runtime.shared import serving

STORY = ROOT.parent / "shared" / "models" / "story"
SMALL = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q0f32]
targets: [host]
compile: {context_window: 512, prefill_chunk: 128, max_batch: 8}
"""


def run_json(recipe: Path, store: Path, *more: str) -> dict[str, dict[str, str]]:
    """Runs a recipe with --json. Returns step name -> the step's entry in the JSON output; under the name "",
    variant name -> status."""
    document = json.loads(checked(mlcbuild("run", recipe, "--json", *more, store=store)))
    assert set(document) == {"variants", "steps", "seconds"}
    by_name = {step["name"]: step for step in document["steps"]}
    by_name[""] = {variant["name"]: variant["status"] for variant in document["variants"]}
    return by_name


def statuses(actual: dict[str, dict[str, str]], kind: str) -> set[str]:
    return {step["status"] for name, step in actual.items() if name.startswith(kind + "/")}


def test_a_second_run_reuses_everything(tiny_bundles: Path, common_store: Path) -> None:
    actual = run_json(tiny_bundles / "recipe.yaml", common_store)
    assert {step["status"] for name, step in actual.items() if name} == {"reused"}
    assert set(actual[""].values()) == {"reused"}


def test_the_last_line_says_what_and_where(tiny_bundles: Path, common_store: Path) -> None:
    last = checked(mlcbuild("run", "recipe.yaml", store=common_store, cwd=tiny_bundles)).splitlines()[-1]
    assert last.startswith("0 built, ")
    assert last.endswith("; 3 bundles in dist")


def test_a_bundle_holds_what_its_manifest_says(tiny_bundles: Path) -> None:
    for bundle in (tiny_bundles / "dist").glob("tiny-*"):
        manifest = json.loads((bundle / "bundle.json").read_bytes())
        present = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
        assert present == {*manifest["files"], "bundle.json", "provenance.json"}
        for name, file in manifest["files"].items():
            assert blake3((bundle / name).read_bytes()).hexdigest() == file["blake3"]


def test_provenance_vouches_for_the_manifest_and_names_sources(tiny_bundles: Path) -> None:
    bundle = tiny_bundles / "dist" / "tiny-q4a8_1-host"
    statement = json.loads((bundle / "provenance.json").read_bytes())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": "bundle.json", "digest": {"sha256": digest}}]
    definition = statement["predicate"]["buildDefinition"]
    sources = {item["name"]: item["digest"]["blake3"] for item in definition["resolvedDependencies"]}
    weights = blake3((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert sources["fetch/tiny/model.safetensors"] == weights
    steps = definition["internalParameters"]["steps"]
    assert {"bundle/tiny-q4a8_1-host", "verify/tiny-q4a8_1-host"} <= set(steps)
    assert str(tiny_bundles) not in json.dumps(statement), "no path of this machine"


def test_verification_figures_are_in_the_manifest(tiny_bundles: Path) -> None:
    figures = {}
    for scheme in ("q0f32", "q4f16_1", "q4a8_1"):
        path = tiny_bundles / "dist" / f"tiny-{scheme}-host" / "bundle.json"
        figures[scheme] = json.loads(path.read_bytes())["verification"]
    exact = figures["q0f32"]
    assert exact["kl_mean"] < 1e-9
    assert exact["top1_agreement"] == 1
    assert exact["decode_error"] < 1e-3
    assert exact["perplexity"] == pytest.approx(exact["reference_perplexity"], rel=1e-4)
    for scheme in ("q4f16_1", "q4a8_1"):
        assert 1e-5 < figures[scheme]["kl_mean"] < 0.1, "a real loss, and a bearable one"


def test_a_variant_beyond_its_threshold_fails_and_says_by_how_much(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    easy = QUICKSTART.replace("q0f32, ", "")
    recipe = project(tmp_path, easy)
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", tmp_path / "prompts.txt")
    first = run_json(recipe, common_store)
    assert set(first[""].values()) == {"reused"}, "a bundle whose steps were reused was not built"
    recipe.write_text(easy.replace("max_kl: 0.1", "max_kl: 0.000001"))
    summary = tmp_path / "summary.md"
    result = mlcbuild("run", recipe, "--keep-going", "--summary", summary, store=common_store)
    assert result.returncode == 1
    assert "the mean KL divergence is 0.0" in result.stdout
    row = next(line for line in summary.read_text().splitlines() if line.startswith(r"| tiny-q4a8\_1-host"))
    assert re.fullmatch(
        r"\|[^|]+\| failed \|[^|]+MB \|[^|]+kB \| 0\.0\d+ \| [\d.]+ \| [\d.]+% \| .*exact .*\|", row
    )
    assert "max_kl is 1e-06" in result.stdout
    refused = tmp_path / "dist" / ".tiny-q4a8_1-host.refused"
    assert f"verification failed; the bundle of an earlier run is in {refused} now" in result.stdout
    assert not [path for path in (tmp_path / "dist").iterdir() if not path.name.startswith(".")]
    recipe.write_text(easy)
    run_json(recipe, common_store)
    assert (tmp_path / "dist" / "tiny-q4a8_1-host" / "bundle.json").is_file()


def test_a_fine_tune_reuses_the_library(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> None:
    """Checks that a model with the same config and other weights reuses the library, and that all other steps
    run again."""
    recipe = project(tmp_path, SMALL)
    path = tmp_path / "tiny" / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    values = np.frombuffer(data, np.float32, offset=start).copy() * np.float32(1.01)
    path.write_bytes(bytes(data[:start]) + values.tobytes())
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "_name_or_path": "another"}))
    actual = run_json(recipe, common_store)
    assert statuses(actual, "library") == {"reused"}
    assert statuses(actual, "weights") == {"built"}
    assert actual[""] == {"tiny-q0f32-host": "built"}


def test_the_speed_of_a_bundle_is_measured_once_on_a_machine_and_never_shared(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    recipe = project(tmp_path, SMALL + "bench: {prompt_tokens: 16, generate_tokens: 4}\n")
    remote, summary = tmp_path / "remote", tmp_path / "summary.md"
    said = checked(mlcbuild("run", recipe, "--summary", summary, store=common_store))
    line = next(line for line in said.splitlines() if line.startswith("speed"))
    form = r"speed   tiny-q0f32-host  prefill: (\d+) tok/s, decode 1: (\d+) tok/s, decode 8: (\d+) tok/s"
    speeds = re.fullmatch(form, line)
    assert speeds is not None and all(int(speed) > 0 for speed in speeds.groups()), said
    head, _, row = [text for text in summary.read_text().splitlines() if text.startswith("|")][:3]
    assert head.endswith(" prefill tok/s | decode 1 tok/s | decode 8 tok/s |")
    assert row.endswith(f" | {' | '.join(speeds.groups())} |")
    again = checked(mlcbuild("run", recipe, store=common_store))
    assert line in again.splitlines() and "0 built" in again
    remote.mkdir()
    checked(mlcbuild("cache", "push", recipe, remote.as_uri(), store=common_store))
    pushed = b"".join(path.read_bytes() for path in (remote / "ac").rglob("*") if path.is_file())
    assert b'"verify/tiny-q0f32-host"' in pushed and b'"bench/' not in pushed


def test_changes_re_run_what_depends_on_them(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> None:
    recipe = project(tmp_path, QUICKSTART.replace("verify:", "#"))
    run_json(recipe, common_store)
    # An override of one matrix: weights that no other test has put into this store.
    changed = "{mixed: {scheme: q0f32, overrides: [{match: layers.1.mlp.down, scheme: q0f16}]}}"
    recipe.write_text(recipe.read_text().replace("[q0f32, q4f16_1, q4a8_1]", changed))
    actual = run_json(recipe, common_store)
    assert {name for name, step in actual.items() if name and step["status"] == "built"} == {
        name for name in actual if "mixed" in name
    }
    recipe.write_text(recipe.read_text() + "verify: {prompts: ['What is 1 + 2?', 'copy abc']}\n")
    actual = run_json(recipe, common_store)
    assert {name.split("/")[0] for name, step in actual.items() if name and step["status"] == "built"} == {
        "reference",
        "verify",
    }
    assert all("prompts" in step["reason"] for name, step in actual.items() if name.startswith("reference/"))
    manifest = json.loads((tmp_path / "dist" / "tiny-mixed-host" / "bundle.json").read_bytes())
    assert 0 < manifest["verification"]["kl_mean"] < 1e-2


def test_plan_and_explain_say_why(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> None:
    text = QUICKSTART.replace("verify:", "#")
    recipe = project(tmp_path, text.replace("[q0f32, q4f16_1, q4a8_1]", "{exact: q0f32}"))
    run_json(recipe, common_store)
    recipe.write_text(text.replace("[q0f32, q4f16_1, q4a8_1]", "{exact: q0f16}"))
    words = checked(mlcbuild("plan", recipe, store=common_store))
    assert "scheme exact: format f32 -> f16" in words
    assert "memory tiny-exact-host:" in words
    explained = checked(mlcbuild("explain", recipe, "weights/tiny/exact/plain", store=common_store))
    assert "- f32" in explained
    assert "+ f16" in explained
    wrong = mlcbuild("explain", recipe, "weights/tiny/exact", store=common_store)
    assert wrong.returncode == 2
    assert "did you mean 'weights/tiny/exact/plain'?" in wrong.stderr


def test_a_copied_store_serves_another_place(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> None:
    recipe = project(tmp_path / "a", QUICKSTART)
    shutil.copy(tiny_bundles / "prompts.txt", tmp_path / "a" / "prompts.txt")
    copy_store(common_store, tmp_path / "store")
    actual = run_json(recipe, tmp_path / "store")
    assert {step["status"] for name, step in actual.items() if name} == {"reused"}
    assert checked(mlcbuild("cache", "verify", store=tmp_path / "store"))


def test_a_missing_linker_stops_only_what_needs_it(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    recipe = project(tmp_path, SMALL.replace("[host]", "[host, aarch64-linux]"))
    planned = mlcbuild("plan", recipe, store=common_store, variables={"PATH": "/none"})
    if "no linker" in planned.stdout:
        assert "cannot run here: no linker for aarch64-unknown-linux-gnu was found" in planned.stdout
        assert re.search(r"\d of them cannot run here, ", planned.stdout)
        step = "library/*/aarch64-linux"
        reason = checked(mlcbuild("explain", recipe, step, store=common_store, variables={"PATH": "/none"}))
        assert "cannot run here: no linker for aarch64-unknown-linux-gnu was found" in reason
    stopped = mlcbuild("run", recipe, store=common_store, variables={"PATH": "/none"})
    if "no linker" not in stopped.stderr:
        pytest.skip("the linker is not found by PATH here")
    assert stopped.returncode == 3
    assert not stopped.stdout, "no step was started"
    assert re.fullmatch(
        r"no linker for .* was found: install .*\. tiny-q0f32-\S+ cannot be built here without "
        r"it, and no step was started; --keep-going builds the other variants, --only chooses some\n",
        stopped.stderr,
    )
    result = mlcbuild("run", recipe, "--keep-going", store=common_store, variables={"PATH": "/none"})
    assert result.returncode == 3
    assert "no linker for aarch64-unknown-linux-gnu was found: install" in result.stdout


def test_a_target_of_another_machine_is_built_and_not_verified(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    if not (shutil.which("aarch64-linux-gnu-ld") or shutil.which("aarch64-linux-gnu-gcc")):
        pytest.skip("no linker for aarch64 here")
    recipe = project(tmp_path, SMALL.replace("[host]", "[aarch64-linux]").replace("q0f32", "q4a8_1"))
    last = checked(mlcbuild("run", recipe, store=common_store)).splitlines()[-2]
    assert "not verified: this is for linux aarch64" in last
    bundle = tmp_path / "dist" / "tiny-q4a8_1-aarch64-linux"
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    assert manifest["verification"] is None
    assert manifest["target"]["triple"] == "aarch64-unknown-linux-gnu"
    machine = int.from_bytes((bundle / "model.so").read_bytes()[18:20], "little")
    assert machine == 183, "the number of AArch64 in an ELF file"
    assert not (bundle / "lib").exists()


def test_an_output_with_files_of_the_user_is_left_alone(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    recipe = project(tmp_path, SMALL)
    mine = tmp_path / "dist" / "tiny-q0f32-host" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    result = mlcbuild("run", recipe, store=common_store)
    assert result.returncode == 2
    assert "holds files that were not written by mlcbuild" in result.stdout
    assert mine.read_text() == "mine"


def test_a_hub_model_is_locked_fetched_and_built(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    """Checks that the embedded model, once it is fetched from a hub, is built by the same steps as from its
    directory."""
    files = {path.name: path.read_bytes() for path in TINY.iterdir()}
    recipe = project(tmp_path, SMALL.replace("./tiny", "hf://org/tiny@main"), [])
    with Hub() as hub:
        hub.add("org/tiny", files)
        there = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        result = mlcbuild("run", recipe, store=common_store, variables=there)
        assert result.returncode == 2
        assert "hf://org/tiny@main must be pinned before it is used: run `mlcbuild lock" in result.stderr
        checked(mlcbuild("lock", recipe, store=common_store, variables=there))
        assert "config.json: {size: " in (tmp_path / "recipe.lock").read_text().replace('"', "")
        checked(mlcbuild("run", recipe, store=common_store, variables=there))
        hub.add("org/tiny", {**files, "config.json": files["config.json"] + b" "})
        stale = mlcbuild("lock", recipe, "--check", store=common_store, variables=there)
        assert stale.returncode == 2
        assert "hf://org/tiny@main: now at" in stale.stderr
    # The hub is gone: everything is in the store.
    document = json.loads(checked(mlcbuild("run", recipe, "--json", store=common_store, variables=there)))
    assert {step["status"] for step in document["steps"]} == {"reused"}
    statement = json.loads((tmp_path / "dist" / "tiny-q0f32-host" / "provenance.json").read_bytes())
    sources = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    weights = next(item for item in sources if item["name"] == "model.safetensors")
    assert weights["uri"].startswith("hf://org/tiny@")
    assert weights["digest"]["sha256"] == hashlib.sha256(files["model.safetensors"]).hexdigest()


@pytest.mark.parametrize("scheme", ["q0f32", "q4f16_1", "q4a8_1"])
def test_bundles_answer_the_held_out_questions(scheme: str, tiny_bundles: Path) -> None:
    """Asks bundles of the embedded model the held-out questions. Without quantization (scheme q0f32) as many
    answers are right as its accuracy.json states; quantized bundles may lose a tenth of the questions."""
    bundle = tiny_bundles / "dist" / f"tiny-{scheme}-host"
    questions = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
    stated = json.loads((TINY / "accuracy.json").read_bytes())
    right = sum(answers(bundle, questions))
    if scheme == "q0f32":
        assert right == stated["right"]
    else:
        assert right >= stated["right"] - 0.1 * len(questions)


def answers(bundle: Path, questions: list[dict[str, str]]) -> list[bool]:
    """Starts a server of a bundle and asks it the questions, eight at a time. Returns for each question
    whether the greedy answer was right."""
    with serving(bundle) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def ask(question: dict[str, str]) -> bool:
            reply = client.chat.completions.create(
                model=server.name,
                messages=[{"role": "user", "content": question["prompt"]}],
                temperature=0,
                max_tokens=64,
            )
            choice = reply.choices[0]
            return choice.message.content == question["answer"] and choice.finish_reason == "stop"

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, questions))


@pytest.mark.skipif(not STORY.is_dir(), reason="the checkpoint `story` is not on this machine")
def test_a_recipe_for_another_checkpoint(tmp_path: Path, common_store: Path) -> None:
    text = "version: 1\nmodels: {story: ./story}\nquantizations: [q0f32]\ntargets: [x86-64-v3]\n"
    recipe = project(tmp_path, text, [STORY])
    actual = run_json(recipe, common_store)
    assert set(actual[""]) == {"story-q0f32-x86-64-v3"}
    exact = json.loads((tmp_path / "dist" / "story-q0f32-x86-64-v3" / "bundle.json").read_bytes())
    assert exact["verification"]["kl_mean"] < 1e-9


def test_killed_in_any_step_a_run_completes_with_the_same_bytes(tmp_path: Path, tiny_bundles: Path) -> None:
    """Kills a run with SIGKILL at a random moment of a step of each kind, beginning with an empty store, and
    checks that a later run completes. Its bundle has the same bytes as that of a build in another directory
    and with another store, except for the provenance file."""
    recipe = project(tmp_path, QUICKSTART.replace("q0f32, q4f16_1, ", ""))
    shutil.copy(tiny_bundles / "prompts.txt", tmp_path / "prompts.txt")
    store = tmp_path / "store"
    rng = random.Random(7)
    longest = {"weights": 0.1, "library": 2.0, "bundle": 0.1, "verify": 0.5}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    for kind in list(longest) * (5 if EVERY else 1):
        command = ["run", str(recipe), "--store", str(store), "--force", f"{kind}/*"]
        reading, writing = os.pipe()
        with (
            os.fdopen(reading) as lines,
            COMMANDS.start("mlcbuild", command, ROOT, environment, writing) as run,
        ):
            os.close(writing)
            started = any(line.startswith(f"start   {kind}/") for line in lines)
            time.sleep(rng.uniform(0, longest[kind]))
            run.kill()
        assert started, f"the run ended before it came to {kind}"
    checked(mlcbuild("run", recipe, store=store))
    checked(mlcbuild("cache", "verify", store=store))
    for _ in range(600):  # a killed run's workers notice its end a moment later; then the next run cleans up
        with Store(store).staging():
            pass
        left = list((store / "tmp").glob("*/*"))
        if not left:
            break
        time.sleep(0.1)
    assert not left, "nothing is left behind"
    first, second = (base / "dist" / "tiny-q4a8_1-host" for base in (tiny_bundles, tmp_path))
    for path in first.rglob("*"):
        # The statement names the recipe by its text, which differs here.
        if path.is_file() and path.name != "provenance.json":
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path.name
