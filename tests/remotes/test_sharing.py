"""Tests of the commands for shared caches with a real recipe, and of uploads that are killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from mlcbuild import keyfile
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Step
from mlcbuild.canon import Entry, file_digest
from mlcbuild.cli import main
from mlcbuild.remotes import Remote, signing
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.caches import NGINX, WITHOUT_NGINX, Handler, nginx, serving
from tests.conftest import checked, mlcbuild
from tests.remotes.users import CHAIN, User, statuses, step


def states(recipe: Path, store: Path) -> set[str]:
    return set(by_step(recipe, store).values())


def by_step(recipe: Path, store: Path) -> dict[str, str]:
    document = json.loads(checked(mlcbuild("plan", recipe, "--no-remote", "--json", store=store)))
    return {actual["name"]: actual["status"] for actual in document["steps"]}


def test_a_recipe_is_pushed_and_pulled(tiny_bundles: Path, common_store: Path, tmp_path: Path) -> None:
    recipe, url = tiny_bundles / "recipe.yaml", (tmp_path / "shared").as_uri()
    (tmp_path / "shared").mkdir()
    said = checked(mlcbuild("cache", "push", recipe, url, store=common_store))
    match = re.fullmatch(rf"{url}: sent \d+ records with [\d.]+ \w+; (\d+) of (\d+) are there\n", said)
    assert match is not None and match[1] == match[2]
    here = tmp_path / "here"
    said = checked(mlcbuild("cache", "pull", recipe, url, store=here))
    assert said == f"{match[1]} fetched, 0 were here, 0 are in no remote\n"
    assert states(recipe, here) == {"hit"} and verify(Store(here)).ok
    again = checked(mlcbuild("cache", "push", "--all", url, store=here))
    assert again.startswith(f"{url}: sent 0 records with 0 B; {match[1]} of ")


def test_a_plan_without_its_remote_does_not_claim_to_fetch(
    tiny_bundles: Path, common_store: Path, tmp_path: Path
) -> None:
    recipe, here = tmp_path / "recipe.yaml", tmp_path / "here"
    (tmp_path / "shared").mkdir()
    url = (tmp_path / "shared").as_uri()
    checked(mlcbuild("cache", "push", tiny_bundles / "recipe.yaml", url, store=common_store))
    text = (tiny_bundles / "recipe.yaml").read_text()
    shutil.copytree(tiny_bundles / "tiny", tmp_path / "tiny")
    shutil.copy(tiny_bundles / "prompts.txt", tmp_path)
    recipe.write_text(f"{text}\ncache:\n  remotes: [{{url: '{url}'}}]\n")
    before = checked(mlcbuild("plan", recipe, store=here))
    assert re.search(r"\(and may be reused\), \d+ to fetch \([\d.]+ \w+ at most\), 0 to reuse", before)
    checked(mlcbuild("run", recipe, "--only", "tiny-q4f16_1-host", store=here))
    alone = checked(mlcbuild("plan", recipe, "--no-remote", "--only", "tiny-q4f16_1-host", store=here))
    assert "fetch" not in alone
    assert re.search(rf"^known  \S+  \(from {re.escape(url)}, which this run does not read\)$", alone, re.M)
    assert re.search(r" \d+ known without their files \(to run if those are needed\), ", alone)


def test_one_variant_is_pushed_with_all_that_it_needs(
    tiny_bundles: Path, common_store: Path, tmp_path: Path
) -> None:
    recipe, url = tiny_bundles / "recipe.yaml", (tmp_path / "shared").as_uri()
    (tmp_path / "shared").mkdir()
    checked(mlcbuild("cache", "push", recipe, url, "--only", "tiny-q4f16_1-host", store=common_store))
    here = tmp_path / "here"
    said = checked(mlcbuild("cache", "pull", recipe, url, store=here))
    assert re.fullmatch(r"7 fetched, 0 were here, \d+ are in no remote\n", said)
    actual = by_step(recipe, here)
    assert actual["verify/tiny-q4f16_1-host"] == "hit" and actual["weights/tiny/q0f32/plain"] != "hit"
    wrong = mlcbuild("cache", "push", recipe, url, "--only", "nothing", store=common_store)
    assert wrong.returncode == 2 and "nothing" in wrong.stderr


def test_a_recipe_travels_in_a_file(tiny_bundles: Path, common_store: Path, tmp_path: Path) -> None:
    recipe, file = tiny_bundles / "recipe.yaml", tmp_path / "x.tar"
    key = keyfile.create(tmp_path / "key.pem")
    variables = {"MLCBUILD_KEY": str(tmp_path / "key.pem")}
    checked(mlcbuild("cache", "export", file, recipe, store=common_store, variables=variables))
    other = mlcbuild("cache", "import", file, "--trust", "ed25519:" + "A" * 43, store=tmp_path / "no")
    assert other.returncode == 2 and "it is not signed by a trusted key" in other.stderr
    here = tmp_path / "here"
    assert "are in the store" in checked(mlcbuild("cache", "import", file, "--trust", key.public, store=here))
    assert states(recipe, here) == {"hit"} and verify(Store(here)).ok
    assert checked(mlcbuild("cache", "gc", "--max-size", "0", store=here)).startswith("removed ")
    assert states(recipe, here) == {"run", "pending"}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("gc", 2, "name what to remove: --max-size 50GB, --unused-days 30, or both"),
        ("gc --max-size much", 2, "--max-size: must be a size such as 8GB or 512MiB, found 'much'"),
        ("gc x --max-size 1", 2, "mlcbuild cache gc: 'x' is one argument too many"),
        (
            "push",
            2,
            "write `mlcbuild cache push RECIPE [REMOTE ...]` or `mlcbuild cache push --all REMOTE ...`",
        ),
        ("push --all", 2, "write `mlcbuild cache push RECIPE"),
        ("push --all ftp://x", 2, "'ftp://x' must start with https://, http://, s3://, oci:// or file:///"),
        ("push --all http://u:secret@x", 2, "a URL must not hold a user name or password"),
        ("push recipe.yaml", 2, "recipe.yaml: it lists no remote to write: name one on the command line"),
        ("push recipe.yaml file:///nowhere/x", 1, "there is no directory /nowhere/x: create it, or mount it"),
        ("pull --all file:///x", 2, "a remote cannot list what it has: name a recipe, not --all"),
        ("pull", 2, "write `mlcbuild cache pull RECIPE [REMOTE ...]`"),
        ("export", 2, "write `mlcbuild cache export FILE [RECIPE]`"),
        ("export nowhere/x.tar", 1, "nowhere/x.tar: the archive cannot be written: No such file"),
        ("export all.tar --only x", 2, "cache export: --only selects steps of a recipe"),
        ("push --all file:///x --only x", 2, "cache push: --only selects steps of a recipe"),
        ("gc --unused-days 30 --only x", 2, "cache gc: --only selects steps of a recipe"),
        ("export all.tar recipe.yaml --only nope", 2, "no step is called 'nope'"),
        ("import", 2, "write `mlcbuild cache import FILE`"),
        ("import x --trust me", 2, "--trust me: a key is ed25519: and 43 characters"),
    ],
)
def test_wrong_usage_is_told(
    command: str, code: int, words: str, tiny_bundles: Path, common_store: Path
) -> None:
    result = mlcbuild("cache", *command.split(), store=common_store, cwd=tiny_bundles)
    assert result.returncode == code and words in result.stderr
    assert "secret" not in result.stderr and "Traceback" not in result.stderr


def rot(store: Store, digest: str) -> None:
    """Changes one byte of a blob without changing its size and times."""
    blob = store.blob(digest)
    times = (blob.stat().st_atime_ns, blob.stat().st_mtime_ns)
    blob.chmod(0o644)
    blob.write_bytes(b"?" + blob.read_bytes()[1:])
    os.utime(blob, ns=times)


@pytest.mark.parametrize("kind", ["directory", "s3", "oci"])
def test_a_store_is_mended_from_a_remote(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    (tmp_path / "shared").mkdir()
    if kind == "s3":
        request.getfixturevalue("s3_login")
        url = request.getfixturevalue("s3_server").bucket(f"b{secrets.token_hex(8)}")
    elif kind == "oci":
        url = request.getfixturevalue("registry_server").url(f"b{secrets.token_hex(8)}")
    user = User(tmp_path / "one", url)
    digests = {actual.name: actual.record.rows[0][1] for actual in user.run().steps if actual.record}
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def verified(code: int, *urls: str) -> str:
        result = mlcbuild("cache", "verify", *urls, store=user.store.root, variables=variables)
        assert result.returncode == code, result.stderr
        return result.stdout

    rot(user.store, digests["a"])
    user.store.blob(digests["b"]).unlink()
    assert "2 problems: what was damaged is removed" in verified(1)
    said = verified(0, url)
    assert all(f"{n}: text.txt (blob {digests[n]}) was missing: fetched anew" in said for n in "ab")
    rot(user.store, digests["a"])
    said = verified(0, url)
    assert f"blob {digests['a']} (a: text.txt) had content that does not match its name: fetched anew" in said
    assert verified(0) == "3 records and 3 files are as they were written\n"


def test_what_no_remote_has_right_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url = (tmp_path / "shared").as_uri()
    user = User(tmp_path / "one", url)
    digests = {actual.name: actual.record.rows[0][1] for actual in user.run().steps if actual.record}
    rot(user.store, digests["c"])
    lie = tmp_path / "shared" / "cas" / digests["c"]
    lie.chmod(0o644)
    lie.write_bytes(b"?" + lie.read_bytes()[1:])
    result = mlcbuild("cache", "verify", url, store=user.store.root)
    assert (
        result.returncode == 1
        and (f"blob {digests['c']} (c: text.txt) has content that does not match its name") in result.stdout
    )
    assert "is refused: its content does not match its digest" in result.stderr
    alone = User(user.store.root)
    assert statuses(alone.run()) == {"a": "reused", "b": "reused", "c": "built"}, "the damage is gone"
    assert verify(user.store).ok


UPLOAD = """
import sys, threading
from pathlib import Path
from typing import Any
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.store.store import Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
for path in sorted((store.root / "ac").glob("*/*")):
    record = store.find(path.name)
    Link(Remote(sys.argv[2])).send(record, store, threading.Event())
"""


@pytest.mark.parametrize("kind", ["directory", "nginx"])
def test_killed_uploaders_leave_a_cache_that_is_right(kind: str, tmp_path: Path) -> None:
    """Checks that after uploads were killed at random, every record that is visible in the cache is complete,
    and every file that it names has the right bytes."""
    if kind == "nginx" and NGINX is None:
        pytest.skip(WITHOUT_NGINX)
    graph = Graph([step(f"s{n}", "big", bytes=300_000 + n) for n in range(20)])
    builder = User(tmp_path / "one")
    assert builder.run(graph).ok
    dice = random.Random(3)
    with ExitStack() as stack:
        root = tmp_path / "shared"
        url = root.as_uri()
        if kind == "nginx":
            server = stack.enter_context(nginx(tmp_path / "nginx"))
            root, url = server.root, server.url
        root.mkdir(exist_ok=True)
        for _ in range(10):
            command = [sys.executable, "-c", UPLOAD, str(builder.store.root), url]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}
            ) as p:
                assert p.stdout is not None and p.stdout.readline()
                time.sleep(dice.random() * 0.15)
                p.kill()
            check(root)
        user = User(tmp_path / "two", url)
        assert user.run(graph).ok and user.warnings() == []
        assert verify(user.store).ok


def check(root: Path) -> None:
    for path in (root / "ac").glob("*") if (root / "ac").exists() else []:
        record = signing.unseal(path.name, path.read_bytes())
        for _, digest, size in record.rows:
            blob = root / "cas" / digest
            assert blob.stat().st_size == size and file_digest(blob) == digest


def test_many_users_at_once(tmp_path: Path) -> None:
    """Checks that several users in threads can build and read with one cache and shared stores without a
    warning about damage."""
    (tmp_path / "shared").mkdir()
    url = (tmp_path / "shared").as_uri()
    users = [User(tmp_path / f"store{n % 3}", url) for n in range(6)]
    threads = [threading.Thread(target=user.run, args=(CHAIN,)) for user in users]
    for user in users:
        with user.store.staging():
            pass
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for user in users:
        assert user.warnings() == [] and verify(user.store).ok
        assert set(statuses(user.run()).values()) == {"reused"}


def test_one_blob_is_downloaded_once(tmp_path: Path) -> None:
    """Checks that threads which request the same blob at the same time wait for a single download."""
    (tmp_path / "shared" / "cas").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"x" * 5_000_000)
    entry = Entry("blob", file_digest(tmp_path / "blob"), 5_000_000)
    (tmp_path / "blob").rename(tmp_path / "shared" / "cas" / entry.digest)
    store = Store(tmp_path / "store")
    output: list[int] = []
    with store.staging():
        sharing = Sharing(store, [Link(Remote((tmp_path / "shared").as_uri()))])
        work = [
            threading.Thread(target=sharing.fetch, args=(entry, threading.Event(), output.append))
            for _ in range(5)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    assert sum(output) == entry.size and store.holds(entry.digest, entry.size)


def test_records_are_pushed_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that files are uploaded in parallel: the server answers none of four uploads before it has
    received all four."""
    store = Store(tmp_path / "store")
    steps = [Step(f"s{n}", "tests.actions:files", {"files": {"file": f"text {n}"}}, {}) for n in range(8)]
    assert execute(Graph(steps), store, Options(executor="inline")).ok
    meeting = threading.Barrier(4)

    def together(handler: Handler) -> bool:
        if handler.command == "PUT" and handler.path.startswith("/cas/"):
            meeting.wait(60)
        return False

    with serving(together) as cache:
        assert main(["cache", "push", "--all", cache.url, "--store", str(store.root)]) == 0
        assert capsys.readouterr().out == f"{cache.url}: sent 8 records with 48 B; 8 of 8 are there\n"
        assert (len(cache.names("ac")), len(cache.names("cas"))) == (8, 8)
        sent = len(cache.requests)
        assert main(["cache", "push", "--all", cache.url, "--store", str(store.root)]) == 0
        assert "PUT" not in {method for method, _ in cache.requests[sent:]}


def test_a_shared_directory_needs_no_locks_and_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a shared directory without locks and hard links, such as one on NFS, can be written, read
    and repaired."""
    shared = (tmp_path / "shared").resolve()
    shared.mkdir()
    link, lock = os.link, fcntl.flock

    def no_link(source: str, target: str, **options: Any) -> None:
        if shared in (*Path(source).absolute().parents, *Path(target).absolute().parents):
            raise OSError(errno.EPERM, "no hard links here")
        link(source, target, **options)

    def no_lock(descriptor: int, operation: int) -> None:
        actual = os.fstat(descriptor)
        for directory, _, names in os.walk(shared):  # in which others make and remove files meanwhile
            for path in (Path(directory), *(Path(directory) / name for name in names)):
                with suppress(FileNotFoundError):
                    if os.path.samestat(path.stat(), actual):
                        raise OSError(errno.ENOLCK, "no locks here")
        lock(descriptor, operation)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(os, "symlink", no_link)
    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(fcntl, "lockf", no_lock)
    for number, expected in enumerate(("built", "reused")):
        user = User(tmp_path / f"store{number}", shared.as_uri())
        assert set(statuses(user.run()).values()) == {expected} and user.warnings() == []
    (blob,) = [path for path in (shared / "cas").iterdir() if path.read_bytes() == b"C\nB\nA"]
    blob.chmod(0o644)
    blob.write_bytes(b"C\nB\nX")
    user = User(tmp_path / "mends", shared.as_uri())
    assert user.text(user.run(), "c") == "C\nB\nA" and user.warnings()
    user = User(tmp_path / "last", shared.as_uri())
    assert set(statuses(user.run()).values()) == {"reused"} and user.warnings() == []
