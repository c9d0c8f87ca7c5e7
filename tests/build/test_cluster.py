"""Runs on a real scheduler of dask.distributed, with workers as processes that have stores of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build import cluster
from mlcbuild.build.cluster import client, site, wire
from mlcbuild.build.cluster.wire import Answer, Order, OrderInput
from mlcbuild.build.events import Event, RunResult, StepPlaced, StepProgress, StepResult, Warned
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.canon import Entry, Tree, code_files
from mlcbuild.errors import InputError, Problem, SetupError, StepError, UsageError
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.records import BuildInfo, Preimage, Record
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests import builder
from tests.cluster import ROOT, Cluster, started
from tests.forkserver import Process

pytestmark = pytest.mark.xdist_group("cluster")
TEXT = "tests.actions:text"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a cluster with the workers `one` to `four`, the last two of them to be killed."""
    with started(tmp_path_factory.mktemp("cluster")) as actual:
        actual.worker("one", "--labels", "first")
        actual.worker("two", "--labels", "fast, gpu=1")
        actual.worker("three", "--labels", "mortal")
        actual.worker("four", "--labels", "mortal")
        actual.wait("one", "two", "three", "four")
        yield actual


class Run:
    """A run of a graph on a cluster, with a remote between the stores."""

    def __init__(self, cluster: Cluster, place: Path, name: str = "store") -> None:
        (place / "remote").mkdir(exist_ok=True)
        self.store = Store(place / name)
        self.remote = f"file://{place}/remote"
        self.address = cluster.address
        self.events: list[Event] = []

    def __call__(self, nodes: list[Node], *, shared: bool = True, **options: object) -> RunResult:
        sharing = Sharing(self.store, [Link(Remote(self.remote))] if shared else [])
        chosen = replace(Options(executor=self.address), **options)  # type: ignore[arg-type]
        return execute(Graph(nodes), self.store, chosen, self.events.append, sharing)

    def places(self, step: str) -> list[str]:
        return [e.worker for e in list(self.events) if isinstance(e, StepPlaced) and e.name == step]

    def warnings(self) -> str:
        return "\n".join(event.message for event in self.events if isinstance(event, Warned))


def trees(store: Path) -> dict[str, bytes]:
    """Returns key of a record -> its first line, which states the files and their digests."""
    return {
        path.name: path.read_bytes().partition(b"\n")[0]
        for path in (store / "ac").rglob("*")
        if path.is_file()
    }


def contents(store: Path) -> object:
    return trees(store), files(store)


def files(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store / "cas").rglob("*") if path.is_file()}


def until(what: object, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_two_and_four_workers_give_the_same_bytes_as_this_machine(two: Cluster, tmp_path: Path) -> None:
    nodes = builder.chain("/dev/null")
    local = Store(tmp_path / "local")
    assert execute(Graph(nodes), local, Options(jobs=1)).ok
    whole = trees(local.root), files(local.root)
    used: dict[int, set[str]] = {}
    for count, labels in ((1, ("fast",)), (2, ()), (4, ())):
        place = tmp_path / str(count)
        place.mkdir()
        run = Run(two, place)
        chosen = [replace(node, needs=labels) if isinstance(node, Step) else node for node in nodes]
        # Forced, since the workers keep what they built for the number before.
        result = run(chosen, jobs=count, force=("*",))
        assert result.ok and result.count("built") == 12
        remote = place / "remote"
        assert (trees(remote), files(remote)) == whole
        expected = {path: data for path, data in whole[1].items() if b"2/" in data}
        assert files(run.store.root) == expected, "only the last steps' files came here"
        assert verify(run.store).ok
        used[count] = {worker for step in result.steps for worker in [step.worker]}
        again = run(chosen)
        assert again.count("reused") == 12
    assert used[1] == {"two"} and len(used[4]) > 2


def test_a_worker_with_the_run_s_store_needs_no_remote(two: Cluster, tmp_path: Path) -> None:
    nodes: list[Node] = [
        Step("a", TEXT, {"text": "same"}, {}, needs=("first",)),
        Step("b", "tests.actions:noisy", {}, {"a": Input("a")}, needs=("first",)),
    ]
    result = Run(two, tmp_path)(nodes, shared=False)
    assert "is not the run's, and there is no remote that both read and write" in str(result.steps[0].error)
    run = Run(two, tmp_path)
    run.store = Store(two.place / "one")
    result = run(nodes, shared=False)
    assert result.ok and {step.worker for step in result.steps} == {"one"}
    assert verify(run.store).ok
    log = result.steps[1].log
    assert log is not None
    assert sorted(log.read_text().splitlines()) == ["from a child", "from native code", "from python"]


def test_a_source_that_workers_do_not_see_goes_through_the_remote(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/cwd").exists():
        pytest.skip("this system has no path that means something else to each process")
    (tmp_path / "mine.txt").write_text("seen by one process only")
    run = Run(two, tmp_path)
    monkeypatch.chdir(tmp_path)
    source = Source("mine", Path("/proc/self/cwd"), ("mine.txt",))
    result = run([source, Step("copy", TEXT, {"text": "head"}, {"of": Input("mine")})])
    assert result.ok, result.steps[0].error
    record = result.steps[0].record
    assert record is not None
    assert run.store.blob(record.rows[0][1]).read_text() == "head\nseen by one process only"
    assert not run.warnings()


def test_a_source_that_workers_see_is_read_in_place(two: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("seen by all")
    run = Run(two, tmp_path)
    source = Source("mine", tmp_path, ("mine.txt",))
    result = run([source, Step("copy", TEXT, {"text": "head"}, {"of": Input("mine")})])
    assert result.ok
    assert b"seen by all" not in files(tmp_path / "remote").values()


def lose(two: Cluster, run: Run, place: Path, do: Callable[[Process], None]) -> tuple[StepResult, list[str]]:
    """Runs a step that waits on the first worker which gets it, and calls `do` for that worker. Returns
    (result of the step, workers that it ran on).
    """
    note = place / "note"
    params = {"note": str(note), "gate": str(place / "gate")}
    step = Step("held", "tests.actions:hold_once", params, {}, needs=("mortal",))

    def act() -> None:
        until(lambda: note.exists() and run.places("held"))
        do(two.named(run.places("held")[0]))

    thread = threading.Thread(target=act)
    thread.start()
    result = run([step])
    thread.join()
    return result.steps[0], run.places("held")


def test_lost_workers(two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, told to stop, declared dead though it lives, and one too many: each with a worker left over."""
    two.worker("five", "--labels", "mortal")
    killed, left, frozen, doomed = ((tmp_path / name) for name in ("killed", "left", "frozen", "doomed"))
    for place in (killed, left, frozen, doomed):
        place.mkdir()

    run = Run(two, killed)
    step, places = lose(two, run, killed, lambda worker: worker.kill())
    assert step.status == "built", step.error
    assert len(set(places)) == 2
    assert f"step held is run again on {places[1]}: {places[0]} was lost" in run.warnings()
    until(lambda: not any(alive(int(pid)) for pid in (killed / "note").read_text().split()))
    assert verify(run.store).ok and all(verify(Store(two.place / name)).ok for name in places)

    two.worker("six", "--labels", "mortal")
    two.wait("five")
    run = Run(two, left)
    step, places = lose(two, run, left, lambda worker: worker.terminate())
    assert step.status == "built", step.error
    assert two.named(places[0]).wait(60) == 0
    assert not list((two.place / places[0] / "tmp").iterdir()), "nothing is left in its store"
    assert "was lost" not in run.warnings()
    until(lambda: not alive(int((left / "note").read_text().split()[0])))

    two.worker("seven", "--labels", "mortal")
    two.wait("six")
    run = Run(two, frozen)
    step, places = lose(two, run, frozen, two.declare_dead)
    assert step.status == "built", step.error
    before = contents(frozen / "remote")
    (frozen / "gate").write_text("")  # its child is done at once; the worker learns of it when it wakes
    two.named(places[0]).send_signal(signal.SIGCONT)
    until(lambda: not alive(int((frozen / "note").read_text().split()[0])))
    assert contents(frozen / "remote") == before
    assert verify(run.store).ok and verify(Store(two.place / places[0])).ok

    two.wait("seven")
    monkeypatch.setattr(client, "MAX_STARTS", 1)
    step, places = lose(two, Run(two, doomed), doomed, lambda worker: worker.kill())
    sentence = f"step held: the workers that ran it were lost, one after the other: {places[0]}"
    assert str(step.error) == sentence


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_run_ends_its_steps(two: Cluster, tmp_path: Path, how: signal.Signals) -> None:
    note = tmp_path / "note"
    (tmp_path / "remote").mkdir()
    arguments = [str(tmp_path / "store"), "holding", str(note), two.address, f"file://{tmp_path}/remote"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.builder", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    until(note.exists)
    process.send_signal(how)
    out, _ = process.communicate(timeout=200)
    if how == signal.SIGINT:
        assert process.returncode == 130
        statuses = {step["name"]: step["status"] for step in json.loads(out)["steps"]}
        assert statuses == {"quick": "built", "held": "skipped"}
    until(lambda: not any(alive(int(pid)) for pid in note.read_text().split()))
    assert all(two.named(name).poll() is None for name in ("one", "two"))


def test_what_no_worker_can_do_is_said_before_anything_runs(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    nodes: list[Node] = [
        Step("good", TEXT, {"text": "good"}, {}),
        Step("large", TEXT, {"text": "large"}, {}, memory=10**15),
        Step("old", TEXT, {"text": "old"}, {}, tools={"apache-tvm": "0.1"}),
        Step("other", TEXT, {"text": "other"}, {"of": Input("good")}, needs=("moonshine",)),
        Step("unlinked", TEXT, {"text": "u"}, {}, tools={"linker": "none"}),
    ]
    with pytest.raises(SetupError) as output:
        run(nodes)
    lines = str(output.value).splitlines()
    assert lines[0].startswith(
        "step large: it needs 1000000.0 GB of memory, and the most that a worker has is 2.0 GB"
    )
    assert lines[1].startswith("step old: no worker has 'apache-tvm 0.1', as here; they have 'apache-tvm 0.")
    assert lines[2].startswith("step unlinked: its key names the linker, and this machine has none")
    assert lines[3].startswith("step other: no worker has 'moonshine': start one with it")
    assert not run.places("good")
    result = run(nodes, keep_going=True)
    assert [step.status for step in result.steps if step.name == "good"] == ["built"]
    assert result.count("failed") == 4
    assert result.exit_code == SetupError.exit_code


def test_another_version_of_mlcbuild_is_refused(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "own_label", lambda: "mlcbuild 99")
    with pytest.raises(SetupError, match="no worker has mlcbuild 99, as here; they have mlcbuild 0"):
        Run(two, tmp_path)([Step("a", TEXT, {"text": "x"}, {})])


def test_labels_choose_the_worker_and_progress_comes_back(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    slow = Step("slow", "tests.actions:slow_progress", {}, {}, needs=("gpu", "fast"))
    result = run([slow, Step("here", "tests.actions:random", {}, {}, shared=False)])
    assert result.ok, [step.error for step in result.steps]
    assert {step.name: step.worker for step in result.steps} == {"slow": "two", "here": ""}
    results = [(e.done, e.total, e.unit) for e in run.events if isinstance(e, StepProgress)]
    assert results[-1] == (3, 3, "layers") and results == sorted(results)


def test_an_error_comes_back_with_its_class_and_log(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    nodes: list[Node] = [
        Step("own", "tests.actions:fail", {"how": "own error"}, {}),
        Step("died", "tests.actions:fail", {"how": "9"}, {}),
    ]
    result = run(nodes, keep_going=True)
    errors = {step.name: step for step in result.steps}
    assert type(errors["own"].error).__name__ == "CheckpointError"
    assert str(errors["own"].error) == "model.safetensors: tensor a is missing"
    log = errors["own"].log
    assert log is not None and log.read_text().startswith("a line before the end\n")
    assert "was killed by SIGKILL" in str(errors["died"].error)


# Without a cluster


def test_exit_codes_of_a_worker(tmp_path: Path) -> None:
    with started(tmp_path / "cluster") as actual:
        address, actual.address = actual.address, "dask://127.0.0.1:1"
        absent = actual.worker("absent")
        actual.address = address
        process = actual.worker("interrupted")
        lonely = actual.worker("lonely")
        actual.wait("interrupted", "lonely")
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130
        actual.processes[0].kill()
        assert lonely.wait(200) == 1
        assert "the scheduler dask://127.0.0.1:" in actual.said("lonely")
        assert absent.wait(200) == 3
        assert "no scheduler answers at dask://127.0.0.1:1" in actual.said("absent")
        assert "Traceback" not in actual.said("absent") + actual.said("lonely")


def test_encryption(tmp_path: Path) -> None:
    """With TLS a run needs the certificate, and a connection without is turned away."""
    certificates(tmp_path / "cluster" / "tls")
    tls = str(tmp_path / "cluster" / "tls")
    with started(tmp_path / "cluster", "--tls", tls) as actual:
        actual.worker("safe")
        actual.wait("safe")
        run = Run(actual, tmp_path)
        assert run([Step("a", TEXT, {"text": "secret"}, {})], tls=tls).ok
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(client, "_CONNECT", 1.0)
            with pytest.raises(SetupError, match="no scheduler answers"):
                run([Step("b", TEXT, {"text": "open"}, {})])


def certificates(place: Path) -> None:
    """Writes a certificate authority and a certificate that it signed, for an encrypted cluster."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    place.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("ours", "worker")]
    for index, file in enumerate(("ca.pem", "cert.pem")):
        certificate_builder = x509.CertificateBuilder(
            names[0], names[index], keys[index].public_key(), 1 + index
        )
        certificate_builder = certificate_builder.not_valid_before(
            now - datetime.timedelta(1)
        ).not_valid_after(now + datetime.timedelta(1))
        certificate_builder = certificate_builder.add_extension(
            x509.BasicConstraints(ca=index == 0, path_length=None), critical=True
        )
        signed = certificate_builder.sign(keys[0], hashes.SHA256())
        (place / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pem = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (place / "key.pem").write_bytes(pem)


def test_a_scheduler_without_workers_and_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CONNECT", 0.5)
    monkeypatch.setattr(client, "_WORKERS", 0.2)
    step = Step("a", TEXT, {"text": "x"}, {})
    nowhere = Cluster(tmp_path, address="dask://127.0.0.1:1")
    with pytest.raises(SetupError, match=r"no scheduler answers at dask://127.0.0.1:1: .*`dask scheduler`"):
        Run(nowhere, tmp_path)([step])
    lonely = pytest.raises(SetupError, match="has no worker: start one with `mlcbuild worker dask://127")
    with started(tmp_path / "cluster") as actual, lonely:
        Run(actual, tmp_path)([step])


def test_without_dask_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "distributed.security", None)
    with pytest.raises(SetupError, match=r"pip install 'mlcbuild\[dask\]'"):
        cluster.security(cluster.address("dask://localhost:8786"))


@pytest.mark.parametrize(
    "text", ["dask://", "dask://host", "tcp://host:1", "dask://host:1/x", "dask://u@h:1"]
)
def test_addresses(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the address of a scheduler: write dask://HOST:PORT"):
        cluster.address(text)
    assert str(cluster.address("dask://a.example:8786")) == "dask://a.example:8786"
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(UsageError, match=r"holds ca.pem, cert.pem and key.pem; it lacks cert.pem, key.pem"):
        cluster.address("dask://a:1", str(tmp_path))


def test_labels() -> None:
    assert cluster.parse_labels(["fast", "gpu=2"]) == {"fast": cluster.PLENTY, "gpu": 2.0}
    for wrong in ("", "gpu=", "gpu=0", "=1", "cores=4", "memory"):
        with pytest.raises(UsageError, match="must be a NAME or NAME=COUNT"):
            cluster.parse_labels([wrong])


def an_order(place: Path) -> Order:
    image = Preimage(TEXT, {"text": "x"}, code_files("tests.actions"), {"tool": "1"}, {})
    argument = OrderInput((Entry("a/b", "0" * 64, 3),), "/no/such/place")
    remotes = (Remote(f"file://{place}", "readwrite", trust=("ed25519:x",)),)
    return Order("run", image.key(), BuildInfo("step", image), {"of": argument}, 2, False, remotes)


def test_orders_and_answers_are_text_and_come_back_whole(tmp_path: Path) -> None:
    order = an_order(tmp_path)
    assert Order.decode(order.encode()) == order
    with pytest.raises(ValueError, match="the order has the format mlcbuild-job/0"):
        Order.decode(order.encode().replace(wire.FORMAT, "mlcbuild-job/0"))
    record = Store(tmp_path / "s").record("0" * 64)
    answer = Answer("w", record, "k", error=StepError("words"), lacking=("a", "b"), unsent=("u",))
    actual = Answer.decode(answer.encode())
    assert (type(actual.error), str(actual.error)) == (StepError, "words")
    assert replace(actual, error=None) == replace(answer, error=None)
    placed = Answer.decode(Answer("w", error=InputError([Problem("f", 1, 2, "m")])).encode())
    assert (type(placed.error), str(placed.error)) == (StepError, "f:1:2: m")


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("cores", "2", "'cores' of the order must be int, not str"),
        ("again", 1, "'again' of the order must be bool, not int"),
        ("extra", 1, "the order has the unknown field 'extra'"),
        ("remotes", [1], "a remote of the order is not a JSON object"),
        ("remotes", [{"url": "file:///x"}], "the order's remote lacks the field 'ci_only'"),
        (
            "remotes",
            [{"url": "ftp://x", "mode": "read", "ci_only": False, "trust": []}],
            "a remote of the order is not valid: 'ftp://x' must start with",
        ),
        (
            "remotes",
            [{"url": "file:///x", "mode": "all", "ci_only": False, "trust": []}],
            "a remote of the order is not valid: its mode or its trust",
        ),
        ("inputs", {"a": [1, []]}, "the input 'a' of the order must be a directory or null, and a list"),
        ("inputs", {"a": [None, [["x", "y", 1]]]}, "the digest or the size of 'x' in it is malformed"),
        ("info", {}, "lacks a field"),
    ],
)
def test_a_malformed_order_is_refused(name: str, value: object, complaint: str, tmp_path: Path) -> None:
    fields = json.loads(an_order(tmp_path).encode())
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Order.decode(json.dumps({**fields, name: value}))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("worker", None, "'worker' of the answer must be str, not NoneType"),
        ("error", ["StepError"], "'error' of the answer must be the name of an error and its message"),
        ("unsent", [1], "'unsent' of the answer must be a list of texts"),
        ("stopped", "no", "'stopped' of the answer must be bool, not str"),
    ],
)
def test_a_malformed_answer_is_refused(name: str, value: object, complaint: str) -> None:
    fields = json.loads(Answer("w").encode())
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Answer.decode(json.dumps({**fields, name: value}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "is not a JSON object"),
        ('{"format": 1, "format": 2}', "the key 'format' is there twice"),
        ('{"format": NaN}', "NaN is not JSON"),
        ("{", "Expecting property name"),
    ],
)
@pytest.mark.parametrize("message", [Order, Answer])
def test_a_message_is_strict_json(message: type[Order | Answer], text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        message.decode(text)


def test_the_record_of_an_answer_is_checked_as_any_other(tmp_path: Path) -> None:
    order = an_order(tmp_path)
    record = Record.create(order.key, Tree.of(()), order.info)
    right = Answer("w", record, order.key).encode()
    assert Answer.decode(right).record == record
    for wrong in (right.replace(r"\"x\"", r"\"y\""), right.replace("0,0,0", "0,0,-1")):
        assert wrong != right
        with pytest.raises(ValueError, match=r"does not follow|three whole numbers"):
            Answer.decode(wrong)


def attempt(order: Order, place: Path) -> Answer:
    store = Store(place / "store")
    here = site.Site("w", store, store.staging())
    try:
        output: list[object] = []
        return site._Attempt(here, order, lambda: True, output.append).run()
    finally:
        here.close()


def test_a_worker_refuses_what_would_not_be_what_the_key_says(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    order = replace(an_order(tmp_path / "remote"), remotes=(Remote(f"file://{tmp_path}/remote"),))
    assert attempt(order, tmp_path).lacking == ("0" * 64,)
    image = replace(order.info.preimage, code={**order.info.preimage.code, "tests/actions.py": "0" * 64})
    wrong = attempt(replace(order, info=replace(order.info, preimage=image)), tmp_path)
    assert str(wrong.error) == (
        "step step: the worker w has another mlcbuild (tests/actions.py differs): "
        "install the same mlcbuild there"
    )
    image = replace(order.info.preimage, action="tests.nowhere:act")
    gone = attempt(replace(order, info=replace(order.info, preimage=image)), tmp_path)
    assert "the worker w has no module 'tests.nowhere'" in str(gone.error)
    alone = attempt(replace(order, remotes=()), tmp_path)
    assert "there is no remote that both read and write" in str(alone.error)
