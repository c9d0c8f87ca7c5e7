"""The verbs of the command line for a recipe's build steps: plan, run, explain, graph."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.build.events import Event, Noted, Reporter, RunFinished, Warned
from mlcbuild.cli.listing import show
from mlcbuild.cli.recipes import open_session
from mlcbuild.errors import UsageError, safe_lines
from mlcbuild.outcomes import Result, VariantResult
from mlcbuild.session import Execution, RecipePlan, Selection, Session

WORDS = {"hit": "reuse", "remote": "fetch", "run": "run", "pending": "wait"}


def print_warnings(event: Event) -> None:
    """Prints an event of a run to stderr if it is a warning or a note. It is the event handler of verbs
    without a live view.
    """
    if isinstance(event, Warned):
        print(f"warning {safe_lines(event.message)}", file=sys.stderr)
    if isinstance(event, Noted):
        print(safe_lines(event.message), file=sys.stderr)


def selection(arguments: argparse.Namespace) -> Selection:
    """Returns the Selection that options of a command line describe: the recipe's variants and build steps
    (--only, --affected-by, --shard), and the steps that run even if their results are stored (--force). An
    option that the verb lacks restricts nothing. Names are not checked here."""
    return Selection(
        tuple(getattr(arguments, "only", ())),
        getattr(arguments, "affected_by", None),
        getattr(arguments, "shard", None),
        tuple(getattr(arguments, "force", ())),
    )


def plan(arguments: argparse.Namespace) -> int:
    recipe_plan = open_session(arguments).plan(selection(arguments), print_warnings)
    document = {
        "steps": [
            {"name": step.name, "key": step.key, "status": step.state, "reason": step.reason}
            for step in recipe_plan.steps
        ],
        "variants": [
            {
                "name": item.variant.name,
                "bundle": str(item.variant.output),
                "memory": recipe_plan.memory[item.variant.name],
            }
            for item in recipe_plan.products
        ],
    }
    show(
        arguments.json,
        document,
        [*_steps(recipe_plan), "", *_memories(recipe_plan.memory), "", _count(recipe_plan)],
    )
    return 0


def _steps(recipe_plan: RecipePlan) -> list[str]:
    words = WORDS if recipe_plan.plan.reads_remotes else {**WORDS, "remote": "known"}
    return [
        f"{words[step.state]:<6} {step.name}" + (f"  ({step.reason})" if step.reason else "")
        for step in recipe_plan.steps
    ]


def _count(recipe_plan: RecipePlan) -> str:
    count = recipe_plan.plan.count
    remote = [step.record for step in recipe_plan.steps if step.state == "remote" and step.record is not None]
    size = sizes.show(sum(record.size for record in remote))
    fetches = f"{count('remote')} to fetch ({size} at most), " if remote else ""
    if remote and not recipe_plan.plan.reads_remotes:
        fetches = f"{count('remote')} known without their files (to run if those are needed), "
    blocked = sum(step.reason.startswith("cannot run here") for step in recipe_plan.steps)
    if blocked:
        fetches = f"{blocked} of them cannot run here, {fetches}"
    return (
        f"{count('run')} to run, {count('pending')} wait for those (and may be reused), {fetches}"
        f"{count('hit')} to reuse"
    )


def _memories(estimates: Mapping[str, Mapping[str, int] | None]) -> list[str]:
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


def execution(arguments: argparse.Namespace) -> Execution:
    """Returns an Execution for a command line: the number of cores that running steps share (--jobs; 0,
    without it, means all), whether to continue after failures (--keep-going), the executor (--executor), and
    its TLS directory (--tls, else $MLCBUILD_TLS, else None). SIGINT and SIGTERM end its run, which must
    therefore be in the main thread."""
    return Execution(
        jobs=arguments.jobs or 0,
        keep_going=arguments.keep_going,
        executor=arguments.executor,
        tls=arguments.tls or os.environ.get("MLCBUILD_TLS"),
        handle_signals=True,
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return plan(arguments)
    began = time.time_ns()
    session, result = build(arguments)
    if arguments.json:
        print(json.dumps(document(result), indent=2))
    else:
        print(safe_lines("\n".join([*_lines(listed(result)), *_end(result)])))
    _leave_receipt(arguments, session, result, began)
    return result.exit_code


def build(arguments: argparse.Namespace) -> tuple[Session, Result]:
    """Runs the build steps that a command line selects, with a live view, and writes the outputs that CI
    systems read. Returns (the Session of the recipe, the result of the run), also if steps failed. Raises
    UsageError if an output cannot be written, which is checked before the run, and InputError for an invalid
    recipe."""
    from mlcbuild.cli import summaries
    from mlcbuild.reports.report import reporting

    summaries.check_writable(arguments)
    session, chosen = open_session(arguments), selection(arguments)
    with reporting(sys.stderr if arguments.json else sys.stdout) as report:
        result = session.run(chosen, execution(arguments), on_event=_to_reporter(report))
    summaries.write(arguments, result.log)
    return session, result


def _to_reporter(report: Reporter) -> Reporter:
    def handle(event: Event) -> None:
        if isinstance(event, Noted):
            print_warnings(event)
        # The verb prints the last line itself, since it names the bundles.
        elif not isinstance(event, RunFinished):
            report(event)

    return handle


def document(result: Result) -> dict[str, object]:
    """Returns the document that `run --json` prints, a dict ready for JSON: the steps of a run, and its
    variants with their bundles."""
    from mlcbuild.reports import report

    variants = [
        {
            "name": item.name,
            "bundle": None if item.bundle is None else str(item.bundle),
            "status": item.status,
            "note": item.words,
        }
        for item in result.variants
    ]
    return report.document(result.run, variants)


def _end(result: Result) -> list[str]:
    """Returns the last lines that `mlcbuild run` prints: speeds, counts, and the directories of the
    bundles.
    """
    from mlcbuild.cli import summaries
    from mlcbuild.reports.report import summary

    return [*summaries.speeds(result.log), f"{summary(result.run)}{_places(result)}"]


def listed(result: Result) -> list[VariantResult]:
    """Returns those results of a recipe's variants that `mlcbuild run` prints on a line each. It leaves out
    variants that an interrupted run did not reach, which the last line only counts.
    """
    return [item for item in result.variants if not (result.run.interrupted and item.status == "skipped")]


def _lines(variants: Iterable[VariantResult]) -> list[str]:
    current_directory = str(Path.cwd())
    return [_line(item, current_directory) for item in variants]


def _line(item: VariantResult, current_directory: str) -> str:
    if item.error is not None:
        return f"failed  {item.name}: {item.error}"
    where = f"  {_near(item.bundle, current_directory)}" if item.bundle is not None else ""
    return f"{item.status:<7} {item.name}{where}" + (f"  ({item.note})" if item.note else "")


def _near(path: Path, current_directory: str) -> str:
    """Returns a path relative to `current_directory` if it lies below it, "." for this directory itself, else
    the path unchanged."""
    text = str(path)
    return "." if text == current_directory else text.removeprefix(current_directory.rstrip("/") + "/")


def _places(result: Result) -> str:
    """Returns the end of the last line that `mlcbuild run` prints, with the number of bundles and the
    directories that contain them, such as "; 2 bundles in dist"; "" without bundles."""
    count, current_directory = len(result.bundles), str(Path.cwd())
    places = sorted({_near(path.parent, current_directory) for path in result.bundles.values()})
    return f"; {count} bundle{'s' if count != 1 else ''} in {', '.join(places)}" if places else ""


def _leave_receipt(arguments: argparse.Namespace, session: Session, result: Result, began: int) -> None:
    """Writes a receipt (the list of everything on which a finished run depended), so that the same command
    line ends at once next time if there is nothing to do. began: start of the run, in ns since 1970.

    It writes none after failures or warnings, if a variant has no bundle, with --json, --shard, --affected-by
    or --force, or if the run writes a file for CI systems (--junit, --summary or $GITHUB_STEP_SUMMARY).
    """
    from mlcbuild.cli import receipts, summaries

    outputs = (arguments.junit, arguments.summary, os.environ.get("GITHUB_STEP_SUMMARY"))
    other = (arguments.json, arguments.shard, arguments.affected_by, arguments.force)
    complete = result.ok and len(result.bundles) == len(result.variants)
    if result.warned or not complete or any((*outputs, *other)):
        return
    lines = _lines(replace(item, status="reused") for item in result.variants)
    printed = receipts.Printed((*lines, *summaries.speeds(result.log)), _places(result))
    receipts.leave(session, result, printed, arguments.words, began)


def explain(arguments: argparse.Namespace) -> int:
    explanation = open_session(arguments).explain(arguments.step)
    planned, changes = explanation.planned, explanation.changes
    lines = [f"{planned.name}: {WORDS[planned.state]}" + (f", {planned.reason}" if planned.reason else "")]
    lines += [f"key {planned.key}" if planned.key else "the key is not known before its inputs are built"]
    for change in changes:
        lines += [change.subject, f"  - {change.before or '(absent)'}", f"  + {change.after or '(absent)'}"]
    if not changes and planned.key is not None:
        lines.append(
            "nothing differs from the last time it was built" if planned.record else "it was never built here"
        )
    print(safe_lines("\n".join(lines)))
    return 0


def graph(arguments: argparse.Namespace) -> int:
    text = open_session(arguments).graph(arguments.format, print_warnings)
    if arguments.output is None:
        print(text.rstrip("\n"))
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: cannot be written: {error.strerror}") from None
    return 0
