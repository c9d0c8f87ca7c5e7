"""Tests of `mlcbuild matrix`, `shard` and `--affected-by`, and of a run's reports to CI systems, through the
real command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mlcbuild.ci import affected
from mlcbuild.errors import UsageError
from tests.conftest import QUICKSTART, ROOT, TINY, checked, copy_store, mlcbuild, project

VARIANTS = ["tiny-q0f32-host", "tiny-q4f16_1-host", "tiny-q4a8_1-host"]


@pytest.fixture
def store(tmp_path: Path, tiny_bundles: Path, common_store: Path) -> Path:
    """Returns the directory of a store that contains all results of the example recipe. It is a copy, from
    which a test may remove records."""
    copy_store(common_store, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def recipe(tmp_path: Path, tiny_bundles: Path) -> Path:
    path = project(tmp_path / "project", QUICKSTART)
    shutil.copy(tiny_bundles / "prompts.txt", path.parent)
    return path


def forget(store: Path, *patterns: str) -> set[str]:
    """Removes the records of steps whose names match `patterns` from a store, so that it resembles the store
    of a new CI runner, and returns the names of these steps."""
    gone = set()
    for path in (store / "ac").rglob("*"):
        if path.is_file():
            name = json.loads(path.read_bytes().splitlines()[1])["step"]
            if any(re.fullmatch(pattern, name) for pattern in patterns):
                path.unlink()
                gone.add(name)
    return gone


def jobs(recipe: Path, store: Path, *more: str) -> list[dict[str, str | None]]:
    document = json.loads(checked(mlcbuild("matrix", recipe, *more, store=store)))
    assert isinstance(document, list)
    return document


# matrix


def test_a_matrix_holds_what_needs_work(recipe: Path, store: Path) -> None:
    assert jobs(recipe, store) == []
    assert [job["name"] for job in jobs(recipe, store, "--all")] == VARIANTS
    forget(store, r"weights/.*/q4a8_1/.*", r"verify/.*q0f32.*")
    by_name = {job["name"]: job for job in jobs(recipe, store)}
    assert set(by_name) == {VARIANTS[0], VARIANTS[2]}
    first, last = by_name[VARIANTS[0]], by_name[VARIANTS[2]]
    assert re.fullmatch("[0-9a-f]{64}", str(first["key"]))
    assert str(first["reason"]).startswith("verify/tiny-q0f32-host: ")
    assert last["key"] is None, "its weights are not known"
    assert str(last["reason"]).startswith("weights/tiny/q4a8_1/x16: ")
    assert shlex.split(str(last["arguments"])) == [str(recipe), "--only", VARIANTS[2]]
    plan = json.loads(checked(mlcbuild("plan", recipe, "--json", store=store)))
    keys = {step["name"]: step["key"] for step in plan["steps"]}
    assert keys["verify/tiny-q0f32-host"] == first["key"]


def test_a_matrix_for_github_is_one_line(recipe: Path, store: Path) -> None:
    assert checked(mlcbuild("matrix", recipe, "--format", "github", store=store)) == '{"include": []}\n'
    text = checked(mlcbuild("matrix", recipe, "--format", "github", "--all", store=store))
    assert text.count("\n") == 1
    entries = json.loads(text)["include"]
    assert {name for entry in entries for name in entry} == {"name", "runner", "key", "reason", "arguments"}
    assert all(value is None or isinstance(value, str) for entry in entries for value in entry.values())


def test_a_matrix_for_gitlab_is_a_child_pipeline(recipe: Path, store: Path) -> None:
    actual = yaml.safe_load(checked(mlcbuild("matrix", recipe, "--format", "gitlab", store=store)))
    assert list(actual) == ["stages", "nothing to build"], "a pipeline must have a job"
    forget(store, "bundle/.*q4a8_1.*")
    actual = yaml.safe_load(
        checked(mlcbuild("matrix", recipe, "--format", "gitlab", "--label", "host=gpu box", store=store))
    )
    job = actual[VARIANTS[2]]
    assert job["stage"] in actual["stages"]
    assert job["tags"] == ["gpu box"]
    assert job["script"][0].startswith(f"mlcbuild run {recipe} --only {VARIANTS[2]} ")
    assert job["artifacts"]["reports"] == {"junit": "junit.xml"}


def test_runners_follow_targets(tmp_path: Path, common_store: Path) -> None:
    text = QUICKSTART.replace("[host]", "[x86-64-v3, aarch64-linux, macos-arm64]").replace("verify:", "#")
    recipe = project(tmp_path, text.replace("q0f32, q4f16_1, ", ""))

    def runners(*more: str) -> list[str | None]:
        result = mlcbuild("matrix", recipe, "--all", *more, store=tmp_path / "none")
        if result.returncode == 3:
            pytest.skip("no linkers for other systems here")
        return [job["runner"] for job in json.loads(checked(result))]

    assert runners() == ["ubuntu-latest", "ubuntu-24.04-arm", "macos-latest"]
    assert runners("--label", "aarch64-linux=mine", "--label", "*=pool") == ["pool", "mine", "pool"]


def test_wrong_labels_and_counts_are_told(recipe: Path, store: Path) -> None:
    result = mlcbuild("matrix", recipe, "--label", "hots=a", "--label", "b", store=store)
    assert result.returncode == 2
    assert "--label hots=a: no variant is for 'hots'; did you mean 'host'?" in result.stderr
    assert "--label b: write --label target=runner" in result.stderr
    result = mlcbuild("matrix", recipe, "--shards", "0", store=store)
    assert (result.returncode, result.stderr) == (2, "--shards 0: there must be at least one\n")
    result = mlcbuild("shard", recipe, "--count", "0", store=store)
    assert (result.returncode, result.stderr) == (2, "--count 0: there must be at least one\n")


def test_settings_reach_the_jobs(tmp_path: Path) -> None:
    text = "vars: {ctx: 128}\n" + QUICKSTART.replace("512", '"${ctx}"').replace("verify:", "#")
    recipe = project(tmp_path / "a place", text)
    (job, *_) = jobs(recipe, tmp_path / "none", "--set", "ctx=256", "--allow-outside")
    words = shlex.split(str(job["arguments"]))
    assert words == [str(recipe), "--set", "ctx=256", "--allow-outside", "--only", VARIANTS[0]]


# shards


def test_shards_do_each_step_once_and_the_last_run_nothing(recipe: Path, store: Path) -> None:
    gone = forget(store, "(weights|bundle|verify|reference|config|tokenizer)/.*")
    listed = jobs(recipe, store, "--shards", "2")
    assert [job["name"] for job in listed] == ["shard 1 of 2", "shard 2 of 2"]
    shown = json.loads(checked(mlcbuild("shard", recipe, "--json", store=store)))
    owned = [set(part["steps"]) for part in shown["shards"]]
    assert not owned[0] & owned[1]
    built: list[str] = []
    variants: list[str] = []
    for number, job in enumerate(listed):
        result = mlcbuild("run", *shlex.split(str(job["arguments"])), "--json", store=store)
        assert f"shard {number + 1}/2 of split {shown['split']}: " in result.stderr
        document = json.loads(checked(result))
        names = {step["name"] for step in document["steps"]}
        assert owned[number] <= names
        built += [step["name"] for step in document["steps"] if step["status"] == "built"]
        variants += [item["name"] for item in document["variants"]]
    assert sorted(built) == sorted(set(built)), "once"
    assert set(built) <= gone
    assert {name for name in owned[0] | owned[1] if not name.startswith("library/")} == set(built)
    assert sorted(variants) == sorted(VARIANTS)
    assert checked(mlcbuild("run", recipe, store=store)).splitlines()[-1].startswith("0 built, ")


def test_a_shard_alone_builds_what_it_needs(recipe: Path, store: Path) -> None:
    forget(store, "(weights|bundle|verify|reference|config|tokenizer)/.*")
    document = json.loads(checked(mlcbuild("run", recipe, "--shard", "2/2", "--json", store=store)))
    assert {step["status"] for step in document["steps"]} <= {"built", "reused"}
    assert {item["status"] for item in document["variants"]} == {"built"}


def test_more_shards_than_work_leave_some_idle(recipe: Path, store: Path) -> None:
    last = checked(mlcbuild("run", recipe, "--shard", "9/9", store=store)).splitlines()[-1]
    assert last == "0 built, 0 reused in 0.00 s"
    wrong = mlcbuild("run", recipe, "--shard", "4/3", store=store)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "--shard 4/3: write i/n with 1 <= i <= n, for example 1/3\n",
    )


def test_recorded_durations_are_used(recipe: Path, store: Path, tmp_path: Path) -> None:
    before = json.loads(checked(mlcbuild("shard", recipe, "--json", store=store)))
    checked(mlcbuild("run", recipe, store=store))
    words = checked(mlcbuild("shard", recipe, "--record", store=store))
    assert re.fullmatch(r"shard 1/2: nothing to run, \d+ are stored", words.splitlines()[0])
    assert len(words.splitlines()) == 3, "no step that is stored is listed"
    assert words.splitlines()[-1].endswith("by the durations in recipe.durations.json")
    kept = json.loads((recipe.parent / "recipe.durations.json").read_bytes())["milliseconds"]
    assert "verify/tiny-q0f32-host" in kept
    forget(store, "verify/tiny-q0f32-host")
    (again,) = [
        part
        for part in json.loads(checked(mlcbuild("shard", recipe, "--json", store=store)))["shards"]
        if part["to_run"]
    ]
    assert again["to_run"] == ["verify/tiny-q0f32-host"]
    assert again["seconds_to_run"] == kept["verify/tiny-q0f32-host"] / 1000, "as measured"
    after = json.loads(checked(mlcbuild("shard", recipe, "--json", store=tmp_path / "empty")))
    assert after["split"] != before["split"], "the file counts, not the store"
    nothing = mlcbuild("shard", recipe, "--record", store=tmp_path / "empty")
    assert nothing.returncode == 2
    assert "there is nothing to record" in nothing.stderr


# affected


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a Git repository with a recipe of two models, all committed."""
    home = tmp_path / "repository"
    recipe = project(home, QUICKSTART.replace("{tiny: ./tiny}", "{tiny: ./tiny, other: ./other}"))
    shutil.copytree(TINY, home / "other")
    recipe.write_text(recipe.read_text().replace("q0f32, q4f16_1, ", ""))
    (home / "prompts.txt").write_text("Hello there\n")
    (home / "notes.md").write_text("a\n")
    git(home, "init", "-q")
    git(home, "add", ".")
    git(home, "commit", "-qm", "first")
    return home


def commit(home: Path, name: str, text: str | None) -> None:
    path = home / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    git(home, "add", "-A")
    git(home, "commit", "-qm", name)


def names(home: Path, revisions: str, *more: str) -> list[str | None]:
    actual = jobs(home / "recipe.yaml", home / ".store", "--affected-by", revisions, *more)
    return [job["name"] for job in actual]


BOTH = ["tiny-q4a8_1-host", "other-q4a8_1-host"]


def test_variants_affected_by_commits(repository: Path) -> None:
    config = json.loads((TINY / "config.json").read_bytes())
    assert names(repository, "HEAD..HEAD") == []
    commit(repository, "notes.md", "b\n")
    commit(repository, "other/README.md", "not an input\n")
    assert names(repository, "HEAD~2..HEAD") == []
    commit(repository, "other/config.json", json.dumps({**config, "use_cache": True}))
    assert names(repository, "HEAD~1..HEAD") == BOTH[1:]
    commit(repository, "prompts.txt", "Hello\n")
    assert names(repository, "HEAD~1..HEAD") == BOTH
    assert names(repository, "HEAD~1..HEAD", "--only", "tiny-*") == BOTH[:1]
    assert names(repository, "HEAD~4..HEAD~1") == BOTH[1:]
    commit(repository, "tiny/generation_config.json", None)
    assert names(repository, "HEAD~1..HEAD") == BOTH[:1], "a deleted file"
    (repository / "recipe.yaml").write_text((repository / "recipe.yaml").read_text() + "# more\n")
    assert names(repository, "HEAD..HEAD") == []
    assert names(repository, "HEAD") == BOTH, "one commit is compared with the working tree"


def test_models_in_submodules_and_behind_links_are_affected(repository: Path) -> None:
    shutil.rmtree(repository / "other")
    shutil.copytree(TINY, repository / "other")
    git(repository / "other", "init", "-q")
    commit(repository / "other", "notes.md", "a\n")
    git(repository, "rm", "-rq", "--cached", "other")
    (repository / "tiny").rename(repository / "v1")
    shutil.copytree(TINY, repository / "v2")
    (repository / "tiny").symlink_to("v1")
    commit(repository, "notes.md", "b\n")
    commit(repository / "other", "notes.md", "b\n")
    commit(repository, "notes.md", "c\n")
    assert names(repository, "HEAD~1..HEAD") == BOTH[1:], "the submodule"
    (repository / "tiny").unlink()
    (repository / "tiny").symlink_to("v2")
    commit(repository, "notes.md", "d\n")
    assert BOTH[0] in names(repository, "HEAD~1..HEAD"), "the link to a directory"


def test_plan_and_run_do_only_what_is_affected(repository: Path) -> None:
    arguments = (repository / "recipe.yaml", "--affected-by", "HEAD..HEAD")
    document = json.loads(checked(mlcbuild("plan", *arguments, "--json", store=repository / ".store")))
    assert document == {"steps": [], "variants": []}
    words = checked(mlcbuild("run", *arguments, store=repository / ".store"))
    assert words.startswith("0 built, 0 reused")
    commit(repository, "tiny/chat_template.jinja", "{{ messages }}")
    result = mlcbuild("plan", arguments[0], "--affected-by", "HEAD~1", "--json", store=repository / ".store")
    document = json.loads(checked(result))
    assert [item["name"] for item in document["variants"]] == BOTH[:1], result.stderr
    assert not any("other" in step["name"] for step in document["steps"])
    assert result.stderr == "affected tiny-q4a8_1-host: fetch/tiny/chat_template.jinja changed\n"


@pytest.mark.parametrize(
    ("revisions", "words"),
    [
        ("nowhere..HEAD", "a shallow clone of a CI system lacks"),
        ("--output=x", "write a range of commits, for example main...HEAD"),
    ],
)
def test_wrong_ranges_are_told(repository: Path, revisions: str, words: str) -> None:
    recipe, store = repository / "recipe.yaml", repository / ".store"
    result = mlcbuild("plan", recipe, f"--affected-by={revisions}", store=store)
    assert result.returncode == 2
    assert words in result.stderr


def test_affected_needs_a_repository_and_git(recipe: Path, tmp_path: Path) -> None:
    plan = ("plan", recipe, "--affected-by", "HEAD")
    result = mlcbuild(*plan, store=tmp_path / "s")
    assert result.returncode == 2
    assert "not a git repository" in result.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ld").symlink_to(str(shutil.which("ld")))
    result = mlcbuild(*plan, store=tmp_path / "s", variables={"PATH": str(tmp_path / "bin")})
    assert (result.returncode, result.stderr) == (
        3,
        "--affected-by needs git: install it (Debian: apt install git)\n",
    )


def test_the_source_of_mlcbuild_is_an_input_where_it_is_in_the_repository() -> None:
    from mlcbuild.locking import read_lock
    from mlcbuild.pipeline import build
    from mlcbuild.recipe import load

    loaded = load(ROOT / "recipes" / "quickstart.yaml")
    pipeline = build(loaded, read_lock(loaded))

    def found(*files: str) -> set[str]:
        reasons = affected.affected(pipeline, frozenset(ROOT / name for name in files))
        assert all(" changed" in reason for reason in reasons.values())
        return set(reasons)

    assert found("mlcbuild/checkpoints/conversion.py") == set(VARIANTS)
    assert found("mlcbuild/cli/build.py", "README.md", "tests/ci/test_ci.py") == set()
    assert found("runtime/pyproject.toml") == set(VARIANTS)
    assert found("targets/x86-64-v2.yaml") == set(), "no variant is for this target"
    with pytest.raises(UsageError, match="write a range"):
        affected.changed(ROOT, "--stat")
