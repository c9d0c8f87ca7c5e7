"""Records in the store which cache keys and step records a run uses, so that garbage collection keeps
them.
"""

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
    """Looks up step records in the store and marks them as used, so that garbage collection keeps them. No
    garbage collection can run during a look-up.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._store = planner.store
        self._saved = self._touched = time.monotonic()

    def plan(self) -> list[Planned]:
        """Returns the plan of every step in the order of the build graph, and marks the step records of
        reused results as used, so that garbage collection keeps them.
        """
        with self._store.settled():
            plans = list(self._planner.all())
            for planned in plans:
                self._use(planned)
        return plans

    def consider(self, step: Step) -> Planned:
        """Returns what a run does with one build step, whose inputs have all been built: its cache key, and
        whether its result is in the store, on a remote cache, or must be built. Marks the record of a result
        in the store as used.
        """
        with self._store.settled():
            planned = self._planner.consider(step)
            self._use(planned)
        return planned

    def find(self, key: str) -> Record | None:
        """Returns the step record of a cache key, and marks it as used; None if the store lacks the record or
        one of its files.
        """
        with self._store.settled():
            record = self._store.find(key)
            if record is not None:
                self._store.touch(record)
        return record

    def write_sometimes(self, results: Callable[[], Mapping[str, StepResult]]) -> None:
        """Writes the cache keys of the current results to the store and marks the results as used, if the
        last write was more than two seconds ago. results: function that returns name of a step -> its result.
        """
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.write(results())

    def write(self, results: Mapping[str, StepResult]) -> None:
        """Writes the cache keys of build steps to the store, and marks the steps' results as used, so that
        garbage collection keeps them. results: name of a step -> its result.
        """
        self._saved = time.monotonic()
        usable = {name: step for name, step in results.items() if step.record is not None and step.key}
        self._store.cache.remember({name: step.key for name, step in usable.items() if step.key})
        self._store.cache.save()
        if self._saved - self._touched > _TOUCH_SECONDS:
            self._touched = self._saved
            for step in usable.values():
                if step.record is not None:
                    self._store.touch(step.record)

    def _use(self, planned: Planned) -> None:
        if planned.state == "hit" and planned.record is not None:
            self._store.touch(planned.record)
