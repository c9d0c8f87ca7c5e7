"""Verbs about a recipe's steps: plan, run, explain, graph."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild_format import sizes

from mlcbuild.build.events import Event, Reporter, RunFinished, RunResult, Status, StepResult, Warned
from mlcbuild.bundles.assemble import LIBRARY
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import read_lock, read_recipe
from mlcbuild.errors import MlcbuildError, UsageError
from mlcbuild.pipeline import Pipeline, Product, build
from mlcbuild.store.store import Store, default_root

if TYPE_CHECKING:
    from mlcbuild.build.plan import Plan, Planned
    from mlcbuild.cli.receipts import Settled
    from mlcbuild.emit import Finished
    from mlcbuild.keyfile import Signer
    from mlcbuild.recipe import Recipe
    from mlcbuild.remotes.sharing import Sharing

WORDS = {"hit": "reuse", "remote": "fetch", "run": "run", "pending": "wait"}


def open_store(arguments: argparse.Namespace) -> Store:
    return Store(Path(arguments.store) if arguments.store else default_root())


def read_pipeline(arguments: argparse.Namespace) -> Pipeline:
    recipe = read_recipe(arguments, with_models=True)
    return build(recipe, read_lock(recipe))


def open_sharing(arguments: argparse.Namespace, recipe: Recipe, store: Store) -> Sharing:
    """The recipe's remotes, unless --no-remote says otherwise."""
    from mlcbuild import keyfile
    from mlcbuild.remotes.link import Link
    from mlcbuild.remotes.sharing import Sharing

    if arguments.no_remote or not recipe.remotes:
        return Sharing(store)
    signer = keyfile.load(keyfile.default_path())
    return Sharing(store, [Link(remote, signer) for remote in recipe.remotes])


def tell(event: Event) -> None:
    """Warnings where there is no live view."""
    if isinstance(event, Warned):
        print(f"warning {event.message}", file=sys.stderr)


def choice(arguments: argparse.Namespace, pipeline: Pipeline) -> tuple[str, ...] | None:
    """The steps that --only and --affected-by leave; () when nothing is left, None for everything."""
    only = pipeline.choose(arguments.only)
    if arguments.affected_by is None:
        return only or None
    from mlcbuild.ci import affected

    files = affected.changed(pipeline.recipe.directory, arguments.affected_by)
    found = affected.affected(pipeline, files)
    for name, reason in found.items():
        print(f"affected {name}: {reason}", file=sys.stderr)
    chosen = (end for item in pipeline.products if item.variant.name in found for end in item.ends)
    return tuple(end for end in chosen if not only or end in only)


def plan(arguments: argparse.Namespace) -> int:
    from mlcbuild.build import plan as planning

    pipeline, store = read_pipeline(arguments), open_store(arguments)
    only = choice(arguments, pipeline)
    found = planning.Plan(())
    if only != ():
        sharing = open_sharing(arguments, pipeline.recipe, store)
        found = planning.plan(
            pipeline.graph, store, force=arguments.force, only=only or (), sharing=sharing, report=tell
        )
    wanted = [item for item in pipeline.products if only is None or item.last in only]
    estimates = {item.variant.name: estimate(pipeline, item, found, store) for item in wanted}
    document = {
        "steps": [
            {"name": step.name, "key": step.key, "status": step.state, "reason": step.reason}
            for step in found.steps
        ],
        "variants": [
            {
                "name": item.variant.name,
                "bundle": str(item.variant.output),
                "memory": estimates[item.variant.name],
            }
            for item in wanted
        ],
    }
    show(
        arguments.json,
        document,
        [*_steps(found.steps), "", *_memories(estimates), "", _count(found)],
    )
    return 0


def _steps(steps: Sequence[Planned]) -> list[str]:
    return [
        f"{WORDS[step.state]:<6} {step.name}" + (f"  ({step.reason})" if step.reason else "")
        for step in steps
    ]


def _count(found: Plan) -> str:
    return (
        f"{found.count('run')} to run, {found.count('pending')} wait for those (and may be reused), "
        f"{found.count('hit')} to reuse"
    )


def estimate(pipeline: Pipeline, product: Product, found: Plan, store: Store) -> dict[str, int] | None:
    """Bytes a bundle takes when it is served, by part; None for a model that is not here yet.

    A compiled library says it all; before that, weights and KV cache follow from the recipe, and the
    workspace is not known.
    """
    from mlcbuild.models import context_window, parameters
    from mlcbuild.quant import stored_bytes

    planned = found.by_name.get(pipeline.graph.resolve(product.library))
    if planned is not None and planned.state == "hit" and planned.record is not None:
        library = next(entry for entry in planned.record.files if entry.path == LIBRARY)
        memory = json.loads(store.read_blob(library))["memory"]
        return {part: int(memory[part]) for part in ("weights", "kv_cache", "workspace")}
    variant = product.variant
    config = pipeline.configs.get(variant.model.name)
    if config is None:
        return None
    tokens = context_window(config, variant.limits.context_window) * variant.limits.max_batch
    item = 4 if variant.scheme.dtype == "float32" else 2
    return {
        "weights": stored_bytes(parameters(config), variant.scheme),
        "kv_cache": tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * item,
    }


def _memories(estimates: dict[str, dict[str, int] | None]) -> list[str]:
    lines = []
    for name, parts in estimates.items():
        words = "unknown until the model is fetched"
        if parts is not None:
            named = ", ".join(
                f"{part.replace('_', ' ')} {sizes.show(count)}" for part, count in parts.items()
            )
            words = f"{sizes.show(sum(parts.values()))} ({named})"
            words += "" if "workspace" in parts else ", workspace known once the library is compiled"
        lines.append(f"memory {name}: {words}")
    return lines


def run(arguments: argparse.Namespace) -> int:
    from mlcbuild import keyfile
    from mlcbuild.build.execute import Options
    from mlcbuild.ci import phases as turns
    from mlcbuild.cli import receipts, summaries
    from mlcbuild.reports import runlog
    from mlcbuild.reports.report import document, reporting, summary

    if arguments.dry_run:
        return plan(arguments)
    began = time.time_ns()
    summaries.check_writable(arguments)
    pipeline, store = read_pipeline(arguments), open_store(arguments)
    only = choice(arguments, pipeline)
    wanted = [item for item in pipeline.products if only is None or item.last in only]
    names: list[tuple[str, ...] | None] = [only] if only != () else []
    if arguments.shard is not None and names:
        names, wanted = _shard(arguments.shard, pipeline, only or (), wanted)
    options = Options(
        jobs=arguments.jobs or 0,
        keep_going=arguments.keep_going,
        force=tuple(arguments.force),
        outputs=_outputs(arguments.only if arguments.shard is None else (), pipeline, wanted),
        executor=_executor(arguments.executor),
        tls=arguments.tls or os.environ.get("MLCBUILD_TLS"),
    )
    signer = keyfile.load(keyfile.default_path())
    with reporting(sys.stderr if arguments.json else sys.stdout) as report:
        clock = runlog.Clock(_without_summary(report))

        def sharing() -> Sharing:
            return open_sharing(arguments, pipeline.recipe, store)

        result = turns.run(pipeline.graph, options, names, sharing, clock)
    outcomes = _finish(pipeline, wanted, result, store, signer)
    rows = [(outcome.product, outcome.status, outcome.words) for outcome in outcomes]
    log = summaries.make_log(pipeline, store, result, clock, rows)
    log = replace(log, shard=arguments.shard or "")
    runlog.save(store, pipeline.recipe.path, log)
    summaries.tell(arguments, log)
    if arguments.json:
        print(json.dumps(document(result, [outcome.to_json() for outcome in outcomes]), indent=2))
    else:
        lines = [outcome.line for outcome in outcomes if outcome.line]
        print("\n".join([*lines, *summaries.speeds(log), f"{summary(result)}{_places(outcomes)}"]))
    if not clock.warned:
        _leave_receipt(arguments, receipts.Settled(pipeline, store, result, log), outcomes, began)
    errors = [outcome.error.exit_code for outcome in outcomes if outcome.error is not None]
    return result.exit_code or max(errors, default=0)


def _leave_receipt(
    arguments: argparse.Namespace, run: Settled, outcomes: Sequence[Outcome], began: int
) -> None:
    """So that this command line is done at once next time, if there is nothing left to do for it."""
    from mlcbuild.cli import receipts, summaries

    told = (arguments.junit, arguments.summary, os.environ.get("GITHUB_STEP_SUMMARY"))
    other = (arguments.json, arguments.shard, arguments.affected_by, arguments.force)
    if any((*told, *other)) or not run.result.ok or not all(outcome.made for outcome in outcomes):
        return
    lines = tuple(replace(outcome, status="reused").line for outcome in outcomes)
    lines += tuple(summaries.speeds(run.log))
    bundles = tuple(outcome.product.variant.output for outcome in outcomes)
    receipts.leave(run, receipts.Said(lines, _places(outcomes)), bundles, arguments.words, began)


def _executor(text: str) -> str:
    """The executor of options. Raises UsageError."""
    from mlcbuild.build.cluster import SCHEME, address

    if text.startswith(SCHEME):
        return str(address(text))
    if text in ("processes", "inline"):
        return {"processes": "pool"}.get(text, text)
    raise UsageError(f"--executor: '{text}' must be processes, inline, or {SCHEME}HOST:PORT")


def _outputs(only: Sequence[str], pipeline: Pipeline, products: Sequence[Product]) -> tuple[str, ...]:
    """Steps whose files are wanted here: what bundles are emitted from, and steps that were named."""
    files = [name for item in products for name in (item.bundle, item.verify, item.bench) if name is not None]
    return tuple(dict.fromkeys([*pipeline.choose(only), *files]))


def _shard(
    text: str, pipeline: Pipeline, only: Sequence[str], wanted: Sequence[Product]
) -> tuple[list[tuple[str, ...] | None], list[Product]]:
    """The turns of one shard, and the variants that are its to finish."""
    from mlcbuild.ci import split as splits

    index, count = splits.parse(text)
    durations = splits.read(splits.place(pipeline.recipe.path))
    found = splits.split(pipeline.graph, only, count, durations)
    mine = found.shards[index - 1]
    print(f"shard {text} of split {found.identity}: {len(mine.steps)} steps", file=sys.stderr)
    turns: list[tuple[str, ...] | None] = [turn for turn in dict.fromkeys((mine.first, mine.steps)) if turn]
    return turns, [item for item in wanted if pipeline.graph.resolve(item.last) in mine.steps]


def _without_summary(report: Reporter) -> Reporter:
    """The last line is ours to write: it says where the bundles are."""

    def tell(event: Event) -> None:
        if not isinstance(event, RunFinished):
            report(event)

    return tell


@dataclass(frozen=True)
class Outcome:
    """What became of a variant."""

    product: Product
    status: Status
    error: MlcbuildError | None = None
    note: str = ""

    @property
    def made(self) -> bool:
        """Whether the bundle is there."""
        return self.status in ("built", "reused")

    def to_json(self) -> dict[str, str | None]:
        variant = self.product.variant
        return {
            "name": variant.name,
            "bundle": str(variant.output) if self.made else None,
            "status": self.status,
            "note": self.words,
        }

    @property
    def words(self) -> str:
        return str(self.error) if self.error is not None else self.note

    @property
    def line(self) -> str:
        variant = self.product.variant
        if self.error is not None:
            return f"failed  {variant.name}: {self.error}"
        where = f"  {_near(variant.output)}" if self.made else ""
        return f"{self.status:<7} {variant.name}{where}" + (f"  ({self.note})" if self.note else "")


def _finish(
    pipeline: Pipeline, products: Sequence[Product], result: RunResult, store: Store, signer: Signer | None
) -> list[Outcome]:
    """Emits the variants whose steps succeeded, and says what became of all."""
    from mlcbuild.emit import Finished

    steps = {step.name: step for step in result.steps}
    records = {name: step.record for name, step in steps.items() if step.record is not None}
    run = Finished(pipeline, store, records, signer)
    return [_finish_one(run, product, steps) for product in products]


def _finish_one(run: Finished, product: Product, steps: Mapping[str, StepResult]) -> Outcome:
    from mlcbuild.emit import emit

    mine = [steps.get(run.pipeline.graph.resolve(name)) for name in product.steps]
    known = [step for step in mine if step is not None]
    if any(step.status == "failed" for step in known):
        return Outcome(product, "failed", note="a step of it failed")
    if len(known) < len(mine) or any(step.status == "skipped" for step in known):
        return Outcome(product, "skipped")
    note = f"not verified: {product.unverified}" if product.verify is None else ""
    try:
        wrote = emit(run, product)
    except MlcbuildError as error:
        return Outcome(product, "failed", error)
    fresh = wrote or any(step.status == "built" for step in known)
    return Outcome(product, "built" if fresh else "reused", note=note)


def _near(path: Path) -> str:
    """A path as a person would type it from here."""
    text, here = str(path), str(Path.cwd())
    return "." if text == here else text.removeprefix(here.rstrip("/") + "/")


def _places(outcomes: Sequence[Outcome]) -> str:
    """The end of the last line: how many bundles there are, and where."""
    made = [outcome for outcome in outcomes if outcome.made]
    places = sorted({_near(outcome.product.variant.output.parent) for outcome in made})
    return f"; {len(made)} bundle{'s' if len(made) != 1 else ''} in {', '.join(places)}" if places else ""


def explain(arguments: argparse.Namespace) -> int:
    from mlcbuild.build import plan as planning

    pipeline, store = read_pipeline(arguments), open_store(arguments)
    sharing = open_sharing(arguments, pipeline.recipe, store)
    steps = pipeline.graph.match([arguments.step])
    if len(steps) > 1:
        raise UsageError(f"'{arguments.step}' means {len(steps)} steps: {', '.join(sorted(steps))}; name one")
    planned, changes = planning.explain(pipeline.graph, store, next(iter(steps)), sharing)
    lines = [f"{planned.name}: {WORDS[planned.state]}" + (f", {planned.reason}" if planned.reason else "")]
    lines += [f"key {planned.key}" if planned.key else "the key is not known before its inputs are built"]
    for change in changes:
        lines += [change.what, f"  - {change.before or '(absent)'}", f"  + {change.after or '(absent)'}"]
    if not changes and planned.key is not None:
        lines.append(
            "nothing differs from the last time it was built" if planned.record else "it was never built here"
        )
    print("\n".join(lines))
    return 0


def graph(arguments: argparse.Namespace) -> int:
    from mlcbuild.build import plan as planning
    from mlcbuild.reports import graph_picture

    pipeline, store = read_pipeline(arguments), open_store(arguments)
    sharing = open_sharing(arguments, pipeline.recipe, store)
    found = planning.plan(pipeline.graph, store, sharing=sharing, report=tell)
    if arguments.format == "html":
        text = graph_picture.html(pipeline.graph, found, pipeline.recipe.name)
    else:
        text = getattr(graph_picture, arguments.format)(pipeline.graph, found)
    if arguments.output is None:
        print(text.rstrip("\n"))
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: cannot be written: {error.strerror}") from None
    return 0
