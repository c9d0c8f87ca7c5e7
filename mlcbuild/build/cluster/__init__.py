"""Steps on other machines: who may run what, in words that both sides understand.

A worker says what it has as named amounts: `cores`, `memory` in bytes, and labels such as
`apache-tvm 0.27.0.post1`, `linker ld: GNU ld 2.40`, `avx2` or whatever its owner calls it. A step says
what it needs in the same words. dask.distributed calls these amounts resources and does the matching; the
functions here find out beforehand what no worker can do, since dask would wait for ever.

Nothing but plain text passes between the two sides (see `wire`), and no artifact ever does: those go through
the store, where both see the same one, or through a remote.
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
"""The amount of a label that any number of steps may use at once; each takes one."""
SCHEME = "dask://"
_SAME = "install the same version there"


@dataclass(frozen=True)
class Address:
    """A scheduler of dask.distributed."""

    host: str
    """host:port."""
    tls: Path | None = None
    """Directory with ca.pem, cert.pem and key.pem; None for a connection that anyone can read."""

    def __str__(self) -> str:
        return SCHEME + self.host

    @property
    def url(self) -> str:
        """As dask writes it."""
        return f"{'tls' if self.tls is not None else 'tcp'}://{self.host}"


def address(text: str, tls: str | None = None) -> Address:
    """The scheduler that `dask://host:port` means. Raises UsageError, also for a directory of `tls` that
    lacks a file.
    """
    host = text.removeprefix(SCHEME)
    if not text.startswith(SCHEME) or not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}", host):
        raise UsageError(
            f"'{text}' is no address of a scheduler: write dask://HOST:PORT, such as dask://10.0.0.5:8786"
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
    """dask's description of how to encrypt. Raises SetupError when dask is not installed."""
    try:
        from distributed.security import Security
    except ImportError:
        raise SetupError(
            "dask.distributed is not installed: `pip install 'mlcbuild[dask]'` brings it"
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


def own() -> str:
    """The label of machines with this version of mlcbuild."""
    return f"mlcbuild {version('mlcbuild')}"


def labels(step: Step) -> tuple[str, ...]:
    """What a worker must have besides cores and memory: this mlcbuild, the tools in the step's key, more."""
    return (own(), *(f"{tool} {found}" for tool, found in sorted(step.tools.items())), *step.needs)


def resources(step: Step, cores: int) -> dict[str, float]:
    """What a step takes while it runs, for dask."""
    return {"cores": cores, "memory": float(step.memory), **dict.fromkeys(labels(step), 1.0)}


def parse_labels(texts: Collection[str]) -> dict[str, float]:
    """`gpu` is a label for any number of steps at once, `gpu=2` one for two. Raises UsageError."""
    found = {}
    for text in texts:
        name, equals, amount = text.rpartition("=") if "=" in text else (text, "", "")
        if not name or name in ("cores", "memory") or (equals and not re.fullmatch(r"[1-9]\d{0,6}", amount)):
            raise UsageError(
                f"--labels: '{text}' must be a NAME or NAME=COUNT with a count from 1; cores and memory have "
                "options of their own"
            )
        found[name] = float(amount) if equals else PLENTY
    return found


def able(needs: Mapping[str, float], worker: Mapping[str, float]) -> bool:
    return all(worker.get(name, 0.0) >= amount for name, amount in needs.items())


def refusal(step: Step, workers: Mapping[str, Mapping[str, float]]) -> str:
    """Why no worker can run a step; "" when one can. `workers` maps names to what they have."""
    needs = resources(step, 1)
    if any(able(needs, worker) for worker in workers.values()):
        return ""
    if not workers:
        return "there is no worker"
    lacking = [
        name for name, n in needs.items() if all(found.get(name, 0.0) < n for found in workers.values())
    ]
    return "; ".join(
        _lack(name, step, workers) for name in lacking
    ) or "no worker has all that it needs: " + ", ".join(name for name in needs if name != own())


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
    if name == own():
        return f"no worker has {name}, as here; they have {', '.join(others) or 'none'}: {_SAME}"
    if name == "linker none":
        return "its key names the linker, and this machine has none for its target: install one here, too"
    if others:
        return f"no worker has '{name}', as here; they have {', '.join(map(repr, others))}: {_SAME}"
    return f"no worker has '{name}': start one that has (`mlcbuild worker --labels` for what it cannot tell)"
