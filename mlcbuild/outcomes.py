"""Defines what planning and running a recipe return: plans, and for each variant its bundle, its measured
accuracy and speed, and the log of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlcbuild.build.changes import Change
from mlcbuild.build.events import (
    Event,
    Reporter,
    RunFinished,
    RunResult,
    Status,
    StepResult,
    StepStarted,
)
from mlcbuild.build.plan import Plan, Planned
from mlcbuild.emit import Finished, emit
from mlcbuild.errors import MlcbuildError, StoreError, VerificationError
from mlcbuild.keyfile import Signer
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.reports import runlog
from mlcbuild.reports.runlog import Clock, LoggedVariant, RunLog
from mlcbuild.store.export import set_aside
from mlcbuild.store.store import Store


@dataclass(frozen=True)
class RecipePlan:
    """The plan of a recipe: the steps that a run would execute, and those whose results it would reuse."""

    plan: Plan
    """The build plan: for each step, in the order of the dependency graph, whether its result is in the store
    or on a remote cache, the step would run, or one of its inputs is not built yet."""
    products: tuple[Product, ...]
    """For each variant (combination of model, quantization and target) that is selected: the names of the
    steps that build and check it."""
    memory: Mapping[str, dict[str, int] | None]
    """Name of a variant -> {"weights", "kv_cache", "workspace": bytes of memory while its bundle is served},
    without "workspace" before its library is compiled; None for a model on a hub whose config is not in the
    store."""

    @property
    def steps(self) -> tuple[Planned, ...]:
        return self.plan.steps


@dataclass(frozen=True)
class Explanation:
    """The reason why a step would run or be reused, and what has changed since it was last built."""

    planned: Planned
    changes: tuple[Change, ...]
    """The differences between this step's inputs, parameters and tools and those in the most similar record
    of an earlier build of it; () if there is no such record, or while an input of the step is not built."""


@dataclass(frozen=True)
class VariantResult:
    """The result of one variant of a recipe in a run: its status, its measured accuracy and speed, and its
    bundle if there is one."""

    product: Product
    status: Status
    error: MlcbuildError | None = None
    """The error for which the bundle could not be written to its output directory; None if there was none."""
    note: str = ""
    """How the variant failed, if one of its steps did; the reason why a step of it was skipped, such as a
    download that failed; or the reason why a finished bundle was not verified. "" otherwise."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Name -> value of what was measured on the bundle: accuracy (kl_mean in nats per token, top1_agreement
    from 0 to 1, perplexity ...) and tokens per second (speed_prefill, and speed_decode_8 for 8 sequences
    together ...); empty if nothing was measured."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """The JSON document of the step that chose formats under a budget of size or loss, with the bits of each
    matrix and the curve of KL divergence against bytes; {} if the variant has no budget, or the step has no
    result on this machine."""

    @property
    def name(self) -> str:
        """Returns the variant's name, model-quantization-target, which is unique in the recipe."""
        return self.product.variant.name

    @property
    def bundle(self) -> Path | None:
        """Returns the absolute path of the variant's bundle if this run built or reused it; None otherwise,
        even if the directory has the bundle of an earlier run."""
        return self.product.variant.output if self.is_done else None

    @property
    def is_done(self) -> bool:
        return self.status in ("built", "reused")

    @property
    def words(self) -> str:
        """Returns the message of the error for which the bundle could not be written, or, without such an
        error, how the variant failed or why it was skipped or not verified; "" if there is none of these."""
        return str(self.error) if self.error is not None else self.note


@dataclass(frozen=True)
class Result:
    """The result of a run of a recipe: its steps, and for each variant its bundle."""

    variants: tuple[VariantResult, ...]
    run: RunResult
    log: RunLog
    warned: bool = False
    """True if the run reported a warning, such as damage in the store, a problem of a remote cache or a lost
    worker."""

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """Returns the result of every step of the run, in the order of the plan."""
        return self.run.steps

    @property
    def seconds(self) -> float:
        return self.run.seconds

    @property
    def bundles(self) -> dict[str, Path]:
        """Returns name of a variant -> directory of its finished bundle, for the variants that have one."""
        return {item.name: item.bundle for item in self.variants if item.bundle is not None}

    @property
    def failures(self) -> tuple[MlcbuildError, ...]:
        """Returns the errors of failed steps, in the order of the plan, then those of bundles that could not
        be written to their directories."""
        errors = [step.error for step in self.run.steps] + [item.error for item in self.variants]
        return tuple(error for error in errors if error is not None)

    @property
    def ok(self) -> bool:
        """Returns True if the run was not interrupted, every selected step has a result, and every bundle was
        written to its directory."""
        return self.run.ok and not self.failures

    @property
    def exit_code(self) -> int:
        """Returns the exit code of `mlcbuild run`: 130 when interrupted, else that of the first failed step's
        error, in the order of the plan, else the largest exit code of the errors for which bundles could not
        be written, else 0."""
        errors = [item.error.exit_code for item in self.variants if item.error is not None]
        return self.run.exit_code or max(errors, default=0)

    def check(self) -> None:
        """Raises the error of the first failed step in the order of the plan or, without one, of the first
        bundle that could not be written, even if the run was interrupted. Without such errors, raises
        MlcbuildError if it was interrupted, and does nothing otherwise."""
        for error in self.failures:
            raise error
        if self.run.interrupted:
            raise MlcbuildError(
                f"the run was interrupted by {self.run.interrupted}; run it again to continue"
            )


def joined(before: tuple[VariantResult, ...], after: tuple[VariantResult, ...]) -> tuple[VariantResult, ...]:
    """Returns the variants' results of the later of two attempts at a run. A bundle that the earlier attempt
    built and the later one reused has the status "built", since this run built it. before, after: results of
    the earlier and of the later attempt."""
    written = {item.name for item in before if item.status == "built"}
    return tuple(
        replace(item, status="built") if item.status == "reused" and item.name in written else item
        for item in after
    )


def finish(
    pipeline: Pipeline, products: Sequence[Product], result: RunResult, store: Store, signer: Signer | None
) -> tuple[VariantResult, ...]:
    """Writes the bundles of variants whose steps succeeded to their directories, and returns the result of
    every variant. If verification refused a variant's bundle, renames the variant's directory NAME, if it
    holds a bundle of an earlier run, to .NAME.refused.

    signer: key that signs the provenance of bundles, or None. An output that cannot be written fails only its
    variant.
    """
    steps = {step.name: step for step in result.steps}
    records = {name: step.record for name, step in steps.items() if step.record is not None}
    run = Finished(pipeline, store, records, signer)
    return tuple(_finish_one(run, product, steps) for product in products)


def _finish_one(run: Finished, product: Product, steps: Mapping[str, StepResult]) -> VariantResult:
    results = [steps.get(run.pipeline.graph.resolve(name)) for name in product.steps]
    ended = [step for step in results if step is not None]
    figures, budget = _figures(run, product, steps), _budget(run, product, steps)
    if any(step.status == "failed" for step in ended):
        return VariantResult(
            product, "failed", note=_failure(run, product, steps), figures=figures, budget=budget
        )
    skipped = next((step for step in ended if step.status == "skipped"), None)
    if len(ended) < len(results) or skipped is not None:
        note = "" if skipped is None else skipped.reason
        return VariantResult(product, "skipped", note=note, figures=figures, budget=budget)
    note = f"not verified: {product.unverified}" if product.verify is None else ""
    try:
        emit(run, product)
    except MlcbuildError as error:
        return VariantResult(product, "failed", error, figures=figures, budget=budget)
    is_new = any(step.status == "built" for step in ended)
    return VariantResult(product, "built" if is_new else "reused", note=note, figures=figures, budget=budget)


def _failure(run: Finished, product: Product, steps: Mapping[str, StepResult]) -> str:
    """Returns a text that says how a variant failed.

    If the step `verify` refused the bundle, renames the output directory NAME with the bundle of an earlier
    run to .NAME.refused, so that nobody ships it by mistake.
    """
    verified = steps.get(run.pipeline.graph.resolve(product.verify)) if product.verify is not None else None
    if verified is None or not isinstance(verified.error, VerificationError):
        return "a step of it failed"
    place = set_aside(product.variant.output)
    return "verification failed" + (f"; the bundle of an earlier run is in {place} now" if place else "")


def _figures(run: Finished, product: Product, steps: Mapping[str, StepResult]) -> dict[str, float]:
    resolve = run.pipeline.graph.resolve
    verified = steps.get(resolve(product.verify)) if product.verify is not None else None
    measured = steps.get(resolve(product.bench)) if product.bench is not None else None
    return _verification(run.store, verified) | _speed(run.store, measured)


def _verification(store: Store, verified: StepResult | None) -> dict[str, float]:
    if verified is not None and isinstance(verified.error, VerificationError):
        return dict(verified.error.figures)
    if verified is None or verified.record is None:
        return {}
    entries = {entry.path: entry for entry in verified.record.files}
    try:
        manifest = json.loads(store.read_blob(entries["bundle.json"]))
    except StoreError:  # The record came from a remote and its files are not here, or the store is damaged.
        return {}
    return {
        name: value
        for name, value in (manifest["verification"] or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _budget(run: Finished, product: Product, steps: Mapping[str, StepResult]) -> dict[str, Any]:
    """Returns the JSON document that was written by the step which chose a variant's formats under a budget
    of size or loss; {} if there is no such step, it has not succeeded, or its files are not on this machine.
    """
    name = next((name for name in product.steps if name.startswith("budget/")), None)
    step = steps.get(run.pipeline.graph.resolve(name)) if name is not None else None
    if step is None or step.record is None:
        return {}
    entries = {entry.path: entry for entry in step.record.files}
    try:
        document: dict[str, Any] = json.loads(run.store.read_blob(entries["budget.json"]))
    except StoreError:  # as in _verification
        return {}
    return document


def _speed(store: Store, measured: StepResult | None) -> dict[str, float]:
    """Returns speed_prefill, speed_decode_1 and speed_decode_<largest batch> -> tokens per second of a
    bundle, all sequences of the batch together; {} without a measurement. measured: result of the step that
    measured them, or None."""
    if measured is None or measured.record is None:
        return {}
    (entry,) = measured.record.files
    try:
        document = json.loads(store.read_blob(entry))
    except StoreError:
        return {}
    return {
        f"speed_{name.replace(' ', '_')}": figure["tokens_per_second"]
        for name, figure in document.items()
        if isinstance(figure, dict)
    }


def run_log(pipeline: Pipeline, result: RunResult, clock: Clock, variants: Sequence[VariantResult]) -> RunLog:
    """Returns the RunLog of a finished run, which `mlcbuild report` and CI systems read: its machine, times,
    steps and variants. clock: recorded the times of the run's steps."""
    steps = {step.name: step for step in result.steps}
    return RunLog(
        pipeline.recipe.name,
        str(pipeline.recipe.path),
        clock.time,
        clock.seconds(),
        runlog.machine(),
        runlog.steps(pipeline.graph, result, clock),
        tuple(_logged(pipeline, steps, item) for item in variants),
        result.interrupted,
    )


def _logged(pipeline: Pipeline, steps: Mapping[str, StepResult], item: VariantResult) -> LoggedVariant:
    product, variant = item.product, item.product.variant
    resolve = pipeline.graph.resolve

    def size(name: str | None) -> int | None:
        step = steps.get(resolve(name)) if name is not None else None
        return step.record.size if step is not None and step.record is not None else None

    results = [step for name in product.steps if (step := steps.get(resolve(name))) is not None]
    errors = [step.error for step in results if step.error is not None]
    return LoggedVariant(
        variant.name,
        variant.model.name,
        variant.quantization,
        variant.target.name,
        item.status,
        str(errors[0]) if errors else item.words,
        variant.model.place.line,
        variant.model.place.column,
        size(product.bundle),
        size(next((name for name in product.steps if name.startswith("weights/")), None)),
        item.figures,
        item.budget,
    )


def with_lacks(plan: Plan, lacks: Mapping[str, str]) -> Plan:
    """Returns a copy of `plan` in which the reason of each step that would run, but cannot on this machine,
    names what is missing. lacks: name of a step -> the tool or device that is missing."""
    if not lacks:
        return plan
    steps = (
        replace(step, reason=f"cannot run here: {lacks[step.name]}")
        if step.name in lacks and step.state in ("run", "pending")
        else step
        for step in plan.steps
    )
    return Plan(tuple(steps), plan.reads_remotes)


def explained(planned: Planned, changes: tuple[Change, ...], lacks: Mapping[str, str]) -> Explanation:
    """Returns the explanation of a planned step. changes: differences from its most similar record; lacks:
    step name -> the tool or device that this machine lacks, which is the reason stated if the step would run.
    For a step in `lacks`, differences without a new value, such as the versions of its tools, are left out.
    """
    if planned.name in lacks:
        # A step that lacks one tool names the version of none: those of the others are no change.
        changes = tuple(change for change in changes if change.after is not None)
        (planned,) = with_lacks(Plan((planned,)), lacks).steps
    return Explanation(planned, changes)


def forward(on_event: Reporter, lacks: Mapping[str, str], event: Event) -> None:
    """Passes an event of a run to `on_event`, except RunFinished: each of the executions that make up a run
    sends it, but its end is reported once.

    lacks: step name -> what this machine lacks for it. The event of such a step's start gets "it cannot run
    here" as its reason.
    """
    if isinstance(event, StepStarted) and event.name in lacks:
        event = replace(event, reason="it cannot run here")
    if not isinstance(event, RunFinished):
        on_event(event)
