"""The resources that steps require and cluster workers offer.

A worker declares named amounts: `cores`, `memory` in bytes, and labels such as `apache-tvm 0.27.0.post1`,
`linker ld: GNU ld 2.40`, `avx2` or any name that its owner chose. A step declares what it requires under the
same names. dask.distributed calls these amounts resources and matches them. The functions here detect in
advance what no worker can run, because dask would wait for it for ever.

The two sides exchange plain text only (see `wire`). Artifacts travel through a store that both sides can see,
or through a remote cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mlcbuild.build.graph import Step
from mlcbuild.errors import SetupError, UsageError

PLENTY = float(1 << 30)
"""The amount that a cluster worker declares of a label, a named capability such as `avx2`, if any number of
steps may use it at once; each step uses 1.
"""
SCHEME = "dask://"
_SAME = "install the same version there"


@dataclass(frozen=True)
class Address:
    """The address of a dask.distributed scheduler."""

    host: str
    """Host name and port, written "host:port"."""
    tls: Path | None = None
    """Directory with ca.pem, cert.pem and key.pem; None for an unencrypted connection."""

    def __str__(self) -> str:
        return SCHEME + self.host

    @property
    def url(self) -> str:
        """Returns the address of a dask.distributed scheduler in dask's notation: "tls://10.0.0.5:8786", or
        "tcp://..." for an unencrypted connection.
        """
        return f"{'tls' if self.tls is not None else 'tcp'}://{self.host}"


def address(text: str, tls: str | None = None) -> Address:
    """Parses the address of a dask scheduler, written `dask://host:port`. tls: path of the directory with the
    certificates; None: the connection is not encrypted.

    Raises UsageError for any other form, and for a `tls` directory that lacks a file.
    """
    host = text.removeprefix(SCHEME)
    if not text.startswith(SCHEME) or not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}", host):
        raise UsageError(
            f"'{text}' is not the address of a scheduler: write dask://HOST:PORT, such as dask://10.0.0.5:8786"
        )
    if tls is None:
        return Address(host)
    missing = [name for name in ("ca.pem", "cert.pem", "key.pem") if not Path(tls, name).is_file()]
    if missing:
        raise UsageError(
            f"{tls}: a directory for TLS holds ca.pem, cert.pem and key.pem; it lacks {', '.join(missing)}"
        )
    return Address(host, Path(tls).absolute())


def security(address: Address) -> object:
    """Returns dask's encryption settings (a distributed.security.Security) for connections to a scheduler's
    address. Raises SetupError when dask is not installed.
    """
    try:
        from distributed.security import Security
    except ImportError:
        raise SetupError(
            "dask.distributed is not installed: install it with `pip install 'mlcbuild[dask]'`"
        ) from None
    if address.tls is None:
        return Security()
    ca, cert, key = (str(address.tls / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    sides = {
        f"tls_{side}_{part}": path
        for side in ("client", "worker")
        for part, path in (("cert", cert), ("key", key))
    }
    return Security(tls_ca_file=ca, require_encryption=True, **sides)


def own_label() -> str:
    """Returns the label that names this version of mlcbuild, such as "mlcbuild 1.2.0". Only cluster workers
    that offer this label run build steps of this version.
    """
    return f"mlcbuild {version('mlcbuild')}"


def labels(step: Step) -> tuple[str, ...]:
    """Returns the labels that a cluster worker must offer to run a build step: this version of mlcbuild, the
    tools in the step's cache key with their versions, and the labels that the step requires.
    """
    return (
        own_label(),
        *(f"{tool} {version_}" for tool, version_ in sorted(step.tools.items())),
        *step.needs,
    )


def resources(step: Step, cores: int) -> dict[str, float]:
    """Returns the dask resources that a build step occupies while it runs with `cores` cores: "cores" ->
    their number, "memory" -> bytes, and each label that the step requires -> 1.
    """
    return {"cores": cores, "memory": float(step.memory), **dict.fromkeys(labels(step), 1.0)}


def parse_labels(texts: Collection[str]) -> dict[str, float]:
    """Parses the labels that a cluster worker offers, texts of the form NAME or NAME=COUNT, and returns name
    -> amount.

    "gpu=2" has the amount 2, so two build steps may use it at once. "gpu" has the amount PLENTY (2**30), so
    any number may. Raises UsageError for other forms, and for the names "cores" and "memory".
    """
    amounts = {}
    for text in texts:
        name, equals, amount = text.rpartition("=") if "=" in text else (text, "", "")
        if not name or name in ("cores", "memory") or (equals and not re.fullmatch(r"[1-9]\d{0,6}", amount)):
            raise UsageError(
                f"--labels: '{text}' must be a NAME or NAME=COUNT with a count from 1; cores and memory have "
                "options of their own"
            )
        amounts[name] = float(amount) if equals else PLENTY
    return amounts


def able(needs: Mapping[str, float], worker: Mapping[str, float]) -> bool:
    """Returns True if a cluster worker offers at least the amount of every resource that a build step needs.
    Both arguments map the name of a resource -> its amount.
    """
    return all(worker.get(name, 0.0) >= amount for name, amount in needs.items())


def refusal(step: Step, workers: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the reason, in words, why no cluster worker can run a build step; "" if one can. workers: name
    of a worker -> its resources (name -> amount).
    """
    needs = resources(step, 1)
    if any(able(needs, worker) for worker in workers.values()):
        return ""
    if not workers:
        return "there is no worker"
    lacking = [
        name for name, n in needs.items() if all(worker.get(name, 0.0) < n for worker in workers.values())
    ]
    return "; ".join(
        _lack(name, step, workers) for name in lacking
    ) or "no worker has all that it needs: " + ", ".join(name for name in needs if name != own_label())


def _lack(name: str, step: Step, workers: Mapping[str, Mapping[str, float]]) -> str:
    if name == "memory":
        most = max(workers, key=lambda worker: workers[worker].get("memory", 0.0))
        has = workers[most].get("memory", 0.0)
        return (
            f"it needs {step.memory / 1e9:.1f} GB of memory, and the most that a worker has is "
            f"{has / 1e9:.1f} GB ({most})"
        )
    kind = name.partition(" ")[0]
    others = sorted(
        {label for worker in workers.values() for label in worker if label.startswith(f"{kind} ")}
    )
    if name == own_label():
        return f"no worker has {name}, as here; they have {', '.join(others) or 'none'}: {_SAME}"
    if name == "linker none":
        return "its key names the linker, and this machine has none for its target: install one here as well"
    if others:
        return f"no worker has '{name}', as here; they have {', '.join(map(repr, others))}: {_SAME}"
    return f"no worker has '{name}': start one with it (`mlcbuild worker --labels` adds labels)"
