"""Builds a checkpoint for this machine, or downloads a published bundle, and keeps it in the store."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from mlcbuild import locking, session
from mlcbuild.build.events import silent
from mlcbuild.bundles.publish import fault
from mlcbuild.bundles.publish.transfer_bundle import pull, unfinished
from mlcbuild.checkpoints import hub
from mlcbuild.checkpoints.fetch import gguf_parts
from mlcbuild.errors import InputError, SourceError, StoreError, UsageError, did_you_mean
from mlcbuild.installed import entries
from mlcbuild.installed.default_scheme import SchemeChoice, choose_scheme, parameter_count
from mlcbuild.installed.entries import BUNDLE, MANIFEST, InstalledModel, InstallOptions
from mlcbuild.quant import as_is
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.store.locks import try_lock

RECIPE = "recipe.yaml"


def install(source: str, target: str, options: InstallOptions) -> InstalledModel:
    """Builds or downloads the bundle of a model, and returns it as an installed model.

    source: an oci:// or hf:// address, or the absolute path of a checkpoint. target: triple, processor and
    features of this machine, separated by spaces. Raises UsageError for a wrong scheme or source, StoreError
    if the store cannot be written, SourceError or PublishError if a download fails, the error of the first
    build step that fails, and KeyboardInterrupt if the build was interrupted. The model's new directory is
    removed if it got no bundle and no part of one, with which the next download continues.
    """
    named = options.scheme
    if named is not None and named not in (names := (*SCHEMES, as_is.NAME)):
        raise UsageError(f"--scheme: '{named}' is not a scheme; {did_you_mean(named, names)}")
    published = _is_published(source)
    if published and named is not None:
        raise UsageError(f"{source}: it is a published bundle, which has its scheme: leave --scheme out")
    chosen = SchemeChoice(named, "as --scheme says") if named is not None else None
    if chosen is None and not published:
        chosen = choose_scheme(target, parameter_count(source))
    path = entries.place(options.root, source, *(("", "") if chosen is None else (chosen.scheme, target)))
    entry = InstalledModel(path, source)
    if chosen is not None:
        stats = {} if "://" in source else _stats(source)
        choice = "default" if named is None else ""
        entry = InstalledModel(path, source, chosen.scheme, target, choice, stats)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if chosen is None:
            options.note(f"{source}: a published bundle, which is fetched and kept as {entry.name}")
            pull(source, entry.bundle)
        else:
            _build(entry, chosen, options)
        entry.write()
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if not (entry.bundle / MANIFEST).is_file() and not any(unfinished(entry.bundle).rglob("*")):
            shutil.rmtree(path, ignore_errors=True)
    return entry


def activity_lock(root: Path) -> Path:
    """Returns the path of a lock file in the store at `root`. Each process holds it shared while it installs
    a model, and the garbage collection alone while it removes what others have left."""
    return root / entries.DIRECTORY / ".installing.lock"


def remove_unfinished(root: Path) -> None:
    """Removes the parts of bundles that interrupted downloads have left among the installed models of the
    store at `root`, unless a process is installing a model now. Parts that cannot be removed stay."""
    directory = root / entries.DIRECTORY
    with suppress(OSError):
        parts = [part for entry in directory.iterdir() if (part := unfinished(entry / BUNDLE)).is_dir()]
        lock = try_lock(activity_lock(root), keep=True) if parts else None
        with lock or nullcontext():
            for part in parts if lock else []:
                shutil.rmtree(part, ignore_errors=True)
                with suppress(OSError):  # It holds an installed model.
                    part.parent.rmdir()


def _stats(source: str) -> entries.Stats:
    """Returns file name -> (size in bytes, mtime in ns) of a local checkpoint's files. Raises UsageError if
    its directory cannot be read."""
    try:
        return entries.stats(Path(source))
    except OSError as error:
        raise UsageError(f"{source}: the checkpoint cannot be read: {error.strerror}") from None


def _is_published(source: str) -> bool:
    """Returns True if `source` is the address (oci:// or hf://) of a published bundle, False if it is the
    address of a checkpoint or a path. For an hf:// address the hub is queried.

    Raises UsageError for a wrong address, or a repository on the hub that holds neither a bundle nor a
    checkpoint, and SourceError if the hub cannot be queried.
    """
    if "://" not in source:
        return False
    if source.startswith("oci://"):
        if problem := fault(source, writing=False):
            raise UsageError(problem)
        return True
    repository = hub.parse_source(source)
    assert repository is not None  # resolve.ADDRESSES has no other scheme.
    _, files = hub.list_files(repository)
    if repository.file:
        try:
            gguf_parts(files, repository.file)
        except SourceError as error:
            raise UsageError(f"{source}: {error}") from None
        return False
    if MANIFEST not in files and "config.json" not in files:
        packed = sorted(name for name in files if name.endswith(".gguf"))
        hint = f": name a GGUF file in it, hf://{repository.repo}/{packed[0]}" if packed else ""
        raise UsageError(f"{source}: it holds neither {MANIFEST} nor config.json{hint}")
    return MANIFEST in files


def _build(entry: InstalledModel, chosen: SchemeChoice, options: InstallOptions) -> None:
    """Writes a recipe into the directory of a model that is being installed, and builds its bundle there.
    entry: the model with its directory in the store; chosen: the quantization scheme, and why it was chosen.

    Raises UsageError for a model that cannot be built, SourceError if the hub cannot be queried, the error of
    the first build step that fails, and KeyboardInterrupt if the build was interrupted.
    """
    recipe, model = entry.directory / RECIPE, entry.name.removesuffix(f"-{entry.scheme}")
    recipe.write_text(recipe_text(model, entry.source, entry.scheme), encoding="utf-8")
    try:
        if "://" in entry.source:
            locking.lock(recipe)
        opened = session.open(recipe, store=options.root, allow_outside=True).unverified()
    except InputError as error:
        texts = [problem.message.removeprefix(f"model '{model}': ") for problem in error.problems]
        source = entry.source
        lines = (text if text.startswith(source) else f"{source}: {text}" for text in texts)
        raise UsageError("\n".join(lines)) from None
    words = "" if options.scheme else f", {chosen.reason} (--scheme chooses another)"
    cpu = entry.target.split()[1]
    options.note(f"{entry.source}: built for this machine, {cpu}, with {entry.scheme}{words}")
    with ExitStack() as stack:
        on_event = stack.enter_context(options.watch()) if options.watch is not None else silent
        result = opened.run(execution=session.Execution(handle_signals=True), on_event=on_event)
    if result.run.interrupted:
        raise KeyboardInterrupt
    result.check()


def recipe_text(name: str, source: str, scheme: str) -> str:
    """Returns the text of a recipe that builds one model for this machine, with the bundle in a directory
    beside the recipe. source: path or address of the checkpoint; scheme: name of the quantization scheme."""
    model, place = json.dumps(name), json.dumps(source, ensure_ascii=False)
    return (
        "# Written by `mlcbuild chat` and `mlcbuild serve`, which build from it.\n"
        f"version: 1\nmodels: {{{model}: {{source: {place}}}}}\nquantizations: [{scheme}]\n"
        "targets: [host]\nbundle: {output: bundle}\n"
    )
