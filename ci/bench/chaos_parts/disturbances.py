"""Disturbs a directory in which mlcbuild builds and serves: changes files, fills the disk, slows the cache
down, kills processes. Each function returns a line that says what it did; ci/bench/chaos, which calls it,
then checks that builds recover.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from chaos_parts.site import NAMES, Service, Site, ViolationError

from tests import kills

Disturbance = Callable[[Site, Service], str]
YEARS = (-57, -1, 1, 12)


def _files(site: Site, kind: str) -> list[Path]:
    return sorted(path for path in (site.store / kind).rglob("*") if path.is_file() and path.stat().st_size)


def _rewrite(path: Path, data: bytes, keep_time: bool) -> None:
    """Overwrites a file with `data` in place; its permissions stay. keep_time: True if its mtime stays too,
    as with failing hardware; False for a change by another program."""
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(status.st_mode & 0o777)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _flipped(site: Site, data: bytes) -> bytes:
    at = site.random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << site.random.randrange(8)]) + data[at + 1 :]


_CHANGED = "were changed since"


def _respect_writes(site: Site, why: str) -> tuple[int, str]:
    """Runs the recipe once after a test has changed files of bundles, and returns (exit code, printed text).
    If the run refuses to replace the changed files, which may be a user's work, the output directory is
    removed, as its message advises. Raises ViolationError if the run succeeds with a wrong bundle, hangs or
    prints a traceback. why: the disturbance, for messages."""
    code, text = site.finish(site.start("run", "recipe.yaml"), why)
    if code == 0:
        site.check(why, text)
    elif _CHANGED in text:
        site.forget_bundles()
    return code, text


def _damage(kind: str, change: str) -> Disturbance:
    def damage(site: Site, _: Service) -> str:
        path = site.random.choice(_files(site, kind))
        data, keep_time = path.read_bytes(), site.random.random() < 0.5
        if change == "flip":
            _rewrite(path, _flipped(site, data), keep_time)
        elif change == "truncate":
            _rewrite(path, data[: site.random.randrange(len(data))], keep_time)
        elif change == "remove":
            path.unlink()
        else:
            other = site.random.choice(_files(site, kind))
            theirs = other.read_bytes()
            _rewrite(path, theirs, keep_time)
            _rewrite(other, data, keep_time)
        if site.random.random() < 0.7:
            site.forget_bundles()
        elif kind == "cas" and not keep_time:  # This writes to a file that bundles may share with the store.
            _respect_writes(site, f"{change} a blob")
        if kind == "cas" and keep_time:  # Silent damage: only `cache verify` reads all bytes.
            code, text = site.finish(site.start("cache", "verify"), f"{change} a blob")
            if code not in (0, 1):
                raise ViolationError(f"cache verify ends with {code}: {text[-300:]}")
        return f"{kind}/{path.name[:12]} ({'time kept' if keep_time else 'new time'})"

    return damage


def _damage_remote(change: str) -> Disturbance:
    """Returns a function that damages one random object in the shared cache, and empties the local store and
    the output directory, so that the next run reads the cache. The function returns the first 16 characters
    of the object's name. change: "flip" changes a random bit, "truncate" cuts the end off, any other text
    exchanges the object's content with that of another one."""

    def damage(site: Site, _: Service) -> str:
        content, names = site.cache.content, sorted(site.cache.content)
        name = site.random.choice(names)
        data = content[name]
        if change == "flip":
            content[name] = _flipped(site, data)
        elif change == "truncate":
            content[name] = data[: site.random.randrange(len(data))]
        else:
            other = site.random.choice([item for item in names if item[:4] == name[:4]])
            content[name], content[other] = content[other], data
        site.forget_store()
        site.forget_bundles()
        return name[:16]

    return damage


def delay_remote(site: Site, _: Service) -> str:
    """Runs a build while each answer of the shared cache is delayed by 0.05 or 0.3 s, without anything stored
    locally. Raises ViolationError unless the run succeeds with the right bundles. Returns a text for the
    report.
    """
    site.delay = site.random.choice((0.05, 0.3))
    site.forget_store()
    site.forget_bundles()
    try:
        if site.run(f"a shared cache that answers after {site.delay} s"):
            raise ViolationError("a slow shared cache fails a run")
    finally:
        site.delay = 0.0
    return "each answer came late"


def kill_run(site: Site, _: Service) -> str:
    """Starts a run that must build everything, kills it or one of its workers with SIGKILL at a random
    moment, and waits for the run's end. Returns what was killed as a text for the report. Raises
    ViolationError if the run still succeeds, but with a wrong bundle, and if it hangs or prints a traceback.
    """
    shutil.rmtree(site.store / "ac", ignore_errors=True)
    site.cache.content.clear()
    process = site.start("run", "recipe.yaml")
    time.sleep(site.random.uniform(0.1, 6))
    victim, what = process.pid, "the run"
    if site.random.random() < 0.5 and (workers := kills.children(process.pid)):
        victim, what = site.random.choice(workers), "a worker"
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        what = "nothing: it had ended"
    code, text = site.finish(process, f"a kill of {what}")
    if code == 0:
        site.check(f"a kill of {what}", text)
    return what


def fill_disk(site: Site, _: Service) -> str:
    """Runs a build with the store on a disk (200 to 1400 kB) that is too small for the results, makes the
    disk larger, and raises ViolationError unless mlcbuild then builds everything in at most two runs. Returns
    a text for the report. Raises CalledProcessError if this user cannot mount a disk.
    """
    site.forget_store()
    site.forget_bundles()
    site.cache.content.clear()
    size = site.random.choice((200, 600, 900, 1400))
    site.store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(site.store)], check=True)
    try:
        site.run(f"a disk of {size} kB")
        subprocess.run(["mount", "-o", "remount,size=256m", str(site.store)], check=True)
        site.must_build(f"a disk of {size} kB that grew")
    finally:
        subprocess.run(["umount", "--lazy", str(site.store)], check=True)
    return f"{size} kB"


def other_years(site: Site, _: Service) -> str:
    """Sets the modification and access times of a random half of the files of the store, the sources and the
    bundles to other years: each to 57 years ago, 1 year ago, or 1 or 12 years ahead, at random. Returns a
    text for the report."""
    places = [*_files(site, "ac"), *_files(site, "cas"), *(site.place / "tiny").iterdir()]
    places += [path for path in site.dist.rglob("*") if path.is_file()]
    for path in site.random.sample(places, len(places) // 2):
        moment = time.time() + site.random.choice(YEARS) * 365 * 86_400
        os.utime(path, (moment, moment))
    return f"{len(places) // 2} files"


def wrong_clock(site: Site, _: Service) -> str:
    """Builds everything again with a clock that is 400 days fast or slow (libfaketime). Raises ViolationError
    if the run fails, or succeeds with a wrong bundle. Returns the shift as a text for the report.
    """
    shutil.rmtree(site.store / "ac", ignore_errors=True)
    site.cache.content.clear()
    shift = site.random.choice(("-400d", "+400d"))
    fake = {"LD_PRELOAD": str(kills.FAKETIME), "FAKETIME": shift, "FAKETIME_NO_CACHE": "1"}
    if site.run(f"a clock that is off by {shift}", fake):
        raise ViolationError(f"a clock that is off by {shift} fails a run")
    return shift


def swap_bundles(site: Site, _: Service) -> str:
    """Exchanges two bundles in the output directory, or the files of one name in them, and runs the build.
    Raises ViolationError unless the run restores the bundles, or fails with a message that they were changed
    since; in the latter case the output directory is then removed. Returns the name of the file, or of the
    first bundle."""
    first, second = (site.dist / name for name in NAMES)
    if site.random.random() < 0.5:
        file = site.random.choice(sorted(path.name for path in first.iterdir() if path.is_file()))
        first, second = first / file, second / file
    aside = site.dist / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    code, text = _respect_writes(site, "swapped bundles")
    if code and _CHANGED not in text:
        raise ViolationError(f"swapped bundles: {text[-300:]}")
    return first.name


def kill_server(_: Site, service: Service) -> str:
    service.kill()
    return "SIGKILL"


def can_mount(place: Path) -> bool:
    return kills.can_mount(place)


TABLE: dict[str, Disturbance] = {
    **{f"{change} a blob": _damage("cas", change) for change in ("flip", "truncate", "remove", "swap")},
    **{f"{change} a record": _damage("ac", change) for change in ("flip", "truncate", "remove", "swap")},
    **{f"{change} in the shared cache": _damage_remote(change) for change in ("flip", "truncate", "swap")},
    "delay the shared cache": delay_remote,
    "kill a run or a worker": kill_run,
    "fill the disk": fill_disk,
    "files of other years": other_years,
    "a clock of another year": wrong_clock,
    "swap bundles": swap_bundles,
    "kill the server": kill_server,
}
"""Name of a disturbance, such as "swap bundles" -> function of (Site, Service) that causes it in a test of
building and serving, and returns a line for the report. It raises ViolationError if mlcbuild already reacts
wrongly during the disturbance."""
