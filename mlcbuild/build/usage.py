"""What a run notes in its store: the keys of its steps, and which records it builds on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mlcbuild.build.events import StepResult
from mlcbuild.build.graph import Step
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.store.layout import USE_NOTED_NS
from mlcbuild.store.records import Record

_SAVE_SECONDS = 2.0
_TOUCH_SECONDS = USE_NOTED_NS / 1e9


class Notes:
    """Finds records so that gc, which may run beside, sees that they are used, or has taken them before."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._store = planner.store
        self._saved = self._touched = time.monotonic()

    def plan(self) -> list[Planned]:
        """Every step of the plan, in order."""
        with self._store.settled():
            found = list(self._planner.all())
            for planned in found:
                self._use(planned)
        return found

    def consider(self, step: Step) -> Planned:
        """The state of one step, now that its inputs are known."""
        with self._store.settled():
            planned = self._planner.consider(step)
            self._use(planned)
        return planned

    def find(self, key: str) -> Record | None:
        """The record of a key when it and its files can be used."""
        with self._store.settled():
            record = self._store.find(key)
            if record is not None:
                self._store.touch(record)
        return record

    def write_sometimes(self, results: Callable[[], Mapping[str, StepResult]]) -> None:
        """Writes the present results, if the last write is some seconds ago."""
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.write(results())

    def write(self, results: Mapping[str, StepResult]) -> None:
        self._saved = time.monotonic()
        known = {name: step for name, step in results.items() if step.record is not None and step.key}
        self._store.cache.remember({name: step.key for name, step in known.items() if step.key})
        self._store.cache.save()
        if self._saved - self._touched > _TOUCH_SECONDS:
            self._touched = self._saved
            for step in known.values():
                if step.record is not None:
                    self._store.touch(step.record)

    def _use(self, planned: Planned) -> None:
        if planned.state == "hit" and planned.record is not None:
            self._store.touch(planned.record)
