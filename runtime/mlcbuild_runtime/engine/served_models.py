"""Manages bundles by name: loads them on the first request, and unloads them when others need their
memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from mlcbuild_format import bundle, sizes
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError, RequestError, ServingError, SetupError, StoppingError
from mlcbuild_format.fields import Json, describe

from mlcbuild_runtime import untrusted
from mlcbuild_runtime.engine import memory_modes
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.memory_modes import ChosenLimits, LimitOverrides
from mlcbuild_runtime.engine.request import State
from mlcbuild_runtime.engine.trace import Trace
from mlcbuild_runtime.locations import directories

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """The directory of a bundle, and a name that replaces the bundle's own, or None."""

    path: Path
    name: str | None = None

    @classmethod
    def of(cls, text: str) -> ModelSource:
        """Returns the directory and, if stated, the name of the bundle that a command-line argument DIRECTORY
        or NAME=DIRECTORY describes. A text that is an existing path is a DIRECTORY, even with `=` in it."""
        name, equals, path = text.partition("=")
        if equals and name and not Path(text).exists():
            return cls(Path(path), name)
        return cls(Path(text))

    def all(self) -> Sequence[ModelSource]:
        """Returns one ModelSource (path and name of a bundle) for each bundle in this source's directory.
        Returns only this source itself if its path is a bundle, if the directory contains none, or if the
        source has a name."""
        if self.name is not None:
            return [self]
        return [ModelSource(path) for path in directories(self.path)] or [self]


@dataclass
class ServedModel:
    """A bundle of a server, loaded or not. Only the object `Models` changes its mutable fields."""

    path: Path
    names: list[str]
    """Names of the model: the first one is listed, the others are aliases."""
    manifest: Manifest | None
    engine: Engine | None = None
    chosen: ChosenLimits | None = None
    error: ServingError | None = None
    """The error of the last attempt to read or load the bundle; None if it succeeded or there was none. A
    lack of memory is not recorded."""
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class Use:
    """A reference to a model's engine. The model stays loaded until `end` is called."""

    def __init__(self, models: Models, entry: ServedModel, engine: Engine) -> None:
        self.engine, self._models, self._entry = engine, models, entry
        self._ended = False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._models._release(self._entry)


class Models:
    """The bundles that a server serves. It loads one when a request names it, and unloads idle ones when
    memory is short. Any thread may call its methods."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        requested: LimitOverrides,
        threads: int | None = None,
        options: EngineOptions | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Creates the list of a server's bundles; none is loaded yet. requested: limits that the command line
        states; threads: number of computing threads, None for the default; options: settings that all engines
        share; trace: file to which every step is written, None for no trace.

        Raises SetupError if two bundles have one name, and BundleError if the only bundle cannot be read. Of
        several bundles, one that cannot be read stays in the list, and requests for it are answered with its
        error.
        """
        self.requested, self._threads, self._trace = requested, threads, trace
        self._options = options or EngineOptions()
        self._door, self._loading = threading.Lock(), threading.Lock()
        self._draining = False
        self.entries: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._stopping: list[tuple[Engine, int]] = []
        """Pairs (engine of an unloaded model, which may still run a step; bytes that its model occupies until
        the engine has stopped)."""
        for source in sources:
            self._add(source, alone=len(sources) == 1)

    @classmethod
    def of(cls, engine: Engine) -> Models:
        """Returns the table of a server's models with a single entry, for an engine that is running
        already."""
        models = cls([], LimitOverrides())
        entry = ServedModel(engine.executor.path, [engine.name], engine.manifest, engine)
        entry.chosen = ChosenLimits(
            "server",
            engine.max_batch,
            engine.executor.pages,
            engine.prefill_chunk,
            engine.manifest.memory.total,
        )
        models.entries, models._by_name = [entry], {engine.name: entry}
        return models

    def _add(self, source: ModelSource, alone: bool) -> None:
        path = source.path.absolute()
        entry = next((other for other in self.entries if other.path == path), None)
        if entry is None:
            entry = ServedModel(path, [], None)
            try:
                entry.manifest = bundle.manifest(path)
            except BundleError as error:
                if alone:
                    raise
                log.warning("%s", error)
                entry.error = error
            self.entries.append(entry)
        name = source.name or (entry.manifest.name if entry.manifest else path.name)
        if self._by_name.setdefault(name, entry) is not entry:
            raise SetupError(
                f"{path} and {self._by_name[name].path} are both called '{name}': give one of them another"
                f" name, NAME={source.path}"
            )
        if name not in entry.names:
            entry.names.append(name)

    def load_first(self) -> None:
        """Loads the first model and starts its engine, before the server accepts requests. Raises BundleError
        for a damaged bundle, SetupError if this machine cannot run it.
        """
        self._load(self.entries[0])

    def at_once(self, name: Json) -> Use | None:
        """Returns a reference to the engine of the model called `name` if it is loaded, else None, without
        waiting for a load. The model stays loaded until the caller calls the reference's method `end`. None
        as the name stands for the first model. Raises RequestError (404) if there is no model of that name.
        """
        entry = self.find(name)
        with self._door:
            return None if entry.engine is None else self._lend(entry, entry.engine)

    def use(self, name: Json) -> Use:
        """Returns a reference to the engine of the model called `name`, after loading it if necessary, which
        may take long. The model stays loaded until the caller calls the reference's method `end`. None stands
        for the first model. Raises RequestError if there is no model of that name (404), the server is
        stopping or has no memory for the model now (503), or the model cannot be loaded (500)."""
        entry = self.find(name)
        with self._loading:
            if self._draining:
                raise StoppingError
            if entry.engine is None:
                try:
                    self._load(entry)
                except (BundleError, SetupError) as error:
                    # A copy: the traceback of the error itself refers to the executor and its memory.
                    entry.error = type(error)(error)
                    raise RequestError(
                        f"the model '{entry.names[0]}' cannot be loaded: {error}",
                        param="model",
                        code="model_not_loaded",
                        status=500,
                    ) from None
                if entry.chosen is not None:
                    log.info("%s is loaded (memory %s)", entry.names[0], sizes.show(entry.chosen.memory))
            with self._door:
                assert entry.engine is not None
                return self._lend(entry, entry.engine)

    def find(self, name: Json) -> ServedModel:
        """Returns the served model called `name`, loaded or not, with its path, names, manifest and engine;
        None stands for the first model. Raises RequestError (404) if there is no model of that name."""
        if name is None:
            return self.entries[0]
        if not isinstance(name, str) or name not in self._by_name:
            served_names = ", ".join(f"'{other}'" for other in self._by_name)
            raise RequestError(
                f"the model {describe(name)} is not here: this server has {served_names}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return self._by_name[name]

    def _lend(self, entry: ServedModel, engine: Engine) -> Use:
        entry.users += 1
        return Use(self, entry, engine)

    def _release(self, entry: ServedModel) -> None:
        with self._door:
            entry.users -= 1
            entry.used = time.monotonic()

    def _load(self, entry: ServedModel) -> None:
        """Loads the bundle of a model, after unloading idle ones if memory is short, and starts its engine.
        Raises BundleError for a damaged bundle, SetupError if this machine cannot run it, RequestError (503)
        if other models use the memory.
        """
        manifest = entry.manifest or bundle.manifest(entry.path)
        chosen = memory_modes.choose(self.requested, manifest)
        if len(self.entries) > 1:
            self._make_room(chosen.memory)
        executor, tokenizer = untrusted.load(entry.path, self._threads, chosen.pages)
        options = replace(
            self._options,
            name=entry.names[0],
            max_batch=chosen.max_batch,
            prefill_chunk=chosen.prefill_chunk,
        )
        try:
            engine = Engine(executor, tokenizer, options)
        except ServingError:  # of the draft bundle
            executor.close()
            raise
        if self._draining:
            engine.drain()
        entry.manifest, entry.chosen, entry.error = manifest, chosen, None
        entry.engine = engine.start(self._trace)

    def _make_room(self, needed: int) -> None:
        """Unloads models without users, least recently used first, until `needed` bytes of the memory for
        bundles are free. Raises RequestError (503) if models in use, or engines that do not stop within 60
        seconds, leave less; without any loaded model, a model may need more than the limit."""
        self._free_stopped()
        while self._loaded_bytes() + needed > self.requested.budget:
            with self._door:
                idle = [entry for entry in self.entries if entry.engine is not None and not entry.users]
                if not idle:
                    break
                victim = min(idle, key=lambda entry: entry.used)
                engine, victim.engine = victim.engine, None
                assert engine is not None and victim.chosen is not None
                self._stopping.append((engine, victim.chosen.memory))
            # Cancelled requests end with the running step.
            engine.drain()
            engine.close(timeout=60)
            self._free_stopped()
        if self._loaded_bytes() and self._loaded_bytes() + needed > self.requested.budget:
            raise RequestError(
                f"the model needs {sizes.show(needed)}, and the models in use leave no room for it in"
                f" {sizes.show(self.requested.budget)}: try later",
                code="overloaded",
                status=503,
            )

    def _free_stopped(self) -> None:
        """Frees the memory of unloaded models whose engines have stopped."""
        for engine, memory in tuple(self._stopping):
            if engine.close(timeout=0):
                with self._door:
                    self._stopping.remove((engine, memory))
                engine.executor.close()

    def _loaded_bytes(self) -> int:
        """Returns the bytes of the weights, KV caches and workspaces of loaded models, and of unloaded ones
        whose engine still runs a step."""
        loaded = sum(entry.chosen.memory for entry in self.entries if entry.engine and entry.chosen)
        return loaded + sum(memory for _, memory in self._stopping)

    @property
    def ready(self) -> bool:
        """Returns True while the server accepts new requests: it is not stopping, and no engine of a loaded
        model has failed or is draining."""
        return not self._draining and all(engine.ready for engine in self.engines)

    @property
    def engines(self) -> list[Engine]:
        """Returns the engines of all loaded models."""
        with self._door:
            return [entry.engine for entry in self.entries if entry.engine is not None]

    def states(self) -> dict[str, State]:
        """Returns name of a loaded model -> a snapshot of its engine's gauges and counters."""
        return {engine.name: engine.state() for engine in self.engines}

    def state(self) -> State:
        """Returns the gauges and counters of all loaded models' engines, added up; `alive` is True if all of
        them are, or none is loaded."""
        states = list(self.states().values())
        counts = {
            item.name: sum(getattr(state, item.name) for state in states)
            for item in fields(State)
            if item.name != "alive"
        }
        return State(**counts, alive=all(state.alive for state in states))

    def drain(self) -> None:
        """Makes all engines refuse new requests; submitted ones continue. No further model is loaded: its
        requests are refused (503), too."""
        self._draining = True
        for engine in self.engines:
            engine.drain()

    def close(self, timeout: float) -> bool:
        """Ends every request of all models with an error and stops their engines; no further model is loaded.
        Waits up to `timeout` seconds in all; returns False if a model is being loaded then, or an engine, of
        an unloaded model too, still runs a step."""
        end, self._draining = time.monotonic() + timeout, True
        if has_loaded := self._loading.acquire(timeout=timeout):
            self._loading.release()
        engines = self.engines
        with self._door:
            engines += [engine for engine, _ in self._stopping]
        for engine in engines:
            engine.close(timeout=0)
        closed = [engine.close(max(0.0, end - time.monotonic())) for engine in engines]
        return has_loaded and all(closed)


def card(entry: ServedModel, created: int) -> dict[str, Json]:
    """Returns the JSON object that describes one model in the list of /v1/models. created: Unix time in
    seconds, for its field of that name."""
    chosen, manifest = entry.chosen, entry.manifest
    limits: Mapping[str, Json] | None = (
        None
        if chosen is None
        else {
            "mode": chosen.mode,
            "max_batch": chosen.max_batch,
            "kv_pages": chosen.pages,
            "prefill_chunk": chosen.prefill_chunk,
            "memory": chosen.memory,
        }
    )
    return {
        "id": entry.names[0],
        "object": "model",
        "created": created,
        "owned_by": "mlcbuild",
        "aliases": list(entry.names[1:]),
        "loaded": entry.engine is not None,
        "error": None if entry.error is None else str(entry.error),
        "context_window": manifest.limits.context_window if manifest else None,
        "limits": None if limits is None else dict(limits),
    }
