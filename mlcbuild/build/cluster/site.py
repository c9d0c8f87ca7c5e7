"""A worker of a cluster: one process that dask gives orders to, with a store of its own or a shared one.

Each order runs in a process of its own kind (see `executors.Pool`), so that it can be ended: when the run no
longer wants it, when this worker is told to stop, or when this worker dies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcbuild import keyfile
from mlcbuild.build.cluster.wire import TOPIC, Answer, Argument, Order
from mlcbuild.build.events import StepProgress
from mlcbuild.build.executors import Pool
from mlcbuild.build.worker import Given, Job, Outcome
from mlcbuild.canon import Entry, module_path, source_digest
from mlcbuild.errors import MlcbuildError, RemoteError, StepError
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.signals import Bell
from mlcbuild.store.staging import StagingArea, remove_tree
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from distributed import Worker

_LOOK = 0.1
"""Seconds between two looks at a running job: is it still wanted, what has it printed?"""
_TELL = 0.5
"""Seconds between two words about a job's progress."""
_PIECE = 8192
"""Bytes of a log in one message: schedulers keep the last thousand."""
_MOST_LOG = 1 << 20
"""Bytes of a log that are passed on while a step runs; its end always is."""
LEAVE = 5.0
"""Seconds for what a worker does before it goes."""


@dataclass
class Site:
    """What the orders of this process share. Methods may be called from several threads."""

    name: str
    store: Store
    staging: StagingArea
    stopping: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """The scheduler knows that this worker goes."""
    active: int = 0
    """Orders at work."""
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _idle: list[Pool] = field(default_factory=list)

    def count(self, change: int) -> None:
        with self._guard:
            self.active += change

    def area(self) -> Path:
        with self._guard:
            return self.staging.subdirectory()

    def take(self) -> Pool:
        """A pool for one job, with a process that has run others if there is one."""
        with self._guard:
            return self._idle.pop() if self._idle else Pool(1)

    def give(self, pool: Pool) -> None:
        with self._guard:
            self._idle.append(pool)

    def digest(self, path: Path) -> str:
        with self._guard:  # the cache is not for two threads
            return self.store.cache.digest(path)[0]

    def close(self) -> None:
        self.stopping.set()
        with self._guard:
            while self._idle:
                self._idle.pop().close()
            self.store.cache.save()
            self.staging.close()


sites: list[Site] = []
"""The site of this process, once it is one: dask calls `work` with nothing but an order."""


def work(text: str) -> str:
    """Runs one order and returns the answer: what dask calls, in a thread of a worker."""
    from distributed import Reschedule, get_worker

    worker = get_worker()
    if not sites:
        raise RuntimeError("this worker was not started with `mlcbuild worker`")
    site, order, task = sites[0], Order.decode(text), worker.get_current_task()
    attempt = _Attempt(site, order, partial(_is_wanted, worker, task), partial(worker.log_event, TOPIC))
    answer = attempt.run()
    if answer.stopped and site.stopping.is_set():
        site.left.wait(LEAVE)  # if this ended now, dask could give the order to this very worker again
        raise Reschedule
    return answer.encode()


def _is_wanted(worker: Worker, task: Any) -> bool:
    """Whether a task runs because somebody waits for it: not when it was cancelled or its run has died."""
    found = worker.state.tasks.get(task)
    return found is not None and found.state not in ("cancelled", "resumed", "released", "forgotten")


class _Attempt:
    """One order on this worker."""

    def __init__(
        self, site: Site, order: Order, wanted: Callable[[], bool], tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._site = site
        self._order = order
        self._wanted = wanted
        self._tell = tell
        self._id = os.urandom(8).hex()
        self._stop = threading.Event()
        """The order is not wanted any more; transfers look at it, too."""
        self._ended = threading.Event()
        links = [Link(remote, keyfile.load(keyfile.default_path())) for remote in order.remotes]
        self._sharing = Sharing(site.store, links)
        self._told = time.monotonic()
        self._sent = 0

    def run(self) -> Answer:
        site, order = self._site, self._order
        site.count(1)
        self._say("start", site=site.name)
        threading.Thread(target=self._watch, daemon=True).start()
        self._same = (site.store.root / "tmp" / order.run).is_dir()
        answer = Answer(site.name, key=order.key, same_store=self._same)
        try:
            self._check()
            known = None if order.again or self._same else site.store.find(order.key)
            if known is not None:
                return self._share(Outcome(order.made.step, known), answer)
            given = self._gather()
            if isinstance(given, list):
                return replace(answer, lacking=tuple(given))
            return self._share(self._perform(given), answer)
        except CancelledError:
            self._say("stopped")
            return replace(answer, stopped=True)
        except MlcbuildError as error:
            return replace(answer, error=error, warnings=tuple(self._sharing.take_warnings()))
        finally:
            self._ended.set()
            self._sharing.close()
            site.count(-1)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK):
            if not self._wanted() or self._site.stopping.is_set():
                self._stop.set()
                return

    def _say(self, kind: str, **more: Any) -> None:
        self._tell(
            {"run": self._order.run, "step": self._order.made.step, "attempt": self._id, "kind": kind, **more}
        )

    def _check(self) -> None:
        """Whether the result would be what the key says, and could be had. Raises StepError, RemoteError."""
        links = self._sharing.links
        if not self._same and not any(link.remote.writes() and link.remote.reads for link in links):
            raise RemoteError(
                f"step {self._order.made.step}: the store of the worker {self._site.name} is not the run's, "
                "and there is no remote that both read and write: name one under cache: remotes:, or start "
                "the worker with the run's store"
            )
        image = self._order.made.preimage
        module = image.action.partition(":")[0]
        step, name = self._order.made.step, self._site.name
        if module_path(module) is None:
            raise StepError(
                f"step {step}: the worker {name} has no module '{module}': install the same there"
            )
        # Equal files have equal imports, so no file is missing from the list where all in it are equal.
        other = sorted(path for path, digest in image.code.items() if source_digest(path) != digest)
        if other:
            raise StepError(
                f"step {step}: the worker {name} has another mlcbuild ({', '.join(other[:3])} "
                f"{'differ' if len(other) > 1 else 'differs'}): install the same there"
            )

    def _gather(self) -> dict[str, Given] | list[str]:
        """The inputs as this machine has them now, or the digests of what it cannot get."""
        lacking: list[str] = []
        found = {}
        for argument, given in self._order.inputs.items():
            found[argument] = self._in_place(argument, given) or Given(argument, given.files)
            if found[argument].root is None:
                lacking += [entry.digest for entry in given.files if not self._fetch(entry)]
        return lacking or found

    def _in_place(self, argument: str, given: Argument) -> Given | None:
        """A source where it lies, when this machine sees it with the same bytes."""
        if given.root is None:
            return None
        root, stats = Path(given.root), {}
        try:
            for entry in given.files:
                path = root / entry.path
                before = path.stat()
                if before.st_size != entry.size or self._site.digest(path) != entry.digest:
                    return None
                stats[entry.path] = (before.st_size, before.st_mtime_ns)
        except (OSError, MlcbuildError):
            return None
        return Given(argument, given.files, root, stats)

    def _fetch(self, entry: Entry) -> bool:
        if self._site.store.hold(entry.digest, entry.size):
            return True
        return not self._sharing.fetch(entry, self._stop, lambda _: None)

    def _perform(self, given: Mapping[str, Given]) -> Outcome:
        """Raises CancelledError."""
        site, order = self._site, self._order
        area = site.area()
        log = site.staging.directory / f"{area.name}.log"
        job = Job(
            name=order.made.step,
            key=order.key,
            preimage=order.made.preimage,
            inputs=tuple(given.values()),
            cores=order.cores,
            store=site.store.root,
            area=area,
            log=log,
            shared=order.made.shared,
        )
        pool, bell = site.take(), Bell()
        outcome = None
        try:
            pool.start(job)
            while outcome is None:
                if self._stop.is_set():
                    raise CancelledError
                for message in pool.messages(_LOOK, bell.fileno()):
                    if isinstance(message, Outcome):
                        outcome = message
                    elif isinstance(message, StepProgress):
                        self._pass_on(message)
                self._send_log(log)
            self._send_log(log, end=True)
        finally:
            bell.close()
            if outcome is None:
                pool.close()
                remove_tree(area)
            else:
                site.give(pool)
            log.unlink(missing_ok=True)
        return outcome

    def _pass_on(self, message: StepProgress) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL or message.done >= message.total:
            self._told = now
            self._say("progress", done=message.done, total=message.total, unit=message.unit)

    def _send_log(self, log: Path, *, end: bool = False) -> None:
        """What was added to a log since the last time; each piece says where it belongs."""
        try:
            size = log.stat().st_size
        except OSError:
            return
        if end:
            self._sent = max(self._sent, size - _PIECE)
        elif self._sent >= _MOST_LOG:
            return
        with log.open("rb") as file:
            file.seek(self._sent)
            data = file.read(_PIECE)
        if data:
            self._say("log", at=self._sent, text=data.decode(errors="replace"))
            self._sent += len(data)

    def _share(self, outcome: Outcome, answer: Answer) -> Answer:
        """Sends a result to where the run can get it, when that is not this store."""
        made = replace(answer, record=outcome.record, fault=outcome.fault, error=outcome.error)
        if outcome.record is None or self._same:
            return made
        links = self._sharing.links
        store = self._site.store
        there = [
            link for link in links if link.remote.writes() and link.send(outcome.record, store, self._stop)
        ]
        readable = [link.name for link in there if link.remote.reads]
        warnings = tuple(self._sharing.take_warnings())
        if not readable:
            raise RemoteError(
                f"step {outcome.name} was built by the worker {self._site.name}, but its files could not be "
                "sent to a remote: " + "; ".join(warnings)
            )
        unsent = tuple(link.name for link in links if link.remote.writes() and link not in there)
        return replace(made, origin=readable[0], unsent=unsent, warnings=warnings)
