"""Tests of the library API: what a Python program gets from a recipe, with real builds of the embedded
model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlcbuild import serving_memory, session
from mlcbuild.build.events import (
    Event,
    Noted,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    Warned,
)
from mlcbuild.bundles import publish
from mlcbuild.ci.job_matrix import Command, Matrix
from mlcbuild.errors import (
    InputError,
    MlcbuildError,
    PublishError,
    StoreError,
    UsageError,
    VerificationError,
)
from mlcbuild.remotes import kinds
from mlcbuild.remotes.kinds import Destination, Kind
from mlcbuild.session import Cancellation, Execution, Selection, Session
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.checkpoint_files import shorten
from tests.conftest import project
from tests.guide import example

pytestmark = pytest.mark.xdist_group("session")  # one process builds what all look at
VARIANT = "tiny-q4f16_1-host"
RECIPE = """\
version: 1
models: {tiny: ./tiny}
quantizations: [q4f16_1]
targets: [host]
compile: {context_window: 128, prefill_chunk: 64, max_batch: 2}
verify: {prompts: [To be or not to be], max_kl: 1.0}
publish: [{to: "toy://shelf/{model}"}]
"""


@dataclass
class Built:
    """The outcome of one build of a recipe, which several tests share: the recipe's path, its store, the
    result, and the events that were reported during the run."""

    recipe: Path
    store: Path
    result: session.Result
    events: list[Event] = field(default_factory=list)

    def open(self, **options: object) -> Session:
        return session.open(self.recipe, store=self.store, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def toy_kind(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Adds a kind of remote that publishes to a dictionary, and returns it: address -> name of the bundle.
    Publishing to an address that contains "broken" fails."""
    shelf: dict[str, str] = {}
    module = types.ModuleType("toy_session_publisher")

    def push(
        bundle: Path, manifest: object, files: Mapping[str, int], to: str, observed: object
    ) -> tuple[str, int]:
        if "broken" in to:
            raise PublishError(f"{to}: the shelf is broken")
        shelf[to] = bundle.name
        return f"{to}#1", sum(files.values())

    module.push = push  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    place = Destination("a shelf", lambda url, writing: "", lambda url: False, module.__name__)
    monkeypatch.setattr(kinds, "KINDS", {**kinds.KINDS, "toy": Kind("toy://", publishes=place)})
    monkeypatch.setattr(publish, "KINDS", kinds.KINDS)
    return shelf


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds a real recipe once for the tests of this module, in worker processes, and returns it with its
    result and events. The recipe names a registry as destination, to which nothing is published."""
    root = tmp_path_factory.mktemp("session")
    recipe = project(root, RECIPE.replace("toy://shelf/{model}", "oci://registry.invalid/{model}:v1"))
    shorten(root / "tiny", 1)
    events: list[Event] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    opened = session.open(recipe, store=root / "store")

    def on_event(event: Event) -> None:
        events.append(event)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    return Built(recipe, root / "store", opened.run(on_event=on_event), events)


def statuses(result: session.Result) -> dict[str, str]:
    return {step.name: step.status for step in result.steps}


def test_a_result_holds_bundles_steps_and_figures(built: Built) -> None:
    result = built.result
    result.check()
    assert result.ok and result.exit_code == 0 and result.failures == ()
    assert set(statuses(result).values()) == {"built"}
    assert {len(step.key or "") for step in result.steps} == {64}
    assert all(step.seconds > 0 and step.reason == "never built" for step in result.steps)
    (variant,) = result.variants
    assert (variant.name, variant.status, variant.bundle) == (VARIANT, "built", result.bundles[VARIANT])
    assert (result.bundles[VARIANT] / "bundle.json").is_file()
    assert 0 < variant.figures["kl_mean"] < 1 and variant.figures["perplexity"] > 1


def test_events_come_in_order(built: Built) -> None:
    events = built.events
    assert isinstance(events[0], RunStarted) and isinstance(events[-1], RunFinished)
    assert sum(isinstance(event, RunFinished) for event in events) == 1
    started = [event.name for event in events if isinstance(event, StepStarted)]
    finished = [event.result.name for event in events if isinstance(event, StepFinished)]
    assert sorted(started) == sorted(finished) == sorted(statuses(built.result))
    graph = built.open().pipeline.graph
    for event in events:
        if isinstance(event, StepStarted):
            needs = [need for need in graph.needs(graph.step(event.name)) if need in finished]
            before = events[: events.index(event)]
            done = [item.result.name for item in before if isinstance(item, StepFinished)]
            assert set(needs) <= set(done), "a step starts after its inputs"


def test_nothing_is_printed_and_a_second_run_reuses_everything(
    built: Built, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = built.open()
    plan = opened.plan()
    assert {step.state for step in plan.steps} == {"hit"} and plan.plan.count("hit") == len(plan.steps)
    assert set(plan.memory[VARIANT] or {}) == set(serving_memory.PARTS)
    result = opened.run()
    assert set(statuses(result).values()) == {"reused"} and result.variants[0].status == "reused"
    assert result.variants[0].figures == built.result.variants[0].figures
    assert capfd.readouterr() == ("", "")


def test_a_failed_step_is_in_the_result(built: Built) -> None:
    strict = built.recipe.with_name("strict.yaml")
    strict.write_text(built.recipe.read_text().replace("max_kl: 1.0", "max_kl: 0.0000001"))
    dist = built.recipe.parent / "dist" / VARIANT
    before = (dist / "bundle.json").read_bytes()
    result = session.open(strict, store=built.store).run()
    assert not result.ok and result.exit_code == 1 and result.bundles == {}
    assert statuses(result)[f"verify/{VARIANT}"] == "failed"
    assert [type(error) for error in result.failures] == [VerificationError]
    with pytest.raises(VerificationError, match="max_kl is 1e-07"):
        result.check()
    assert result.variants[0].status == "failed"
    refused = dist.with_name(f".{VARIANT}.refused")
    assert str(refused) in result.variants[0].note
    assert (refused / "bundle.json").read_bytes() == before, "nothing is lost"
    assert not dist.exists(), "an older bundle does not pass for the result"
    refused.rename(dist)


def test_an_output_that_cannot_be_written_fails_its_variant(built: Built) -> None:
    other = built.recipe.with_name("taken.yaml")
    other.write_text(built.recipe.read_text() + 'bundle: {output: "taken/{model}-{quantization}-{target}"}\n')
    place = built.recipe.parent / "taken" / VARIANT
    place.mkdir(parents=True)
    (place / "mine.txt").write_text("keep")
    result = session.open(other, store=built.store).run()
    assert result.run.ok and not result.ok and result.exit_code == 2
    assert isinstance(result.variants[0].error, UsageError) and result.failures == (result.variants[0].error,)
    assert (place / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("other_thread", [False, True])
def test_a_run_is_cancelled_and_goes_on_later(built: Built, other_thread: bool) -> None:
    cancel = Cancellation()

    def on_event(event: Event) -> None:
        if isinstance(event, StepStarted):
            if other_thread:
                threading.Thread(target=cancel.cancel).start()
            else:
                cancel.cancel()

    selection = Selection(force=("weights/*", "verify/*"))
    result = built.open().run(selection, on_event=on_event, cancel=cancel)
    assert (result.run.interrupted, result.exit_code, result.ok) == ("the caller", 130, False)
    assert "skipped" in statuses(result).values()
    with pytest.raises(MlcbuildError, match="interrupted by the caller"):
        result.check()
    assert built.open().run(cancel=cancel).run.interrupted == "the caller", "it stays cancelled"
    assert built.open().run().ok
    assert verify(Store(built.store)).ok


def test_an_exception_of_the_caller_ends_the_run(built: Built) -> None:
    class Left(Exception):  # noqa: N818 - it is no error
        pass

    def on_event(event: Event) -> None:
        if isinstance(event, StepStarted):
            raise Left

    with pytest.raises(Left):
        built.open().run(Selection(force=("weights/*",)), on_event=on_event)
    assert built.open().run(Selection(force=("weights/*",))).ok, "no lock and no worker was left"


def test_two_threads_share_one_store(built: Built, tmp_path: Path) -> None:
    """Checks that two sessions in threads of one process can build into different outputs with one store."""
    results: dict[str, session.Result] = {}
    barrier = threading.Barrier(2)

    def build(name: str) -> None:
        recipe = built.recipe.with_name(f"{name}.yaml")
        text = built.recipe.read_text().replace("To be or not to be", "Whether it is nobler")
        recipe.write_text(text + f'bundle: {{output: "{name}/{{model}}-{{quantization}}-{{target}}"}}\n')
        opened = session.open(recipe, store=built.store)
        barrier.wait()
        results[name] = opened.run()

    threads = [threading.Thread(target=build, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = results["one"], results["two"]
    assert first.ok and second.ok
    changed = {name for name in statuses(first) if name.startswith(("reference/", "verify/"))}
    assert len(changed) == 2
    for name in statuses(first):
        both = sorted((statuses(first)[name], statuses(second)[name]))
        assert both == (["built", "reused"] if name in changed else ["reused", "reused"]), name
    manifests = [(result.bundles[VARIANT] / "bundle.json").read_bytes() for result in (first, second)]
    assert manifests[0] == manifests[1]


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nmodels: {a: ./nowhere}\nquantizations: [q4f61]\ntargets: [hots]\n")
    with pytest.raises(InputError) as caught:
        session.open(recipe)
    assert [(problem.line, problem.column > 1) for problem in caught.value.problems] == [
        (2, True),
        (3, True),
        (4, True),
    ]
    with pytest.raises(InputError):
        session.check(recipe)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda built: built.open().run(Selection(only=("nobody",))), UsageError, "'nobody'"),
        (lambda built: built.open().plan(Selection(force=("nobody",))), UsageError, "'nobody'"),
        (lambda built: built.open().explain("*"), UsageError, "name one"),
        (lambda built: built.open().run(Selection(shard="3/2")), UsageError, "1 <= i <= n"),
        (lambda built: built.open().split(0), UsageError, "at least one"),
        (
            lambda built: built.open().run(execution=Execution(executor="moon")),
            UsageError,
            "'moon' must be processes, inline, or dask://HOST:PORT",
        ),
        (lambda built: built.open(remotes=["ftp://x"]), UsageError, "remotes: 'ftp://x' must start with"),
    ],
)
def test_wrong_arguments_are_errors_of_the_caller(
    built: Built, call: Callable[[Built], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(").replace("*", r"\*")):
        call(built)


def test_a_store_of_another_format_is_refused(built: Built, tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"format": "other/9"}')
    with pytest.raises(StoreError, match="the store's format is other/9"):
        session.open(built.recipe, store=tmp_path)


def test_remotes_of_the_caller_replace_those_of_the_recipe(built: Built, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    url = f"file://{tmp_path}/cache"
    # Results that are in the store already are sent by `cache push`; a forced step is built, and sent.
    assert built.open(remotes=[url]).run(Selection(only=("config/*",), force=("config/*",))).ok
    other = session.open(built.recipe, store=tmp_path / "store", remotes=[url])
    states = {step.name: step.state for step in other.plan().steps}
    assert states["config/tiny"] == "remote" and states["tokenizer/tiny"] == "run"
    result = other.run(Selection(only=("config/*",)))
    assert statuses(result) == {"config/tiny": "reused"} and result.steps[0].reason == f"from {url}"
    alone = other.over(()).plan(Selection(only=("tokenizer/*",)))
    assert [step.state for step in alone.steps] == ["run"]


def test_explain_names_the_difference(built: Built) -> None:
    assert built.open().explain(f"bundle/{VARIANT}").planned.state == "hit"
    other = built.recipe.with_name("wider.yaml")
    other.write_text(built.recipe.read_text().replace("prefill_chunk: 64", "prefill_chunk: 32"))
    explained = session.open(other, store=built.store).explain("library/*")
    assert explained.planned.state == "run"
    assert [(change.subject, change.before, change.after) for change in explained.changes] == [
        ("limits: prefill_chunk", "64", "32")
    ]


def test_jobs_shards_and_drawings(built: Built) -> None:
    opened = built.open()
    command = Command("recipe.yaml")
    assert opened.jobs(Matrix(command)) == [], "everything is built"
    (job,) = opened.jobs(Matrix(command, all=True))
    assert job.name == VARIANT and job.arguments == f"recipe.yaml --only {VARIANT}"
    shards = opened.split(2).shards
    assert sorted(name for shard in shards for name in shard.steps) == sorted(
        step.name for step in opened.plan().steps
    )
    notes: list[Event] = []
    results = [opened.run(Selection(shard=f"{index}/2"), on_event=notes.append) for index in (1, 2)]
    assert sorted(item.name for result in results for item in result.variants) == [VARIANT]
    assert [note.message.partition(" of ")[0] for note in notes if isinstance(note, Noted)] == [
        "shard 1/2",
        "shard 2/2",
    ]
    assert opened.graph("svg").startswith("<svg") and f"verify/{VARIANT}" in opened.graph()


def test_bundles_are_published_without_a_command_line(
    built: Built, toy_kind: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = built.recipe.with_name("published.yaml")
    text = built.recipe.read_text().replace("oci://registry.invalid/{model}:v1", "toy://shelf/{model}")
    recipe.write_text(text.replace("publish: [", "publish: [{to: 'toy://broken/{model}'}, "))
    opened = session.open(recipe, store=built.store)
    reported: list[str] = []
    sent = opened.publish(opened.run(), on_sent=lambda item: reported.append(item.status))
    assert [(item.name, item.to, item.status) for item in sent] == [
        (VARIANT, "toy://broken/tiny", "failed"),
        (VARIANT, "toy://shelf/tiny", "published"),
    ]
    assert reported == ["failed", "published"] and toy_kind == {"toy://shelf/tiny": VARIANT}
    assert sent[0].note == "toy://broken/tiny: the shelf is broken"
    assert sent[1].address == "toy://shelf/tiny#1" and sent[1].size > 0
    assert capfd.readouterr() == ("", "")


def test_a_recipe_without_destinations_cannot_be_published(built: Built) -> None:
    recipe = built.recipe.with_name("private.yaml")
    lines = [line for line in built.recipe.read_text().splitlines() if not line.startswith("publish")]
    recipe.write_text("\n".join(lines) + "\n")
    opened = session.open(recipe, store=built.store)
    with pytest.raises(UsageError, match="it lists no destination"):
        opened.require_destinations()
    with pytest.raises(UsageError, match="it lists no destination"):
        opened.publish(opened.run())


def test_damage_in_the_store_is_reported_as_an_event(built: Built, tmp_path: Path) -> None:
    opened = session.open(built.recipe, store=tmp_path / "store")
    only = Selection(only=("config/*",))
    assert opened.run(only).ok
    record = next((tmp_path / "store" / "ac").rglob("?" * 64))
    record.chmod(0o644)
    record.write_text("damaged")
    events: list[Event] = []
    result = opened.run(only, on_event=events.append)
    assert result.ok and result.warned and statuses(result) == {"config/tiny": "built"}
    assert any(isinstance(event, Warned) and "the record is not used" in event.message for event in events)


def test_the_chapter_of_the_guide_runs(built: Built, tmp_path: Path) -> None:
    """Checks that the Python program in the section "From Python" of recipes/README.md runs, with a store
    that has the library already."""
    project(tmp_path, RECIPE.partition("publish:")[0])
    shorten(tmp_path / "tiny", 1)
    (tmp_path / "store").symlink_to(built.store)
    code = example("From Python", "recipes/README.md")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{VARIANT}: {tmp_path}/dist/{VARIANT}, KL ")
