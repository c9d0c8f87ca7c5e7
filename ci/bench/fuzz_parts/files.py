"""Fuzzing targets whose cases are files on disk: recipes, records, stores, bundles, archives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from random import Random

import yaml
from fuzz_parts.mutate import dumped, mutated_bytes, mutated_json, mutated_lines
from mlcbuild_format import bundle
from mlcbuild_format.errors import ServingError
from mlcbuild_runtime.text.tokenizer import Tokenizer

from mlcbuild import models
from mlcbuild.cli import main
from mlcbuild.remotes.signing import RefusedError, unseal
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests import checkpoint_files, product
from tests.conftest import TINY
from tests.runtime import toy


def command(*arguments: str | Path) -> tuple[int, str]:
    """Runs mlcbuild's command line with these arguments in this process, and returns (exit code, text printed
    to standard output and standard error). An unexpected exception in mlcbuild becomes an error message and
    an exit code, as for users."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([str(argument) for argument in arguments])
    return code, out.buffer.getvalue().decode(errors="replace")


def accepted(*arguments: str | Path) -> None:
    """Runs a command of mlcbuild on input before it is mutated, and asserts that the exit code is 0.
    Otherwise, all mutations would be refused for the same reason, and nothing would be tested.
    """
    code, text = command(*arguments)
    assert code == 0, text


def fault(code: int, text: str, allowed: tuple[int, ...]) -> str | None:
    """Returns the reason why a command's exit code and printed text are not a proper answer to bad input: a
    traceback or a report of a defect, an exit code that is not in `allowed`, or control characters. None if
    there is none of these.
    """
    if "a defect of mlcbuild" in text or "Traceback" in text:
        return next(line for line in text.splitlines() if "defect" in line or "Traceback" in line)
    if code not in allowed:
        return f"exit code {code}: {text[-300:]}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text.replace("\r\n", "\n")):
        return f"control characters on the terminal: {text[-300:]!r}"
    return None


class Files:
    """The interface of a fuzzing target. `make` returns a random case as bytes; `check` runs it, and returns
    the reason why mlcbuild treats it wrongly, or None.
    """

    def close(self) -> None:
        """Ends the processes that a fuzzing target started; does nothing by default. The caller removes the
        target's files, whose directory it owns.
        """


class Recipes(Files):
    """A fuzzing target: creates mutated recipe files, and checks that the commands validate and plan accept
    each or refuse it with a suitable message, which for validate names the recipe file, with or without line
    and column. plan may refuse a recipe that validate accepts only because of a lock. A case is the file."""

    WORDS = (
        *(
            "tiny",
            "q4f16_1",
            "host",
            "x86-64-v3",
            "models/tiny",
            "hf://a/b@main",
            "${x}",
            "${ctx}",
            "{model}",
        ),
        *("~", ".", "..", "[]", "{}", "[a, b]", "{a: b}", "&a", "*a", "<<:", "include:", "exclude:", "1e999"),
        *("0x10", "no", "2024-01-01", "|-", ">", "#", "!!binary", "dist/a", "dist/../b", "prompts.txt"),
    )
    TEXT = """\
version: 1
name: fuzzed
vars: {ctx: 256, x: tiny}
models:
  tiny: {source: "./${x}"}
quantizations:
  q4: q4f16_1
  mixed:
    scheme: q4f32_1
    overrides: [{match: "lm_head|embed*", scheme: q8f32_1}]
targets: {v3: x86-64-v3, own: {extends: x86-64-v4, features: [+avx512vnni]}}
matrix:
  exclude: [{quantization: mixed, target: own}]
  include: [{model: tiny, quantization: q4, target: v3, compile: {max_batch: 4}}]
compile: {context_window: "${ctx}", prefill_chunk: 64, max_batch: 8}
verify: {prompts: prompts.txt, max_kl: 0.1, min_top1: 0.5}
bench: {prompt_tokens: 16, generate_tokens: 8}
bundle: {output: "dist/{model}-{quantization}-{target}"}
"""

    def __init__(self, place: Path) -> None:
        shutil.copytree(TINY, place / "tiny")
        (place / "prompts.txt").write_text("one\ntwo\n")
        self.recipe, self.store = place / "recipe.yaml", place / "store"
        os.environ["MLCBUILD_STORE"], os.environ["HF_HUB_OFFLINE"] = str(self.store), "1"
        self.recipe.write_text(self.TEXT)
        accepted("validate", self.recipe)
        accepted("plan", self.recipe)

    def make(self, random: Random) -> bytes:
        if random.random() < 0.15:
            return mutated_bytes(random, self.TEXT.encode(), tuple(word.encode() for word in self.WORDS))
        if random.random() < 0.4:
            document = mutated_json(random, yaml.safe_load(self.TEXT))
            return dumped(document)  # JSON is valid YAML.
        return mutated_lines(random, self.TEXT, self.WORDS)

    def check(self, case: bytes) -> str | None:
        self.recipe.write_bytes(case)
        code, text = command("validate", self.recipe)
        if problem := fault(code, text, (0, 2)):
            return f"validate: {problem}"
        if code == 2 and not re.search(r"recipe\.yaml(:\d+:\d+)?: ", text):
            return f"validate names no place: {text[:300]}"
        planned, more = command("plan", self.recipe)
        if problem := fault(planned, more, (0, 2)):
            return f"plan: {problem}"
        # Only a missing lock of a source is noticed later, since the source's files are not on this machine.
        if (code, planned) == (0, 2) and "lock" not in more:
            return f"plan finds what validate does not: {more[:300]}"
        return None


class Records(Files):
    """A fuzzing target: creates mutated records of step results, as a remote may return them for a cache key,
    and checks that each is refused, or that its key and files are consistent and it can be written again
    unchanged. A case is the cache key, a line break, and the record.
    """

    def __init__(self, place: Path) -> None:
        store, _ = built(place)
        paths = [path for path in (store / "ac").rglob("*") if path.is_file()]
        self.records = {path.name: path.read_bytes() for path in sorted(paths)}

    def make(self, random: Random) -> bytes:
        key = random.choice(list(self.records))
        data = self.records[key]
        if random.random() < 0.8:
            lines: list[bytes] = data.split(b"\n")
            at = random.randrange(2)
            lines[at] = dumped(mutated_json(random, json.loads(lines[at])))
            data = b"\n".join(lines)
        else:
            data = mutated_bytes(random, data)
        return key.encode() + b"\n" + data

    def check(self, case: bytes) -> str | None:
        key, _, data = case.partition(b"\n")
        try:
            record = unseal(key.decode(), data)
        except RefusedError:
            return None
        if not record.consistent():
            return "a record is accepted whose key or tree does not follow from it"
        if unseal(key.decode(), record.encode()) != record:
            return "what is accepted is not what is written again"
        return None


class Stores(Records):
    """A fuzzing target: creates mutated records of step results, as a remote may return them, puts each into
    a local store, and checks that the commands cache status, plan and cache verify do not crash. A case is
    the cache key, a line break, and the record; an unknown key is replaced by one of the store's."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.store, self.recipe = built(place)

    def check(self, case: bytes) -> str | None:
        key, _, data = case.partition(b"\n")
        # The key of a saved case changes with the sources; it then replaces another record.
        name = key.decode() if key.decode() in self.records else min(self.records)
        path = self.store / "ac" / name[:2] / name
        path.chmod(0o644)
        path.write_bytes(data)
        try:
            for arguments in (("cache", "status"), ("plan", str(self.recipe)), ("cache", "verify")):
                code, text = command(*arguments)
                if problem := fault(code, text, (0, 1, 2)):
                    return f"{arguments[0]} {arguments[1] if arguments[0] == 'cache' else ''}: {problem}"
        finally:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(self.records[name])
        return None


class Manifests(Files):
    """A fuzzing target: creates mutated JSON files of a bundle, and checks that the commands inspect and
    verify, and the tokenizer's loader, accept or properly refuse it. A case is a file's name, a line break,
    and the file's content.
    """

    FILES = (
        "bundle.json",
        "bundle.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    )

    def __init__(self, place: Path) -> None:
        self.bundle = place / "toy"
        if not self.bundle.exists():
            toy.write(self.bundle)
        names = {path.name for path in self.bundle.iterdir()}
        # The toy bundle's config belongs to no family; `inspect` describes such a model.
        document = json.loads((self.bundle / "bundle.json").read_bytes())
        config = replace(checkpoint_files.CONFIG, vocab_size=toy.VOCAB)
        document["model"]["config"] = models.to_json(config)
        (self.bundle / "bundle.json").write_text(json.dumps(document))
        self.files = {name: (self.bundle / name).read_bytes() for name in self.FILES if name in names}
        accepted("inspect", self.bundle)
        accepted("verify", self.bundle)

    def make(self, random: Random) -> bytes:
        name = random.choice([name for name in self.FILES if name in self.files])
        data = self.files[name]
        if random.random() < 0.85:
            data = dumped(mutated_json(random, json.loads(data)))
        else:
            data = mutated_bytes(random, data)
        return name.encode() + b"\n" + data

    def check(self, case: bytes) -> str | None:
        name, _, data = case.partition(b"\n")
        path = self.bundle / name.decode()
        try:
            path.write_bytes(data)
            if path.name != "bundle.json":
                self._list(path)
                if problem := self._tokenize():
                    return problem
            for verb in ("inspect", "verify"):
                code, text = command(verb, self.bundle)
                if problem := fault(code, text, (0, 1, 2)):
                    return f"{verb}: {problem}"
        finally:
            path.write_bytes(self.files[name.decode()])
            (self.bundle / "bundle.json").write_bytes(self.files["bundle.json"])
        return None

    def _list(self, path: Path) -> None:
        """Writes the bundle's original manifest with the new size and digest of one changed file, as the
        author of a malicious bundle would. path: the changed file, in the bundle's directory."""
        document = json.loads(self.files["bundle.json"])
        entry = toy.describe(path)
        document["files"][path.name] = {"blake3": entry.blake3, "size": entry.size}
        (self.bundle / "bundle.json").write_text(json.dumps(document))

    def _tokenize(self) -> str | None:
        try:
            Tokenizer.load(self.bundle, bundle.manifest(self.bundle).serving)
        except ServingError as error:
            return fault(1, str(error), (1,))
        return None


class Archives(Files):
    """A fuzzing target: creates mutated archives as `mlcbuild cache export` writes them, and checks that
    importing one into an empty store works or is refused with a suitable message, that nothing is written
    beside the store, and that the store is then intact and at most 1 MiB larger than the archive. A case is
    the archive."""

    def __init__(self, place: Path) -> None:
        self.place = place
        _, recipe = built(place)
        self.archive = place / "whole.tar"
        accepted("cache", "export", self.archive, recipe)
        self.members: list[tuple[tarfile.TarInfo, bytes]] = []
        with tarfile.open(self.archive) as archive:
            for item in archive:
                file = archive.extractfile(item)
                self.members.append((item, file.read() if file else b""))
        accepted("cache", "import", self.archive, "--store", place / "taken")

    def make(self, random: Random) -> bytes:
        if random.random() < 0.3:
            return mutated_bytes(
                random, self.archive.read_bytes(), (b"ustar", b"../../x", b"\x80" + b"\xff" * 11)
            )
        members = [(item.name, item.type, "", data) for item, data in self.members]
        for _ in range(random.choice((1, 1, 2))):
            self._change(random, members)
        out = io.BytesIO()
        kind = random.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT))
        with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
            for name, entry, link, data in members:
                item = tarfile.TarInfo(name)
                item.type, item.linkname, item.size = entry, link, len(data)
                tar.addfile(item, io.BytesIO(data))
        return out.getvalue()

    def _change(self, random: Random, members: list[tuple[str, bytes, str, bytes]]) -> None:
        at = random.randrange(len(members))
        name, kind, link, data = members[at]
        way = random.randrange(6)
        if way == 0:
            name = random.choice(
                ("../x", "/x", "ac/" + "g" * 64, "cas/..", "con", name.upper(), members[0][0])
            )
        elif way == 1:
            kinds = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
            kind, link = random.choice(kinds), "../x"
        elif way == 2 and data[:1] == b"{":
            lines = data.split(b"\n")
            lines[0] = dumped(mutated_json(random, json.loads(lines[0])))
            data = b"\n".join(lines)
        elif way == 3:
            data = mutated_bytes(random, data)
        elif way == 4:
            del members[at]
            return
        else:
            other = random.randrange(len(members))
            members[at], members[other] = members[other], members[at]
            return
        members[at] = name, kind, link, data

    def check(self, case: bytes) -> str | None:
        path, store = self.place / "case.tar", self.place / "taken"
        shutil.rmtree(store, ignore_errors=True)
        path.write_bytes(case)
        beside = {entry.name for entry in self.place.iterdir()}
        code, text = command("cache", "import", path, "--store", store)
        if problem := fault(code, text, (0, 2)):
            return problem
        if new := {entry.name for entry in self.place.iterdir()} - beside - {"taken"}:
            return f"it wrote beside the store: {new}"
        held = sum(entry.stat().st_size for entry in store.rglob("*") if entry.is_file())
        if held > len(case) + (1 << 20):
            return f"{len(case)} bytes became {held} in the store"
        if (store / "store.json").exists():
            report = verify(Store(store))
            if report.damaged or report.missing:
                return f"the store is damaged: {[*report.damaged, *report.missing][:3]}"
        return None


def built(place: Path) -> tuple[Path, Path]:
    """Returns (path of a store with the results of a small recipe's steps, path of the recipe), both in the
    directory `place`. They are created at the first call for a directory, with actions that cost nothing in
    place of the steps' own. Each call also sets the environment variables MLCBUILD_STORE and
    XDG_CONFIG_HOME to paths in `place`.
    """
    store = place / "store"
    os.environ["MLCBUILD_STORE"], os.environ["XDG_CONFIG_HOME"] = str(store), str(place)
    recipe = place / "recipe.yaml"
    if not recipe.exists():
        product.make(place, 2, ("q4f16_1", "q0f32"), ("x86-64-v3",))
        product.replace_work()
        accepted("run", recipe, "--executor", "inline")
    return store, recipe
