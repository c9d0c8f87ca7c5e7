"""Selects the part of a recipe that is planned or run: by name, by what changed in Git, by shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcbuild.build.events import Noted, Reporter, silent
from mlcbuild.build.plan import Plan
from mlcbuild.errors import SetupError
from mlcbuild.pipeline import Pipeline, Product


@dataclass(frozen=True)
class Selection:
    """The options that select the part of a recipe to plan or run, by default all of it, and the steps that
    run again."""

    only: tuple[str, ...] = ()
    """Names or shell patterns of variants and steps. The steps that they need are included. () selects
    everything.
    """
    affected_by: str | None = None
    """A range of Git commits, such as "main...HEAD", which selects the variants with an input that changed in
    it, or one commit, with which the working tree is compared; None: no such limit.
    """
    shard: str | None = None
    """A shard, one machine's share of the steps, such as "2/3", the second of three; None: all steps. Each
    step belongs to one shard, but a shard also builds steps of others on which its own depend, if neither the
    store nor a remote cache has their results."""
    force: tuple[str, ...] = ()
    """Names or shell patterns of steps that run even when the store holds their results."""


EVERYTHING = Selection()


@dataclass(frozen=True)
class Selected:
    """The steps and variants of a recipe that the user selected."""

    products: tuple[Product, ...]
    """The selected variants, each with the names of its steps; with a shard, only those whose last step is in
    it."""
    only: tuple[str, ...] | None
    """Names of the selected steps, which a shard does not limit; None: all steps; (): none. The steps on
    which they depend are not listed, but selected, too."""
    phases: tuple[tuple[str, ...] | None, ...]
    """The phases of a run, which run one after the other: for each phase the names of its steps, or None for
    all steps of the recipe. There is no phase if nothing is selected, else one. Only a shard (one machine's
    share of the steps) can have two: first those of its steps that need few results of other shards, then all
    of its steps, of which the former are reused."""
    outputs: tuple[str, ...]
    """Names of the steps whose files must be on this machine after a run: those that build, verify and
    measure the bundles of the selected variants, and, unless a shard is selected, those that the user
    named."""


def select(pipeline: Pipeline, selection: Selection, on_event: Reporter = silent) -> Selected:
    """Applies a selection to a recipe, and returns the selected steps and variants.

    on_event: receives a message (`Noted`) for each variant that is selected because its inputs changed in
    Git, and one for the selected shard. Raises UsageError for unknown names, a malformed shard, and a range
    of commits that Git does not know; SetupError if Git is missing; InputError for a malformed file of
    durations.
    """
    only = _only(pipeline, selection, on_event)
    products = [item for item in pipeline.products if only is None or item.last in only]
    phases: Sequence[tuple[str, ...] | None] = () if only == () else (only,)
    named = selection.only
    if selection.shard is not None:
        named = ()
        if phases:
            phases, products = _shard(pipeline, selection.shard, only or (), products, on_event)
    files = [step for item in products for step in (item.bundle, item.verify, item.bench) if step is not None]
    outputs = tuple(dict.fromkeys([*pipeline.choose(named), *files]))
    return Selected(tuple(products), only, tuple(phases), outputs)


def require_tools(pipeline: Pipeline, selected: Selected, plan: Plan) -> None:
    """Raises SetupError, before any step starts, if this machine lacks a tool for a selected step that a
    run would execute.
    """
    graph = pipeline.graph
    names = frozenset[str]().union(
        *(graph.nodes if phase is None else graph.closure(phase) for phase in selected.phases)
    )
    for step, words in pipeline.lacks.items():
        name = graph.resolve(step)
        if name in names and plan[name].state in ("run", "pending"):
            blocked = [item.variant.name for item in pipeline.products if item.library == step]
            more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
            raise SetupError(
                f"{words}. {blocked[0]}{more} cannot be built here without it, and no step was started; "
                "--keep-going builds the other variants, --only chooses some"
            )


def _only(pipeline: Pipeline, selection: Selection, on_event: Reporter) -> tuple[str, ...] | None:
    only = pipeline.choose(selection.only)
    if selection.affected_by is None:
        return only or None
    from mlcbuild.ci import affected

    files = affected.changed(pipeline.recipe.directory, selection.affected_by)
    reasons = affected.affected(pipeline, files)
    for name, reason in reasons.items():
        on_event(Noted(f"affected {name}: {reason}"))
    ends = (end for item in pipeline.products if item.variant.name in reasons for end in item.ends)
    return tuple(end for end in ends if not only or end in only)


def _shard(
    pipeline: Pipeline, text: str, only: Sequence[str], products: Sequence[Product], on_event: Reporter
) -> tuple[list[tuple[str, ...] | None], list[Product]]:
    """Returns (the phases of one shard, the variants whose bundles it completes). A shard is one machine's
    share of the steps; a phase is a list of names of steps, and phases run one after the other. text: number
    of the shard, such as "2/3"; only: names of the selected steps, () for all; products: the selected
    variants. Raises UsageError if the text is not of this form, InputError for a malformed file of
    durations."""
    from mlcbuild.ci import split as splits

    graph = pipeline.graph
    index, count = splits.parse(text)
    dealt = splits.split(graph, only, count, splits.read(durations(pipeline)))
    shard = dealt.shards[index - 1]
    on_event(Noted(f"shard {text} of split {dealt.identity}: {len(shard.steps)} steps"))
    phases: list[tuple[str, ...] | None] = [
        phase for phase in dict.fromkeys((shard.first, shard.steps)) if phase
    ]
    return phases, [item for item in products if graph.resolve(item.last) in shard.steps]


def durations(pipeline: Pipeline) -> Path:
    """Returns the path of the file beside a recipe that holds the durations of steps. By these durations the
    steps are divided into shards, one for each machine. The file need not exist."""
    from mlcbuild.ci import split as splits

    return splits.place(pipeline.recipe.path)
