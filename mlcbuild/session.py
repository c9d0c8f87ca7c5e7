"""Builds from Python: opens a recipe with a store, plans it, runs it, publishes its bundles.

    from mlcbuild import session

    build = session.open("recipe.yaml", store="store")
    result = build.run(session.Selection(only=("tiny-*",)), on_event=print)
    result.check()
    for variant in result.variants:
        print(variant.name, variant.bundle, variant.figures)

Nothing here prints, exits, or reads a command line, and no signal handler is installed unless the options
(`Execution`) of a run ask for it. Functions may be called from any thread, several at a time: a `Session` has
no state that a call changes, and any number of sessions, processes and machines may share one store. A run
whose steps fail returns a result, whose `check` raises their errors. Every other expected failure is an
exception of `mlcbuild.errors`; one that concerns a recipe holds all problems of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from mlcbuild import keyfile, outcomes
from mlcbuild.build import plan as planning
from mlcbuild.build.events import Event, Reporter, RunFinished, RunResult, Warned, silent
from mlcbuild.errors import LostBlobError, UsageError
from mlcbuild.execution import HERE, Execution, options
from mlcbuild.keyfile import Signer
from mlcbuild.locking import LockedSource, check, lock, moved, read_lock, read_recipe
from mlcbuild.outcomes import Explanation, RecipePlan, Result, VariantResult
from mlcbuild.pipeline import Pipeline, build
from mlcbuild.recipe import Recipe
from mlcbuild.remotes import Remote, fault, normal
from mlcbuild.reports import runlog
from mlcbuild.selection import EVERYTHING, Selection, durations, require_tools, select
from mlcbuild.serving_memory import serving_memory
from mlcbuild.signals import Cancellation
from mlcbuild.store.store import Store, default_root

if TYPE_CHECKING:
    from mlcbuild.build.graph import Graph
    from mlcbuild.bundles.publish.uploads import Parcel, Sent
    from mlcbuild.ci.job_matrix import CiJob, Matrix
    from mlcbuild.ci.split import Split
    from mlcbuild.remotes.sharing import Sharing
    from mlcbuild.replication import CheckedStore, Pulled, Pushed
    from mlcbuild.store.records import Record

__all__ = [
    "Cancellation",
    "Execution",
    "Explanation",
    "LockedSource",
    "RecipePlan",
    "Result",
    "Selection",
    "Session",
    "VariantResult",
    "check",
    "lock",
    "moved",
    "open",
]

GraphFormat: TypeAlias = Literal["mermaid", "dot", "svg", "html"]

_ATTEMPTS = 5
"""Maximum number of attempts of one run. After an attempt that met damaged files in the store and removed
them, the next one rebuilds them; it may meet other damaged files."""


def open(
    recipe: str | Path,
    *,
    store: str | Path | None = None,
    remotes: Iterable[str | Remote] | None = None,
    settings: Mapping[str, str] | None = None,
    allow_outside: bool = False,
    key: str | Path | None = None,
) -> Session:
    """Reads a recipe, its lock and the configs of its local models, and returns a session.

    store: directory of the artifact store, created by the first write; by default $MLCBUILD_STORE, or a
    directory in the user's cache. remotes: shared caches, as URLs or `Remote` objects, that replace those of
    the recipe; () for none. settings: variable name -> value for the recipe's vars. allow_outside: True if
    paths may leave the project. key: file with the private key that signs records and provenance; by default
    $MLCBUILD_KEY or, if it exists, the user's.

    Raises InputError with all problems of the recipe, the models and the lock; UsageError for sources that
    are not locked, and for URLs that name no remote cache; StoreError for a store of another format.
    """
    read = read_recipe(recipe, settings, allow_outside)
    if remotes is not None:
        read = replace(read, remotes=_resolved(remotes, read))
    root = Path(store) if store is not None else default_root()
    return Session(build(read, read_lock(read)), Store(root), None if key is None else Path(key))


def _resolved(listed: Iterable[str | Remote], recipe: Recipe) -> tuple[Remote, ...]:
    """Returns the listed URLs or `Remote` objects as remote caches; a URL that the recipe lists, too, gets
    the keys that the recipe trusts for it. Raises UsageError for a URL of no remote cache."""
    trust = {remote.url: remote.trust for remote in recipe.remotes}
    remotes = []
    for item in listed:
        if isinstance(item, str):
            if problem := fault(item):
                raise UsageError(f"remotes: {problem}")
            url = normal(item)
            item = Remote(url, trust=trust.get(url, ()))  # noqa: PLW2901
        remotes.append(item)
    return tuple(remotes)


@dataclass(frozen=True)
class Session:
    """An opened recipe with a store, as returned by `open`."""

    pipeline: Pipeline
    store: Store
    """The store of built files. Methods use other Stores of its directory, so that threads share no state."""
    key: Path | None = None
    """Path of the signing key; None: $MLCBUILD_KEY or, if it exists, the user's."""

    @property
    def recipe(self) -> Recipe:
        return self.pipeline.recipe

    def over(self, remotes: Iterable[str | Remote]) -> Session:
        """Returns a session on the same recipe that uses `remotes`, URLs or `Remote` objects, in place of the
        recipe's remote caches. Raises UsageError for a URL of no remote cache."""
        recipe = replace(self.recipe, remotes=_resolved(remotes, self.recipe))
        return replace(self, pipeline=replace(self.pipeline, recipe=recipe))

    def unverified(self) -> Session:
        """Returns a session on the same recipe that builds bundles without measuring their speed and without
        comparing them with their models, which for a large model takes most of the time."""
        return replace(self, pipeline=self.pipeline.unverified())

    # Planning

    def plan(self, selection: Selection = EVERYTHING, on_event: Reporter = silent) -> RecipePlan:
        """Computes what a run would do, and why; ignores the shard. Writes only cached digests of sources.

        on_event: receives warnings about the store and remotes. Raises UsageError for names that match
        nothing or an unreadable key, SourceError or StoreError for an unreadable source or store."""
        selected = select(self.pipeline, replace(selection, shard=None), on_event)
        store = Store(self.store.root)
        plan = planning.Plan(())
        if selected.only != ():
            plan = planning.plan(
                self.pipeline.graph,
                store,
                force=selection.force,
                only=selected.only or (),
                sharing=self._sharing(store),
                report=on_event,
            )
        memory = {
            item.variant.name: serving_memory(self.pipeline, item, plan, store) for item in selected.products
        }
        return RecipePlan(outcomes.with_lacks(plan, self.pipeline.lacks), selected.products, memory)

    def explain(self, step: str) -> Explanation:
        """Returns whether and why a step would run, and how its parameters, files and tools differ from its
        most similar earlier build. step: its name or a pattern. Raises UsageError unless one step matches,
        SourceError for unreadable sources, StoreError for an unreadable store."""
        names = sorted(self.pipeline.graph.match([step]))
        if len(names) > 1:
            raise UsageError(f"'{step}' means {len(names)} steps: {', '.join(names)}; name one")
        store = Store(self.store.root)
        planned, changes = planning.explain(self.pipeline.graph, store, names[0], self._sharing(store))
        return outcomes.explained(planned, changes, self.pipeline.lacks)

    def graph(self, form: GraphFormat = "mermaid", on_event: Reporter = silent) -> str:
        """Returns a drawing of all steps and their states as text in the format `form`. on_event: receives
        warnings. Raises UsageError, SourceError or StoreError for an unreadable key, source or store."""
        from mlcbuild.reports import graph_picture

        graph, store = self.pipeline.graph, Store(self.store.root)
        plan = planning.plan(graph, store, sharing=self._sharing(store), report=on_event)
        if form == "html":
            return graph_picture.html(graph, plan, self.recipe.name)
        draw: Callable[..., str] = getattr(graph_picture, form)
        return draw(graph, plan)

    def jobs(
        self, matrix: Matrix, selection: Selection = EVERYTHING, on_event: Reporter = silent
    ) -> list[CiJob]:
        """Returns the jobs of a CI matrix (name, runner, arguments of `mlcbuild run`): one for each selected
        variant that needs work, or at most `matrix.shards` jobs, if set, that share all work. Raises
        UsageError for unknown names and wrong options in `matrix`, SourceError or StoreError for an
        unreadable source or store."""
        from mlcbuild.ci import job_matrix as matrices

        products = select(self.pipeline, selection, on_event).products
        graph, store = self.pipeline.graph, Store(self.store.root)
        plan = planning.plan(graph, store, sharing=self._sharing(store), report=on_event)
        return matrices.jobs(products, self.pipeline, plan, matrix)

    def split(self, count: int, selection: Selection = EVERYTHING, on_event: Reporter = silent) -> Split:
        """Divides the selected steps, or all if there are none, among `count` shards, each step to one.
        Returns each shard's steps, and a digest by which machines see that they divided alike. Raises
        UsageError for a count below 1 and for unknown names, InputError for a malformed file of durations."""
        from mlcbuild.ci import split as splits

        if count < 1:
            raise UsageError(f"--count {count}: there must be at least one")
        only = select(self.pipeline, selection, on_event).only
        # An empty selection divides everything, as `mlcbuild shard` always did.
        return splits.split(self.pipeline.graph, only or (), count, splits.read(durations(self.pipeline)))

    def record_durations(self) -> None:
        """Writes how long this recipe's steps took, according to the records of this store, to the file of
        durations beside it, by which later calls divide the steps among machines (shards). Entries of its
        other steps stay. Raises UsageError if no step was built in this store or the file cannot be written,
        InputError if it is malformed."""
        from mlcbuild.ci import split as splits

        graph, path = self.pipeline.graph, durations(self.pipeline)
        measured = splits.recorded(graph, Store(self.store.root))
        if not measured:
            raise UsageError("there is nothing to record: no step of this recipe was built in this store")
        old = splits.read(path) if path.exists() else {}
        splits.write(path, {**{name: spent for name, spent in old.items() if name in graph}, **measured})

    # Running

    def run(
        self,
        selection: Selection = EVERYTHING,
        execution: Execution = HERE,
        *,
        on_event: Reporter = silent,
        cancel: Cancellation | None = None,
    ) -> Result:
        """Builds the selected steps that the store lacks, and writes bundles to their directories.

        on_event: called in this thread with every event of `mlcbuild.build.events`, RunFinished last; an
        exception that it raises ends the run and its workers, and leaves this function. cancel: ends the run
        from another thread, or from on_event. Steps that were built are kept in every case.

        A failed or cancelled run is a result, not an exception: see `Result.check`. Raises UsageError for
        names that match nothing, an unknown executor or an unreadable key, SourceError for an unreadable
        source, SetupError for a step that no worker can run or, without `keep_going`, that this machine
        cannot run, InputError for malformed durations of shards, StoreError when the store cannot be used.
        """
        from mlcbuild.ci import shard_phases

        store, signer = Store(self.store.root), self._signer()
        selected = select(self.pipeline, selection, on_event)
        if self.pipeline.lacks and not execution.keep_going:
            require_tools(self.pipeline, selected, self.plan(selection).plan)
        settings = options(execution, selection.force, selected.outputs)
        clock = runlog.Clock(partial(outcomes.forward, on_event, self.pipeline.lacks))
        sharing = partial(self._sharing, store)
        graph, result, variants = self.pipeline.graph, RunResult((), 0.0), tuple[VariantResult, ...]()
        for left in reversed(range(_ATTEMPTS)):
            attempt = shard_phases.run(graph, settings, selected.phases, sharing, clock, cancel)
            result = shard_phases.joined(result, attempt)
            ends = outcomes.finish(self.pipeline, selected.products, result, store, signer)
            variants = outcomes.joined(variants, ends)
            lost = _lost_blob(attempt, variants)
            if lost is None or attempt.interrupted or not left:
                break
            clock(Warned(f"{lost}; this is done now"))
            settings = replace(settings, force=_still_forced(graph, settings.force, result))
        log = replace(outcomes.run_log(self.pipeline, result, clock, variants), shard=selection.shard or "")
        runlog.save(store, self.recipe.path, log)
        on_event(RunFinished(result))
        return Result(variants, result, log, clock.warned)

    def publish(
        self,
        result: Result,
        *,
        unverified: bool = False,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> tuple[Sent, ...]:
        """Sends the finished bundles of a run to the destinations that the recipe names. Returns one result
        for each pair of a bundle and a destination, and one for each bundle that is skipped.

        unverified: True if bundles are sent that this machine could not compare with their model; otherwise
        those are skipped. on_sent: function that is called with each result as soon as there is one. A
        destination that fails stops no other, which its result says. Raises UsageError when the recipe names
        no destination, BundleError at a damaged bundle; what was sent before stays.
        """
        from mlcbuild.bundles.publish.uploads import send

        self.require_destinations()
        return send(self._parcels(result, unverified), on_sent)

    def require_destinations(self) -> None:
        """Raises UsageError, before hours of work, if the recipe names no destination for bundles."""
        if not self.recipe.destinations:
            raise UsageError(
                f"{self.recipe.path}: it lists no destination: add `publish: [{{to: "
                '"oci://host/team/{model}:{quantization}-{target}"}]`'
            )

    @staticmethod
    def _parcels(result: Result, unverified: bool) -> Iterator[Sent | Parcel]:
        from mlcbuild.bundles.publish.uploads import Sent

        for item in result.variants:
            product = item.product
            if item.bundle is None:
                continue
            if product.verify is None and not unverified:
                yield Sent(item.name, "", "skipped", note=f"it is not verified, {product.unverified}")
                continue
            for url in product.variant.destinations:
                yield item.name, item.bundle, url

    # Sharing

    def records(self, selection: Selection = EVERYTHING) -> Iterator[Record]:
        """Yields the records of the steps of `selection` that are in the store, without results that are
        valid on this machine only. Raises UsageError for unknown names, SourceError or StoreError for an
        unreadable source or store."""
        from mlcbuild.replication import shareable

        steps = self.over(()).plan(selection).steps
        return shareable(step.record for step in steps if step.state == "hit" and step.record is not None)

    def push(self, selection: Selection = EVERYTHING) -> Pushed:
        """Sends the store's results of the selected steps, those that it has, to the remote caches that are
        written to. Raises UsageError for unknown names, an unreadable key, or no such remote; RemoteError
        with all warnings of remotes, once the rest is sent; SourceError or StoreError for an unreadable
        source or store."""
        from mlcbuild import replication

        remotes = self._remotes("write")
        return replication.push(Store(self.store.root), self.records(selection), remotes, self._signer())

    def pull(self, selection: Selection = EVERYTHING) -> Pulled:
        """Downloads all results of the selected steps that remote caches have into this store, for runs
        without a network; counts those that none has. Raises UsageError for unknown names or if no remote is
        read, RemoteError if one failed or sent wrong data and a result is absent, SourceError for an
        unreadable source, StoreError if the store cannot be used."""
        from mlcbuild import replication

        over = self.over(self._remotes("read"))
        warnings: list[str] = []
        plan = over.plan(selection, partial(_collect, warnings)).plan
        return replication.pull(Store(self.store.root), plan, over.recipe.remotes, warnings)

    def verify_store(self) -> CheckedStore:
        """Checks all bytes of this store, removes damaged files, downloads them and missing ones, and returns
        what was restored and what was not. Raises UsageError if no remote is read, StoreError if the store
        cannot be used."""
        from mlcbuild import replication

        return replication.verify(Store(self.store.root), self._remotes("read"))

    def _remotes(self, mode: Literal["read", "write"]) -> list[Remote]:
        """Returns the remote caches that runs read ("read") or fill ("write"). Raises UsageError if none."""
        remotes = [
            remote for remote in self.recipe.remotes if (remote.reads if mode == "read" else remote.writes())
        ]
        if not remotes:
            raise UsageError(
                f"{self.recipe.path}: it lists no remote to {mode}: name one on the command line"
            )
        return remotes

    def _signer(self) -> Signer | None:
        return keyfile.load_own(self.key)

    def _sharing(self, store: Store) -> Sharing:
        from mlcbuild.remotes.link import Link
        from mlcbuild.remotes.sharing import Sharing

        if not self.recipe.remotes:
            return Sharing(store)
        signer = self._signer()
        return Sharing(store, [Link(remote, signer) for remote in self.recipe.remotes])


def _still_forced(graph: Graph, force: Iterable[str], result: RunResult) -> tuple[str, ...]:
    """Returns the names, sorted, of the steps that the next attempt of a run must execute even if the store
    holds their results: those that match the user's patterns `force`, except those that the attempts so far,
    `result`, built."""
    built = {step.name for step in result.steps if step.status == "built"}
    return tuple(sorted(graph.match(force) - built))


def _lost_blob(run: RunResult, variants: Iterable[VariantResult]) -> LostBlobError | None:
    """Returns the first error of a run that is about a lost file of the store, which another attempt
    repairs; None if there is none."""
    errors = [step.error for step in run.steps] + [item.error for item in variants]
    return next((error for error in errors if isinstance(error, LostBlobError)), None)


def _collect(warnings: list[str], event: Event) -> None:
    if isinstance(event, Warned):
        warnings.append(event.message)
