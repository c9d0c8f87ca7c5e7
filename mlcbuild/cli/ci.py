"""Verbs for CI systems: matrix, shard, report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mlcbuild.ci import matrix as matrices
from mlcbuild.ci import split as splits
from mlcbuild.ci.outputs import headline
from mlcbuild.cli.build import choice, open_sharing, open_store, read_pipeline, tell
from mlcbuild.cli.listing import show
from mlcbuild.errors import UsageError
from mlcbuild.reports.report import duration


def matrix(arguments: argparse.Namespace) -> int:
    from mlcbuild.build import plan as planning

    pipeline, store = read_pipeline(arguments), open_store(arguments)
    count = arguments.shards
    if count is not None and count < 1:
        raise UsageError(f"--shards {count}: there must be at least one")
    names = dict.fromkeys(item.variant.target.name for item in pipeline.products)
    given = matrices.labels(arguments.label, names)
    command = matrices.Command(arguments.recipe, tuple(arguments.settings), arguments.allow_outside)
    only = choice(arguments, pipeline)
    products = [item for item in pipeline.products if only is None or item.last in only]
    sharing = open_sharing(arguments, pipeline.recipe, store)
    found = planning.plan(pipeline.graph, store, sharing=sharing, report=tell)
    jobs = matrices.variants(products, pipeline, found, given, command)
    if not arguments.all:
        products = [item for item, job in zip(products, jobs, strict=True) if job.reason]
        jobs = [job for job in jobs if job.reason]
    if count is not None:
        jobs = matrices.shards(products, count, given, command)
    if arguments.format == "json":
        print(json.dumps([vars(job) for job in jobs], indent=2, ensure_ascii=False))
    else:
        print(matrices.github(jobs) if arguments.format == "github" else matrices.gitlab(jobs))
    return 0


def shard(arguments: argparse.Namespace) -> int:
    """Shows the split that `run --shard` uses; with --record, of the durations that it writes first."""
    pipeline = read_pipeline(arguments)
    if arguments.count < 1:
        raise UsageError(f"--count {arguments.count}: there must be at least one")
    path = splits.place(pipeline.recipe.path)
    if arguments.record:
        known = splits.read(path) if path.exists() else {}
        mine = splits.recorded(pipeline.graph, open_store(arguments))
        if not mine:
            raise UsageError("there is nothing to record: no step of this recipe was built in this store")
        kept = {name: spent for name, spent in known.items() if name in pipeline.graph}
        splits.write(path, {**kept, **mine})
    only = choice(arguments, pipeline) or ()
    found = splits.split(pipeline.graph, only, arguments.count, splits.read(path))
    lines = []
    for index, part in enumerate(found.shards, 1):
        lines.append(f"shard {index}/{arguments.count}: {duration(part.milliseconds / 1000)}")
        lines += [f"  {name}" for name in part.steps]
    lines.append(f"split {found.identity}, {_basis(path.name if path.exists() else '')}")
    document = {
        "split": found.identity,
        "shards": [{"steps": list(part.steps), "seconds": part.milliseconds / 1000} for part in found.shards],
    }
    show(arguments.json, document, lines)
    return 0


def _basis(name: str) -> str:
    return f"by the durations in {name}" if name else "by estimates; --record writes what was measured"


def report(arguments: argparse.Namespace) -> int:
    """The page of the recipe's last run, compared with the one before. Does not read the recipe."""
    from mlcbuild.reports import page, runlog

    recipe, store = Path(arguments.recipe), open_store(arguments)
    logs = runlog.latest(store, recipe, 2)
    if not logs:
        raise UsageError(
            f"{recipe}: the store at {store.root} has no run of it to report; "
            f"run `mlcbuild run {recipe}` first"
        )
    before = logs[1] if len(logs) > 1 else None
    try:
        Path(arguments.output).write_text(page.html(logs[0], before), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: cannot be written: {error.strerror}") from None
    print(f"{arguments.output}: {headline(logs[0])}")
    return 0
