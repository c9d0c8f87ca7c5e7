"""A real S3 server: Ceph's radosgw on a cluster of one monitor and one storage process, all in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.caches import free_port, until_open

if TYPE_CHECKING:
    from obstore.store import S3Store

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
WITHOUT_S3 = next(
    (
        f"{name} is not installed: apt-get install radosgw ceph-mon ceph-osd"
        for name in _PROGRAMS
        if not shutil.which(name)
    ),
    "" if find_spec("obstore") else "obstore is not installed: pip install 'mlcbuild[s3]'",
)
"""The reason why no test can use a real S3 server on this machine; "" if tests can."""
ACCESS, SECRET = "testuser", "a secret of the tests"

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}]
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {home}
admin socket =
pid file =
log to file = false
log to stderr = true
err to stderr = true
keyring = {home}/keyring
mon data = {home}/mon
mon cluster log file =
mon data avail crit = -1
mon data avail warn = 0
mon allow pool size one = true
mon max pg per osd = 10000
paxos propose interval = 0.02
paxos min wait = 0.005
osd data = {home}/osd
osd objectstore = memstore
memstore device bytes = {memory}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush update on start = false
osd heartbeat interval = 1
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 16
rgw enable gc threads = false
rgw enable lc threads = false
rgw enable quota threads = false
rgw run sync thread = false
"""


@dataclass(frozen=True)
class Server:
    endpoint: str
    home: Path

    def bucket(self, name: str) -> str:
        """Creates a bucket, and returns the URL of a remote in it."""
        import obstore

        signed = obstore.sign(self.store(name), "PUT", "", timedelta(minutes=5))
        with urllib.request.urlopen(urllib.request.Request(signed, method="PUT")) as answer:
            assert answer.status == 200
        return f"s3://{name}/cache/mlc?endpoint={self.endpoint}"

    def warm(self) -> None:
        """Stores two objects in the Ceph server, so that it creates its storage pools now: this is slow and
        would otherwise delay the first test."""
        import obstore

        self.bucket("warm")
        for parts in (False, True):
            obstore.put(self.store("warm"), "object", b"x" * (6 << 20), use_multipart=parts)

    def store(self, name: str) -> S3Store:
        from obstore.store import S3Store

        return S3Store(
            name,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS,
            secret_access_key=SECRET,
            client_options={"allow_http": True, "timeout": "200s"},
        )

    def objects(self, name: str) -> list[str]:
        """Returns all objects of a bucket, and the parts of uploads that were neither ended nor aborted."""
        listed = self.admin("bucket", "list", "--bucket", name, "--allow-unordered")
        return sorted(str(item["name"]) for item in json.loads(listed))

    def admin(self, *arguments: str, program: str = "radosgw-admin") -> bytes:
        """Runs radosgw-admin or ceph, and returns its standard output."""
        environment = {**os.environ, "CEPH_CONF": str(self.home / "ceph.conf")}
        command = [program, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, timeout=200, check=True).stdout

    @contextmanager
    def full(self) -> Iterator[None]:
        """Makes the storage process count as full while the block runs, so that the S3 server refuses to
        store more."""
        self._fill(nearfull="0.0001", backfillfull="0.0002", full="0.0003")
        try:
            yield
        finally:
            self._fill(full="0.95", backfillfull="0.9", nearfull="0.85")

    def _fill(self, **ratios: str) -> None:
        for name, ratio in ratios.items():
            self.admin("osd", f"set-{name}-ratio", ratio, program="ceph")
        end = time.monotonic() + 100
        while (b"OSD_FULL" in self.admin("health", "detail", program="ceph")) != (ratios["full"] < "0.5"):
            assert time.monotonic() < end, "the server does not notice"
            time.sleep(0.1)


@contextmanager
def radosgw(home: Path, memory: int = 1 << 30) -> Iterator[Server]:
    """Yields a running Ceph server with an S3 interface (radosgw), whose objects are kept in memory: at most
    `memory` bytes.

    Its monitor process, ceph-mon, stores some megabytes on disk. The check for free disk space is switched
    off by a negative limit (`mon data avail crit`), because even with a limit of 0 percent ceph-mon exits at
    its start when less than one percent is free.
    """
    home.mkdir(parents=True)
    for name in ("mon", "osd"):
        (home / name).mkdir()
    (home / "keyring").touch()
    monitor, port, fsid = free_port(), free_port(), str(uuid.uuid4())
    (home / "ceph.conf").write_text(
        _CONFIG.format(home=home, monitor=monitor, port=port, fsid=fsid, memory=memory)
    )
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "CEPH_CONF": str(home / "ceph.conf")}

    def run(*command: str) -> str:
        result = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=200, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def start(*command: str) -> None:
        with (home / f"{command[0]}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    try:
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}]", "monmap")
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(home / "monmap"))
        start("ceph-mon", "-f", "-i", "a")
        until_open(monitor, processes[-1], home / "ceph-mon.log")
        identity = str(uuid.uuid4())
        number = run("ceph", "osd", "new", identity)
        run("ceph", "osd", "crush", "add", f"osd.{number}", "1.0", "root=default")
        run("ceph-osd", "--mkfs", "-i", number, "--osd-uuid", identity)
        start("ceph-osd", "-f", "-i", number)
        # radosgw has defaults of its own for these two.
        start(
            "radosgw", "-f", "-n", "client.admin", "--auth_client_required=none", "--ms_mon_client_mode=crc"
        )
        until_open(port, processes[-1], home / "radosgw.log")
        run(
            *("radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests"),
            *("--access-key", ACCESS, "--secret-key", SECRET),
        )
        server = Server(f"http://127.0.0.1:{port}", home)
        server.warm()
        yield server
    finally:
        for process in reversed(processes):
            process.kill()  # there is nothing to keep
            process.wait()
