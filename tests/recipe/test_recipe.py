"""Tests of what valid recipes mean: variables, settings, paths, and the cost of reading them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.documents.document import Place
from mlcbuild.errors import InputError
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.recipe import LocalSource, RequestedLimits, Variant, Verify, expand, load
from mlcbuild.targets import host as this_machine
from mlcbuild.targets.presets import read_preset, resolve
from mlcbuild.targets.target import Target
from tests.build.test_scale import calls
from tests.recipes import HEAD, NAME_RULE, ROOT, changed, faults, project, read, readme_recipes

__all__ = ["project"]


def test_the_smallest_recipe_and_its_defaults(project: Path) -> None:
    recipe = read(HEAD)
    here = project / "recipes"
    assert recipe.path == Path("recipes/q.yaml")
    assert (recipe.name, recipe.directory, recipe.lock) == ("q", here, here / "q.lock")
    (variant,) = expand(recipe)
    model = variant.model
    assert variant == Variant(
        "tiny-q4f16_1-x86-64-v3",
        model,
        "q4f16_1",
        SCHEMES["q4f16_1"],
        resolve("x86-64-v3"),
        RequestedLimits(None, 512, 8),
        None,
        here / "dist" / "tiny-q4f16_1-x86-64-v3",
    )
    assert (model.name, model.source) == ("tiny", LocalSource(here / "models/tiny"))
    assert model.place == Place("recipes/q.yaml", 2, 16)


def test_the_recipe_of_the_readme(project: Path) -> None:
    (text,) = [block for block in readme_recipes() if "name: assistants" in block]
    recipe = read(text)
    variants = {variant.name: variant for variant in expand(recipe)}
    assert list(variants) == [
        *(f"tiny-{scheme}-{name}" for scheme in ("q4", "mixed") for name in recipe.targets),
        *("qwen-q4-x86-64-v3", "qwen-q4-x86-64-v4-vnni"),
        *(f"qwen-mixed-{name}" for name in recipe.targets),
    ]
    assert recipe.models["qwen"].source == HubSource("Qwen/Qwen3-0.6B", "main")
    big = variants["tiny-mixed-x86-64-v3"]
    assert big.limits == RequestedLimits(4096, 512, 16)
    assert {v.limits for v in variants.values() if v is not big} == {RequestedLimits(4096, 512, 8)}
    assert big.verify == Verify(
        project / "recipes/prompts.txt", 0.05, 0.95, None, big.verify.place if big.verify else None
    )
    assert big.scheme.overrides == (("lm_head|embed*", SCHEMES["q8f32_1"]),)
    assert replace(big.scheme, name="q4f32_1", overrides=()) == SCHEMES["q4f32_1"]
    assert recipe.lock == project / "recipes/recipe.lock"


@pytest.mark.parametrize("text", readme_recipes())
def test_every_example_of_the_readme_loads(project: Path, text: str) -> None:
    assert expand(read(text))


def test_every_recipe_of_the_readme_is_tried() -> None:
    assert len(readme_recipes()) == 15


def test_every_preset_example_of_the_targets_readme_is_right(project: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "targets" / "README.md").read_text(), re.DOTALL)
    _recipe, preset, inline = blocks  # tests/test_guides.py loads the recipe
    Path("p.yaml").write_text(preset)
    assert replace(read_preset(Path("p.yaml")), name="") == replace(resolve("x86-64-v4-vnni"), name="")
    assert len(expand(read(changed(targets="").replace("targets: \n", inline)))) == 2


def test_own_schemes_are_named_by_what_they_hold(project: Path) -> None:
    rule = "{scheme: q4f32_1, overrides: [{match: lm_head, scheme: q8f32_1}]}"
    other = "{scheme: q4f32_1, overrides: [{match: embed, scheme: q8f32_1}]}"
    text = changed(quantizations=f"{{a: {rule}, b: {rule}, c: {other}, d: {{scheme: q4f32_1}}, e: q4f32_1}}")
    schemes = read(text).schemes
    assert schemes["a"] == schemes["b"]
    assert schemes["a"].name != schemes["c"].name
    assert re.fullmatch("q4f32_1-[0-9a-f]{8}", schemes["a"].name)
    assert schemes["d"] == schemes["e"] == SCHEMES["q4f32_1"]
    # The name is part of keys and bundles, so it must change on purpose only.
    assert schemes["a"].name == "q4f32_1-91055f1f"


def test_targets_have_the_recipes_names(project: Path) -> None:
    text = changed(targets="{a: x86-64-v3, b: {extends: x86-64-v3, features: [+avxvnni]}, c: host}")
    actual = read(text).targets
    assert actual["a"] == replace(resolve("x86-64-v3"), name="a")
    assert actual["b"].features == ("+avxvnni",)
    assert actual["c"] == Target("c", *this_machine.host())
    assert [variant.target.name for variant in expand(read(text))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf://o/n", HubSource("o/n", "main")),
        ("hf://o/n@v1.0", HubSource("o/n", "v1.0")),
        ("hf://o/n@refs/pr/3", HubSource("o/n", "refs/pr/3")),
        ("hf://O-1/n.2_x@" + "a" * 40, HubSource("O-1/n.2_x", "a" * 40)),
    ],
)
def test_hub_sources(project: Path, text: str, source: HubSource) -> None:
    recipe = read(changed(models=f"{{a: '{text}', b: {{source: '{text}'}}}}"))
    assert [model.source for model in recipe.models.values()] == [source, source]
    assert source.is_pinned == (len(source.revision) == 40)
    assert str(source) == f"hf://{source.repo}@{source.revision}"


def test_names_are_what_was_written(project: Path) -> None:
    """Checks that names such as `no`, `1.10` or `007` stay as they are written, and are not read as YAML
    booleans or numbers."""
    written = ["no", "1.10", "true", "007", "on", "1e3", "2024-01-01"]
    text = changed(models=f"{{{', '.join(f'{name}: models/tiny' for name in written)}}}")
    text += f"name: 1.50\nmatrix: {{model: [{', '.join(written[:-1])}]}}\n"
    recipe = read(
        text.replace("]}", "], include: [{model: 2024-01-01, quantization: q4f16_1, target: x86-64-v3}]}")
    )
    assert recipe.name == "1.50"
    assert list(recipe.models) == written
    assert [variant.model.name for variant in expand(recipe)] == written


def test_prompts_in_the_recipe(project: Path) -> None:
    recipe = read(HEAD + "verify: {prompts: [one, 'two\n\n  lines', 3], max_perplexity_increase: 0.5}\n")
    (variant,) = expand(recipe)
    assert variant.verify == Verify(
        ("one", "two\nlines", "3"), None, None, 0.5, Place("recipes/q.yaml", 5, 9)
    )


def test_settings_of_include_entries_replace_one_by_one(project: Path) -> None:
    text = changed(quantizations="[q0f32, q0f16, q4f32_1]") + (
        "verify: {prompts: prompts.txt, max_kl: 1, min_top1: 0.5}\n"
        "compile: {context_window: 1024}\n"
        "matrix:\n"
        "  quantization: [q0f32, q0f16]\n"
        "  include:\n"
        "    - {compile: {max_batch: 2, prefill_chunk: 64}}\n"
        "    - {quantization: q0f16, compile: {max_batch: 3}, verify: {max_kl: 0, prompts: [x]}}\n"
        "    - {model: tiny, quantization: q4f32_1, target: x86-64-v3, compile: {prefill_chunk: 1024}}\n"
    )
    first, second, third = expand(read(text))
    assert [v.quantization for v in (first, second, third)] == ["q0f32", "q0f16", "q4f32_1"]
    assert first.limits == RequestedLimits(1024, 64, 2)
    assert second.limits == RequestedLimits(1024, 64, 3)
    assert third.limits == RequestedLimits(1024, 1024, 8)
    assert first.verify and second.verify and third.verify
    assert (first.verify.max_kl, first.verify.min_top1) == (1.0, 0.5)
    assert (second.verify.prompts, second.verify.max_kl, second.verify.min_top1) == (("x",), 0.0, 0.5)
    assert second.verify.place == Place("recipes/q.yaml", 11, 62)
    assert replace(third.verify, place=None) == replace(first.verify, place=None)


def test_prompts_may_come_from_every_include_entry(project: Path) -> None:
    text = HEAD + "verify: {max_kl: 1}\nmatrix: {include: [{model: tiny, verify: {prompts: [x]}}]}\n"
    (variant,) = expand(read(text))
    assert variant.verify
    assert (variant.verify.prompts, variant.verify.max_kl) == (("x",), 1.0)


def test_a_small_context_lowers_the_default_prefill(project: Path) -> None:
    (variant,) = expand(read(HEAD + "compile: {context_window: 100}\n"))
    assert variant.limits == RequestedLimits(100, 100, 8)


# Variables.


def test_variables_keep_their_types(project: Path) -> None:
    text = changed(models="{m: 'models/${dir}'}") + (
        "name: 'v${version}-${flag}'\n"
        "vars: {dir: tiny, ctx: 128, version: 1.10, flag: true, kl: 0.5}\n"
        "compile: {context_window: '${ctx}'}\n"
        "verify: {prompts: ['costs $${5}', '${ctx}', 'a${ctx}b'], max_kl: '${kl}'}\n"
    )
    recipe = read(text)
    (variant,) = expand(recipe)
    assert recipe.name == "v1.10-true"
    assert variant.limits.context_window == 128
    assert variant.verify
    assert variant.verify.prompts == ("costs ${5}", "128", "a128b")
    assert variant.verify.max_kl == 0.5


VARIED = HEAD + (
    "vars: {ctx: 4096, kl: 0.5, who: x}\nname: '${who}'\ncompile: {context_window: '${ctx}'}\n"
    "verify: {prompts: [x], max_kl: '${kl}'}\n"
)


def test_settings_of_the_command_line(project: Path) -> None:
    recipe = read(VARIED, values={"ctx": "8192", "kl": "1", "who": "12"})
    (variant,) = expand(recipe)
    assert recipe.name == "12"
    assert variant.limits.context_window == 8192
    assert variant.verify
    assert variant.verify.max_kl == 1.0
    assert read(VARIED, values={"who": "yes"}).name == "yes"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ctxx": "1"}, "5:1: --set ctxx=1: this recipe has no variable 'ctxx'; did you mean 'ctx'?"),
        ({"ctx": "many"}, "5:13: --set ctx=many: variable 'ctx' is a number here, and 'many' is not"),
        ({"ctx": "true"}, "5:13: --set ctx=true: variable 'ctx' is a number here, and 'true' is not"),
        ({"ctx": ""}, "5:13: --set ctx=: variable 'ctx' is a number here, and '' is not"),
        ({"ctx": "1.5"}, "7:27: 'context_window' must be a whole number, not 1.5 (from ${ctx})"),
        ({"ctx": "0"}, "7:27: 'context_window' must be at least 1, not 0 (from ${ctx})"),
        ({"who": "../x"}, f"6:7: 'name' {NAME_RULE}, not '../x' (from ${{who}})"),
    ],
)
def test_wrong_settings_of_the_command_line(project: Path, values: Mapping[str, str], expected: str) -> None:
    assert faults(VARIED, **values) == [expected]


def test_a_truth_stays_a_truth(project: Path) -> None:
    text = HEAD + "vars: {flag: true}\nname: 'n${flag}'\n"
    assert read(text, values={"flag": "false"}).name == "nfalse"
    assert faults(text, flag="1") == [
        "5:14: --set flag=1: variable 'flag' is true or false here, and '1' is not"
    ]


def test_a_setting_without_vars_is_told_so(project: Path) -> None:
    assert faults(HEAD, a="1") == ["1:1: --set a=1: this recipe has no variable 'a'; none is defined"]


# Paths.


def test_paths_may_not_leave_the_project(project: Path) -> None:
    (project.parent / "outside").mkdir()
    (project.parent / "p.txt").write_text("x")
    rule = f"leaves the project {project.resolve()}; allow it with --allow-outside"
    absolute = project.parent / "outside"
    text = changed(models=f"{{a: ../../outside, b: '{absolute}', c: ../shared}}") + (
        "verify: {prompts: ../../p.txt}\nlock: ../../x.lock\nbundle: {output: '../../{model}'}\n"
    )
    assert faults(text) == [
        f"2:13: '../../outside' {rule}",
        f"2:31: '{absolute}' {rule}",
        f"5:19: '../../p.txt' {rule}",
        f"6:7: '../../x.lock' {rule}",
        f"7:18: '../../{{model}}' {rule}".replace("{model}", "x"),
    ]
    recipe = read(text, outside=True)
    assert [variant.output.resolve() for variant in expand(recipe)] == [
        project.parent / name for name in "abc"
    ]


def test_links_count_as_where_they_lead(project: Path) -> None:
    (project.parent / "outside").mkdir()
    Path("recipes/link").symlink_to(project.parent / "outside")
    Path("recipes/loop").symlink_to("loop")
    Path("recipes/inner").symlink_to("models/tiny")
    rule = f"leaves the project {project.resolve()}; allow it with --allow-outside"
    text = changed(models="{a: link, b: inner}") + "bundle: {output: 'link/{model}'}\n"
    assert faults(text) == [f"2:13: 'link' {rule}", f"5:18: 'link/x' {rule}"]
    read(text.replace("link/{model}", "d/{model}"), outside=True)
    loop = "leads nowhere: symbolic links on the way form a loop; correct them"
    assert faults(changed(models="{a: loop}")) == [f"2:13: 'loop' {loop}"]


def test_without_a_checkout_the_project_is_the_recipes_directory(project: Path) -> None:
    Path(".git").rmdir()
    assert faults(changed(models="{a: ../shared}"))[0].startswith("2:13: '../shared' leaves the project")
    Path(".git").write_text("gitdir: elsewhere\n")  # as in a worktree
    read(changed(models="{a: ../shared}"))


def test_outputs_through_a_link_do_not_hide_what_they_replace(project: Path) -> None:
    Path("recipes/alias").symlink_to("models")
    assert faults(changed(models="{m: models/tiny}") + "bundle: {output: 'alias/tiny'}\n") == [
        "5:18: the output 'alias/tiny' would replace the model 'm'"
    ]


def test_outputs_are_normalised(project: Path) -> None:
    recipe = read(
        changed(models="{m: models/tiny, n: models/tiny}") + "bundle: {output: './d//{target}/../{model}'}\n"
    )
    assert [v.output.relative_to(recipe.directory).as_posix() for v in expand(recipe)] == ["d/m", "d/n"]


def test_the_recipe_can_be_named_by_any_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(HEAD)
    monkeypatch.chdir(project / "recipes")
    second = load(Path("q.yaml"))
    third = load(project / "recipes" / "q.yaml")
    assert [variant.output for variant in expand(first)] == [variant.output for variant in expand(second)]
    assert expand(third)[0].output == expand(first)[0].output
    assert second.lock == third.lock == first.lock


def test_odd_file_names_give_usable_recipe_names(project: Path) -> None:
    assert read(HEAD, "recipes/my recipe!.yaml").name == "my-recipe-"
    assert read(HEAD, "recipes/.hidden").name == "-hidden"
    assert read(HEAD, "recipes/recipe.yaml").lock == project / "recipes/recipe.lock"
    with pytest.raises(InputError, match="the lock file would replace the recipe"):
        read(HEAD, "recipes/recipe.lock")


# Cost.


def _large(models: int) -> str:
    """Returns the text of a recipe with `models` models, and with one rule in its matrix for each model."""
    numbers = range(models)
    lines = ["version: 1", "models:", *(f"  m{i}: {{source: models/tiny}}" for i in numbers)]
    lines += ["quantizations:", *(f"  s{i}: {name}" for i, name in enumerate([*SCHEMES, "q0f32"]))]
    lines += ["targets:", *(f"  t{i}: {{extends: x86-64-v3, features: [+avxvnni]}}" for i in range(4))]
    lines += ["matrix:", "  exclude:"]
    lines += [f"    - {{model: m{i}, quantization: s{i % 8}}}" for i in numbers]
    lines += ["  include:"]
    lines += [f"    - {{model: m{i}, target: t0, compile: {{max_batch: {i + 1}}}}}" for i in numbers]
    return "\n".join(lines)


def test_the_cost_of_a_recipe_grows_with_its_size(project: Path) -> None:
    """Checks that the number of function calls for a recipe grows linearly with its size. Comparing each
    variant with each rule of the matrix calls no function."""
    expand(read(_large(5)))  # performs what happens once in a process, such as imports
    counts = []
    for models in (10, 20, 40):
        text = _large(models)
        variants: list[Variant] = []
        counts.append(calls(lambda text=text, variants=variants: variants.extend(expand(read(text)))))  # type: ignore[misc]
        assert len(variants) == models * 4 * len(SCHEMES)
    small, middle, large = counts
    assert (large - middle) / (middle - small) < 2.3, counts


def test_reading_recipes_loads_nothing_heavy(project: Path) -> None:
    Path("recipes/q.yaml").write_text(HEAD)
    code = (
        "import sys; from pathlib import Path; import mlcbuild.recipe as r; before = set(sys.modules);"
        "r.expand(r.load(Path('recipes/q.yaml')));"
        "print([n for n in ('tvm', 'numpy', 'networkx', 'huggingface_hub') if n in sys.modules],"
        "      [n for n in ('jsonschema',) if n in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] []"
