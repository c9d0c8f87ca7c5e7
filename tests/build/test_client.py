"""Tests of a build that uses a cluster: addresses and certificates of schedulers, and schedulers that do not
answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mlcbuild.build import cluster
from mlcbuild.build.cluster import client
from mlcbuild.build.graph import Step
from mlcbuild.build.worker import Job, JobInput
from mlcbuild.canon import Entry, bytes_digest
from mlcbuild.errors import SetupError, UsageError
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store.store import Store
from tests.build.cluster_runs import TEXT, Run
from tests.cluster import Cluster, started

pytestmark = pytest.mark.xdist_group("cluster")


def test_encryption(tmp_path: Path) -> None:
    """Checks that a cluster with TLS runs steps for a client with its certificate and refuses an unencrypted
    connection."""
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


def test_one_source_is_given_to_several_steps_in_a_common_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "model.bin").write_bytes(b"weights")
    entry = Entry("model.bin", bytes_digest(b"weights"), 7)
    job = SimpleNamespace(inputs=[JobInput("checkpoint", (entry,), tmp_path)])
    with store.staging() as staging:
        giver = object.__new__(client.Cluster)
        giver._sharing, giver._staging = Sharing(store), staging
        assert [giver._give(cast(Job, job), {entry.digest}, True) for _ in range(3)] == ["", "", ""]
        assert store.holds(entry.digest, entry.size) and not list(staging.directory.iterdir())


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
